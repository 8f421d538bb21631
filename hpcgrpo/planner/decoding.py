"""Decoding by continuous batching over a distribution of lengths: how many sequences run at each moment, and how long
that takes. The tail of the longest sequences comes out by itself."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Request(NamedTuple):
    """One completion to decode, in tokens."""

    prompt: int
    length: int


@dataclass(frozen=True)
class Rates:
    """What one decoding step of an engine costs."""

    weight_bytes: float  # read in every step
    kv_bytes: float  # read of each token that a sequence holds
    flops: float  # of one sequence's step, attention aside
    flops_per_context_token: float
    bytes_per_second: float  # as reached
    flops_per_second: float  # as reached
    step_seconds: float  # whatever the batch

    def seconds(self, running: int, context_tokens: float) -> float:
        """One step of `running` sequences that hold `context_tokens` together: bound by memory or by arithmetic."""
        read = (self.weight_bytes + self.kv_bytes * context_tokens) / self.bytes_per_second
        work = (running * self.flops + context_tokens * self.flops_per_context_token) / self.flops_per_second
        return max(read, work) + self.step_seconds


class Spell(NamedTuple):
    """Steps during which the same sequences run."""

    steps: int
    running: int
    context_tokens: float  # of all of them together, in the middle of it


def spells(requests: Sequence[Request], *, max_sequences: int, max_tokens: float | None) -> Iterator[Spell]:
    """The steps of one engine that starts requests in their order as room appears.

    A sequence takes a place of `max_sequences` and its whole prompt and completion of `max_tokens` (None: no limit).
    Raises ValueError for a request that does not fit alone.
    """
    waiting = list(reversed(requests))
    ends: list[
        tuple[int, int, int]
    ] = []  # (step at which it ends, tokens it then held, tokens before step 0)
    now, held, offset = 0, 0, 0  # tokens reserved; sum over running of prompt - start
    while waiting or ends:
        while waiting and len(ends) < max_sequences:
            prompt, length = waiting[-1]
            if max_tokens is not None and held + prompt + length > max_tokens:
                if not ends:
                    raise ValueError(
                        f"a sequence of {prompt + length:,} tokens does not fit the {max_tokens:,.0f} tokens of an"
                        " engine's key-value cache; lower generation.max_completion_length, or raise"
                        " generation.vllm_tensor_parallel_size or vllm_gpu_memory_utilization"
                    )
                break
            waiting.pop()
            heapq.heappush(ends, (now + length, prompt + length, prompt - now))
            held, offset = held + prompt + length, offset + prompt - now
        end = ends[0][0]
        if end > now:
            yield Spell(end - now, len(ends), offset + len(ends) * (now + end) / 2)
        now = end
        while ends and ends[0][0] == now:
            _, tokens, before = heapq.heappop(ends)
            held, offset = held - tokens, offset - before


def total_seconds(parts: Sequence[Spell], rates: Rates) -> float:
    """The spells' steps at the engine's rates."""
    return sum(part.steps * rates.seconds(part.running, part.context_tokens) for part in parts)


def shuffled(requests: Sequence[Request]) -> list[Request]:
    """In an order that has nothing to do with length, the same each time."""
    order = list(requests)
    random.Random(0).shuffle(order)
    return order


def batches(requests: Sequence[Request], *, room: int, max_tokens: int | None) -> list[list[Request]]:
    """The in-process generator's batches: like prompts together, each within rows x (prompt + `room`) tokens."""
    ordered = sorted(requests)
    if max_tokens is None:
        return [ordered] if ordered else []
    cuts = [0]
    for i, request in enumerate(ordered):
        if i > cuts[-1] and (i - cuts[-1] + 1) * (request.prompt + room) > max_tokens:
            cuts.append(i)
    return [ordered[a:b] for a, b in pairwise([*cuts, len(ordered)])]
