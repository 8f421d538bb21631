"""A generator whose completions have the lengths that it is given: real sampling of synthetic rollouts, to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from hpcgrpo.generation.decoded import Decoded
from hpcgrpo.types import Arrived, Completion, Request, Sampling

if TYPE_CHECKING:
    from torch import Tensor


class Sampler(Protocol):
    """What samples for real, and takes `Request.length`."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived | None = None
    ) -> list[Completion]: ...

    def metrics(self) -> dict[str, float]: ...

    def update_weights(self, tensors: Callable[[], Iterable[tuple[str, Tensor]]], version: int) -> None: ...

    def take_decoded(self) -> dict[str, Decoded]: ...


class ForcedGenerator:
    """Another generator's completions, each as long as its seed draws from `lengths`, whatever tokens come.

    So runs of several algorithms sample the same lengths as often, as far as they ask for as many completions. One that
    is shorter than the longest allowed passes for one that ended by itself.
    """

    def __init__(self, sampler: Sampler, lengths: Sequence[int]) -> None:
        """`lengths` in tokens, each as likely as the others. Raises ValueError for none, and for one below 1."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths {list(lengths)[:5]}: give at least one, each of 1 token or more")
        self.sampler, self.lengths = sampler, tuple(lengths)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived | None = None
    ) -> list[Completion]:
        """One completion per request, in their order; a length is cut at `max_completion_length`."""
        longest = sampling.max_completion_length
        forced = [replace(r, length=min(longest, self.lengths[r.seed % len(self.lengths)])) for r in requests]
        told = None if arrived is None else lambda i, completion: arrived(i, _ended(completion, longest))
        return [_ended(c, longest) for c in self.sampler.generate(forced, sampling, told)]

    def metrics(self) -> dict[str, float]:
        """As the other generator's."""
        return self.sampler.metrics()

    def update_weights(self, tensors: Callable[[], Iterable[tuple[str, Any]]], version: int) -> None:
        """As the other generator's."""
        self.sampler.update_weights(tensors, version)

    def take_decoded(self) -> dict[str, Decoded]:
        """As the other generator's."""
        return self.sampler.take_decoded()


def _ended(completion: Completion, longest: int) -> Completion:
    if completion.finish_reason == "abort" or len(completion.token_ids) == longest:
        return completion
    return replace(completion, finish_reason="stop")
