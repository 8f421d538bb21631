"""Following an evaluation's jobs to their end: what they do, then the table that they came to."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from evaluation import jobs
from evaluation.jobs import WATCH
from evaluation.reasons import Submitted, exit_code, explain, submitted
from evaluation.scripts import MERGE
from hpcgrpo.config_file import ConfigError
from hpcgrpo.launch import queue
from hpcgrpo.launch.follow import GONE_SECONDS, INTERRUPTED, LEAVING_SECONDS, say

POLL_SECONDS = 5.0


def follow(
    folder: Path,
    *,
    out: TextIO | None = None,
    tell: Callable[[str], None] = say,
    poll_seconds: float = POLL_SECONDS,
) -> int:
    """Until the merge has ended: what the jobs do to `tell`, then the merge's words to `out` -> its exit code.

    1 where it never ran. `out` None is standard output. Each task that is missing is told with its reason. Ctrl-C ends
    the following alone (130).
    """
    done = submitted(folder)
    if done is None:
        raise ConfigError(f"{folder}: no evaluation was queued here")
    try:
        _until_over(
            lambda: jobs.states(done),
            over=lambda: exit_code(folder / "jobs", MERGE) is not None,
            shown=lambda states: "; ".join(_shown(done, states)),
            tell=tell,
            poll_seconds=poll_seconds,
        )
    except KeyboardInterrupt:
        tell(f"no longer following; the evaluation goes on. To end it: scancel {' '.join(done.ids)}")
        return INTERRUPTED
    code = exit_code(folder / "jobs", MERGE)
    printed = _printed(folder / "jobs" / f"{MERGE}.log", whole=code is None)
    (out or sys.stdout).write(printed)
    for name, reason in explain(folder).items():
        if reason not in printed:
            tell(f"{name}: {reason}")
    if code is None:
        tell(
            f"the job that merges the results ({done.merge}) left the queue without its end; Slurm says"
            f" {queue.final_state(done.merge or '0')}. `hpcgrpo eval-merge {folder}` makes the table"
        )
    return 1 if code is None else code


def _printed(log: Path, *, whole: bool) -> str:
    """What the merge printed; without srun's own lines where it ended by itself."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except OSError:
        return ""
    return "".join(line for line in lines if whole or not line.startswith("srun: "))


def follow_watch(
    folder: Path, *, tell: Callable[[str], None] = say, poll_seconds: float = POLL_SECONDS
) -> int:
    """Until the job that watches for checkpoints has ended -> its exit code; see `jobs.watching`.

    1 where it left the queue without its end. Ctrl-C ends the following alone (130).
    """
    job = jobs.watching(folder)
    assert job is not None

    def states() -> dict[str, str]:
        found = queue.state(job)
        return {job: found} if found else {}

    try:
        _until_over(
            states,
            over=lambda: exit_code(folder, WATCH) is not None,
            shown=lambda found: f"job {job} (watches for checkpoints): {found[job]}",
            tell=tell,
            poll_seconds=poll_seconds,
        )
    except KeyboardInterrupt:
        tell(f"no longer following; the evaluations go on. To end what queues them: scancel {job}")
        return INTERRUPTED
    code = exit_code(folder, WATCH)
    if code != 0:
        how = f"with code {code}" if code else f"without its end; Slurm says {queue.final_state(job)}"
        tell(f"job {job}, which watches for checkpoints, left the queue {how}; see {folder}/{WATCH}.log")
    return 1 if code is None else code


def _until_over(
    states: Callable[[], Mapping[str, str]],
    *,
    over: Callable[[], bool],
    shown: Callable[[Mapping[str, str]], str],
    tell: Callable[[str], None],
    poll_seconds: float,
) -> None:
    """Out of the queue for a while, or the last one has written how it ended (`over`) and had time to leave."""
    told, gone_since, over_since = "", None, None
    while True:
        now = time.monotonic()
        if over():
            over_since = over_since or now
        try:
            found = states()
            words = (found and shown(found)) or "none in the queue"
            gone_since = None if found else gone_since or now
        except queue.Unreachable as error:
            words = str(error)
        if words != told and not (over_since is not None and gone_since is not None and not told):
            told = words
            tell(words)
        if over_since is not None and (gone_since is not None or now - over_since > LEAVING_SECONDS):
            return
        if gone_since is not None and now - gone_since >= GONE_SECONDS:
            return
        time.sleep(poll_seconds)


def _shown(done: Submitted, states: Mapping[str, str]) -> Iterator[str]:
    mine = [states[e] for e in done.elements.values() if e in states]
    if mine:
        counts = ", ".join(f"{mine.count(state)} {state}" for state in sorted(set(mine)))
        waiting = f", waiting for job {done.after}" if done.after and set(mine) == {"PENDING"} else ""
        yield f"job {' '.join(done.arrays)}: {counts} of {len(done.elements)}{waiting}"
    elif done.merge and done.merge in states:
        yield f"job {done.merge} (merge): {states[done.merge]}"
