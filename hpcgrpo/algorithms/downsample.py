"""Down-sampling: of each group, train a subset. PODS (arXiv 2504.13818) and GFPO (2508.09726) as wrappers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

from hpcgrpo.algorithms.base import Algorithm, Credit, Select
from hpcgrpo.algorithms.credit import is_uniform
from hpcgrpo.algorithms.schema import check_types, refuse, require
from hpcgrpo.types import Group, stable_seed

Downsample = Literal["max_variance", "top_bottom", "top", "random", "none"]
FilterMetric = Literal["length", "efficiency"]
NormaliseOn = Literal["kept", "group"]

Kept = tuple[int, ...]  # places in a group, ascending
Choose = Callable[[Group], Kept]
Chooser = Callable[[Sequence[float], Sequence[int], int], list[int]]  # values [n], seeds [n], m -> m places

OF_A_SUBSET = "distillation holds in expectation over all that is sampled; a chosen subset would bend it"
REFUSED = {
    "cppo": "cppo goes outside: write it over the down-sampling, as base: of cppo",
    "pods": "pods down-samples each group already; change its num_train instead",
    "gfpo": "gfpo down-samples each group already; change its num_train instead",
    "codistill": "codistill down-samples each group itself; set its num_train and downsample",
    "opd": OF_A_SUBSET,
    "igrpo.train_drafts": "its drafts are groups of another size; without train_drafts it works",
}


def pods(
    *,
    base: Algorithm,
    num_train: int,
    downsample: Downsample = "max_variance",
    normalise_on: NormaliseOn = "kept",
) -> Algorithm:
    """Sample many completions of a prompt, train a subset of them (PODS, arXiv 2504.13818).

    Options:
        base: the algorithm that trains on the subset; its num_generations is what is sampled (n)
        num_train: completions of each group that are trained on (m)
        downsample: which: the greatest variance of rewards | best and worst | best | at random | none left out
        normalise_on: advantages over the kept completions (PODS, appendix A.3) or over the whole group

    `base` selects within the subset. A prompt takes up m of train_batch_size. Over kdrl the teacher too teaches
    on the subset. Raises ValueError for a value that is not allowed and for a base that selects already.
    """
    options = dict(locals())
    check_types(pods, options)
    whole = downsample != "none" or num_train == base.num_generations
    rule = (
        f"with downsample none all num_generations={base.num_generations} are trained on; write that number"
    )
    require(whole, "num_train", num_train, rule)
    return _subset("pods", options, lambda group: subset(group, group.rewards, num_train, downsample))


def gfpo(
    *, base: Algorithm, num_train: int, metric: FilterMetric = "length", normalise_on: NormaliseOn = "kept"
) -> Algorithm:
    """Sample many completions of a prompt, train the shortest or most efficient (GFPO, arXiv 2508.09726).

    Options:
        base: the algorithm that trains on the subset; its num_generations is what is sampled (G)
        num_train: completions of each group that are trained on (k)
        metric: what is kept: the shortest completions, or those with the most reward per token
        normalise_on: advantages over the kept completions or over the whole group

    Ties go to the lower place. `base` selects within the subset; a group that is uniform there teaches nothing,
    also where dynamic sampling found a spread in the whole. Raises ValueError as `pods` does.
    """
    options = dict(locals())
    check_types(gfpo, options)
    score = FILTERS[metric]
    return _subset("gfpo", options, lambda group: subset(group, score(group), num_train, "top"))


def subset(group: Group, values: Sequence[float], num: int, downsample: Downsample) -> Kept:
    """The places of `num` of a group's rollouts, chosen by one value each; all where there are no more."""
    if num >= len(values):
        return tuple(range(len(values)))
    seeds = [rollout.completion.seed for rollout in group.rollouts]
    return tuple(sorted(DOWNSAMPLE[downsample](values, seeds, num)))


def part(group: Group, kept: Kept) -> Group:
    """The group of the kept rollouts alone."""
    return replace(group, rollouts=tuple(group.rollouts[i] for i in kept))


def credit_kept(credit: Credit, choose: Choose) -> Credit:
    """Advantages formed over the chosen rollouts of each group; 0 for the others."""

    def over_kept(groups: Sequence[Group]) -> list[tuple[float, ...]]:
        kept = [choose(group) for group in groups]
        advantages = credit([part(group, k) for group, k in zip(groups, kept, strict=True)])
        return [
            _spread(len(group.rollouts), k, a) for group, k, a in zip(groups, kept, advantages, strict=True)
        ]

    return over_kept


