"""PODS and GFPO: which completions are kept, what they are credited, and what the wrappers may stand on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import pvariance
from typing import Any

import pytest
from tabular import TableRollouts, Tabular, completion, group, step

from hpcgrpo.algorithms import build
from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.algorithms.downsample import DOWNSAMPLE, subset

EIGHT = [3, 3, 0, 1, 0, 2.5, 1, 0]
POPULATION = {"std_ddof": 0, "std_eps": 0.0}


def wrapper(name: str, size: int, num: int, base: dict[str, Any] | None = None, **options: Any) -> Algorithm:
    inner = {"name": "grpo", "num_generations": size, **(base or {})}
    return build({"name": name, "num_train": num, "base": inner, **options})


def kept(values: Sequence[float], num: int, downsample: Any = "max_variance") -> tuple[int, ...]:
    return subset(group(values), values, num, downsample)


# ---- E7


@pytest.mark.parametrize(("rewards", "expected", "variance"), [
    ([0, 0, 0, 1, 1, 1, 1, 1], (0, 1, 6, 7), 0.25),
    ([0, 0, 0, 0, 0, 0, 0, 1], (0, 1, 2, 7), 0.1875),
    (EIGHT, (0, 1, 2, 4), 2.25),
    ([0, .1, .2, .3, 1, .95, .9, .05], (0, 4, 5, 7), 0.22625),
])  # fmt: skip
def test_e7_greatest_variance(rewards: list[float], expected: tuple[int, ...], variance: float) -> None:
    assert kept(rewards, 4) == expected
    assert pvariance([rewards[i] for i in expected]) == pytest.approx(variance)


def test_e7_advantages_of_the_subset() -> None:
    (a,) = wrapper("pods", 8, 4, POPULATION).credit([group([0, 0, 0, 1, 1, 1, 1, 1])])
    assert a == pytest.approx((-1, -1, 0, 0, 0, 0, 1, 1))
    (a,) = wrapper("pods", 8, 4, POPULATION).credit([group(EIGHT)])
    assert a == pytest.approx((1, 1, -1, 0, -1, 0, 0, 0))


def test_no_subset_has_a_greater_variance() -> None:
    rng = random.Random(0)
    for _ in range(200):
        size = rng.randint(2, 9)
        values = [rng.choice([0, 0.5, 1, rng.gauss(0, 1), 1e6 + rng.random()]) for _ in range(size)]
        num = rng.randint(1, size)
        best = max(pvariance(c) for c in itertools.combinations(values, num))
        found = kept(values, num)
        assert len(set(found)) == num
        assert pvariance([values[i] for i in found]) == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_equal_rewards_keep_the_first() -> None:
    assert kept([0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], 2) == (0, 1)


def test_the_other_choosers() -> None:
    assert kept(EIGHT, 4, "top_bottom") == (0, 1, 2, 4)
    assert kept([5, 1, 4, 2, 3], 3, "top_bottom") == (0, 1, 2)  # two best, one worst
    assert kept(EIGHT, 4, "top") == (0, 1, 3, 5)  # of the two 1s the first
    assert kept(EIGHT, 8, "top") == tuple(range(8))
    with pytest.raises(KeyError):
        kept(EIGHT, 4, "tpo")
    assert DOWNSAMPLE["none"](EIGHT, range(8), 4) == list(range(8))


def test_random_choice_is_even_and_repeatable() -> None:
    counts = [0] * 4
    for position in range(400):
        g = group([1, 0, 0, 0], position=position)
        places = subset(g, g.rewards, 2, "random")
        assert places == subset(g, g.rewards, 2, "random") and len(places) == 2
        for i in places:
            counts[i] += 1
    assert min(counts) > 0.8 * 200


# ---- E8

E8 = group([1, 1, 0, 1], lengths=[100, 50, 20, 200])


@pytest.mark.parametrize(("metric", "places", "advantages"), [
    ("length", (1, 2), (0, 1, -1, 0)), ("efficiency", (0, 1), (0, 0, 0, 0)),
])  # fmt: skip
def test_e8_gfpo(metric: str, places: tuple[int, ...], advantages: tuple[float, ...]) -> None:
    algorithm = wrapper("gfpo", 4, 2, POPULATION, metric=metric)
    credited = algorithm.credit([E8])
    assert credited[0] == pytest.approx(advantages)
    assert algorithm.select([E8], credited) == [places]


# ---- what both do


@pytest.mark.parametrize("name", ["pods", "gfpo"])
def test_a_prompt_takes_up_what_is_trained(name: str) -> None:
    algorithm = wrapper(name, 8, 4)
    assert (algorithm.num_generations, algorithm.batch_share, algorithm.name) == (8, 4, name)
    rollouts = TableRollouts(Tabular())
    groups = algorithm.explore(rollouts.first(), rollouts)
    assert [len(g.rollouts) for g in groups] == [8] * 4
    assert [len(k) for k in algorithm.select(groups, algorithm.credit(groups))] == [4] * 4


def test_the_whole_group_can_be_what_advantages_are_formed_over() -> None:
    """[1,1,0,1]: mean 0.75, population std sqrt(3)/4; of the shortest two one is right."""
    algorithm = wrapper("gfpo", 4, 2, POPULATION, normalise_on="group")
    credited = algorithm.credit([E8])
    assert credited[0] == pytest.approx((0, 1 / 3**0.5, -(3**0.5), 0))
    assert algorithm.select([E8], credited) == [(1, 2)]


def test_the_base_selects_within_the_subset() -> None:
    """A truncated completion is chosen and then left out; a subset of equal rewards teaches nothing."""
    g = group([0, 0, 1, 1], lengths=[5, 4, 3, 2])
    cut = replace(g.rollouts[2], completion=replace(completion((1,) * 3, reason="length")))
    g = replace(g, rollouts=(*g.rollouts[:2], cut, g.rollouts[3]))
    base = {"mask_truncated_completions": True, "zero_variance": "drop"}
    for options, places in (({}, ()), ({"normalise_on": "group"}, (3,))):
        algorithm = wrapper("gfpo", 4, 2, base, **options)
        assert algorithm.select([g], algorithm.credit([g])) == [places]
    algorithm = wrapper("pods", 4, 2, base)
    assert algorithm.select([g], algorithm.credit([g])) == [(0, 3)]


@pytest.mark.parametrize("name", ["pods", "gfpo"])
@pytest.mark.parametrize("normalise_on", ["kept", "group"])
def test_all_of_a_group_is_the_base(name: str, normalise_on: str) -> None:
    base = {"name": "dr_grpo", "num_generations": 5}
    algorithm = wrapper(name, 5, 5, base, normalise_on=normalise_on)
    results = []
    for a in (build(base), algorithm):
        policy = Tabular()
        rollouts = TableRollouts(policy)
        results.append(step(a.explore(rollouts.first(), rollouts), a, policy))
    assert results[0][0] == results[1][0]
    assert all((results[0][2][c] == results[1][2][c]).all() for c in results[0][2])


def test_cppo_prunes_what_gfpo_keeps() -> None:
    """k counts from gfpo's num_train; pruned are completions of the subset, by its advantages."""
    inner = {"name": "gfpo", "num_train": 4, "base": {"name": "grpo", "num_generations": 8}}
    algorithm = build({"name": "cppo", "pruning_rate": 0.5, "base": inner})
    assert (algorithm.num_generations, algorithm.batch_share) == (8, 2)
    g = group([0, 0, 0, 1, 1, 1, 1, 1], lengths=[1, 9, 9, 2, 3, 4, 9, 9])
    advantages = algorithm.credit([g])
    assert [i for i, a in enumerate(advantages[0]) if a] == [0, 3, 4, 5]
    assert algorithm.select([g], advantages) == [(0, 3)]  # the wrong one is farthest from the mean 3/4
    still = build({**algorithm.options, "allocation": False})
    assert still.batch_share == 4 and still.select([g], advantages) == [(0, 3)]


