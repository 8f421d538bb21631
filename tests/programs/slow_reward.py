"""A reward that an untrained model can earn, and that takes its time, so that a fault can hit the middle of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

CALLS = count(1)


def slowly(completions: Sequence[str], seconds: float = 0.0, hold: str = "", free: int = 0) -> list[float]:
    """The share of different characters in each completion, after `seconds`.

    All calls of a process but the first `free` also wait for as long as there is a file `hold`.
    """
    held = next(CALLS) > free and hold
    time.sleep(seconds)
    while held and Path(hold).exists():
        time.sleep(0.05)
    return [len(set(text)) / max(1, len(text)) for text in completions]
