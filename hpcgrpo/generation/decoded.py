"""What decoding has to read, counted from the completions that came."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Decoded:
    """The least that an engine reads to decode some completions, the first token of each being the prompt's.

    Of completions that run side by side the longest says how often the weights are read; every later token reads the
    keys and values of all tokens before it and its own.
    """

    steps: int = 0  # times through the weights
    pairs: int = 0  # tokens' keys and values, each time that one is read

    @classmethod
    def side_by_side(cls, lengths: Iterable[tuple[int, int]]) -> Decoded:
        """Of completions begun together, by (prompt, completion) tokens."""
        found = [(prompt, completion) for prompt, completion in lengths if completion]
        pairs = sum((c - 1) * p + c * (c - 1) // 2 for p, c in found)
        return cls(max((c - 1 for _, c in found), default=0), pairs)

    def then(self, other: Decoded) -> Decoded:
        """One after the other."""
        return Decoded(self.steps + other.steps, self.pairs + other.pairs)

    def beside(self, other: Decoded) -> Decoded:
        """Both at once on the same engine, asked by two ranks."""
        return Decoded(max(self.steps, other.steps), self.pairs + other.pairs)
