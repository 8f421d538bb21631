"""One learner rank as a process: its log, its stacks on demand, and what it leaves behind when it fails."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, NoReturn

from hpcgrpo.attempt import Attempt
from hpcgrpo.journal import write_atomically
from hpcgrpo.launch.ranks import die_with_parent
from hpcgrpo.sections import RunConfig


def main(run: RunConfig, body: Callable[[RunConfig, IO[str]], None]) -> int:
    """Run `body` as the rank that torchrun's variables name, its progress going to the second argument -> 0.

    What goes wrong is raised.
    """
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    attempt = Attempt.of_environment()
    rank = int(os.environ.get("RANK", "0"))
    summary = (
        own_log(attempt, rank) if attempt is not None and "HPCGRPO_ADDRESS" in os.environ else sys.stderr
    )
    try:
        with errors_noted(attempt, rank):
            body(run, summary)
            if attempt is not None and os.environ.get("LOCAL_RANK", "0") == "0":
                attempt.note_return()
    except Exception:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(3)  # rank 0 most likely has the same to say, and its end ends this one
        raise
    return 0


def then_leave(program: Callable[[], int]) -> NoReturn:
    """Run `program` and end the process with its exit code, what libraries asked to do at exit done.

    Threads are left as they are. Python would take them apart: one of gloo's that lets go of a collective's tensors
    needs Python for it, and ends in `terminate called without an active exception` where Python is on its way out.
    """
    try:
        code: object = program()
    except SystemExit as stop:
        code = stop.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def own_log(attempt: Attempt, rank: int) -> IO[str]:
    """Send output and errors to `rank-<r>.log`, stacks too on SIGQUIT -> the job's own output, for rank 0."""
    log = os.open(attempt.folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    summary = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    (attempt.folder / f"rank-{rank}.pid-{attempt.node}").write_text(str(os.getpid()))
    return summary


@contextmanager
def errors_noted(attempt: Attempt | None, rank: int) -> Iterator[None]:
    """Leave an exception in `rank-<r>.error.json` before it goes on."""
    try:
        yield
    except Exception as error:
        if attempt is not None:
            said = {
                "time": time.time(),
                "rank": rank,
                "type": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
            }
            with suppress(OSError):
                write_atomically(attempt.folder / f"rank-{rank}.error.json", json.dumps(said, indent=1))
        raise
