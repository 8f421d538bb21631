"""How evenly a step is shared out over ranks: as estimated for any, and as measured by running every rank's share.

    .venv/bin/python benchmarks/balance.py [--ranks 2,4,8,16] [--measure 8] [--json]

Three ways to share one optimizer step out take turns: equal numbers of groups in order (naive), groups by their
tokens, the longest first (tokens), and this package's (ours). How to read the output: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import _rows
from _rows import positive, positives

from hpcgrpo.balance import Cost, share_out
from hpcgrpo.planner import shapes
from hpcgrpo.pretrained import Pretrained
from hpcgrpo.types import MicroBatch, Piece, Row

Shares = Sequence[Sequence[MicroBatch]]  # [ranks][micro-batches]
SIGMA = 0.8  # of the logarithm of a length
REAL = "Qwen/Qwen2.5-7B-Instruct"  # whose FLOPs the estimates count
SMALL = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HEADER = f"{'ranks':>5}{'G':>4}{'prompt':>8}{'naive':>9}{'tokens':>9}{'ours':>9}   {'naive':>8}{'tokens':>9}{'ours':>9}"


def main() -> None:
    options = parse_arguments()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, where installed, prints to stdout
    estimated = [estimate(options, *case) for case in product(options.ranks, options.groups, options.prompts)]
    measured = list(measure(options)) if options.measure else []
    result = {"settings": vars(options), "estimated": estimated, "measured": measured}
    result["rows"] = [as_row(case) for case in measured]
    print(json.dumps(result, indent=1) if options.json else as_text(result))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=positives, default=[2, 4, 8, 16], help="(default 2,4,8,16)")
    parser.add_argument(
        "--groups", type=positives, default=[8, 16], help="completions a group (default 8,16)"
    )
    parser.add_argument(
        "--prompts", type=positives, default=[128, 512, 2048], help="tokens (default 128,512,2048)"
    )
    parser.add_argument(
        "--completions", type=positive, default=1024, help="an optimizer step, estimated (1024)"
    )
    parser.add_argument(
        "--longest", type=positive, default=4096, help="tokens a completion at most, estimated (4096)"
    )
    parser.add_argument(
        "--budget", type=positive, default=16384, help="tokens of a micro-batch, estimated (16384)"
    )
    parser.add_argument("--steps", type=positive, default=8, help="estimated of each kind (default 8)")
    parser.add_argument(
        "--measure",
        type=lambda text: positives(text) if text else [],
        default=[8],
        help="ranks to measure; '' for none (default 8)",
    )
    parser.add_argument("--measured-completions", type=positive, default=256)
    parser.add_argument("--measured-longest", type=positive, default=512)
    parser.add_argument("--measured-budget", type=positive, default=4096)
    parser.add_argument("--repeats", type=positive, default=3, help="measurements of each share (default 3)")
    parser.add_argument("--json", action="store_true", help="print every number as JSON, and nothing else")
    options = parser.parse_args()
    if options.budget <= max(options.prompts):
        parser.error(
            f"--budget {options.budget} is not above the longest of --prompts, {max(options.prompts)}"
        )
    return options


# ---- steps, and three ways to share them out


def lengths(count: int, longest: int, source: random.Random) -> list[int]:
    """Log-normal, cut at `longest`, of which the mean is a quarter."""
    sample = [math.exp(SIGMA * random.Random(i).gauss(0, 1)) for i in range(4096)]
    low, high = 1.0, float(longest)
    for _ in range(40):
        median = (low + high) / 2
        mean = statistics.fmean(min(longest, median * x) for x in sample)
        low, high = (median, high) if mean < longest / 4 else (low, median)
    return [min(longest, max(1, round(median * math.exp(SIGMA * source.gauss(0, 1))))) for _ in range(count)]


def step(
    completions: int, group: int, prompt: int, longest: int, seed: int, vocabulary: int = 2
) -> list[Piece]:
    """The groups of one optimizer step, of random tokens."""
    source = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(source.choices(range(1, vocabulary), k=count))

    rows = [
        Row(i, ids(n), (-1.0,) * n, source.gauss(0, 1), 1e-5)
        for i, n in enumerate(lengths(completions, longest, source))
    ]
    return [Piece(ids(prompt), tuple(rows[i : i + group])) for i in range(0, completions, group)]


def naive(pieces: Sequence[Piece], ranks: int, budget: int, cost: Cost) -> Shares:
    """Equally many groups each, in order."""
    n = len(pieces)
    return [first_fit(pieces[n * r // ranks : n * (r + 1) // ranks], budget) for r in range(ranks)]


def by_tokens(pieces: Sequence[Piece], ranks: int, budget: int, cost: Cost) -> Shares:
    """The longest group first, each to the rank with the fewest tokens."""
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    for piece in sorted(pieces, key=lambda p: -p.tokens):
        min(shares, key=lambda share: sum(p.tokens for p in share)).append(piece)
    return [first_fit(share, budget) for share in shares]


def first_fit(pieces: Sequence[Piece], budget: int) -> list[MicroBatch]:
    """Micro-batches of at most `budget` tokens, the longest piece first; longer pieces are cut."""
    bins: list[list[Piece]] = []
    for piece in sorted((part for p in pieces for part in cut(p, budget)), key=lambda p: -p.tokens):
        fits = (b for b in bins if sum(p.tokens for p in b) + piece.tokens <= budget)
        found = next(fits, None)
        if found is None:
            bins.append(found := [])
        found.append(piece)
    return [tuple(b) for b in bins]


def cut(piece: Piece, budget: int) -> list[Piece]:
    parts: list[list[Row]] = [[]]
    for row in piece.rows:
        held = len(piece.prefix) + sum(len(r.token_ids) for r in parts[-1])
        if parts[-1] and held + len(row.token_ids) > budget:
            parts.append([])
        parts[-1].append(row)
    return [Piece(piece.prefix, tuple(rows)) for rows in parts]


WAYS: Mapping[str, Callable[[Sequence[Piece], int, int, Cost], Shares]] = {
    "naive": naive,
    "tokens": by_tokens,
    "ours": share_out,
}


# ---- as estimated


def estimate(options: argparse.Namespace, ranks: int, group: int, prompt: int) -> dict[str, Any]:
    """Means over steps: spread, and the time a step takes when ranks wait in every micro-batch, over a rank's mean."""
    size = shapes.known(REAL)
    assert size is not None
    cost = Pretrained(REAL, None, config_of(size)).training_cost
    found: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for seed in range(options.steps):
        pieces = step(options.completions, group, prompt, options.longest, seed)
        plain = cost.micro_batch(tuple(pieces))
        for name, way in WAYS.items():
            begun = time.process_time()
            shares = way(pieces, ranks, options.budget, cost)
            seconds = time.process_time() - begun
            found[name].append(figures(shares, pieces, options.budget, cost, plain) | {"seconds": seconds})
    means = {name: {k: statistics.fmean(x[k] for x in all_) for k in all_[0]} for name, all_ in found.items()}
    worst = {name: max(x["spread"] for x in all_) for name, all_ in found.items()}
    return {"ranks": ranks, "group": group, "prompt": prompt, "means": means, "worst_spread": worst}


