"""What a model computed, counted from the rows that it was given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from hpcgrpo.learning.packing import Packed

Timed = Callable[[str], AbstractContextManager[None]]  # a part's name -> what counts a block's time to it


def untimed(part: str) -> AbstractContextManager[None]:
    """For a learner whose time nobody asks for."""
    return nullcontext()


@dataclass
class Passes:
    """The rows of some passes, added up: nothing padded, a prefix that rows share once."""

    tokens: int = 0  # through the layers
    pairs: int = 0  # of queries and keys
    targets: int = 0  # tokens with log-probs: through the output layer

    def add(self, packed: Packed) -> None:
        """Count one packed row."""
        self.tokens += packed.layout.plan.tokens
        self.pairs += packed.layout.plan.pairs
        self.targets += len(packed.targets)

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.tokens + other.tokens, self.pairs + other.pairs, self.targets + other.targets)


@dataclass
class Computed:
    """What a policy's models computed since they were last asked."""

    forward: Passes = field(default_factory=Passes)  # for log-probs alone
    trained: Passes = field(default_factory=Passes)  # forward and backward

    def add(self, packed: Packed, *, trained: bool) -> None:
        """Count one packed row."""
        (self.trained if trained else self.forward).add(packed)

    def __add__(self, other: Computed) -> Computed:
        return Computed(self.forward + other.forward, self.trained + other.trained)
