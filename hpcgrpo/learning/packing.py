"""A micro-batch as one packed row of tensors: every prefix once, then the completions, nothing padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hpcgrpo.algorithms.base import Loss, Metrics
from hpcgrpo.learning.attention import Layout, position_ids
from hpcgrpo.types import Batch, MicroBatch, Row


@dataclass(frozen=True, slots=True)
class Packed:
    """T input tokens, of which N positions predict a completion token."""

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64, counted from each sequence's own start
    layout: Layout  # which token may attend to which
    source: Tensor  # [N] int64, index into T of the position that predicts each completion token
    targets: Tensor  # [N] int64, the completion tokens
    batch: Batch | None  # None where this rank runs short: a token is computed and counts nothing


def pack_row(micro_batch: MicroBatch, device: torch.device) -> Packed:
    """Lay out the pieces: all prefixes first, then all completions less their last token, which predicts nothing."""
    if not micro_batch:
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        return Packed(zero[None], zero[None], Layout((1,), ((),)), zero, zero, None)
    prefixes = tuple(len(p.prefix) for p in micro_batch)
    rows = [r for p in micro_batch for r in p.rows]
    tails = tuple(tuple(len(r.token_ids) - 1 for r in p.rows if len(r.token_ids) > 1) for p in micro_batch)
    ids: list[int] = []
    source: list[int] = []
    for piece in micro_batch:
        ids += piece.prefix
    end = 0
    for piece in micro_batch:
        end += len(piece.prefix)
        for row in piece.rows:
            source += [end - 1, *range(len(ids), len(ids) + len(row.token_ids) - 1)]
            ids += row.token_ids[:-1]
    layout = Layout(prefixes, tails)
    return Packed(
        input_ids=torch.tensor(ids, device=device)[None],
        position_ids=position_ids(layout).to(device),
        layout=layout,
        source=torch.tensor(source, device=device),
        targets=torch.tensor([t for r in rows for t in r.token_ids], device=device),
        batch=_batch(rows, device),
    )


def _batch(rows: list[Row], device: torch.device) -> Batch:
    lengths = torch.tensor([len(r.token_ids) for r in rows], device=device)

    def per_token(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).repeat_interleave(lengths)

    def stream(values: list[tuple[float, ...]]) -> Tensor | None:
        """[T] log-probs; None where not every token has one."""
        flat = torch.tensor([x for row in values for x in row], dtype=torch.float32, device=device)
        return flat if len(flat) == int(lengths.sum()) else None

    return Batch(
        row=torch.arange(len(rows), device=device).repeat_interleave(lengths),
        lengths=lengths,
        advantages=per_token([r.advantage for r in rows]),
        weights=per_token([r.weight for r in rows]),
        old=stream([r.old for r in rows]),
        behavior=stream([r.behavior for r in rows]),
        peer=stream([r.peer for r in rows]),
        rewards=per_token([r.reward for r in rows]),
    )


class FirstPass:
    """A loss that keeps the log-probs of a pass over rows: at the weights before the step they are the `old` ones of
    all later passes, so that none is made for them alone.

    Exact for the first optimizer step of several; rows of later ones need theirs before it. Rows that have theirs
    keep them.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.logprobs: list[Tensor] = []

    def __call__(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        self.logprobs.append(logprobs.detach() if batch.old is None else batch.old)
        return self.loss(logprobs, batch)

    def rows(self, rows: Sequence[Packed]) -> list[Packed]:
        """The rows of that pass, in its order, with their old log-probs."""
        kept = iter(self.logprobs)
        return [r if r.batch is None else with_streams(r, old=next(kept)) for r in rows]


def with_streams(packed: Packed, **streams: Any) -> Packed:
    """The same row with further log-prob streams ([N] each: old, reference, peer) or another `progress`."""
    if packed.batch is None:
        return packed
    return replace(packed, batch=replace(packed.batch, **streams))
