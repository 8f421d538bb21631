"""What a run measured, read from its folder however it ended: curves, phases, the profile."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hpcgrpo.journal import METRICS
from hpcgrpo.report.markup import finite

MAX_POINTS = 400  # of a curve; of more, the smallest and the largest of each stretch
MAX_BARS = 60  # of the picture of phases
SMOOTHED_FROM = 60  # points of a curve, from which on a running mean is drawn too
SMOOTHED_OVER = 10
# In runs of earlier versions the phase explore held these.
INNER = ("generate", "grade", "exchange")
STEADY = ("learning_rate", "peak_memory_gb")  # nothing to smooth
OUTCOMES = ("/right", "/wrong", "/unparsed", "/timeout", "/error")  # of grading
TIMING = "timing_s/"
SUM_TOLERANCE = 0.02

Line = dict[str, Any]
Point = tuple[float, float | None]  # step, value; None: it was none (NaN, infinite)


def lines_of(folder: Path, notes: list[str]) -> list[Line]:
    """The steps of metrics.jsonl in order, the last one of several of a step; what is broken is left out and noted."""
    path = folder / METRICS
    found: dict[int, Line] = {}
    broken = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                line = _line(text)
                if line is not None:
                    found[line["step"]] = line
                elif text.strip():
                    broken += 1
    except FileNotFoundError:
        notes.append(f"{METRICS} is not there: no step was taken, or it was not kept")
    except OSError as error:
        notes.append(f"{METRICS} cannot be read ({error.strerror})")
    if broken:
        notes.append(f"{broken} of the lines of {METRICS} are cut off or damaged and left out")
    return [found[step] for step in sorted(found)]


def _line(text: str) -> Line | None:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    step = values.get("step") if isinstance(values, dict) else None
    return values if isinstance(step, int) and not isinstance(step, bool) else None


def points(lines: Sequence[Line], name: str) -> list[Point]:
    """One metric's (step, value) where it was written; an outcome that no completion of a step had has a share of 0."""
    if name.startswith("rewards/") and name.endswith(OUTCOMES):
        lines = [{name: 0.0, **line} if "reward" in line else line for line in lines]
    found = ((line["step"], line[name]) for line in lines if name in line)
    return [(step, float(v) if finite(v) else None) for step, v in found]


def names_of(lines: Sequence[Line]) -> list[str]:
    """Every metric, in the order of its first appearance."""
    return list(dict.fromkeys(name for line in lines for name in line if name != "step"))


def summary(lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    """Of each metric how many values it has, its first, last, smallest, largest and mean, and how many were none."""
    found: dict[str, dict[str, Any]] = {}
    for name in names_of(lines):
        all_points = points(lines, name)
        kept = [(step, v) for step, v in all_points if v is not None]
        values = [v for _, v in kept]
        if not values:
            found[name] = {"count": 0, "not_finite": len(all_points)}
            continue
        one: dict[str, Any] = {
            "count": len(values),
            "not_finite": len(all_points) - len(values),
            "first_step": kept[0][0],
            "first": values[0],
            "last_step": kept[-1][0],
            "last": values[-1],
            "min": min(values),
            "max": max(values),
            "mean": fmean(values),
            "last_mean": fmean(values[-SMOOTHED_OVER:]) if len(values) >= 2 * SMOOTHED_OVER else None,
        }
        found[name] = one
    return found


def curve(name: str, all_points: Sequence[Point]) -> dict[str, Any]:
    """A metric as it is drawn: thinned, with a running mean where there are many points that scatter."""
    steady = name.endswith(STEADY)
    smooth = running_mean(all_points) if len(all_points) >= SMOOTHED_FROM and not steady else []
    return {"points": thinned(all_points), "smoothed": thinned(smooth), "count": len(all_points)}


def running_mean(all_points: Sequence[Point]) -> list[Point]:
    """The mean of the last ten values at each step; values that were none are passed over."""
    found: list[Point] = []
    recent: list[float] = []
    for step, value in all_points:
        if value is not None:
            recent = [*recent, value][-SMOOTHED_OVER:]
        found.append((step, fmean(recent) if recent else None))
    return found


def thinned(all_points: Sequence[Point]) -> list[Point]:
    """At most MAX_POINTS: of each stretch its smallest and largest, so that no spike is lost; the ends stay."""
    if len(all_points) <= MAX_POINTS:
        return list(all_points)
    first, *middle, last = all_points
    stretches = MAX_POINTS // 2 - 1
    kept = [first]
    for i in range(stretches):
        stretch = middle[len(middle) * i // stretches : len(middle) * (i + 1) // stretches]
        values = [p for p in stretch if p[1] is not None]
        if not values:
            kept.append(stretch[0])
            continue
        ends = {min(values, key=lambda p: p[1] or 0.0), max(values, key=lambda p: p[1] or 0.0)}
        kept += sorted(ends, key=lambda p: p[0])
    return [*kept, last]


def phases(lines: Sequence[Line], profile: Mapping[str, Any]) -> dict[str, Any]:
    """Where a step's time goes: seconds by phase, in total over the run, the median step, and bars over the run.

    Phases that lie in others are told apart from those that add up to the step.
    """
    steps = [line for line in lines if finite(line.get("step_time"))]
    names = [n.removeprefix(TIMING) for n in names_of(steps) if n.startswith(TIMING)]
    totals = _totals(profile)
    inner = _inner(steps, names)
    outer = [n for n in names if n not in inner]
    step_seconds = [line["step_time"] for line in steps]
    whole = sum(step_seconds)
    covered = sum(_seconds(line, n) for line in steps for n in outer)
    return {
        "outer": outer,
        "inner": sorted(n for n in names if n in inner),
        "beside": [n for n in totals if n not in names and "/" not in n],
        "total_seconds": totals,
        "median_seconds": {n: median(_seconds(line, n) for line in steps) for n in names},
        "step_seconds_median": median(step_seconds) if step_seconds else None,
        "step_seconds_sum": whole if step_seconds else None,
        "covered": covered / whole if whole else None,
        "bars": list(_bars(steps, outer)),
    }


def _totals(profile: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of phases and of their parts over all starts."""
    found = [profile.get(key) for key in ("phase_seconds", "part_seconds")]
    return {
        str(k): float(v) for part in found if isinstance(part, dict) for k, v in part.items() if finite(v)
    }


def _inner(steps: Sequence[Line], names: Sequence[str]) -> set[str]:
    """Phases within others: those with a slash, and the known ones where all together exceed the step."""
    within = {n for n in names if "/" in n}
    flat = [n for n in names if n not in within]
    whole = sum(line["step_time"] for line in steps)
    added = sum(_seconds(line, n) for line in steps for n in flat)
    return within | {n for n in flat if n in INNER} if added > (1 + SUM_TOLERANCE) * whole else within


def _bars(steps: Sequence[Line], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Mean seconds of each phase over a stretch of steps, and of the step."""
    count = min(MAX_BARS, len(steps))
    for i in range(count):
        part = steps[len(steps) * i // count : len(steps) * (i + 1) // count]
        means = {n: fmean(_seconds(line, n) for line in part) for n in names}
        yield {
            "first_step": part[0]["step"],
            "last_step": part[-1]["step"],
            "step_seconds": fmean(line["step_time"] for line in part),
            "phase_seconds": means,
        }


def _seconds(line: Mapping[str, Any], phase: str) -> float:
    value = line.get(TIMING + phase)
    return max(0.0, float(value)) if finite(value) else 0.0


def plain(value: Any) -> Any:
    """What JSON can hold: numbers that are none become null, keys text."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not abs(value) < 1e308:
        return None
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