# ---- what is refused

GRPO8 = {"name": "grpo", "num_generations": 8}
PODS = {"name": "pods", "num_train": 4, "base": GRPO8}
GFPO = {"name": "gfpo", "num_train": 4, "base": GRPO8}


def of(base: dict[str, Any], name: str = "pods", **options: Any) -> dict[str, Any]:
    return {"name": name, "num_train": 4, "base": base, **options}


@pytest.mark.parametrize(("spec", "message"), [
    (of(GRPO8, num_train=1), r"num_train=1 .* 2 to num_generations=8 of the base"),
    (of(GRPO8, num_train=9), r"num_train=9 .* 2 to num_generations=8"),
    (of(GRPO8, num_train=0, normalise_on="group"), r"num_train=0 .* 1 to num_generations=8"),
    (of(GRPO8, downsample="none"), r"num_train=4 .* all num_generations=8 are trained on"),
    (of(GRPO8, "gfpo", num_train=12), r"num_train=12 .* 2 to"),
    (of(GRPO8, "gfpo", metric="size"), r"metric='size' .* length \| efficiency"),
    ({"name": "pods", "base": GRPO8}, r"^num_train is missing: pods needs it"),
    ({"name": "gfpo", "num_remains_in_group": 4, "base": GRPO8}, r"our name for this is num_train$"),
    (of(PODS), r"base='pods' .* pods down-samples each group already"),
    (of(GFPO), r"base='gfpo' .* gfpo down-samples each group already"),
    (of(PODS, "gfpo"), r"base='pods' .* already; change its num_train"),
    (of({"name": "cppo", "pruning_rate": 0.5, "base": GRPO8}, "gfpo"), r"base='cppo' .* as base: of cppo"),
    (of({"name": "igrpo", "base": PODS}), r"base='igrpo' .* pods down-samples"),
    (of({"name": "codistill"}), r"base='codistill' .* set its num_train and downsample"),
    (of({"name": "opd", "base": GRPO8}), r"base='opd' .* in expectation over all that is sampled"),
    (of({"name": "igrpo", "train_drafts": True, "base": GRPO8}), r"drafts are groups of another size"),
    ({"name": "cppo", "pruning_rate": 0.5, "base": PODS}, r"base='pods' .* ties would decide"),
    ({"name": "cppo", "pruning_rate": 0.5, "base": {"name": "igrpo", "base": PODS}}, r"base='igrpo' .* ties"),
    ({"name": "cppo", "pruning_rate": 0.5, "normalise_by": "group", "base": GFPO}, r"write normalise_by: kept"),
])  # fmt: skip
def test_what_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(spec)
