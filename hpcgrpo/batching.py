"""Groups -> micro-batches: credit, select, weigh, share out over ranks, pack.

Every rank computes the same plan from the same groups, so nothing but the groups is ever exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise

from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.types import Group, MicroBatch, Piece, Rollout, Row, Totals


@dataclass(frozen=True, slots=True)
class Plan:
    """One optimizer step, shared out."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]  # [ranks][micro-batches], equally many on every rank
    totals: Totals

    def spread(self) -> float:
        """Tokens of the fullest rank over the mean of all ranks (1 is even)."""
        loads = [sum(p.tokens for m in rank for p in m) for rank in self.micro_batches]
        return max(loads) * len(loads) / max(1, sum(loads))


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
) -> Plan:
    """Weigh the kept completions of one optimizer step and share them out over `ranks`.

    `token_budget` bounds the tokens of a micro-batch (a longer single sequence gets one of its own).
    `shared_prefix` False gives every completion a piece, and every piece a micro-batch, of its own.
    """
    pieces, totals = weighed(credited, algorithm, max_completion_length, rows_per_device)
    if shared_prefix:
        even = max(1, -(-sum(p.tokens for p in pieces) // ranks))
        pieces = [part for p in pieces for part in cut(p, min(token_budget, even))]
    else:
        pieces = [replace(p, rows=(row,)) for p in pieces for row in p.rows]
    shares = [pack(share, token_budget if shared_prefix else 0) for share in share_out(pieces, ranks)]
    count = max(1, *map(len, shares))
    full = tuple(tuple(share) + ((),) * (count - len(share)) for share in shares)
    return Plan(full, totals)


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


def cut(piece: Piece, limit: int) -> list[Piece]:
    """Cut a piece into pieces of at most `limit` tokens (prefix included), a row being indivisible."""
    parts: list[list[Row]] = []
    room = 0
    for row in piece.rows:
        if not parts or len(row.token_ids) > room:
            parts.append([])
            room = limit - len(piece.prefix)
        parts[-1].append(row)
        room -= len(row.token_ids)
    return [replace(piece, rows=tuple(p)) for p in parts]


def share_out(pieces: Iterable[Piece], ranks: int) -> list[list[Piece]]:
    """The longest piece first, each to the rank that has least (ties: the lowest rank)."""
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for piece in sorted(pieces, key=lambda p: -p.tokens):
        rank = loads.index(min(loads))
        shares[rank].append(piece)
        loads[rank] += piece.tokens
    return shares


def pack(pieces: Iterable[Piece], token_budget: int) -> list[MicroBatch]:
    """First fit by decreasing size into micro-batches of at most `token_budget` tokens."""
    bins: list[list[Piece]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda p: -p.tokens):
        fits = next((b for b, r in enumerate(room) if piece.tokens <= r), None)
        if fits is None:
            fits = len(bins)
            bins.append([])
            room.append(token_budget)
        bins[fits].append(piece)
        room[fits] -= piece.tokens
    return [tuple(b) for b in bins]
