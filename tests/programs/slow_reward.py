"""A reward that an untrained model can earn, and that takes its time, so that a fault can hit the middle of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence


def slowly(completions: Sequence[str], seconds: float = 0.0) -> list[float]:
    """The share of different characters in each completion, after `seconds`."""
    time.sleep(seconds)
    return [len(set(text)) / max(1, len(text)) for text in completions]
