"""What the logs of one start of a run say went wrong: who, when, in which line. Logs may be huge, cut off or binary."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgrpo.causes import Cause, cause_of

TAIL_BYTES = 2**20  # of a log that are read
LINE_CHARACTERS = 500
MAX_FINDINGS = 200  # of one log
TIME_LINES = 2000  # after an error, of which one may say when it was

_NOISE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_PREFIX = re.compile(
    r"\s*(?:\[rank\d+\]:|\(\w[\w ]*(?: pid=\d+)?\)|\d\d:\d\d:\d\d \[[^\]]*\]|\[?[EWIF]\d{4} [\d:.]+[^\]]*\]"
    r"|(?:ERROR|CRITICAL) [\d-]+ [\d:.,]+ \[[^\]]*\]|\d+:(?=\s)|\[\d{4}-[^\]]*\]|\[(?:ERROR|error)\]"
    r"|\d{4}-\d\d-\d\d[T ][\d:.,]+(?: -)?)\s*"
)
_QUIET = re.compile(r"\b(?:INFO|DEBUG|WARNING|WARN|UserWarning|FutureWarning|DeprecationWarning)\b")
_EXCEPTION = re.compile(
    r"(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Failure|Timeout|NotFound|Interrupt)\b(?:: |:?\s*$)"
)
_ERROR = re.compile(
    r"(?:[\w.]+: )?(?:fatal )?error: |(?:slurmstepd|srun|sbatch|slurmd|scontrol): error: |Killed\s*$", re.I
)
_DATES = (  # with a date, without a year, the time alone
    (re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)"), "%Y-%m-%d %H:%M:%S"),
    (re.compile(r"\b(\d\d-\d\d) (\d\d:\d\d:\d\d)\b"), "%m-%d %H:%M:%S"),
    (re.compile(r"\b[EWIF](\d{4}) (\d\d:\d\d:\d\d)"), "%m%d %H:%M:%S"),
    (re.compile(r"^(?:\d+: )?()(\d\d:\d\d:\d\d)\b"), "%H:%M:%S"),
)


@dataclass(frozen=True)
class Finding:
    """An error that one process wrote, or that was written about it."""

    process: str  # rank 3, engine 0, node 1, Slurm
    file: Path
    line: int | None  # from 1; None where the file's beginning was not read
    time: float  # epoch seconds; of a line without one the time of the lines around, or when the file was last written
    text: str
    cause: Cause | None
    traceback: str = ""

    @property
    def distance(self) -> int:
        """From the root of the failure, as `Cause.distance`."""
        return self.cause.distance if self.cause else 0


def of_attempt(folder: Path) -> list[Finding]:
    """Every finding in the folder of one start, a rank's own report in place of its log."""
    found = [f for path in _files(folder, "*error*.json") if (f := of_error_file(path))]
    told = {f.process for f in found}
    for path in _files(folder, "*.log"):
        process = process_of(path.name)
        if process not in told or not process.startswith("rank"):
            found += of_log(path, process)
    return found


def process_of(name: str) -> str:
    """`rank-3.log` -> `rank 3`, `job-12.log` -> `Slurm`."""
    match = re.match(r"(rank|engine|node)(?:-error)?-(\d+)", name)
    return f"{match[1]} {match[2]}" if match else "Slurm" if name.startswith("job-") else name


def first(findings: list[Finding]) -> Finding | None:
    """The earliest of those nearest to the root: what merely follows from another failure comes last."""
    return min(findings, key=lambda f: (f.distance, f.time), default=None)


def of_error_file(path: Path, process: str | None = None) -> Finding | None:
    """What a rank or node wrote when it failed: {time, rank, type, message, traceback}, or torchrun's own form."""
    values = read_json(path)
    if isinstance(values.get("message"), dict):
        values = _of_torchrun(values["message"])
    if not values:
        return None
    kind, message = str(values.get("type") or ""), clean(str(values.get("message") or ""))
    text = f"{kind}: {message}" if kind else message
    trace = str(values.get("traceback") or "")
    named = process_of(path.name)
    if named == path.name and "rank" in values:
        named = f"rank {values['rank']}"
    when = _float(values.get("time"))
    cause = cause_of(text) or _cause_in(trace)
    if cause is None and kind in ("ValueError", "ConfigError"):
        cause = cause_of("ConfigError")
    when = when if when is not None else written(path)
    return Finding(process or named, path, None, when, text, cause, trace[-20_000:])


