"""How far an evaluation is: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import IO, Any

from hpcgrpo.journal import live_bar

LINE_EVERY_SECONDS = 15.0


@dataclass
class Progress:
    """Counts graded completions; a context manager."""

    name: str
    total: int
    done: int = 0
    right: int = 0
    stream: IO[str] = field(default_factory=lambda: sys.stderr)
    told: float = float("-inf")
    first: tuple[float, int] | None = None  # when this start's first ones were graded; how many were then
    bar: Any = None

    def __enter__(self) -> Progress:
        if self.stream.isatty():
            self.bar = live_bar(self.name, self.total, self.done, self.stream)
        else:
            self._line("")  # it has begun, and what is there of earlier starts
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def add(self, graded: int, right: int) -> None:
        """Some more completions were graded."""
        self.done, self.right = self.done + graded, self.right + right
        self.first = self.first or (time.monotonic(), self.done)
        said = f"right {self.right / self.done:.3f}" if self.done else ""
        if self.bar is not None:
            self.bar.update(0, completed=self.done, said=said)
        elif self.done == self.total or time.monotonic() - self.told >= LINE_EVERY_SECONDS:
            self._line(f" {said}{self._left()}")

    def _line(self, said: str) -> None:
        self.told = time.monotonic()
        print(f"{self.name} {self.done}/{self.total}{said}", file=self.stream, flush=True)

    def _left(self) -> str:
        """By the rate since the first new completions, so that nothing that came before them counts."""
        began, before = self.first or (0.0, self.done)
        new = self.done - before
        if not new or self.done == self.total:
            return ""
        seconds = (time.monotonic() - began) / new * (self.total - self.done)
        return f" about {seconds / 60:.0f} min left" if seconds >= 90 else f" about {seconds:.0f} s left"
