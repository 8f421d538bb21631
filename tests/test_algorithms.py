"""What each algorithm samples, credits, selects and weighs, with values worked by hand; and its options."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import random
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tabular import TableRollouts, Tabular, completion, group, prompt, totals_of

from hpcgrpo import algorithms
from hpcgrpo.algorithms import ALGORITHMS, build
from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.algorithms.cppo import num_kept
from hpcgrpo.algorithms.grpo import grpo
from hpcgrpo.algorithms.igrpo import choose_draft, igrpo
from hpcgrpo.types import Batch, Completion, Group, Prompt, Rollout, Score

ORACLE = Path(__file__).parents[2] / "shared" / "oracles" / "worked_examples.py"
BASES = ("grpo", "dr_grpo", "dapo", "gspo", "gmpo", "bnpo")
EIGHT = [3, 3, 0, 1, 0, 2.5, 1, 0]


def credit(spec: dict[str, Any], *rewards: Sequence[float]) -> list[tuple[float, ...]]:
    return build(spec).credit([group(r, position=i) for i, r in enumerate(rewards)])


# ---- E1: advantages

POPULATION = {"std_ddof": 0, "std_eps": 0.0}
SAMPLE = {"std_eps": 0.0}
MEAN_ONLY = {"scale_rewards": "none"}


def eight(three: float, zero: float, one: float, half: float) -> list[float]:
    """The advantages of EIGHT, by what rewards of 3, 0, 1 and 2.5 get."""
    return [{3: three, 0: zero, 1: one, 2.5: half}[r] for r in EIGHT]


@pytest.mark.parametrize(
    ("options", "rewards", "expected"),
    [
        (POPULATION, [1, 0, 0, 1], [1, -1, -1, 1]),
        (SAMPLE, [1, 0, 0, 1], [0.8660254, -0.8660254, -0.8660254, 0.8660254]),
        ({}, [1, 0, 0, 1], [0.8658754, -0.8658754, -0.8658754, 0.8658754]),
        ({"std_eps": 1e-6}, [1, 0, 0, 1], [0.8660239, -0.8660239, -0.8660239, 0.8660239]),
        (MEAN_ONLY, [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        (POPULATION, [1, 0, 0, 0], [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
        (SAMPLE, [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        ({}, [1, 0, 0, 0], [1.4997001, -0.4999000, -0.4999000, -0.4999000]),
        (MEAN_ONLY, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        (POPULATION, [2, 1, 0, 1], [1.4142136, 0, -1.4142136, 0]),
        (SAMPLE, [2, 1, 0, 1], [1.2247449, 0, -1.2247449, 0]),
        ({}, [2, 1, 0, 1], [1.2245949, 0, -1.2245949, 0]),
        (MEAN_ONLY, [2, 1, 0, 1], [1, 0, -1, 0]),
        (POPULATION, EIGHT, eight(1.3516907, -1.0513150, -0.2503131, 0.9511897)),
        (SAMPLE, EIGHT, eight(1.2643908, -0.9834151, -0.2341465, 0.8897565)),
        ({}, EIGHT, eight(1.2642961, -0.9833414, -0.2341289, 0.8896899)),
        (MEAN_ONLY, EIGHT, eight(1.6875, -1.3125, -0.3125, 1.1875)),
    ],
)  # fmt: skip
def test_e1_advantages(options: dict[str, Any], rewards: list[float], expected: list[float]) -> None:
    assert credit({"name": "grpo", **options}, rewards)[0] == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_have_advantages_of_exactly_zero(name: str, value: float) -> None:
    """Also where the mean of the rewards is rounded, and where they differ by rounding alone."""
    nearly = [value, value, math.nextafter(value, 0.5)]
    assert credit({"name": name}, [value] * 3, [1, 0, 0], nearly)[::2] == [(0.0,) * 3] * 2


def test_dr_grpo_centres_only_and_dapo_standardises() -> None:
    assert credit({"name": "dr_grpo"}, [1, 0, 0, 0])[0] == (0.75, -0.25, -0.25, -0.25)
    for name in ("dapo", "gspo", "gmpo"):
        assert credit({"name": name}, [1, 0, 0, 0]) == credit({"name": "grpo"}, [1, 0, 0, 0])


def test_batch_scale_divides_by_the_std_of_all_rewards() -> None:
    """[1,0] and [3,0]: all rewards have mean 1 and population variance (0+1+4+1)/4 = 1.5."""
    spec = {"name": "grpo", "scale_rewards": "batch", "std_ddof": 0, "std_eps": 0.0}
    s = math.sqrt(1.5)
    first, second = credit(spec, [1, 0], [3, 0])
    assert first == pytest.approx((0.5 / s, -0.5 / s)) and second == pytest.approx((1.5 / s, -1.5 / s))
    assert credit(spec) == []
    assert credit({**spec, "std_eps": 1.0}, [1, 0], [3, 0])[0] == pytest.approx(
        (0.5 / (s + 1), -0.5 / (s + 1))
    )


# ---- E9: BNPO


def rates(*right: int) -> list[list[float]]:
    return [[1.0] * n + [0.0] * (4 - n) for n in right]


def test_e9_bnpo() -> None:
    a = credit({"name": "bnpo"}, *rates(1, 2, 3, 2))
    assert a[0][:2] == pytest.approx((0.667379, -0.222460), abs=1e-6)
    assert a[1][0] == pytest.approx(0.350079, abs=1e-6)
    a = credit({"name": "bnpo", "ddof": 0}, *rates(1, 2, 3, 2))
    assert a[0][0] == pytest.approx(0.668833, abs=1e-6)
    assert a[1][0] == pytest.approx(0.318760, abs=1e-6)


def test_bnpo_maps_the_range_of_rewards_to_0_1() -> None:
    plain = credit({"name": "bnpo"}, *rates(1, 2, 3, 2))
    wide = [[3 * r - 1 for r in rs] for rs in rates(1, 2, 3, 2)]
    mapped = credit({"name": "bnpo", "reward_min": -1.0, "reward_max": 2.0}, *wide)
    assert [x for a in mapped for x in a] == pytest.approx([x for a in plain for x in a])
    with pytest.raises(
        ValueError, match=r"reward=2\.0 .*\[reward_min, reward_max\] = \[0\.0, 1\.0\].*set both"
    ):
        credit({"name": "bnpo"}, [2, 0])


@pytest.mark.parametrize("right", [[1], [1, 1, 1]])
def test_bnpo_without_spread_between_prompts_only_centres(right: list[int]) -> None:
    assert credit({"name": "bnpo"}, *rates(*right))[0] == (0.75, -0.25, -0.25, -0.25)


def test_bnpo_with_moments_off_the_middle() -> None:
    """Rates 1/4, 3/4, 3/4, 3/4: mean 5/8, variance 1/16, c = 11/4; the density's norm by a Riemann sum."""
    alpha, beta = 1 + 2.75 * 0.625 / 3, 1 + 2.75 * 0.375 / 3
    midpoints = [(i + 0.5) / 100_000 for i in range(100_000)]
    norm = math.fsum(x ** (alpha - 1) * (1 - x) ** (beta - 1) for x in midpoints) / 100_000
    expected = 0.75 * norm / (0.25 ** (alpha - 1) * 0.75 ** (beta - 1))
    assert credit({"name": "bnpo"}, *rates(1, 3, 3, 3))[0][0] == pytest.approx(expected, rel=1e-4)


