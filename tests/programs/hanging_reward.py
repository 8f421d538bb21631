"""A reward that hangs once, at the third call of a job's first start, as a service that does not answer would."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import count

CALLS = count(1)


def hangs_once(completions: Sequence[str]) -> list[float]:
    """The share of different characters; in the first start of a job, the third call never returns."""
    if next(CALLS) == 3 and os.environ.get("HPCGRPO_ATTEMPT", "").endswith(".0"):
        wait_for_the_service_that_never_answers()
    return [len(set(text)) / max(1, len(text)) for text in completions]


def wait_for_the_service_that_never_answers() -> None:
    """Found by its name in the stacks."""
    time.sleep(10_000)
