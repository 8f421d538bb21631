"""What the runs of a study left: whether each is finished, and each metric as one number."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from hpcgrpo.journal import read_metrics
from hpcgrpo.launch.local import newest_checkpoint
from hpcgrpo.study.cells import Cell
from hpcgrpo.study.design import Study

PROFILE = "profile/"  # a metric's name that begins so is a key of profile.json
Reducer = str | Mapping[str, int]

WHOLE_RUN: dict[str, Callable[[list[float]], float]] = {
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
    "mean": fmean,
    "median": median,
    "min": min,
    "max": max,
    "sum": sum,
}


@dataclass(frozen=True)
class Outcome:
    """A run as it stands."""

    cell: Cell
    finished: bool
    steps: int  # of the newest checkpoint
    lines: Sequence[Mapping[str, Any]]  # of metrics.jsonl
    values: Mapping[str, float | None]  # metric -> number; None where the run has not measured it


def collect(study: Study) -> list[Outcome]:
    """Every run's outcome, in the study's order. Metrics are those of finished runs only."""
    return [_outcome(study, cell) for cell in study.cells]


def _outcome(study: Study, cell: Cell) -> Outcome:
    steps, finished = newest_checkpoint(cell.run.folder, cell.run.train)
    lines = read_metrics(cell.run.folder)
    profile = _profile(cell)
    values = {
        name: measure(name, how, lines, profile) if finished else None for name, how in study.metrics.items()
    }
    return Outcome(cell, finished, steps, lines, values)


def measure(
    name: str, how: Reducer, lines: Sequence[Mapping[str, Any]], profile: Mapping[str, Any]
) -> float | None:
    """One number of a run: `name` over all lines that have it, by first, last, mean, median, min, max, sum, or the
    mean of the `{first: n}` or `{last: n}` of them. None where no line has it.
    """
    if name.startswith(PROFILE):
        value = profile.get(name.removeprefix(PROFILE))
        return float(value) if isinstance(value, int | float) else None
    found = [float(line[name]) for line in lines if name in line]
    if not found:
        return None
    if isinstance(how, str):
        return float(WHOLE_RUN[how](found))
    (end, count), *_ = how.items()
    return fmean(found[:count] if end == "first" else found[-count:])


def _profile(cell: Cell) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return dict(json.loads((cell.run.folder / "profile.json").read_text(encoding="utf-8")))
    return {}