def test_the_weight_of_bnpo_is_bounded() -> None:
    """A rate of 1e-6 among twenty of 1/2 has a density near 1e-18, and so a weight of 1e6."""
    assert credit({"name": "bnpo"}, [2e-6, 0], *[[1, 0]] * 20)[0] == pytest.approx((1.0, -1.0))


def test_bnpo_with_moments_of_one_half_is_grpo_up_to_a_constant() -> None:
    """Rates 1/4 and 3/4 have mean 1/2 and variance 1/16, so a = b = 3/2 and alpha = beta = 1 + 1/2.

    There f(p) = (8/pi) sqrt(p (1 - p)), which is the population std of 0/1 rewards times 8/pi.
    """
    a = credit({"name": "bnpo", "ddof": 0}, *rates(1, 3))
    grpo_like = credit({"name": "grpo", **POPULATION}, *rates(1, 3))
    assert a[0] == pytest.approx([math.pi / 8 * x for x in grpo_like[0]])


# ---- weights, batch shares


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1 / 12, 1 / 4]),  # 1 / (N len)
        ("gspo", [1 / 12, 1 / 4]),
        ("gmpo", [1 / 12, 1 / 4]),
        ("dapo", [1 / 8, 1 / 8]),  # 1 / tokens
        ("dr_grpo", [1 / 16, 1 / 16]),  # 1 / (N L_max)
        ("bnpo", [1 / 4, 1 / 4]),  # 1 / N
    ],
)
def test_token_weights(name: str, expected: list[float]) -> None:
    g = group([1, 0, 1, 0], lengths=[3, 1, 3, 1])
    assert build({"name": name}).weigh([3, 1, 3, 1], totals_of([g], [3, 1, 3, 1])) == pytest.approx(
        expected * 2
    )


@pytest.mark.parametrize("name", BASES)
def test_what_a_base_says_about_itself(name: str) -> None:
    plain = build({"name": name, "num_generations": 6})
    assert (plain.name, plain.num_generations, plain.batch_share, plain.num_drafts) == (name, 6, 6, 0)
    assert plain.streams == frozenset()
    assert build({"name": name, "beta": 0.04}).streams == {"reference"}


# ---- E10: dynamic sampling, overlong filtering

MIXED, RIGHT, WRONG = [1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]


def select(algorithm: Algorithm, groups: Sequence[Group]) -> list[tuple[int, ...]]:
    return algorithm.select(groups, algorithm.credit(groups))


def test_e10_drop_leaves_uniform_groups_out() -> None:
    groups = [group(r, position=i) for i, r in enumerate((MIXED, RIGHT, WRONG))]
    everything = (0, 1, 2, 3)
    assert select(build({"name": "grpo"}), groups) == [everything] * 3
    assert select(build({"name": "grpo", "zero_variance": "drop"}), groups) == [everything, (), ()]


