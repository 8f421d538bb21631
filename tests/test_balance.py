"""Sharing out by estimated cost: the estimate itself, evenness, budgets, and few micro-batches."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from statistics import fmean

import pytest
import torch

from hpcgrpo.balance import Cost, share_out
from hpcgrpo.learning.packing import pack_row
from hpcgrpo.pretrained import Pretrained
from hpcgrpo.types import MicroBatch, Piece, Row

SEVEN_B = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4,
}  # fmt: skip
COST = Pretrained("", None, SEVEN_B).training_cost


def groups(completions: int, size: int, prompt: int, longest: int, seed: int = 0) -> list[Piece]:
    """Log-normal lengths, cut at the longest, with a mean of about a quarter of it."""
    source = random.Random(seed)
    lengths = [
        max(1, min(longest, round(0.2 * longest * math.exp(0.8 * source.gauss(0, 1)))))
        for _ in range(completions)
    ]
    rows = [Row(i, (1,) * n, (), 0.0, 0.0) for i, n in enumerate(lengths)]
    return [Piece((0,) * prompt, tuple(rows[i : i + size])) for i in range(0, completions, size)]


def costs(shares: tuple[tuple[MicroBatch, ...], ...]) -> list[list[float]]:
    return [[COST.micro_batch(m) for m in share] for share in shares]


def spread(shares: tuple[tuple[MicroBatch, ...], ...]) -> float:
    totals = [sum(rank) for rank in costs(shares)]
    return max(totals) / fmean(totals)


def waiting(shares: tuple[tuple[MicroBatch, ...], ...]) -> float:
    """Time of a step in which ranks wait in every micro-batch, over a rank's mean."""
    found = costs(shares)
    return sum(map(max, zip(*found, strict=True))) / fmean(map(sum, found))


def tokens(micro_batch: MicroBatch) -> int:
    return sum(p.tokens for p in micro_batch)


# --- the estimate -----------------------------------------------------------------------------------------


def test_cost_by_hand() -> None:
    """A prefix of 3, completions of 2 and 4: inputs 3 + 1 + 3, pairs 6 + (3 + 1) + (9 + 6), predictions 2 + 4."""
    piece = Piece((0,) * 3, (Row(0, (1,) * 2, (), 0.0, 0.0), Row(1, (1,) * 4, (), 0.0, 0.0)))
    assert Cost(1.0, 0.0, 0.0).micro_batch((piece,)) == 7
    assert Cost(0.0, 1.0, 0.0).micro_batch((piece,)) == 25
    assert Cost(0.0, 0.0, 1.0).micro_batch((piece, piece)) == 12
    assert Cost().micro_batch(()) == 0


def test_the_cost_counts_what_the_packed_row_computes() -> None:
    """Inputs and predictions of the row itself, and pairs one by one: each token sees its prefix and its own past."""
    micro_batch = tuple(groups(24, 4, 11, 40))
    row = pack_row(micro_batch, torch.device("cpu"))
    pairs = sum(
        sum(range(1, len(p.prefix) + 1))
        + sum(len(p.prefix) + i for r in p.rows for i in range(1, len(r.token_ids)))
        for p in micro_batch
    )
    assert Cost(1.0, 0.0, 0.0).micro_batch(micro_batch) == row.input_ids.numel()
    assert Cost(0.0, 1.0, 0.0).micro_batch(micro_batch) == pairs
    assert Cost(0.0, 0.0, 1.0).micro_batch(micro_batch) == row.targets.numel()


def test_the_cost_of_a_model_by_hand() -> None:
    """Hidden 8, two layers, 4 heads of 2, 2 key-value heads, 12 inner, 10 tokens: a layer's matrices are
    8 x (8 + 4 + 4 + 8 + 36) = 480."""
    config = {
        "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 12, "vocab_size": 10,
    }  # fmt: skip
    assert Pretrained("", None, config).training_cost == Cost(6 * 2 * 480, 14 * 2 * 8, 8 * 10 * 8)
    mixture = {**config, "num_experts_per_tok": 3, "moe_intermediate_size": 4}
    assert Pretrained("", None, mixture).training_cost == Pretrained("", None, config).training_cost
    assert Pretrained("", None, {}).training_cost == Cost()


