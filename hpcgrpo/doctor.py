"""What went wrong in a run: of every start the first process that failed, its error, the likely cause, the way out."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpcgrpo.causes import cause_of
from hpcgrpo.checkpoint_folder import complete, step_of
from hpcgrpo.config import ConfigError
from hpcgrpo.evidence import (
    Finding,
    clean,
    first,
    of_attempt,
    of_error_file,
    of_log,
    read_json,
    tail,
    written,
)
from hpcgrpo.journal import LOCK, gone
from hpcgrpo.launch.lead import CODE_SAVED

MARKS = ("config.yaml", "metrics.jsonl", "slurm", "torchrun", "checkpoints")
RECENT_SECONDS = 90.0  # a start whose files were written within these is taken to be running
SLACK_SECONDS = 60.0  # Slurm writes its last lines a little after the end
MAX_STARTS = 200  # the latest ones are looked at
UNHEALTHY = ("failed", "lost", "stopped")


@dataclass
class Start:
    """One start of the run: a Slurm job's first run or one after a requeue, or a start on this machine."""

    name: str
    began: float  # epoch seconds, as `end`
    end: float
    ended: Mapping[str, Any] = field(default_factory=dict)  # node 0's ended.json
    findings: list[Finding] = field(default_factory=list)
    state: str = "failed"  # finished, saved, running, failed, lost, stopped


def run(folder: Path, *, as_json: bool) -> int:
    """Print what went wrong in the run in `folder` -> 0 for a run that is finished or goes on, else 1.

    Raises ConfigError (exit code 2) for a folder that holds no run.
    """
    report = diagnose(folder)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return 1 if report["state"] in UNHEALTHY else 0


def diagnose(folder: Path) -> dict[str, Any]:
    """The state of a run and of its starts, as plain values. Raises ConfigError for a folder that holds no run."""
    _check(folder)
    job = _job(folder)
    starts = _starts(folder, over=job is not None and job.state is None)
    step, saved, finished = _progress(folder)
    state = "finished" if finished else _state(folder, starts, step, job)
    waited = sum(max(0.0, later.began - one.end) for one, later in pairwise(starts))
    last = next((s for s in reversed(starts) if s.state in UNHEALTHY), None) if state in UNHEALTHY else None
    failure = _failure(last) if last else None
    if state == "failed" and not starts and job is not None:
        failure = _never_started(job)
    return {
        "run": str(folder),
        "state": state,
        "step": step,
        "checkpoint_step": saved,
        "starts": [_described(start) for start in starts],
        "seconds_between_starts": round(waited, 1),
        "failure": failure,
    }


@dataclass(frozen=True)
class Job:
    """The run's last job, as the queue knows it."""

    id: str
    state: str | None  # None: it has left the queue
    ended: str  # how


def _job(folder: Path) -> Job | None:
    """The last job that was submitted for a run; None where there is none, or nobody can tell how it is."""
    from hpcgrpo.launch import submit

    try:
        submitted = submit.last(folder)
        state = submitted.state() if submitted else None
        if submitted is None:
            return None
        return Job(submitted.job_id, state, "" if state else submitted.final_state())
    except ValueError:  # no Slurm here, or it is silent
        return None


def _never_started(job: Job) -> dict[str, Any]:
    return {
        "start": f"job {job.id}",
        "process": None,
        "error": f"job {job.id} ended ({job.ended}) before any of its nodes wrote a word",
        "cause": "it was cancelled before it began, or its nodes do not see the run's folder or may not write there",
        "way_out": "set output_dir to a file system that all nodes share; `scontrol show job` names Slurm's reason",
    }


def _check(folder: Path) -> None:
    if folder.is_dir() and any((folder / mark).exists() for mark in MARKS):
        return
    what = "holds no run" if folder.is_dir() else "no such folder"
    place = folder if folder.is_dir() else folder.parent
    near = sorted(p.parent.name for p in place.glob("*/config.yaml")) if place.is_dir() else []
    hint = (
        f"; runs there: {', '.join(near[:8])}"
        if near
        else " (a run's folder is output_dir/name, e.g. logs/igrpo-7b)"
    )
    raise ConfigError(f"{folder}: {what}{hint}")


# ---- progress


