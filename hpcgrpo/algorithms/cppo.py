"""CPPO (arXiv 2503.22342) as a wrapper: of each group, train the completions with the largest |advantage|."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from hpcgrpo.algorithms.base import Algorithm, Select, Weigh
from hpcgrpo.algorithms.schema import check_types, refuse, require
from hpcgrpo.types import Group, Totals, stable_seed

PruneMetric = Literal["smallest", "largest", "random", "smallest_raw", "largest_raw"]
PruneScope = Literal["group", "rank", "global"]
NormaliseBy = Literal["kept", "group"]
PruneTieBreak = Literal["first", "balanced"]

STILL_TAUGHT = (
    "its teacher teaches a completion with advantage 0 as well, so a small advantage is no reason to go"
)
REFUSED = {
    "cppo": "it prunes already; raise its pruning_rate instead",
    "pods": "in a subset of max variance all |A| are nearly equal, so ties would decide; lower its num_train instead",
    "codistill": "it down-samples already; lower its num_train instead",
    "kdrl": STILL_TAUGHT,
    "opd": STILL_TAUGHT,
    "igrpo.train_drafts": "its drafts are groups of another size; without train_drafts it works",
}


class Candidate(NamedTuple):
    """A completion that may be pruned: its group, its place there, its advantage and its sampling seed."""

    group: int
    place: int
    advantage: float
    seed: int


def cppo(
    *,
    base: Algorithm,
    pruning_rate: float,
    prune_metric: PruneMetric = "smallest",
    prune_scope: PruneScope = "group",
    normalise_by: NormaliseBy = "kept",
    tie_break: PruneTieBreak = "first",
    allocation: bool = True,
) -> Algorithm:
    """Keep k = max(1, floor(G (1 - P))) completions of a group, by advantages of the full group (Eqs. 8-10).

    Options:
        base: the algorithm whose completions are pruned
        pruning_rate: share of the completions that is left out of training (P), 0 <= P < 1
        prune_metric: which go: smallest | largest |A|, at random, smallest | largest A with its sign (raw)
        prune_scope: over what to rank: each group (the paper), a rank's groups, the whole step
        normalise_by: the divisor of the loss counts the kept (1/k) or all sampled completions (1/G)
        tie_break: at equal metric: lowest index first, or positive and negative advantages in turn
        allocation: a prompt takes up k instead of G of train_batch_size: more prompts fill the step

    Prunes what `base` selects; where that is fewer than k, all of it stays. Over gfpo, G is its num_train.
    With `pruning_rate` 0 this is `base`, bit by bit. Raises ValueError for a value that is not allowed and for
    a base that chooses already or teaches by more than advantages.
    """
    options = dict(locals())
    check_types(cppo, options)
    way_out = "0 <= pruning_rate < 1; at 1 nothing would be left to train, at 0 this is its base"
    require(0 <= pruning_rate < 1, "pruning_rate", pruning_rate, way_out)
    refuse(base.name, base.options, REFUSED)
    whole = base.batch_share == base.num_generations
    rule = "group counts all that is sampled, and its base trains a part of it; write normalise_by: kept"
    require(whole or normalise_by == "kept", "normalise_by", normalise_by, rule)
    kept = num_kept(base.batch_share, pruning_rate)
    return replace(
        base,
        name="cppo",
        select=_prune(base, pruning_rate, prune_metric, prune_scope, tie_break),
        weigh=_by_sampled(base.weigh) if normalise_by == "group" and pruning_rate else base.weigh,
        batch_share=kept if allocation else base.batch_share,
        options={"name": "cppo", **options, "base": dict(base.options)},
    )


def num_kept(count: int, pruning_rate: float) -> int:
    """How many of `count` completions stay. Plain floor would give 0 for 10 at 0.9, as 1 - 0.9 < 0.1."""
    return max(1, math.floor(count * (1 - pruning_rate) + 1e-9))


def _prune(
    base: Algorithm, rate: float, metric: PruneMetric, scope: PruneScope, tie_break: PruneTieBreak
) -> Select:
    scope_of = SCOPES[scope]

    def select(groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> list[tuple[int, ...]]:
        whole: Counter[Hashable] = Counter()
        candidates: dict[Hashable, list[Candidate]] = defaultdict(list)
        for g, indices in enumerate(base.select(groups, advantages)):
            scope_name = scope_of(g, groups[g])
            whole[scope_name] += min(len(groups[g].rollouts), base.batch_share)
            candidates[scope_name] += _candidates(g, groups[g], advantages[g], indices)
        kept: list[list[int]] = [[] for _ in groups]
        for scope_name, rows in candidates.items():
            for row in _ranked(rows, metric, tie_break)[: num_kept(whole[scope_name], rate)]:
                kept[row.group].append(row.place)
        return [tuple(sorted(indices)) for indices in kept]

    return select


def _candidates(
    g: int, group: Group, advantages: Sequence[float], indices: Sequence[int]
) -> Iterator[Candidate]:
    for i in indices:
        yield Candidate(g, i, advantages[i], group.rollouts[i].completion.seed)


def _ranked(rows: Sequence[Candidate], metric: PruneMetric, tie_break: PruneTieBreak) -> list[Candidate]:
    """The rows, those to keep first: by the metric, then the tie rule, then their order."""
    turns = TIE_BREAKS[tie_break](rows)
    keys = [METRICS[metric](row) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (keys[i], turns[i], i))
    return [rows[i] for i in order]


def _in_turn(rows: Sequence[Candidate]) -> list[int]:
    """How many earlier rows have the same advantage: sorting by it takes +a and -a alternately."""
    seen: Counter[float] = Counter()
    turns = []
    for row in rows:
        advantage = _rounded(row.advantage)
        turns.append(seen[advantage])
        seen[advantage] += 1
    return turns


def _rounded(advantage: float) -> float:
    """Mirror images of a mean tie in spite of rounding."""
    return round(advantage, 12)


def _by_sampled(base: Weigh) -> Weigh:
    """Divide by what was sampled, as if the pruned rows were there with a loss of 0 (Eq. 7's 1/G)."""

    def weigh(lengths: Sequence[int], totals: Totals) -> list[float]:
        return base(lengths, replace(totals, rows=totals.sampled_rows, tokens=totals.sampled_tokens))

    return weigh


# What is kept first sorts first.
METRICS: dict[str, Callable[[Candidate], float]] = {
    "smallest": lambda row: -abs(_rounded(row.advantage)),
    "largest": lambda row: abs(_rounded(row.advantage)),
    "random": lambda row: stable_seed("prune", row.seed),
    "smallest_raw": lambda row: -_rounded(row.advantage),
    "largest_raw": lambda row: _rounded(row.advantage),
}
SCOPES: dict[str, Callable[[int, Group], Hashable]] = {
    "group": lambda g, group: g,
    "rank": lambda g, group: group.rank,
    "global": lambda g, group: None,
}
TIE_BREAKS: dict[str, Callable[[Sequence[Candidate]], Sequence[int]]] = {
    "first": lambda rows: [0] * len(rows),
    "balanced": _in_turn,
}
