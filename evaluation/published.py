"""The papers' tables: a row of them as one side of a comparison, and the list of rows."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from hpcgrpo.algorithms.schema import nearest

# Columns of the papers' tables -> the benchmarks that they can be; of several the first one that was measured.
COLUMNS: dict[str, tuple[str, ...]] = {
    "AIME24": ("aime24",),
    "AIME25": ("aime25",),
    "AMC": ("amc23", "amc_2022_2023"),
    "AMC23": ("amc23",),
    "GSM8K": ("gsm8k",),
    "MATH500": ("math500",),
    "Minerva": ("minerva",),
    "Olympiad": ("olympiadbench",),
    "GPQA": ("gpqa_diamond",),
    "MMLU-Pro": ("mmlu_pro",),
}
# What "Accuracy" is of, by how the table's name begins. CPPO's MATH numbers are multiples of 1/500.
ACCURACY: dict[str, tuple[str, ...]] = {
    "cppo_gsm8k": ("gsm8k",),
    "cppo_table_4": ("gsm8k",),
    "cppo_math": ("math500", "math"),
    "cppo_table_5": ("math500", "math"),
}


@dataclass(frozen=True)
class Side:
    """One of the two that are compared."""

    name: str
    scores: Mapping[str, float]  # benchmark -> avg@k in [0, 1]
    results: Mapping[str, Mapping[str, Any]]  # benchmark -> its result file; none of a published row
    notes: tuple[str, ...] = ()


def find(table: str, row: str, *, beside: Collection[str] = ()) -> Side:
    """A row of the papers' tables (hpcgrpo/data/published.yaml) by benchmark. Raises ValueError with the nearest."""
    tables = every_table()
    if table not in tables:
        raise ValueError(f"{table}: no such table{nearest(table, tables)}; one of: {', '.join(tables)}")
    found = tables[table]
    rows = {_plain(name): name for name in found["rows"]}
    if _plain(row) not in rows:
        near = [rows[n] for n in difflib.get_close_matches(_plain(row), rows, 1, 0.5)]
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{table}: no row {row!r}{hint}; rows: {', '.join(found['rows'])}")
    name = rows[_plain(row)]
    scores, notes = {}, [found["source"], *found.get("remarks", ())]
    for column, score in zip(found["columns"], found["rows"][name], strict=True):
        benchmarks = _benchmarks(table, column)
        if score is not None and benchmarks:
            chosen = next((b for b in benchmarks if b in beside), benchmarks[0])
            scores[chosen] = score / 100
            if len(benchmarks) > 1:
                notes.append(
                    f"{column} is taken for {chosen}; the paper could mean {' or '.join(benchmarks)}."
                )
    if not scores or name.startswith("Printed"):
        raise ValueError(
            f"{table}:{name} holds no score of a benchmark; see --list-published for rows that do"
        )
    return Side(f"{table}:{name}", scores, {}, tuple(notes))


def every_row() -> list[dict[str, Any]]:
    """The papers' rows that can be compared with: name (TABLE:ROW), source, and scores in percent by benchmark."""
    found = []
    for table, contents in every_table().items():
        for row in contents["rows"]:
            try:
                side = find(table, row)
            except ValueError:
                continue
            scores = {benchmark: round(100 * score, 2) for benchmark, score in side.scores.items()}
            found.append({"name": side.name, "source": contents["source"], "scores": scores})
    return found


def list_rows(*, as_json: bool) -> int:
    """Print the papers' rows, one a line or as a JSON list -> 0."""
    rows = every_row()
    if as_json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return 0
    for row in rows:
        print(f"{row['name']}   {'  '.join(f'{name} {score:g}' for name, score in row['scores'].items())}")
    return 0


@cache
def every_table() -> dict[str, Any]:
    """The papers' tables as they stand in hpcgrpo/data/published.yaml: name -> source, columns, rows, remarks."""
    import yaml

    text = (resources.files("hpcgrpo") / "data" / "published.yaml").read_text(encoding="utf-8")
    tables: dict[str, Any] = yaml.safe_load(text)
    return tables


def _benchmarks(table: str, column: str) -> tuple[str, ...]:
    if column == "Accuracy":
        return next((names for start, names in ACCURACY.items() if table.startswith(start)), ())
    return COLUMNS.get(column, ())


def _plain(row: str) -> str:
    return " ".join(row.casefold().split())