def _of_torchrun(inner: Mapping[str, Any]) -> dict[str, Any]:
    """{"message", "extraInfo": {"py_callstack", "timestamp"}} under our own names."""
    extra = inner.get("extraInfo")
    extra = extra if isinstance(extra, Mapping) else {}
    found = {"traceback": extra.get("py_callstack"), "time": extra.get("timestamp")}
    return {"message": inner.get("message")} | found


def _cause_in(trace: str) -> Cause | None:
    """A chain of exceptions names its root first."""
    raised = [line.strip() for line in trace.splitlines() if _EXCEPTION.match(line.strip())]
    found = [cause for line in raised[:20] if (cause := cause_of(line))]
    return min(found, key=lambda c: c.distance, default=None)


def of_log(path: Path, process: str) -> list[Finding]:
    """The lines of a log's last megabyte that say that something failed."""
    lines, whole = tail(path)
    end = written(path)
    found: list[Finding] = []
    for number, raw in enumerate(lines, 1):
        read = _read_line(raw) if len(raw) > 5 else None
        if read is None:
            continue
        text, cause = read
        about = re.search(r"\brank (\d+) ended (?:with|by)", text)
        whose = f"rank {about[1]}" if about else process
        when = _time_at(lines, number - 1, end)
        found.append(Finding(whose, path, number if whole else None, when, clean(text), cause))
        if len(found) >= MAX_FINDINGS:
            break
    return found


def _read_line(raw: str) -> tuple[str, Cause | None] | None:
    """A line's text and cause where it says that something failed; else None."""
    text = bare(raw)
    if not text or _QUIET.search(raw[:80]) or "DUE TO JOB REQUEUE" in text:
        return None
    failing = bool(_EXCEPTION.match(text) or _ERROR.match(text))
    marked = failing or bool(re.match(r"(?:\S+ )?(?:ERROR|CRITICAL)\b", raw))
    cause = cause_of(text, sure=marked)
    if cause is None and (not failing or text.startswith("KeyboardInterrupt")):
        return None
    return text, cause


def _time_at(lines: list[str], index: int, end: float) -> float:
    """When a line was written: what it says, else what the next one says, since errors stand before verdicts."""
    told = (time_in(line, end) for line in lines[index : index + TIME_LINES])
    return next((when for when in told if when is not None), end)


def tail(path: Path) -> tuple[list[str], bool]:
    """The lines of the last megabyte, and whether that is all of the file; nothing where it cannot be read."""
    try:
        with path.open("rb") as file:
            skipped = max(0, path.stat().st_size - TAIL_BYTES)
            file.seek(skipped)
            text = file.read(TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return [], False
    lines = re.split(r"\r?\n|\r", text)
    return (lines[1:] if skipped else lines), not skipped


def bare(line: str) -> str:
    """A line without colours, control characters and what loggers put before the message."""
    text = _NOISE.sub("", line[: 8 * LINE_CHARACTERS])
    for _ in range(5):
        match = _PREFIX.match(text)
        if match is None:
            break
        text = text[match.end() :]
    return text.strip()


def clean(text: str) -> str:
    """One line of bounded length; the first lines of a longer message are joined."""
    joined = " ".join(_NOISE.sub("", text[: 16 * LINE_CHARACTERS]).split())
    return joined if len(joined) <= LINE_CHARACTERS else joined[: LINE_CHARACTERS - 1] + "…"


def time_in(line: str, near: float) -> float | None:
    """When a line was written, if it says so; what of the date is missing is that of `near`, in epoch seconds."""
    for pattern, form in _DATES:
        match = pattern.search(line[:200])
        if match is None:
            continue
        day = time.localtime(near)
        try:
            told = time.strptime(f"{match[1]} {match[2]}".strip(), form)
        except ValueError:
            return None
        year = told.tm_year if "%Y" in form else day.tm_year
        month, date = (told.tm_mon, told.tm_mday) if "%d" in form else (day.tm_mon, day.tm_mday)
        when = time.mktime((year, month, date, told.tm_hour, told.tm_min, told.tm_sec, 0, 0, -1))
        return when - 86400 if "%d" not in form and when > near + 3600 else when
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} where the file is none, is cut off or is larger than any of ours."""
    try:
        if path.stat().st_size > 16 * TAIL_BYTES:
            return {}
        values = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def written(path: Path) -> float:
    """When a file was last written, in epoch seconds; 0 where it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    try:
        yield from sorted(p for p in folder.glob(pattern) if p.is_file())
    except OSError:
        return