def test_truncated_completions_can_be_left_out() -> None:
    g = group(MIXED)
    cut = replace(g.rollouts[2], completion=completion(reason="length"))
    g = replace(g, rollouts=(*g.rollouts[:2], cut, g.rollouts[3]))
    assert select(build({"name": "dapo"}), [g]) == [(0, 1, 3)]
    assert select(build({"name": "dapo", "mask_truncated_completions": False}), [g]) == [(0, 1, 2, 3)]


def scripted(uniform: Callable[[int], bool]) -> Callable[[Prompt, Completion], float]:
    """A reward under which the group of a prompt is uniform or not, by the prompt's position."""
    return lambda q, c: 0.0 if uniform(q.position) else float(c.seed % 2)


def explored(algorithm: Algorithm, rollouts: TableRollouts) -> list[int]:
    return [g.prompt.position for g in algorithm.explore(rollouts.first(), rollouts)]


def test_refill_takes_the_first_groups_with_a_spread() -> None:
    """Of positions 0, 1, 2, ... every second is uniform: two rounds of 4 give 1, 3 and 5, 7."""
    dapo = build({"name": "dapo", "num_generations": 16})
    rollouts = TableRollouts(Tabular(), scripted(lambda i: i % 2 == 0))
    assert explored(dapo, rollouts) == [1, 3, 5, 7]
    assert rollouts.collective.count("more") == 1


def test_refill_leaves_no_surplus_and_keeps_the_order_of_the_run() -> None:
    """Three of four in the first round, four in the second: the first of the second completes the step."""
    dapo = build({"name": "dapo", "num_generations": 16})
    assert explored(dapo, TableRollouts(Tabular(), scripted(lambda i: i == 1))) == [0, 2, 3, 4]


@pytest.mark.parametrize("rounds", [1, 3])
def test_refill_stops_at_its_cap_with_what_it_has(rounds: int) -> None:
    dapo = build({"name": "dapo", "num_generations": 16, "max_generation_batches": rounds})
    rollouts = TableRollouts(Tabular(), scripted(lambda i: i % 4 != 0))
    assert explored(dapo, rollouts) == [4 * i for i in range(rounds)]
    assert rollouts.collective.count("more") == rounds - 1
    nothing = TableRollouts(Tabular(), lambda q, c: 1.0)
    assert explored(dapo, nothing) == [] and dapo.credit([]) == [] and dapo.select([], []) == []


def over_ranks(ranks: int, work: Callable[[TableRollouts], list[int]], **options: Any) -> list[Any]:
    """Run `work` on each rank in a thread; `total` sums over ranks and fails where one is missing."""
    barrier, counts, results = threading.Barrier(ranks, timeout=120), [0] * ranks, [None] * ranks

    def rank(r: int) -> None:
        def reduce(count: int) -> int:
            counts[r] = count
            barrier.wait()
            total = sum(counts)
            barrier.wait()
            return total

        rollouts = TableRollouts(Tabular(), rank=r, ranks=ranks, reduce=reduce, **options)
        results[r] = (work(rollouts), rollouts.collective)  # type: ignore[call-overload]

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("wrapped", [False, True])
def test_refill_gives_the_same_step_on_any_number_of_ranks(wrapped: bool) -> None:
    """Ranks find unequally many, rank 0 of 4 nothing, and still make the same collective calls."""
    spec: dict[str, Any] = {"name": "dapo", "num_generations": 12}
    algorithm = build({"name": "igrpo", "drafts": 2, "base": spec} if wrapped else spec)
    uniform = scripted(lambda i: i % 4 == 0 or i % 3 == 0)
    found = set()
    for ranks in (1, 2, 4):
        results = over_ranks(ranks, lambda r: explored(algorithm, r), reward=uniform, batch=8)
        assert all(calls == results[0][1] for _, calls in results)
        found.add(tuple(sorted(p for positions, _ in results for p in positions)))
    assert found == {(1, 2, 5, 7, 10, 11, 13, 14)}


# ---- E4: iGRPO


def drafts(*rewards: float, lengths: Sequence[int] = ()) -> tuple[Rollout, ...]:
    return group(rewards, lengths=lengths).rollouts


@pytest.mark.parametrize(("p", "n", "expected"), [
    (.1, 2, .19), (.3, 2, .51), (.5, 2, .75), (.9, 2, .99),
    (.1, 4, .3439), (.3, 4, .7599), (.5, 4, .9375), (.9, 4, .9999),
    (.1, 8, .569533), (.3, 8, .942352), (.5, 8, .996094), (.9, 8, 1.0),
])  # fmt: skip
def test_e4_the_best_draft_is_right_as_often_as_any_is(p: float, n: int, expected: float) -> None:
    """Every outcome of n drafts, weighed by its probability."""
    right, wrong = drafts(1.0, 0.0)
    success = 0.0
    for outcome in itertools.product((right, wrong), repeat=n):
        chance = math.prod(p if d is right else 1 - p for d in outcome)
        success += chance * (choose_draft(outcome, "best", "first") is right.completion)
    assert success == pytest.approx(1 - (1 - p) ** n) and success == pytest.approx(expected, abs=1e-6)