def _progress(folder: Path) -> tuple[int, int | None, bool]:
    """(last step in metrics.jsonl, that of the newest complete checkpoint or None, whether that is the run's last)."""
    step = 0
    for line in reversed(tail(folder / "metrics.jsonl")[0]):
        found = re.match(r'\{"step": (\d+)\b.*\}\s*$', line)
        if found:
            step = int(found[1])
            break
    newest = next(iter(complete(folder / "checkpoints")), None)
    saved = step_of(newest) if newest else None
    limit = re.search(r"^ +max_steps: (\d+)\s*$", "\n".join(tail(folder / "config.yaml")[0]), re.MULTILINE)
    flagged = newest is not None and read_json(newest / "trainer_state.json").get("finished") is True
    finished = flagged or bool(limit and (saved or 0) >= int(limit[1]) > 0)
    return step, saved, finished


def _state(folder: Path, starts: list[Start], step: int, job: Job | None) -> str:
    if job is not None and job.state is not None:
        asked = starts and starts[-1].name.rpartition(".")[0] == job.id and starts[-1].state != "running"
        return "queued again" if asked else "queued" if job.state == "PENDING" else "running"
    if starts:
        return starts[-1].state
    if job is not None:
        return "failed"
    moved = max((written(folder / name) for name in ("metrics.jsonl", LOCK, "config.yaml")), default=0.0)
    if time.time() - moved < RECENT_SECONDS and not gone(folder):
        return "running"
    return "stopped" if step or (folder / "metrics.jsonl").exists() else "not started"


# ---- starts


def _starts(folder: Path, *, over: bool) -> list[Start]:
    """Every start, in the order of their ends; `over`: none is running, says the queue."""
    slurm = folder / "slurm"
    found = [p for p in slurm.glob("*.*") if p.is_dir() and re.fullmatch(r"\w+\.\d+", p.name)]
    found = sorted(found, key=lambda p: written(p))[-MAX_STARTS:]
    starts = sorted((_start(path) for path in found), key=lambda s: s.end)
    for path in sorted(slurm.glob("job-*.log")) + sorted(slurm.glob("submitit/*/*log.*")):
        _share(path, starts)
    for start in starts:
        start.state = _state_of(start, later=starts[-1] is not start, over=over)
    errors = [f for p in sorted((folder / "torchrun").glob("*/*/*/error.json")) if (f := _of_rank(p))]
    if errors and not starts:
        starts = [Start("local", min(f.time for f in errors), max(f.time for f in errors), {}, errors)]
    return starts


def _start(folder: Path) -> Start:
    ended = read_json(folder / "ended.json")
    times = [written(p) for p in folder.iterdir() if p.is_file()] or [written(folder)]
    began, end = (_seconds(ended.get(k)) for k in ("began", "ended"))
    start = Start(folder.name, began or min(times), end or max(times), ended)
    if _went_well(ended):
        return start
    start.findings = of_attempt(folder)
    if reason := str(ended.get("reason") or ""):
        about = re.search(r"\b(rank|engine) (\d+)(?:: | \(| was ended)", reason)
        whose = f"{about[1]} {about[2]}" if about else "node 0"
        cause = cause_of(reason.splitlines()[0]) or cause_of(reason)
        start.findings.append(Finding(whose, folder / "ended.json", None, start.end, clean(reason), cause))
    return start


def _went_well(ended: Mapping[str, Any]) -> bool:
    """Whether a start finished the run, or saved it and is followed by another one."""
    return ended.get("code") == 0 or (ended.get("code") == CODE_SAVED and bool(ended.get("requeued")))


def _share(path: Path, starts: list[Start]) -> None:
    """Give what a job's log says to the start in whose time it falls: requeued starts write into one log."""
    job = path.parent.name if path.parent.parent.name == "submitit" else path.stem.removeprefix("job-")
    own = [s for s in starts if s.name.rpartition(".")[0] in (job, f"local{job}")]
    findings = of_log(path, "Slurm")
    if not own and findings:
        starts.append(Start(job, findings[0].time, written(path), {}, findings))
        starts.sort(key=lambda s: s.end)
    elif own:
        for finding in findings:
            start = next((s for s in own if finding.time <= s.end + SLACK_SECONDS), own[-1])
            if not _went_well(start.ended):
                start.findings.append(finding)


