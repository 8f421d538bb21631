"""Which jobs an evaluation was queued as, and why one of its tasks did not end well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.scripts import STOPPED
from hpcgrpo import evidence
from hpcgrpo.journal import write_atomically
from hpcgrpo.launch import queue

RECORD = "submitted.json"


@dataclass(frozen=True)
class Submitted:
    """The jobs of an evaluation that was queued last."""

    folder: Path  # of the results
    elements: Mapping[str, str]  # task -> its element's id, `<array>_<index>`
    merge: str | None  # None: it could not be queued
    after: str | None  # the training's job that they wait for
    run: str | None  # the training's folder, where one is waited for

    @property
    def arrays(self) -> list[str]:
        return sorted({element.partition("_")[0] for element in self.elements.values()})

    @property
    def ids(self) -> list[str]:
        """What `scancel` takes."""
        return [*self.arrays, *([self.merge] if self.merge else [])]


def submitted(folder: Path) -> Submitted | None:
    """The jobs that were queued last for the evaluation in `folder`, live or not."""
    record = evidence.read_json(folder / "jobs" / "slurm" / RECORD)
    if not record:
        return None
    values = {key: record.get(key) for key in ("merge", "after", "run")}
    return Submitted(folder, dict(record.get("elements") or {}), **values)


def write_record(done: Submitted) -> None:
    """So that whoever comes later knows the jobs."""
    keys = {"elements": dict(done.elements), "merge": done.merge, "after": done.after, "run": done.run}
    write_atomically(done.folder / "jobs" / "slurm" / RECORD, json.dumps(keys, indent=1) + "\n")


# ---- why something is missing


def explain(folder: Path) -> dict[str, str]:
    """Task -> why it did not end well, of the evaluation that was queued last; written to its `.reason` as well.

    What a task itself has written there is kept. For the merge, and for whoever asks later.
    """
    jobs = submitted(folder)
    if jobs is None:
        return {}
    found = {}
    training = _of_training(jobs)
    for name, element in jobs.elements.items():
        path = folder / "jobs" / f"{name}.reason"
        said = path.read_text(encoding="utf-8").strip() if path.exists() else ""
        reason = said or _why_not(folder / "jobs", name, element, training)
        if reason:
            found[name] = reason
        if reason and not said:
            with suppress(OSError):
                write_atomically(path, reason + "\n")
    return found


def _of_training(jobs: Submitted) -> str | None:
    return why(jobs.after, Path(jobs.run) if jobs.run else None) if jobs.after else None


def _why_not(jobs: Path, name: str, element: str, training: str | None) -> str | None:
    code = exit_code(jobs, name)
    if code is not None:
        return _of_code(code, jobs / f"{name}.log") if code else None
    end, started = queue.end(element), (jobs / f"{name}.log").exists()
    if end is None:
        if training and not started:
            return f"cancelled: {training}"
        return f"job {element} ended without a word, and Slurm no longer knows how"
    if end.reason == "DependencyNeverSatisfied" or (end.state == "CANCELLED" and training and not started):
        return f"cancelled: {training or 'what it waited for did not end well'}"
    if end.state == "CANCELLED":
        return f"cancelled: job {element} was ended from outside" + ("" if started else " before it started")
    if end.state == "COMPLETED":
        return None
    if end.state not in queue.OVER:
        return f"not finished: job {element} is {end.state}"
    return f"job {element} ended {_ended(end)}{_finding(jobs / f'{name}.log')}"


def _of_code(code: int, log: Path) -> str:
    if code == STOPPED:
        return "stopped before its end; the same command goes on from there"
    return f"failed with exit code {code}{_finding(log)}"


def _finding(log: Path) -> str:
    found = evidence.first(evidence.of_log(log, "evaluation"))
    return f": {found.text}" if found else f"; see {log}"


def exit_code(jobs: Path, name: str) -> int | None:
    """What the last start of a task or of the merge left with; None while it has not."""
    try:
        return int((jobs / "slurm" / f"{name}.code").read_text())
    except (OSError, ValueError):
        return None


def why(job: str, run_folder: Path | None) -> str | None:
    """How a training job ended, e.g. `the training job 12 ended FAILED (exit code 1): out of memory`.

    None where it ended well, is live, or where neither Slurm nor the run's own words tell.
    """
    end, said = queue.end(job), _last_words(job, run_folder)
    if end is None and said:
        code = int(said.get("code") or 0)
        end = queue.End("FAILED" if code else "COMPLETED", code)
    if end is None or end.state == "COMPLETED" or end.state not in queue.OVER:
        return None
    reason = evidence.clean(str(said.get("reason") or ""))
    return f"the training job {job} ended {_ended(end)}" + (f": {reason}" if reason else "")


def _ended(end: queue.End) -> str:
    if end.state == "CANCELLED":
        return end.state
    how = f" (exit code {end.code})" if end.code else f" (signal {end.signal})" if end.signal else ""
    return end.state + how


def _last_words(job: str, run_folder: Path | None) -> dict[str, Any]:
    """What a job's last start wrote about its end, where it was not queued again."""
    if run_folder is None:
        return {}
    starts = sorted((run_folder / "slurm").glob(f"{job}.*"), key=_restart)
    found = [evidence.read_json(p / "ended.json") for p in starts]
    found.append(evidence.read_json(run_folder / "slurm" / "ended.json"))
    mine = [e for e in found if str(e.get("job")) == job and not e.get("requeued")]
    return mine[-1] if mine else {}


def _restart(path: Path) -> int:
    number = path.name.rpartition(".")[2]
    return int(number) if number.isdigit() else -1
