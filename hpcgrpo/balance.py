"""Even shares: pieces over ranks and micro-batches, so that no rank is estimated to wait long for another.

Ranks wait for each other in every micro-batch, since they gather the weights together. So a step takes the sum of
each micro-batch's costliest rank, and what is evened out are the n-th micro-batches of all ranks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hpcgrpo.types import MicroBatch, Piece, Row

EVEN = 0.01  # over the mean: micro-batches within it trade nothing more
TRADES = 8  # a micro-batch, at most
SHORT = (
    64  # a prefix below this part of a micro-batch is computed again rather than another micro-batch begun
)


@dataclass(frozen=True, slots=True)
class Cost:
    """What it takes to train on tokens, in any unit; by default tokens are counted.

    Of a model: the FLOPs of its layers' matrices per token, of attention per (query, key) pair, and of the output
    layer per predicted token. A prefix is computed once.
    """

    token: float = 1.0
    pair: float = 0.0
    predicted: float = 0.0

    def prefix(self, length: int) -> float:
        """Of so many tokens that a group has in common."""
        return self.token * length + self.pair * length * (length + 1) / 2

    def row(self, prefix: int, length: int) -> float:
        """Of a completion after such a prefix; its last token predicts nothing, so that it is no input."""
        return (length - 1) * (self.token + self.pair * (prefix + length / 2)) + self.predicted * length

    def micro_batch(self, micro_batch: MicroBatch) -> float:
        """Of all its prefixes and completions; 0 for an empty one."""
        return sum(
            self.prefix(len(p.prefix)) + sum(self.row(len(p.prefix), len(r.token_ids)) for r in p.rows)
            for p in micro_batch
        )


def share_out(
    pieces: Iterable[Piece], ranks: int, token_budget: int, cost: Cost
) -> tuple[tuple[MicroBatch, ...], ...]:
    """[ranks][micro-batches], equally many on every rank, of at most `token_budget` tokens each.

    A longer single sequence gets a micro-batch of its own; budget 0 gives one to every row.
    """
    sharing = _Sharing(cost, token_budget)
    parts = sharing.fill([load for piece in pieces for load in sharing.cut(piece)], ranks)
    parts.sort(key=lambda part: -part.cost)
    shares: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for start in range(0, len(parts), ranks):
        together = parts[start : start + ranks]
        sharing.even_out(together)
        most_first = sorted(range(ranks), key=lambda rank: -totals[rank])
        for rank, part in zip(most_first, sorted(together, key=lambda p: p.cost), strict=True):
            shares[rank].append(tuple(load.piece for load in part.loads))
            totals[rank] += part.cost
    return tuple(map(tuple, shares))


class _Load(NamedTuple):
    """A piece as it is shared out."""

    piece: Piece
    rows: tuple[float, ...]  # what each completion costs
    cost: float  # of all
    size: int  # the room it takes


class _Offer(NamedTuple):
    """A piece, or some of its rows, that one part may give to another."""

    load: _Load
    places: tuple[int, ...]  # of the rows in the piece; () is all of it
    saves: float  # of the giver's cost
    adds: float  # to the taker's cost: the prefix too, where the taker hasn't got it
    frees: int  # room
    takes: int


@dataclass(slots=True)
class _Part:
    """A micro-batch in the making."""

    loads: list[_Load] = field(default_factory=list)
    cost: float = 0.0
    size: int = 0

    def add(self, load: _Load) -> None:
        self.loads.append(load)
        self.cost += load.cost
        self.size += load.size

    def remove(self, load: _Load) -> None:
        self.loads = [x for x in self.loads if x is not load]
        self.cost -= load.cost
        self.size -= load.size

    def of_group(self, load: _Load) -> _Load | None:
        """The part's own piece of the group that `load` is of."""
        return next((x for x in self.loads if x.piece.prefix is load.piece.prefix), None)