def test_choice_of_the_draft() -> None:
    ds = drafts(0, 1, 2, 2, 0, lengths=[2, 2, 3, 1, 1])
    chosen = {d.completion: i for i, d in enumerate(ds)}
    assert chosen[choose_draft(ds, "best", "first")] == 2
    assert chosen[choose_draft(ds, "best", "shortest")] == 3
    assert chosen[choose_draft(ds, "worst", "first")] == 0
    assert chosen[choose_draft(ds, "worst", "shortest")] == 4
    empty = choose_draft(ds, "empty", "first")
    assert (empty.token_ids, empty.logprobs, empty.text) == ((), (), "")


@pytest.mark.parametrize(("choice", "pool"), [("random", {0, 1, 2, 3}), ("best", {1, 3}), ("worst", {0, 2})])
def test_random_choices_are_even_and_repeatable(choice: Any, pool: set[int]) -> None:
    counts = dict.fromkeys(pool, 0)
    for position in range(400):
        ds = group([0, 1, 0, 1], position=position).rollouts
        draft = choose_draft(ds, choice, "random")
        assert draft == choose_draft(ds, choice, "random")
        counts[[d.completion for d in ds].index(draft)] += 1
    assert min(counts.values()) > 0.7 * 400 / len(pool)


def test_igrpo_drafts_then_refines() -> None:
    algorithm = build({"name": "igrpo", "drafts": 3, "base": {"name": "grpo", "num_generations": 4}})
    assert (algorithm.num_drafts, algorithm.num_generations, algorithm.batch_share) == (3, 4, 4)
    rollouts = TableRollouts(Tabular(), batch=2)
    groups = algorithm.explore(rollouts.first(), rollouts)
    assert rollouts.asked == [(0, 3, "draft"), (1, 3, "draft"), (0, 4, "sample"), (1, 4, "sample")]
    for position, g in enumerate(groups):
        assert len(g.drafts) == 3 and len(g.rollouts) == 4
        assert {d.prompt for d in map(strip, g.drafts)} == {strip_prompt(prompt(position))}
        best = max(g.drafts, key=lambda d: d.reward)
        assert g.prompt.text == f"question {position}\n\nPrevious draft:\n{best.completion.text}"
        assert all(r.prompt is g.prompt for r in g.rollouts)
        assert g.rewards == tuple(r.reward for r in g.rollouts)


def strip(rollout: Rollout) -> Rollout:
    return replace(rollout, prompt=strip_prompt(rollout.prompt))


def strip_prompt(q: Prompt) -> Prompt:
    """A prompt without its dictionaries, so that it can be hashed."""
    return replace(q, messages=(), columns=())  # type: ignore[arg-type]


def test_igrpo_passes_its_options_to_the_refinement() -> None:
    class Recorded(TableRollouts):
        def refine(self, prompt: Prompt, draft: Completion, **options: Any) -> Prompt:
            self.seen = options
            return super().refine(prompt, draft, **options)

    options = {
        "refine_template": "{draft} | {question}",
        "max_refine_prompt_length": 77,
        "keep_reasoning": False,
    }
    rollouts = Recorded(Tabular(), batch=1)
    groups = build({"name": "igrpo", **options}).explore(rollouts.first(), rollouts)
    assert rollouts.seen == {"template": "{draft} | {question}", "max_length": 77, "keep_reasoning": False}
    assert groups[0].prompt.text.endswith(" | question 0")


def test_igrpo_can_train_its_drafts_as_groups_of_their_own() -> None:
    algorithm = build({**BOTH, "base": {"name": "grpo", "num_generations": 4}})
    assert (algorithm.num_drafts, algorithm.num_generations, algorithm.batch_share) == (3, 4, 4 + 3)
    rollouts = TableRollouts(Tabular(), batch=2)
    groups = algorithm.explore(rollouts.first(), rollouts)
    assert [(g.stage, g.prompt.position, len(g.rollouts)) for g in groups] == [
        ("sample", 0, 4), ("draft", 0, 3), ("sample", 1, 4), ("draft", 1, 3),
    ]  # fmt: skip
    for refined, drafted in zip(groups[::2], groups[1::2], strict=True):
        assert drafted.rollouts == refined.drafts and drafted.drafts == ()
        assert drafted.prompt.text == f"question {drafted.prompt.position}"
    assert rollouts.asked == [(0, 3, "draft"), (1, 3, "draft"), (0, 4, "sample"), (1, 4, "sample")]


def test_refill_inside_igrpo_drafts_the_further_prompts_too() -> None:
    algorithm = build({"name": "igrpo", "drafts": 2, "base": {"name": "dapo", "num_generations": 16}})
    rollouts = TableRollouts(Tabular(), scripted(lambda i: i % 2 == 0))
    groups = algorithm.explore(rollouts.first(), rollouts)
    assert [g.prompt.position for g in groups] == [1, 3, 5, 7]
    assert all("Previous draft" in g.prompt.text and len(g.drafts) == 2 for g in groups)
    assert [g.drafts[0].prompt.position for g in groups] == [1, 3, 5, 7]
    assert sum(num for _, num, stage in rollouts.asked if stage == "draft") == 2 * 8


