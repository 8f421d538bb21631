"""The tables of a study: what was compared, as values, as Markdown and on the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hpcgrpo.journal import write_atomically
from hpcgrpo.study.cells import Cell
from hpcgrpo.study.design import Study
from hpcgrpo.study.results import Outcome
from hpcgrpo.study.statistics import Key, difference, grouped, mean

HEADS = (
    "",
    "n",
    "mean",
    "s.e.",
    "95 % interval",
    "difference",
    "95 % interval",
    "ratio",
    "p (t)",
    "p (Wilcoxon)",
)


def build(study: Study, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Per metric and label: n, mean, spread, and the difference to the baseline; and which runs are missing."""
    return {
        "study": study.name,
        "compare": list(study.compare),
        "baseline": study.baseline,
        "units": list(study.group or study.pair),
        "runs": len(outcomes),
        "metrics": {name: _metric(study, outcomes, name) for name in study.metrics},
        "missing": [
            {"cell": o.cell.name, "labels": dict(o.cell.labels), "steps": o.steps}
            for o in outcomes
            if not o.finished
        ],
        "published": [p.model_dump() for p in study.published],
    }


def _metric(study: Study, outcomes: Sequence[Outcome], name: str) -> dict[str, Any]:
    pairs = {label: of_label(study, outcomes, name, label) for label in study.labels}
    return {
        label: _row(values, pairs[study.baseline], unit_positions(study)) for label, values in pairs.items()
    }


def of_label(study: Study, outcomes: Sequence[Outcome], name: str, label: str) -> dict[Key, float]:
    """A label's values of a metric, by pair."""
    found = [(o.cell, o.values[name]) for o in outcomes if study.label(o.cell) == label]
    return by_pair(study, [(cell, value) for cell, value in found if value is not None])


def by_pair(study: Study, values: Iterable[tuple[Cell, float]]) -> dict[Key, float]:
    """Values of runs by the labels of their pair; runs that differ in other axes alone are averaged."""
    axes = [axis.name for axis in study.axes]
    whole = {tuple(cell.labels[a] for a in axes): value for cell, value in values}
    return grouped(whole, [axes.index(axis) for axis in study.pair])


def unit_positions(study: Study) -> list[int]:
    """Which labels of a pair tell the independent units apart: those of `group`, else all."""
    return [study.pair.index(axis) for axis in study.group or study.pair]


def _row(
    values: Mapping[Key, float], baseline: Mapping[Key, float], positions: Sequence[int]
) -> dict[str, Any]:
    own = mean(list(grouped(values, positions).values()))
    row: dict[str, Any] = asdict(own) if own else {"n": 0}
    if values is not baseline and (found := difference(values, baseline, positions)):
        row["against_baseline"] = asdict(found)
    return row


def write(study: Study, outcomes: Sequence[Outcome], table: Mapping[str, Any]) -> None:
    """table.json, table.md and results.json (every run's values) in the study's folder."""
    write_atomically(study.folder / "table.json", json.dumps(table, indent=1) + "\n")
    write_atomically(study.folder / "table.md", markdown(table))
    runs = [
        {
            "cell": o.cell.name,
            "labels": dict(o.cell.labels),
            "finished": o.finished,
            "steps": o.steps,
            "values": dict(o.values),
        }
        for o in outcomes
    ]
    write_atomically(study.folder / "results.json", json.dumps(runs, indent=1) + "\n")


def markdown(table: Mapping[str, Any]) -> str:
    """The tables, the study's pictures and the published numbers as Markdown."""
    lines = [f"# {table['study']}", "", *_notes(table), ""]
    for name, rows in table["metrics"].items():
        lines += [f"## {name}", "", *_grid(HEADS, _cells(rows)), ""]
    lines += ["![metrics](metrics.png)", "", "![curves](curves.png)", ""]
    for published in table["published"]:
        columns = list(dict.fromkeys(key for row in published["rows"].values() for key in row))
        rows = [[label, *(_plain(row.get(c)) for c in columns)] for label, row in published["rows"].items()]
        lines += [f"## Published: {published['table']}", "", *_grid(["", *columns], rows), ""]
    return "\n".join(lines)


def _notes(table: Mapping[str, Any]) -> list[str]:
    units = " x ".join(table["units"]) or "single runs"
    notes = [f"n counts {units}; differences and tests are paired, against {table['baseline']}."]
    if table["missing"]:
        cells = ", ".join(f"{m['cell']} ({m['steps']} steps)" for m in table["missing"])
        notes.append(f"Missing: {len(table['missing'])} of {table['runs']} runs are not finished: {cells}.")
    return notes


def _grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def _cells(rows: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    return [[label, *_values(row)] for label, row in rows.items()]


def _values(row: Mapping[str, Any]) -> Iterator[str]:
    against = row.get("against_baseline") or {}
    gap = against.get("difference") or {}
    yield str(row["n"])
    yield from (number(row.get("mean")), number(row.get("standard_error")), _interval(row))
    yield number(gap.get("mean"), sign=True)
    yield _interval(gap, sign=True)
    yield number(against.get("ratio"))
    yield from (_p(against.get("p_t")), _p(against.get("p_wilcoxon")))


def number(value: float | None, *, sign: bool = False) -> str:
    """Four digits after the point below one, four in all above; nothing for None."""
    if value is None:
        return ""
    form = "+" if sign and value else ""
    small = 0.001 <= abs(value) < 1
    return format(value, f"{form}.4f" if small else f"{form}.4g")


def _interval(row: Mapping[str, Any], *, sign: bool = False) -> str:
    if row.get("low") is None:
        return ""
    return f"{number(row['low'], sign=sign)} to {number(row['high'], sign=sign)}"


def _p(value: float | None) -> str:
    return "" if value is None else "<0.0001" if value < 1e-4 else f"{value:.4f}"


def _plain(value: Any) -> str:
    return "" if value is None else str(value)


def show(table: Mapping[str, Any]) -> None:
    """Print the tables, narrower than in Markdown."""
    from rich.console import Console
    from rich.table import Column, Table

    widest = max(len(name) for name in table["metrics"])
    shown = Table(Column("", min_width=min(widest, 36)), "n", "mean", "difference", "95 % interval", "p")
    for name, rows in table["metrics"].items():
        shown.add_row(f"[bold]{name}[/bold]")
        for label, n, centre, error, _, gap, gap_interval, _, p, rank_p in _cells(rows):
            spread = f" ± {error}" if error else ""
            tests = f"{p}, {rank_p}" if rank_p else p
            shown.add_row(f"  {label}", n, f"{centre}{spread}", gap, gap_interval, tests)
        shown.add_section()
    Console().print(shown)
    print("mean ± standard error; p of the paired t-test, then of Wilcoxon's signed ranks from 6 pairs on")
    for note in _notes(table):
        print(note)