def select_kept(select: Select, choose: Choose) -> Select:
    """What `select` keeps of the group of chosen rollouts, as places in the whole group."""

    def over_kept(groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> list[Kept]:
        kept = [choose(group) for group in groups]
        parts = [part(group, k) for group, k in zip(groups, kept, strict=True)]
        own = [tuple(a[i] for i in k) for a, k in zip(advantages, kept, strict=True)]
        return [tuple(k[i] for i in s) for k, s in zip(kept, select(parts, own), strict=True)]

    return over_kept


def _spread(count: int, kept: Kept, advantages: Sequence[float]) -> tuple[float, ...]:
    given = dict(zip(kept, advantages, strict=True))
    return tuple(given.get(i, 0.0) for i in range(count))


def _subset(name: str, options: dict[str, Any], choose: Choose) -> Algorithm:
    """`base` on the chosen rollouts of each group."""
    base, num, on_kept = options["base"], options["num_train"], options["normalise_on"] == "kept"
    refuse(base.name, base.options, REFUSED)
    least = 2 if on_kept else 1
    rule = f"{least} to num_generations={base.num_generations} of the base, which is how many are sampled"
    require(least <= num <= base.num_generations, "num_train", num, rule)
    credit = credit_kept(base.credit, choose) if on_kept else _zeroed(base.credit, choose)
    return replace(
        base,
        name=name,
        credit=credit,
        select=select_kept(base.select, choose) if on_kept else _within(base.select, choose),
        batch_share=num,
        options={"name": name, **options, "base": dict(base.options)},
    )


def _zeroed(credit: Credit, choose: Choose) -> Credit:
    """Advantages over the whole group, 0 for what is not chosen."""

    def over_all(groups: Sequence[Group]) -> list[tuple[float, ...]]:
        advantages = credit(groups)
        return [
            _spread(len(a), k, [a[i] for i in k])
            for a, k in zip(advantages, map(choose, groups), strict=True)
        ]

    return over_all


def _within(select: Select, choose: Choose) -> Select:
    """What `select` keeps of the whole group and `choose` of it too."""

    def over_all(groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> list[Kept]:
        chosen = [set(choose(group)) for group in groups]
        selected = select(groups, advantages)
        return [tuple(i for i in s if i in c) for s, c in zip(selected, chosen, strict=True)]

    return over_all


# ---- the choosers; ties go to the lower place


def _max_variance(values: Sequence[float], seeds: Sequence[int], num: int) -> list[int]:
    """The `num` values of greatest variance: always some lowest and some highest, found by sums in O(n log n).

    Of splits with equal variance the one with fewest highest. Source: PODS, theorem 1 and algorithm 2.
    """
    if is_uniform(values):
        return list(range(num))
    order = _ascending(values)
    low, span = values[order[0]], values[order[-1]] - values[order[0]]
    scaled = [(values[i] - low) / span for i in order]
    sums = [0.0, *accumulate(scaled)]
    squares = [0.0, *accumulate(x * x for x in scaled)]

    def spread(high: int) -> float:
        s, q = (total[num - high] + total[-1] - total[len(order) - high] for total in (sums, squares))
        return round(num * q - s * s, 9)  # num^2 times the variance; rounding makes ties of equal ones

    best = max(range(num + 1), key=spread)
    return order[: num - best] + order[len(order) - best :]


def _top_bottom(values: Sequence[float], seeds: Sequence[int], num: int) -> list[int]:
    order, high = _ascending(values), (num + 1) // 2
    return order[: num - high] + order[len(order) - high :]


def _top(values: Sequence[float], seeds: Sequence[int], num: int) -> list[int]:
    return _ascending([-value for value in values])[:num]


def _random(values: Sequence[float], seeds: Sequence[int], num: int) -> list[int]:
    return _ascending([stable_seed("downsample", seed) for seed in seeds])[:num]


def _none(values: Sequence[float], seeds: Sequence[int], num: int) -> list[int]:
    return list(range(len(values)))


def _ascending(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=values.__getitem__)


def _shortness(group: Group) -> list[float]:
    return [-float(len(rollout.completion.token_ids)) for rollout in group.rollouts]


def _efficiency(group: Group) -> list[float]:
    return [rollout.reward / max(1, len(rollout.completion.token_ids)) for rollout in group.rollouts]


DOWNSAMPLE: dict[str, Chooser] = {
    "max_variance": _max_variance,
    "top_bottom": _top_bottom,
    "top": _top,
    "random": _random,
    "none": _none,
}
FILTERS: dict[str, Callable[[Group], list[float]]] = {"length": _shortness, "efficiency": _efficiency}