@dataclass(frozen=True, slots=True)
class _Sharing:
    """How pieces are measured, cut and shared out."""

    cost: Cost
    budget: int  # tokens of a micro-batch; 0: it is one row

    @property
    def room(self) -> int:
        return self.budget or 1

    def load(self, piece: Piece, rows: Iterable[Row]) -> _Load:
        piece, prefix = replace(piece, rows=tuple(rows)), len(piece.prefix)
        costs = tuple(self.cost.row(prefix, len(row.token_ids)) for row in piece.rows)
        size = min(piece.tokens, self.budget) if self.budget else 1
        return _Load(piece, costs, self.cost.prefix(prefix) + sum(costs), size)

    def cut(self, piece: Piece) -> list[_Load]:
        """A piece as pieces within the budget, prefix included, a row being indivisible."""
        parts: list[list[Row]] = []
        room = 0
        for row in piece.rows:
            if not parts or len(row.token_ids) > room:
                parts.append([])
                room = self.budget - len(piece.prefix)
            parts[-1].append(row)
            room -= len(row.token_ids)
        return [self.load(piece, rows) for rows in parts]

    def divide(self, load: _Load, places: Collection[int]) -> tuple[_Load, _Load]:
        """The piece with the rows of these places, and with the others; the prefix is in both."""
        rows = load.piece.rows
        return (
            self.load(load.piece, (rows[i] for i in places)),
            self.load(load.piece, (row for i, row in enumerate(rows) if i not in places)),
        )

    # ---- as few micro-batches as may be, about equally full

    def fill(self, loads: Sequence[_Load], ranks: int) -> list[_Part]:
        """Micro-batches, a multiple of `ranks`: the costliest piece first, each to the one that has least."""
        least = max(1, -(-sum(load.size for load in loads) // (ranks * self.room)))
        packed = self.pack(loads, ranks * least)
        packed += [_Part() for _ in range(ranks * max(least, -(-len(packed) // ranks)) - len(packed))]
        cheapest = [(0.0, i, _Part()) for i in range(len(packed))]
        for load in sorted((x for part in packed for x in part.loads), key=lambda x: -x.cost):
            full = []
            while cheapest and cheapest[0][2].size + load.size > self.room:
                full.append(heapq.heappop(cheapest))
            if not cheapest:
                return packed  # fuller ones leave no room for this order
            _, i, part = cheapest[0]
            part.add(load)
            heapq.heapreplace(cheapest, (part.cost, i, part))
            for entry in full:
                heapq.heappush(cheapest, entry)
        return [part for _, _, part in cheapest]

    def pack(self, loads: Iterable[_Load], least: int) -> list[_Part]:
        """The largest first, each to the micro-batch that it fills best.

        Once `least` are begun, a piece with a short prefix that fits nowhere is divided.
        """
        parts: list[_Part] = []
        rooms: list[tuple[int, int]] = []  # of each part, ascending, and its place
        waiting = sorted(loads, key=lambda x: x.size)
        while waiting:
            load = waiting.pop()
            at = bisect_left(rooms, (load.size, -1))
            if at == len(rooms):
                halves = self._fitting(load, rooms[-1][0]) if len(parts) >= least else None
                if halves is None:
                    rooms.append((self.room, len(parts)))
                    parts.append(_Part())
                else:
                    load, rest = halves
                    insort(waiting, rest, key=lambda x: x.size)
                    at = len(rooms) - 1
            room, place = rooms.pop(at)
            parts[place].add(load)
            insort(rooms, (room - load.size, place))
        return parts

    def _fitting(self, load: _Load, room: int) -> tuple[_Load, _Load] | None:
        """A piece divided so that the first half fits; None where its prefix is too long for that."""
        prefix = len(load.piece.prefix)
        places = _within([len(row.token_ids) for row in load.piece.rows], room - prefix)
        if prefix * SHORT > self.budget or not 0 < len(places) < len(load.rows):
            return None
        return self.divide(load, places)

    # ---- evenness

    def even_out(self, parts: list[_Part]) -> None:
        """Let the costliest part trade with the cheapest that helps, until all are even or none does.

        What is traded are pieces, and where that is not enough their rows, though that repeats prefixes.
        """
        enough = (1 + EVEN) * sum(p.cost for p in parts) / len(parts)
        rows = False
        for _ in range(TRADES * len(parts)):
            heavy, *others = sorted(parts, key=lambda p: -p.cost)
            if heavy.cost <= enough:
                break
            if not any(self.trade(heavy, light, rows) for light in others[::-1]):
                if rows or not self.budget:
                    break
                rows = True

    def trade(self, heavy: _Part, light: _Part, rows: bool) -> bool:
        """Make the exchange that leaves the costlier of the two cheapest -> whether there is one that helps."""
        gap = heavy.cost - light.cost
        returns = sorted(self.offers(light, heavy, 0.0, rows), key=lambda x: x.saves + x.adds)
        keys = [x.saves + x.adds for x in returns]
        worst, best = heavy.cost * (1 - 1e-9), None
        for give in self.offers(heavy, light, gap, rows):
            at = bisect_left(keys, give.saves + give.adds - gap)  # what it takes for both to cost the same
            for back in (_NOTHING, *returns[max(0, at - 1) : at + 1]):
                left = max(heavy.cost - give.saves + back.adds, light.cost - back.saves + give.adds)
                fits = max(heavy.size - give.frees + back.takes, light.size - back.frees + give.takes)
                if left < worst and fits <= self.room:
                    worst, best = left, (give, back)
        if best is not None:
            given, returned = self.take(heavy, best[0]), self.take(light, best[1])
            self.join(light, given)
            self.join(heavy, returned)
        return best is not None

    def offers(self, part: _Part, other: _Part, gap: float, rows: bool) -> Iterator[_Offer]:
        """What a part may give: each piece, with `rows` also each row, and so many of a piece as fill the gap."""
        for load in part.loads:
            yield _Offer(load, (), load.cost, load.cost, load.size, load.size)
            if not rows or len(load.rows) == 1:
                continue
            again = 0 if other.of_group(load) else len(load.piece.prefix)
            extra = self.cost.prefix(again)
            for places in (*((i,) for i in range(len(load.rows))), _within(load.rows, (gap - extra) / 2)):
                if 0 < len(places) < len(load.rows):
                    cost = sum(load.rows[i] for i in places)
                    size = sum(len(load.piece.rows[i].token_ids) for i in places)
                    yield _Offer(load, places, cost, cost + extra, size, size + again)

    def take(self, part: _Part, offer: _Offer) -> _Load | None:
        """Remove from a part what it gives."""
        if offer is _NOTHING:
            return None
        part.remove(offer.load)
        if not offer.places:
            return offer.load
        given, rest = self.divide(offer.load, offer.places)
        part.add(rest)
        return given

    def join(self, part: _Part, load: _Load | None) -> None:
        """Add a piece to a part: to its own piece of the same group, where it has one."""
        if load is None:
            return
        own = part.of_group(load)
        if own is not None:
            part.remove(own)
            load = self.load(own.piece, own.piece.rows + load.piece.rows)
        part.add(load)


_NOTHING = _Offer(_Load(Piece((), ()), (), 0.0, 0), (), 0.0, 0.0, 0, 0)


def _within(values: Sequence[float], limit: float) -> tuple[int, ...]:
    """Places of values whose sum is at most `limit`, the largest first."""
    chosen = []
    for place in sorted(range(len(values)), key=lambda i: -values[i]) if limit > 0 else ():
        if values[place] <= limit:
            chosen.append(place)
            limit -= values[place]
    return tuple(chosen)