def config_of(size: shapes.Shape) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
    }


def figures(
    shares: Shares, pieces: Sequence[Piece], budget: int, cost: Cost, plain: float
) -> dict[str, float]:
    """`plain`: what the step costs with every prefix once."""
    count = max(map(len, shares))
    costs = [sorted(map(cost.micro_batch, share), reverse=True) for share in shares]
    mean = sum(map(sum, costs)) / len(costs)
    together = sum(max((c[i] for c in costs if i < len(c)), default=0.0) for i in range(count))
    return {
        "spread": max(map(sum, costs)) / mean,
        "waiting": together / mean,
        "time": together * len(costs) / plain,
        "micro_batches": float(count),
        "above_least": count - least(pieces, len(shares), budget),
    }


def least(pieces: Sequence[Piece], ranks: int, budget: int) -> int:
    """Micro-batches a rank that no sharing of whole groups can go below: by all tokens, and since no two groups of
    more than half the budget go together."""

    def computed(piece: Piece) -> int:  # a group above the budget repeats its prefix
        prefix = len(piece.prefix)
        return piece.tokens + prefix * (-(-(piece.tokens - prefix) // (budget - prefix)) - 1)

    by_all = -(-sum(map(computed, pieces)) // (ranks * budget))
    large = sum(2 * p.tokens > budget for p in pieces)
    return max(by_all, -(-large // ranks))


# ---- as measured


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """CPU-seconds of forward and backward of every rank's share, run one after the other, ways taking turns."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cost = Pretrained("", None, SMALL).training_cost
    with tempfile.TemporaryDirectory() as folder:
        learner = small_learner(folder)
        for ranks, group, prompt in product(options.measure, options.groups, options.prompts):
            pieces = step(
                options.measured_completions, group, prompt, options.measured_longest, 0, SMALL["vocab_size"]
            )
            plans = {name: way(pieces, ranks, options.measured_budget, cost) for name, way in WAYS.items()}
            seconds = {name: [[] for _ in range(ranks)] for name in WAYS}
            run_share(learner, plans["ours"][0])  # threads and allocator start outside the measurement
            for _ in range(options.repeats):
                for rank in range(ranks):
                    for name, plan in plans.items():
                        seconds[name][rank].append(run_share(learner, plan[rank]))
            yield {"ranks": ranks, "group": group, "prompt": prompt, **compared(plans, seconds, cost)}
            print(f"measured: {ranks} ranks, G {group}, prompt {prompt}", file=sys.stderr)
    dist.destroy_process_group()


def small_learner(folder: str) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from hpcgrpo.learning.fsdp import FsdpLearner

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SMALL, max_position_embeddings=8192)).save_pretrained(folder)
    return FsdpLearner(
        folder, mesh=init_device_mesh("cpu", (1,)), device=torch.device("cpu"), temperature=1.0, bf16=False,
        gradient_checkpointing=False, attn_implementation="packed", chunk_bytes=2**22, weight_decay=0.0,
        betas=(0.9, 0.999), epsilon=1e-8, max_grad_norm=1.0, with_reference=False,
    )  # fmt: skip


def run_share(learner: Any, share: Sequence[MicroBatch]) -> float:
    from hpcgrpo.algorithms import build

    rows = learner.prepare(share, old=False, reference=False)
    loss = build({"name": "grpo", "num_generations": 8}).loss
    begun = time.process_time()
    learner.update(rows, loss, learning_rate=0.0)
    return time.process_time() - begun


def compared(
    plans: Mapping[str, Shares], seconds: Mapping[str, list[list[float]]], cost: Cost
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, plan in plans.items():
        taken = [statistics.median(turns) for turns in seconds[name]]
        costs = [sum(map(cost.micro_batch, share)) for share in plan]
        found[name] = {
            "spread": max(taken) / statistics.fmean(taken),
            "estimated_spread": max(costs) / statistics.fmean(costs),
            "cpu_seconds": taken,
        }
    return found


# ---- what it says


def as_row(case: Mapping[str, Any]) -> dict[str, Any]:
    """The slowest rank's time of the naive split over ours; at best it is the naive one's own spread."""
    ratio = max(case["naive"]["cpu_seconds"]) / max(case["ours"]["cpu_seconds"])
    bound = max(case["naive"]["cpu_seconds"]) / statistics.fmean(case["naive"]["cpu_seconds"])
    name = (
        f"balance, {case['ranks']} ranks, G {case['group']}, prompt {case['prompt']}: as many groups a rank"
    )
    return _rows.row(
        name, ratio, of="CPU-seconds of the slowest rank", bound=bound, bound_is="its mean over the ranks"
    )


def as_text(result: Mapping[str, Any]) -> str:
    lines = [
        "estimated: costliest rank over the mean          waiting in every micro-batch, over the mean",
        HEADER,
    ]
    counted: dict[str, list[float]] = {name: [] for name in WAYS}
    slowest = 0.0
    for case in result["estimated"]:
        means = case["means"]
        spreads = "".join(f"{means[name]['spread']:>9.3f}" for name in WAYS)
        waits = "".join(f"{means[name]['waiting']:>9.3f}" for name in WAYS)
        lines.append(f"{case['ranks']:>5}{case['group']:>4}{case['prompt']:>8}{spreads}  {waits}")
        for name in WAYS:
            counted[name].append(means[name]["above_least"])
        slowest = max(slowest, means["ours"]["seconds"])
    lines.append(
        "micro-batches above the least possible, mean: "
        + ", ".join(f"{name} {statistics.fmean(values):.2f}" for name, values in counted.items())
        + f"; ours takes {slowest * 1e3:.1f} CPU-milliseconds at most"
    )
    if result["measured"]:
        lines += ["measured: costliest rank over the mean           the same, as estimated", HEADER]
    for case in result["measured"]:
        spreads = "".join(f"{case[name]['spread']:>9.3f}" for name in WAYS)
        guesses = "".join(f"{case[name]['estimated_spread']:>9.3f}" for name in WAYS)
        lines.append(f"{case['ranks']:>5}{case['group']:>4}{case['prompt']:>8}{spreads}  {guesses}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