# ---- E5: CPPO


@pytest.mark.parametrize(("size", "rate", "kept"), [
    (16, 0, 16), (16, .5, 8), (16, .75, 4), (16, .875, 2), (16, .9375, 1), (16, .3, 11), (16, .95, 1),
    (8, 0, 8), (8, .5, 4), (8, .75, 2), (8, .875, 1), (10, .9, 1), (20, .9, 2),
])  # fmt: skip
def test_e5_how_many_are_kept(size: int, rate: float, kept: int) -> None:
    assert num_kept(size, rate) == kept
    algorithm = build(
        {"name": "cppo", "pruning_rate": rate, "base": {"name": "grpo", "num_generations": size}}
    )
    assert (algorithm.batch_share, algorithm.num_generations) == (kept, size)
    still = build({**algorithm.options, "allocation": False})
    assert still.batch_share == size


def pruned(
    *rewards: Sequence[float], rate: float = 0.5, ranks: Sequence[int] = (), **options: Any
) -> list[set[int]]:
    groups = [group(r, position=i, rank=ranks[i] if ranks else 0) for i, r in enumerate(rewards)]
    kept = select(build({"name": "cppo", "pruning_rate": rate, **options}), groups)
    assert all(list(k) == sorted(k) for k in kept)
    return [set(k) for k in kept]


THREE = ([1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1])


def test_e5_which_are_kept() -> None:
    assert pruned(EIGHT) == [{0, 1, 2, 4}]
    assert pruned(*THREE) == [{0, 1}] * 3
    assert pruned(*THREE, prune_scope="global") == [{0, 1}, {0, 1, 2, 3}, set()]


def test_rank_scope_prunes_within_the_groups_of_a_rank() -> None:
    """Rank 0 has groups 0 and 2 (k = 4 of 8), rank 1 has group 1 (k = 2 of 4)."""
    assert pruned(*THREE, prune_scope="rank", ranks=[0, 1, 0]) == [{0, 1, 2, 3}, {0, 1}, set()]
    assert pruned(*THREE, prune_scope="rank", ranks=[0, 0, 0]) == pruned(*THREE, prune_scope="global")


@pytest.mark.parametrize(("metric", "kept"), [
    ("smallest", {0, 3}), ("largest", {1, 2}), ("smallest_raw", {0, 1}), ("largest_raw", {2, 3}),
])  # fmt: skip
def test_prune_metrics_say_which_advantages_go(metric: str, kept: set[int]) -> None:
    """Advantages are proportional to the rewards, whose mean is 0."""
    assert pruned([4, 1, -2, -3], prune_metric=metric) == [kept]


def test_random_pruning_is_even_and_repeatable() -> None:
    counts = [0] * 4
    algorithm = build({"name": "cppo", "pruning_rate": 0.5, "prune_metric": "random"})
    for position in range(400):
        g = [group([1, 0, 0, 0], position=position)]
        kept = select(algorithm, g)
        assert kept == select(algorithm, g) and len(kept[0]) == 2
        for i in kept[0]:
            counts[i] += 1
    assert min(counts) > 0.8 * 200


def test_balanced_ties_take_both_signs() -> None:
    """In [1, 1, 0, 0] all |A| are equal: the first two are both right, balanced takes one of each."""
    assert pruned([1, 1, 0, 0]) == [{0, 1}]
    assert pruned([1, 1, 0, 0], tie_break="balanced") == [{0, 2}]
    assert pruned([1, 1, 1, 0, 0, 0], rate=1 / 3, tie_break="balanced") == [{0, 1, 3, 4}]
    assert pruned([1, 0, 0, 0], tie_break="balanced") == [{0, 1}]


def test_mirror_images_tie_in_spite_of_rounding() -> None:
    """Of [0.1, 0.2, 0.3] the outer two are equally far from the mean; 0.3 - 0.2 is less in binary."""
    assert pruned([0.3, 0.2, 0.1], rate=0.6) == [{0}] and pruned([0.1, 0.2, 0.3], rate=0.6) == [{0}]


def cppo_loss(rate: float, normalise_by: str) -> float:
    """E5's A = [4, 2, -1, -3] (rewards minus their mean 0.5) at ratio 1, one token each."""
    groups = [group([4, 2, -1, -3], lengths=[1] * 4)]
    base = {"name": "grpo", "scale_rewards": "none", "num_generations": 4}
    spec = {"name": "cppo", "pruning_rate": rate, "normalise_by": normalise_by, "base": base}
    algorithm = build(spec)
    advantages = [(4.0, 2.0, -1.0, -3.0)]
    (kept,) = algorithm.select(groups, advantages)
    lengths = torch.ones(len(kept), dtype=torch.int64)
    weights = algorithm.weigh([1] * len(kept), totals_of(groups, [1] * len(kept)))
    batch = Batch(
        row=torch.arange(len(kept)),
        lengths=lengths,
        advantages=torch.tensor([advantages[0][i] for i in kept]),
        weights=torch.tensor(weights),
    )
    return algorithm.loss(torch.full((len(kept),), -1.0), batch)[0].item()


