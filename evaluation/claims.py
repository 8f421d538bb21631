"""A folder of results is one process's at a time: who else is at work there, and for how long a start waits for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcgrpo.journal import FolderInUse, claim
from hpcgrpo.types import Stopped

TAKEOVER_SECONDS = 180.0  # for the lock of an earlier start on a node that is gone


def never() -> bool:
    """Nobody asks to stop."""
    return False


@contextmanager
def sole(
    place: Path, *, say: Callable[[str], None], stopping: Callable[[], bool] = never, shared: bool = False
) -> Iterator[None]:
    """Hold `place` for the time of the block; `shared`: beside others that share it.

    A start that Slurm made anew waits for the lock of a node that is gone, and says at once for whom and how long.
    Raises FolderInUse, naming the other process, and Stopped where it is told to stop while it waits.
    """
    patience = TAKEOVER_SECONDS if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" else 0.0
    began = time.monotonic()
    waits = False
    while True:
        try:
            lock = claim(place, shared=shared)
            break
        except FolderInUse as error:
            if time.monotonic() - began >= patience:
                raise FolderInUse(_refusal(place, error.owner), error.owner) from None
            if not waits:
                say(f"{place}: {error.owner} is at work here; waiting up to {patience:.0f} s for it to end")
            waits = True
        if stopping():
            raise Stopped
        time.sleep(1)
    if waits:
        say(f"{place}: free after {time.monotonic() - began:.0f} s")
    with lock:
        yield


def _refusal(place: Path, owner: str) -> str:
    return (
        f"{place}: another evaluation ({owner}) is at work here; wait for it or stop it, or let the results go"
        " elsewhere (--output-dir)"
    )