# --- sharing out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("prompt", [128, 512, 2048])
def test_realistic_steps_are_shared_out_within_two_percent(ranks: int, size: int, prompt: int) -> None:
    for seed in range(2):
        shares = share_out(groups(1024, size, prompt, 4096, seed), ranks, 16384, COST)
        assert spread(shares) <= 1.02
        assert waiting(shares) <= 1.08


def test_few_groups_a_rank_are_cut_where_their_prompt_is_short() -> None:
    """8 groups over 16 ranks."""
    pieces = groups(128, 16, 128, 2048)
    shares = share_out(pieces, 16, 16384, COST)
    assert spread(shares) <= 1.05
    assert sum(tokens(m) for share in shares for m in share) <= 1.06 * sum(p.tokens for p in pieces)


def test_a_long_prompt_is_not_repeated_without_need() -> None:
    """Two ranks, two groups: cutting one would cost more than it evens out."""
    rows = [Row(i, (1,) * n, (), 0.0, 0.0) for i, n in enumerate((100, 100, 150, 150))]
    pieces = [Piece((0,) * 2048, tuple(rows[:2])), Piece((0,) * 2048, tuple(rows[2:]))]
    shares = share_out(pieces, 2, 16384, COST)
    assert sorted(len(m) for share in shares for m in share) == [1, 1]
    assert {len(p.rows) for share in shares for m in share for p in m} == {2}


@pytest.mark.parametrize("ranks", [1, 2, 5, 16])
@pytest.mark.parametrize("budget", [0, 50, 300, 5000])
def test_nothing_is_lost_and_budgets_hold(ranks: int, budget: int) -> None:
    for seed in range(8):
        source = random.Random(seed)
        pieces = groups(4 * source.randint(1, 12), 4, source.choice((0, 3, 40)), 200, seed)
        shares = share_out(pieces, ranks, budget, COST)
        rows = Counter(r.index for share in shares for m in share for p in m for r in p.rows)
        assert rows == Counter(r.index for p in pieces for r in p.rows)
        assert len({len(share) for share in shares}) == 1
        of_row = {r.index: p.prefix for p in pieces for r in p.rows}
        for micro_batch in (m for share in shares for m in share):
            single = len(micro_batch) == 1 and len(micro_batch[0].rows) == 1
            assert single or tokens(micro_batch) <= budget
            assert all(of_row[r.index] is p.prefix for p in micro_batch for r in p.rows)


@pytest.mark.parametrize("ranks", [2, 8])
def test_micro_batches_are_as_few_as_all_tokens_allow(ranks: int) -> None:
    """Prompts are short against the budget, so that groups may be divided to fill gaps: one more is the exception."""
    above = []
    for seed in range(20):
        pieces = groups(512, 8, 128, 2048, seed)
        least = -(-sum(p.tokens for p in pieces) // (ranks * 16384))
        above.append(len(share_out(pieces, ranks, 16384, COST)[0]) - least)
    assert min(above) == 0 and max(above) <= 1 and fmean(above) <= 0.2


def test_sequence_by_sequence_ranks_get_alike_ones_together() -> None:
    """Budget 0: a row a micro-batch, as few as can be, in the order in which ranks wait the least."""
    pieces = groups(60, 4, 20, 400)
    shares = share_out(pieces, 4, 0, COST)
    assert {len(share) for share in shares} == {15}
    alone = sorted((COST.micro_batch((Piece(p.prefix, (r,)),)) for p in pieces for r in p.rows), reverse=True)
    assert sum(map(max, zip(*costs(shares), strict=True))) == pytest.approx(sum(alone[::4]))
    assert spread(shares) <= 1.03


def test_the_plan_is_the_same_every_time() -> None:
    """Ranks plan by themselves: equal groups in other objects must give the same plan."""
    first, second = (share_out(groups(256, 8, 100, 1000), 8, 4096, COST) for _ in range(2))
    assert first == second


def test_thousands_of_completions_take_milliseconds() -> None:
    pieces = groups(4096, 8, 512, 4096)
    taken = []
    for _ in range(5):
        begun = time.process_time()
        share_out(pieces, 8, 16384, COST)
        taken.append(time.process_time() - begun)
    assert min(taken) < 0.05
