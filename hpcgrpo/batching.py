"""Groups -> micro-batches: credit, select, weigh, share out over ranks, pack.

Every rank computes the same plan from the same groups, so nothing but the groups is ever exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise

from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.balance import Cost, share_out
from hpcgrpo.types import Group, MicroBatch, Piece, Rollout, Row, Totals


@dataclass(frozen=True, slots=True)
class Plan:
    """One optimizer step, shared out."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]  # [ranks][micro-batches], equally many on every rank
    totals: Totals
    costs: tuple[tuple[float, ...], ...]  # [ranks][micro-batches], as estimated

    def spread(self) -> float:
        """Estimated cost of the costliest rank over the mean of all ranks (1 is even, and so is nothing at all)."""
        loads = [sum(rank) for rank in self.costs]
        return max(loads) * len(loads) / (sum(loads) or 1.0) if any(loads) else 1.0


@dataclass(frozen=True, slots=True)
class Credited:
    """Groups with their advantages and what `select` kept of them."""

    groups: tuple[Group, ...]
    advantages: tuple[tuple[float, ...], ...]
    kept: tuple[tuple[int, ...], ...]


def credit(groups: Sequence[Group], algorithm: Algorithm) -> Credited:
    """Advantages over all groups of the step, and the completions that are trained on."""
    advantages = algorithm.credit(groups)
    kept = algorithm.select(groups, advantages)
    assert len(groups) == len(advantages) == len(kept)
    return Credited(tuple(groups), tuple(advantages), tuple(kept))


def split(credited: Credited, parts: int) -> list[Credited]:
    """Cut into `parts` optimizer steps of whole groups, in order and as even as possible."""
    n = len(credited.groups)
    bounds = [n * i // parts for i in range(parts + 1)]
    return [
        Credited(credited.groups[a:b], credited.advantages[a:b], credited.kept[a:b])
        for a, b in pairwise(bounds)
    ]


def plan(
    credited: Credited,
    algorithm: Algorithm,
    *,
    ranks: int,
    token_budget: int,
    max_completion_length: int,
    rows_per_device: int,
    shared_prefix: bool = True,
    cost: Cost = Cost(),
) -> Plan:
    """Weigh the kept completions of one optimizer step and share them out over `ranks`, evenly by `cost`.

    `token_budget` bounds the tokens of a micro-batch (a longer single sequence gets one of its own).
    `shared_prefix` False gives every completion a piece, and every piece a micro-batch, of its own.
    """
    pieces, totals = weighed(credited, algorithm, max_completion_length, rows_per_device)
    shares = share_out(pieces, ranks, token_budget if shared_prefix else 0, cost)
    return Plan(shares, totals, tuple(tuple(map(cost.micro_batch, share)) for share in shares))


def weighed(
    credited: Credited, algorithm: Algorithm, max_completion_length: int, rows_per_device: int
) -> tuple[list[Piece], Totals]:
    """One piece per group with kept completions, each row carrying its advantage and token weight."""
    chosen = [(g, i) for g, kept in enumerate(credited.kept) for i in kept]
    completions = [credited.groups[g].rollouts[i].completion for g, i in chosen]
    sampled = [len(r.completion.token_ids) for group in credited.groups for r in group.rollouts]
    lengths = [len(c.token_ids) for c in completions]
    totals = Totals(
        rows=len(lengths),
        tokens=sum(lengths),
        sampled_rows=len(sampled),
        sampled_tokens=sum(sampled),
        max_completion_length=max_completion_length,
        rows_per_device=rows_per_device,
    )
    weights = algorithm.weigh(lengths, totals) if lengths else []
    rows: dict[int, list[Row]] = {}
    for index, ((g, i), c, weight) in enumerate(zip(chosen, completions, weights, strict=True)):
        rollout = credited.groups[g].rollouts[i]
        rows.setdefault(g, []).append(
            Row(
                index,
                c.token_ids,
                _behavior(rollout),
                credited.advantages[g][i],
                weight,
                rollout.reward,
                rollout.old or (),
                rollout.peer or (),
            )
        )
    return [Piece(credited.groups[g].prompt.token_ids, tuple(r)) for g, r in rows.items()], totals


def _behavior(rollout: Rollout) -> tuple[float, ...]:
    """The generator's log-probs; of a hint's tokens the actor's own, which count as if it had sampled them."""
    logprobs, hint = rollout.completion.logprobs, rollout.completion.hint_length
    return rollout.old[:hint] + logprobs[hint:] if hint and rollout.old is not None else logprobs


def everything(groups: Sequence[Group]) -> Credited:
    """All rollouts, as they are before any is credited: to have their log-probs computed."""
    return Credited(
        tuple(groups),
        tuple((0.0,) * len(g.rollouts) for g in groups),
        tuple(tuple(range(len(g.rollouts))) for g in groups),
    )


def with_logprobs(
    groups: Sequence[Group], old: Mapping[int, tuple[float, ...]], peer: Mapping[int, tuple[float, ...]]
) -> list[Group]:
    """The groups with every rollout's log-probs under both policies, given by `Row.index` of `everything`."""
    index = count()

    def compared(rollout: Rollout) -> Rollout:
        i = next(index)
        return replace(rollout, old=old[i], peer=peer[i])

    return [replace(g, rollouts=tuple(map(compared, g.rollouts))) for g in groups]
