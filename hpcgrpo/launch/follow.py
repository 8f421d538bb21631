"""Following a submitted run to its end, through requeues: its log as it grows, and at last its exit code."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from hpcgrpo.launch.queue import Unreachable

ENDED = "ended.json"  # in the run's slurm folder: how the job ended, written by its node 0
POLL_SECONDS = 2.0
GONE_SECONDS = 10.0  # out of the queue for so long, a job is over; file systems show its last words late
LEAVING_SECONDS = 60.0  # for a job that says it has ended to leave the queue
INTERRUPTED = 130


@dataclass(frozen=True)
class Submitted:
    """A job that was handed over, and how to ask for it."""

    job_id: str
    folder: Path  # the run's
    logs: tuple[Path, ...]
    cancel: str  # the command that ends it
    state: Callable[[], str | None]  # None once it is out of the queue; raises Unreachable
    reason: Callable[[], str]  # why it waits, where it runs
    final_state: Callable[[], str]


@dataclass
class Tail:
    """Copies whole lines of growing files to a stream."""

    paths: Sequence[Path]
    out: TextIO
    read: dict[Path, int] = field(default_factory=dict)  # bytes

    def skip(self) -> None:
        """Leave out what is there already."""
        self.read = {path: path.stat().st_size for path in self.paths if path.exists()}

    def copy(self, *, last: bool = False) -> None:
        """Show what is new; with `last` also a line without its end."""
        for path in self.paths:
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self.read.get(path, 0))
                fresh = file.read()
            whole = fresh if last else fresh[: fresh.rfind(b"\n") + 1]
            self.read[path] = self.read.get(path, 0) + len(whole)
            self.out.write(whole.decode("utf-8", "replace"))
        self.out.flush()


def follow(job: Submitted, *, out: TextIO, skip: bool = False, poll_seconds: float = POLL_SECONDS) -> int:
    """Show a job's log until the run ends -> the run's exit code; 1 where the job was ended from outside.

    A controller that does not answer is asked again for as long as it takes. Ctrl-C ends the following alone (130).
    """
    tail = Tail(job.logs, out)
    if skip:
        tail.skip()
    try:
        return _until_over(job, tail, poll_seconds)
    except KeyboardInterrupt:
        say(f"no longer following; job {job.job_id} goes on. To end it: {job.cancel}")
        return INTERRUPTED


def _until_over(job: Submitted, tail: Tail, poll_seconds: float) -> int:
    shown, silent, gone_since = "", False, None
    while True:
        tail.copy()
        ended = outcome(job)
        if ended is not None:
            _let_it_leave(job, tail, poll_seconds)
            code, why = ended
            say(f"job {job.job_id} ended with code {code}" + (f": {why}" if why else ""))
            return code
        try:
            state = job.state()
            now = f"{state} {job.reason()}".rstrip() if state else ""
            if silent:
                say("Slurm's controller answers again")
            silent = False
        except Unreachable as error:
            if not silent:
                say(f"{error}; still following")
            silent = True
            time.sleep(poll_seconds)
            continue
        gone_since = None if state else (gone_since or time.monotonic())
        if gone_since is not None and time.monotonic() - gone_since >= GONE_SECONDS:
            return _ended_from_outside(job, tail)
        if now and now != shown:
            shown = now
            say(f"job {job.job_id} {now}")
        time.sleep(poll_seconds)


def outcome(job: Submitted) -> tuple[int, str] | None:
    """What node 0 wrote about this job's end: exit code and reason; None while it goes on."""
    try:
        said = json.loads((job.folder / "slurm" / ENDED).read_text(encoding="utf-8"))
        over = str(said["job"]) == job.job_id and not said.get("requeued")
        return (int(said["code"]), str(said.get("reason", ""))) if over else None
    except (OSError, ValueError, KeyError):
        return None  # not there, or half read


def _let_it_leave(job: Submitted, tail: Tail, poll_seconds: float) -> None:
    """Until the job is out of the queue, so that the run can be submitted again as soon as this ends."""
    deadline = time.monotonic() + LEAVING_SECONDS
    try:
        while job.state() is not None and time.monotonic() < deadline:
            tail.copy()
            time.sleep(poll_seconds)
    except Unreachable:
        pass
    tail.copy(last=True)


def _ended_from_outside(job: Submitted, tail: Tail) -> int:
    tail.copy(last=True)
    ended = outcome(job)
    if ended is not None:
        return ended[0]
    say(
        f"job {job.job_id} left the queue without a word of the run's own; Slurm says {job.final_state()}. The same"
        f" command goes on from the last checkpoint; `hpcgrpo doctor {job.folder}` looks for the cause"
    )
    return 1


def say(text: str) -> None:
    """A line about the job, beside the run's own lines."""
    print(f"hpcgrpo: {text}", file=sys.stderr, flush=True)