@pytest.mark.parametrize(
    ("rate", "by_kept", "by_group"), [(0, -0.5, -0.5), (0.25, -1.0, -0.75), (0.5, -0.5, -0.25)]
)
def test_e5_losses(rate: float, by_kept: float, by_group: float) -> None:
    assert cppo_loss(rate, "kept") == pytest.approx(by_kept)
    assert cppo_loss(rate, "group") == pytest.approx(by_group)


def test_token_mean_counts_tokens_before_or_after_pruning() -> None:
    g = [group(MIXED, lengths=[4, 1, 2, 3])]
    for by, tokens in (("kept", 5), ("group", 10)):
        spec = {"name": "cppo", "pruning_rate": 0.5, "normalise_by": by, "base": {"name": "dapo"}}
        assert build(spec).weigh([4, 1], totals_of(g, [4, 1])) == [1 / tokens] * 2


def test_cppo_prunes_what_its_base_selects() -> None:
    """The uniform group is dropped by DAPO first; a truncated completion is never kept for its advantage."""
    base = {"name": "dapo", "num_generations": 4, "zero_variance": "drop"}
    g = group([1, 0, 0, 0])
    cut = replace(g.rollouts[0], completion=completion(reason="length"))
    groups = [replace(g, rollouts=(cut, *g.rollouts[1:])), group(RIGHT, position=1)]
    algorithm = build({"name": "cppo", "pruning_rate": 0.5, "base": base})
    assert select(algorithm, groups) == [(1, 2), ()]


# ---- build

NESTED: dict[str, Any] = {
    "name": "igrpo",
    "drafts": 2,
    "base": {"name": "cppo", "pruning_rate": 0.5, "base": {"name": "dapo", "num_generations": 4}},
}


BOTH: dict[str, Any] = {"name": "igrpo", "drafts": 3, "train_drafts": True}


SPECS = [{"name": n} for n in (*BASES, "igrpo", "kdrl", "opd", "codistill")]
SPECS += [NESTED, BOTH, *({"name": n, "num_train": 4} for n in ("pods", "gfpo"))]


def test_build_nests() -> None:
    algorithm = build(NESTED)
    assert algorithm.name == "igrpo" and algorithm.num_drafts == 2 and algorithm.batch_share == 2
    assert algorithm.options["base"]["base"]["epsilon_high"] == 0.28


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_options_are_complete_and_build_the_same_again(spec: dict[str, Any]) -> None:
    def layers(options: Any) -> list[set[str]]:
        own = set(options) - {"name"}
        return [own] + (layers(options["base"]) if "base" in options else [])

    algorithm = build(spec)
    assert build(algorithm.options).options == algorithm.options
    own = layers(algorithm.options)
    rows = algorithms.describe()
    assert own[0] == {row.option for row in rows if row.algorithm == spec["name"]}


def test_a_wrapper_without_a_base_wraps_grpo() -> None:
    assert build({"name": "igrpo"}).options["base"]["name"] == "grpo"
    assert build({"name": "igrpo"}).num_generations == 8
    assert (
        igrpo(base=grpo(num_generations=4)).options
        == build({"name": "igrpo", "base": {"name": "grpo", "num_generations": 4}}).options
    )