def _of_rank(path: Path) -> Finding | None:
    return of_error_file(path, process=f"rank {path.parent.name}")


def _state_of(start: Start, *, later: bool, over: bool) -> str:
    code = start.ended.get("code")
    if code == 0:
        return "finished"
    if code == CODE_SAVED:
        return "saved" if start.ended.get("requeued") or later else "stopped"
    if start.ended:
        return "stopped" if "cancelled" in str(start.ended.get("reason")) else "failed"
    if not later and not over and time.time() - start.end < RECENT_SECONDS:
        return "running"
    return "failed" if first(start.findings) else "lost"


def _seconds(value: Any) -> float | None:
    return (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None
    )


# ---- the report

LOST = (
    "it ended without a word: its first node was lost (a node failure, a kill of the whole step, a full disk)",
    "look at `sacct -j JOB` and at the node's system log; submit again: the run goes on from its last checkpoint",
)
SILENT = (
    "none is known to this command; the error itself is above",
    "`hpcgrpo check` on the run's config.yaml finds most of what a configuration can cause",
)


def _described(start: Start) -> dict[str, Any]:
    ended = start.ended
    return {
        "start": start.name,
        "state": start.state,
        "code": ended.get("code"),
        "reason": ended.get("reason"),
        "requeued": ended.get("requeued"),
        "began": start.began,
        "ended": start.end,
        "first_step": ended.get("first_step"),
        "last_step": ended.get("last_step"),
        "failure": _failure(start) if start.state in UNHEALTHY else None,
    }


def _failure(start: Start) -> dict[str, Any]:
    """The first process that failed, and what is behind it."""
    found = first(start.findings)
    if found is None:
        reason = str(start.ended.get("reason") or "")
        what, way_out = LOST if not reason else SILENT
        return {
            "start": start.name,
            "process": None,
            "error": reason or None,
            "cause": what,
            "way_out": way_out,
        }
    what, way_out = (found.cause.what, found.cause.way_out) if found.cause else SILENT
    others = {f.process for f in start.findings} - {found.process, "Slurm"}
    return {
        "start": start.name,
        "process": found.process,
        "file": str(found.file),
        "line": found.line,
        "time": found.time,
        "error": found.text,
        "name": found.cause.name if found.cause else None,
        "cause": what,
        "way_out": way_out,
        "followed_by": sorted(others),
    }


def show(report: Mapping[str, Any]) -> None:
    """Print a report of `diagnose` for people."""
    starts = report["starts"]
    count = f"{len(starts)} start{'s' * (len(starts) != 1)}"
    print(f"{report['run']}: {report['state']}; step {report['step']}, {count}", end="")
    waited = report["seconds_between_starts"]
    print(f", {_duration(waited)} between them" if len(starts) > 1 else "")
    for start in starts:
        _show_start(start)
    if not starts and report["failure"]:
        _show_failure(report["failure"])
    if not starts and report["state"] == "stopped":
        saved = report["checkpoint_step"]
        kept = "without a checkpoint" if saved is None else f"with a checkpoint of step {saved}"
        next_start = "starts it over" if saved is None else "goes on from there"
        print(
            f"  it stopped before its end, {kept}. A run on this machine writes its errors to the terminal; the same"
            f" command {next_start}"
        )


def _show_start(start: Mapping[str, Any]) -> None:
    lasted = _duration(start["ended"] - start["began"])
    steps = f", steps {start['first_step']} to {start['last_step']}" if start["last_step"] is not None else ""
    reason = f": {start['reason']}" if start["reason"] and not start["failure"] else ""
    print(f"{start['start']}  {start['state']}{reason} ({lasted}{steps})")
    if start["failure"] is not None:
        _show_failure(start["failure"])


def _show_failure(failure: Mapping[str, Any]) -> None:
    if failure["process"]:
        place = failure["file"] + (f", line {failure['line']}" if failure["line"] else "")
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure["time"]))
        print(f"  first:   {failure['process']} at {at} ({place})")
    if failure["error"]:
        print(f"  error:   {failure['error']}")
    print(f"  cause:   {failure['cause']}")
    print(f"  way out: {failure['way_out']}")
    if failure.get("followed_by"):
        print(f"  after it: {', '.join(failure['followed_by'])}")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