@pytest.mark.parametrize(("spec", "message"), [
    ({"name": "drgrpo"}, r"^name='drgrpo' is not an algorithm \(did you mean dr_grpo\?\); known are grpo, "),
    ({"name": "GRPO"}, r"did you mean grpo"),
    ({"drafts": 4}, r"name=None is not an algorithm"),
    ("grpo", r"^algorithm='grpo' must be a mapping with a name"),
    ({"name": "igrpo", "base": "grpo"}, r"^base='grpo' must be a mapping"),
    ({"name": "igrpo", "base": {"name": "cppo", "base": {"name": "x"}}}, r"^base\.base\.name='x' is not"),
    ({"name": "grpo", "epsilon_hihg": 0.3}, r"^epsilon_hihg: .* no such option \(did you mean epsilon_high"),
    ({"name": "grpo", "clip_ratio_low": 0.2}, r"^clip_ratio_low: our name for this is epsilon$"),
    ({"name": "grpo", "clip_ratio_high": 0.2}, r"is epsilon_high$"),
    ({"name": "grpo", "kl_loss_coef": 0.2}, r"is beta$"),
    ({"name": "grpo", "rollout.n": 8}, r"is num_generations$"),
    ({"name": "grpo", "n_samples_per_prompt": 8}, r"is num_generations$"),
    ({"name": "grpo", "group_size": 8}, r"is num_generations$"),
    ({"name": "grpo", "loss_type": "dapo"}, r"is loss_agg, and for 'dapo' write loss_agg: token_mean$"),
    ({"name": "grpo", "loss_type": "grpo"}, r"write loss_agg: seq_mean_token_mean$"),
    ({"name": "grpo", "loss_type": "bnpo"}, r"write loss_agg: token_mean_local$"),
    ({"name": "grpo", "loss_type": "dr_grpo"}, r"write loss_agg: const_len$"),
    ({"name": "grpo", "loss_agg_mode": "seq-mean-token-sum"}, r"write loss_agg: seq_mean_token_sum$"),
    ({"name": "igrpo", "num_drafts": 4}, r"is drafts$"),
    ({"name": "cppo", "pruning": .5}, r"is pruning_rate$"),
    ({"name": "cppo", "pruning_rate": .5, "metric": "random"}, r"is prune_metric$"),
    ({"name": "igrpo", "num_generations": 4}, r"igrpo has no option num_generations; .*under base:$"),
    ({"name": "grpo", "drafts": 4}, r"grpo has no option drafts; it is one of igrpo$"),
    ({"name": "grpo", "base": {"name": "grpo"}}, r"it is one of igrpo, cppo, pods, gfpo, kdrl, opd$"),
    ({"name": "gspo", "loss_type": "grpo"}, r"gspo has no option loss_agg; it is one of grpo, dapo"),
    ({"name": "grpo", "temperature": 1.0}, r"temperature: this belongs under generation:"),
    ({"name": "grpo", "epsilon": "0.2"}, r"^epsilon='0\.2' \(str\) .* expected float; .*without quotes"),
    ({"name": "grpo", "epsilon": True}, r"epsilon=True \(bool\) has the wrong type: expected float"),
    ({"name": "grpo", "epsilon": None}, r"epsilon=None \(NoneType\) has the wrong type"),
    ({"name": "grpo", "beta": float("nan")}, r"beta=nan \(float\) is not a finite number"),
    ({"name": "bnpo", "reward_max": float("inf")}, r"reward_max=inf \(float\) is not a finite number"),
    ({"name": "grpo", "delta": "x"}, r"expected float \| null"),
    ({"name": "grpo", "num_generations": 8.0}, r"num_generations=8\.0 \(float\) .* expected int"),
    ({"name": "grpo", "num_generations": True}, r"expected int"),
    ({"name": "grpo", "std_ddof": True}, r"std_ddof=True \(bool\) is not one of 0 \| 1"),
    ({"name": "grpo", "std_ddof": 2}, r"not one of 0 \| 1"),
    ({"name": "grpo", "kl_estimator": "k4"}, r"not one of k1 \| k2 \| k3"),
    ({"name": "grpo", "loss_agg": "seq_mean"}, r"did you mean token_mean"),
    ({"name": "grpo", "scale_rewards": True}, r"not one of group \| batch \| none"),
    ({"name": "grpo", "mask_truncated_completions": 1}, r"expected bool"),
    ({"name": "grpo", "num_generations": 1}, r"num_generations=1 .* at least 2"),
    ({"name": "grpo", "epsilon": 0}, r"epsilon=0 is not allowed"),
    ({"name": "grpo", "epsilon": 1.5}, r"epsilon=1\.5 is not allowed"),
    ({"name": "grpo", "epsilon_high": -0.1}, r"epsilon_high=-0\.1"),
    ({"name": "grpo", "delta": 1.2}, r"delta=1\.2 .* must exceed 1 \+ epsilon_high = 1\.2; null"),
    ({"name": "grpo", "beta": -0.1}, r"beta=-0\.1"),
    ({"name": "grpo", "std_eps": -1.0}, r"std_eps"),
    ({"name": "grpo", "importance_sampling_cap": 0.5}, r"importance_sampling_cap=0\.5"),
    ({"name": "grpo", "max_generation_batches": 0}, r"max_generation_batches=0"),
    ({"name": "gspo", "epsilon": -1.0}, r"epsilon=-1\.0"),
    ({"name": "gmpo", "clip_log": 0.0}, r"clip_log=0\.0"),
    ({"name": "bnpo", "reward_min": 1.0}, r"reward_max=1\.0 .* exceed reward_min=1\.0"),
    ({"name": "igrpo", "drafts": 0}, r"drafts=0 .* without any it is its base"),
    ({"name": "igrpo", "refine_template": "{question}"}, r"must contain \{question\} and \{draft\}"),
    ({"name": "igrpo", "refine_template": "{question} again"}, r"must contain .*\{draft\}"),
    ({"name": "igrpo", "max_refine_prompt_length": 0}, r"max_refine_prompt_length=0"),
    ({"name": "igrpo", "draft_choice": "bst"}, r"did you mean best"),
    ({"name": "igrpo", "base": {"name": "igrpo"}}, r"iGRPO of iGRPO"),
    ({"name": "igrpo", "train_drafts": True, "drafts": 1}, r"drafts=1 .* train_drafts .* at least 2"),
    ({**NESTED, "train_drafts": True}, r"base='cppo' .* leave train_drafts off"),
    ({"name": "igrpo", "train_drafts": True, "base": {"name": "pods", "num_train": 4}}, r"base='pods' .* cut"),
    ({"name": "igrpo", "train_drafts": True, "base": {"name": "gfpo", "num_train": 4}}, r"base='gfpo' .* cut"),
    ({"name": "igrpo", "train_drafts": True, "base": {"name": "codistill"}}, r"base='codistill' .* cut"),
    ({"name": "cppo", "pruning_rate": 0.5, "base": BOTH}, r"base='igrpo' .* without train_drafts it works"),
    ({"name": "cppo", "pruning_rate": 0.5, "base": {"name": "kdrl", "base": BOTH}}, r"base='kdrl' .* teaches"),
    ({"name": "igrpo", "base": {"name": "cppo", "pruning_rate": 0.5, "base": {"name": "igrpo"}}}, "iGRPO of"),
    ({"name": "cppo"}, r"^pruning_rate is missing: cppo needs it"),
    ({"name": "cppo", "pruning_rate": 1}, r"pruning_rate=1 .* 0 <= pruning_rate < 1"),
    ({"name": "cppo", "pruning_rate": -0.5}, r"pruning_rate=-0\.5"),
    ({"name": "cppo", "pruning_rate": 0.5, "base": NESTED}, r"base='igrpo' .* prunes already"),
    ({"name": "igrpo", "base": {"name": "grpo", "epsilon": 2.0}}, r"^base\.epsilon=2\.0 is not allowed"),
])  # fmt: skip
def test_what_build_refuses(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(spec)


def test_messages_can_begin_with_a_path() -> None:
    with pytest.raises(ValueError, match=r"^policies\.small\.base\.epsilon=2\.0"):
        build({"name": "igrpo", "base": {"name": "grpo", "epsilon": 2.0}}, where="policies.small.")


@pytest.mark.parametrize("name", BASES)
def test_builders_refuse_a_wrong_type_when_called_directly(name: str) -> None:
    for option, value in (("beta", "0"), ("num_generations", None), ("kl_estimator", "k9")):
        with pytest.raises(ValueError, match=f"^{option}="):
            ALGORITHMS[name](**{option: value})


def test_describe_lists_every_option_with_a_line() -> None:
    rows = algorithms.describe()
    assert {row.algorithm for row in rows} == set(ALGORITHMS)
    assert all(row.doc and row.type and row.default for row in rows)
    table = {(row.algorithm, row.option): row for row in rows}
    assert table["dapo", "epsilon_high"][2:4] == ("float | null", "0.28")
    assert table["grpo", "zero_variance"][2:4] == ("keep | drop | refill", "keep")
    assert table["cppo", "pruning_rate"].default == "required"
    assert table["gspo", "epsilon"].doc == "lower clip range of the sequence ratio"
    assert table["gspo", "beta"].doc == table["grpo", "beta"].doc


def test_algorithms_import_without_torch() -> None:
    code = "import sys; from hpcgrpo import algorithms as a; a.build({'name': 'igrpo'}); a.describe()"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# ---- an independent numpy computation


@pytest.fixture(scope="module")
def oracle() -> dict[str, Any]:
    if not ORACLE.is_file():
        pytest.skip(f"needs {ORACLE}, which does not come with the project")
    with contextlib.redirect_stdout(io.StringIO()):
        return runpy.run_path(str(ORACLE))


def random_rewards(seed: int) -> list[list[float]]:
    rng = random.Random(seed)
    return [[rng.choice([0.0, 0.5, 1.0, rng.random()]) for _ in range(6)] for _ in range(5)]


@pytest.mark.parametrize("mode", ["group", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_advantages_equal_the_oracle(oracle: dict[str, Any], mode: str, ddof: int, eps: float) -> None:
    for seed in range(20):
        rewards = random_rewards(seed)
        ours = credit({"name": "grpo", "scale_rewards": mode, "std_ddof": ddof, "std_eps": eps}, *rewards)
        for a, r in zip(ours, rewards, strict=True):
            assert a == pytest.approx(oracle["adv"](r, mode, ddof, eps).tolist(), abs=1e-12)


@pytest.mark.parametrize("ddof", [0, 1])
def test_bnpo_equals_the_oracle(oracle: dict[str, Any], ddof: int) -> None:
    np = oracle["np"]
    for seed in range(20):
        rewards = random_rewards(seed)
        p = np.mean(rewards, axis=1)
        m, v = p.mean(), p.var(ddof=ddof)
        c = m * (1 - m) / v - 1
        alpha, beta = max(1, 1 + c * m / 3), max(1, 1 + c * (1 - m) / 3)
        expected = [
            (np.array(r) - q) / oracle["beta_pdf"](q, alpha, beta) for r, q in zip(rewards, p, strict=True)
        ]
        ours = credit({"name": "bnpo", "ddof": ddof}, *rewards)
        assert np.allclose(ours, expected, atol=1e-10)


def test_a_rollout_is_what_these_tests_take_it_for() -> None:
    """The random choices above rest on seeds that differ, and `group` on rewards as given."""
    g = group([1, 0.5])
    assert g.rewards == (1.0, 0.5) and g.rollouts[0].score == Score(1.0, {})
    assert len({r.completion.seed for r in g.rollouts}) == 2
