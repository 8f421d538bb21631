"""`hpcgrpo eval --compare A B`: two evaluations, or one and a published row, benchmark by benchmark and on average."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from evaluation import metrics
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
# Settings that may differ without a word: what the comparison is about, and what scores don't depend on.
EXPECTED_TO_DIFFER = (
    "seed",
    "model",
    "weights",
    "step",
    "checkpoint",
    "engines",
    "device",
    "grader_processes",
)
SHOWN_LENGTH = 40  # characters of a setting in a warning


@dataclass(frozen=True)
class Side:
    """One of the two that are compared."""

    name: str
    scores: Mapping[str, float]  # benchmark -> avg@k in [0, 1]
    results: Mapping[str, Mapping[str, Any]]  # benchmark -> its result file; none of a published row
    notes: tuple[str, ...] = ()


def run(a: str, b: str, *, common_only: bool, as_json: bool) -> int:
    """Compare two places (see `load`) and print it -> 0. Raises ValueError where they can't be compared."""
    first = load(a)
    second = load(b, beside=first.scores)
    if not first.results and second.results:
        first = load(a, beside=second.scores)
    found = compare(first, second, common_only=common_only)
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        show(found)
    return 0


# --------------------------------------------------------------------------------------------------- sides


def load(place: str, *, beside: Collection[str] = ()) -> Side:
    """A folder of `<benchmark>.json` files, a run's folder with such an `eval/`, one file, or TABLE:ROW of the papers.

    beside: the benchmarks of the other side, which settle what an ambiguous column of a paper is taken for.
    """
    path = Path(place)
    if path.is_dir():
        return _measured(place, _results(path.glob("*.json")) or _results(path.glob("eval/*.json")))
    if path.is_file():
        return _measured(place, _results([path]))
    table, colon, row = place.partition(":")
    if colon:
        return published_side(table, row, beside=beside)
    near = path.parent.iterdir() if path.parent.is_dir() else ()
    raise ValueError(
        f"{place}: no such folder or result file, and no TABLE:ROW of the papers"
        f"{nearest(place, [*map(str, near), *published_tables()])}; list these with --list-published"
    )


def _results(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    return {path.name: found for path in sorted(paths) if (found := _result(path))}


def _result(path: Path) -> dict[str, Any] | None:
    """A result file's contents; None of another JSON file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error}); evaluate again to rewrite it") from None
    if not isinstance(found, dict) or not {"benchmark", "summary", "problems"} <= set(found):
        return None
    return found


def _measured(place: str, files: Mapping[str, dict[str, Any]]) -> Side:
    if not files:
        raise ValueError(
            f"{place}: holds no results; expected <benchmark>.json as `hpcgrpo eval` writes them, in it or its eval/"
        )
    results: dict[str, Mapping[str, Any]] = {}
    for name, result in files.items():
        if result["benchmark"] in results:
            raise ValueError(f"{place}: {name} is a second result of {result['benchmark']}; name one file")
        results[result["benchmark"]] = result
    scores = {benchmark: float(r["summary"]["avg@k"]["mean"]) for benchmark, r in results.items()}
    models = sorted({_model(r.get("model", "unknown model")) for r in results.values()})
    return Side(f"{place} ({', '.join(models)})", scores, results)


def _model(model: Any) -> str:
    if not isinstance(model, Mapping):
        return str(model)
    step = model.get("step")
    return f"{model.get('name')}" if step is None else f"{model.get('name')}, step {step}"


# ------------------------------------------------------------------------------------------- the papers' rows


def published_side(table: str, row: str, *, beside: Collection[str] = ()) -> Side:
    """A row of the papers' tables (hpcgrpo/data/published.yaml) by benchmark. Raises ValueError with the nearest."""
    tables = published_tables()
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


def published(results: Sequence[Mapping[str, Any]], table: str, row: str) -> dict[str, Any]:
    """A user's results beside a published row: `compare` with the results as A and the row as B."""
    measured = _measured("results", {str(r["benchmark"]): dict(r) for r in results})
    return compare(measured, published_side(table, row, beside=measured.scores))


def published_rows() -> list[dict[str, Any]]:
    """The papers' rows that can be compared with: name (TABLE:ROW), source, and scores in percent by benchmark."""
    found = []
    for table, contents in published_tables().items():
        for row in contents["rows"]:
            try:
                side = published_side(table, row)
            except ValueError:
                continue
            scores = {benchmark: round(100 * score, 2) for benchmark, score in side.scores.items()}
            found.append({"name": side.name, "source": contents["source"], "scores": scores})
    return found


def list_published(*, as_json: bool) -> int:
    """Print the papers' rows, one a line or as a JSON list -> 0."""
    rows = published_rows()
    if as_json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return 0
    for row in rows:
        print(f"{row['name']}   {'  '.join(f'{name} {score:g}' for name, score in row['scores'].items())}")
    return 0


@cache
def published_tables() -> dict[str, Any]:
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


# --------------------------------------------------------------------------------------------- the comparison


def compare(a: Side, b: Side, *, common_only: bool = False) -> dict[str, Any]:
    """A - B of every benchmark that both have, then of their average; ready for JSON, scores in [0, 1].

    Of two measured sides every problem is paired (`metrics.paired`). A published row has no problems: the interval is
    then the measured side's alone, and there is no test. Raises ValueError without a benchmark in common.
    """
    shared = [name for name in a.scores if name in b.scores]
    if not shared:
        raise ValueError(
            f"no benchmark in common: {a.name} has {', '.join(a.scores)}; {b.name} has {', '.join(b.scores)}"
        )
    measured = [name for name in shared if name in a.results and name in b.results]
    pairs = {name: _paired(name, a, b, common_only) for name in measured}
    rows = [_row(name, a, b, pairs.get(name)) for name in shared]
    return {
        "a": a.name,
        "b": b.name,
        "rows": rows,
        "average": _average(a, b, rows, pairs) if len(rows) > 1 else None,
        "only_a": [name for name in a.scores if name not in b.scores],
        "only_b": [name for name in b.scores if name not in a.scores],
        "warnings": list(_warnings(a, b, measured)),
        "notes": [*_notes(a, b, pairs), *a.notes, *b.notes],
    }


def _rights(side: Side, name: str) -> dict[str, list[int]]:
    return {problem: p["right"] for problem, p in side.results[name]["problems"].items()}


def _paired(name: str, a: Side, b: Side, common_only: bool) -> metrics.Paired:
    try:
        return metrics.paired(_rights(a, name), _rights(b, name), common_only=common_only)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _row(name: str, a: Side, b: Side, pair: metrics.Paired | None) -> dict[str, Any]:
    if pair is None:
        own = [side.results[name]["summary"]["avg@k"] for side in (a, b) if name in side.results]
        difference = _beside(a.scores[name] - b.scores[name], own, negated=name in b.results)
        return {
            "benchmark": name,
            "a": a.scores[name],
            "b": b.scores[name],
            "difference": difference,
            "p": None,
        }
    return {
        "benchmark": name,
        "a": pair.mean_a,
        "b": pair.mean_b,
        "difference": asdict(pair.difference),
        "p": pair.p,
        "test": pair.test,
        "problems": pair.num_problems,
        "won": pair.won,
        "lost": pair.lost,
        "level": pair.level,
        "left_out": {"a": pair.left_out_a, "b": pair.left_out_b},
    }


def _beside(gap: float, own: Sequence[Mapping[str, Any]], *, negated: bool) -> dict[str, Any]:
    """A difference to a published number: the measured side's interval, moved; without one for two published."""
    if not own:
        return {"mean": gap, "low": None, "high": None, "interval": None}
    ends = [own[0][end] - own[0]["mean"] for end in ("low", "high")]
    low, high = (-ends[1], -ends[0]) if negated else ends
    return {"mean": gap, "low": gap + low, "high": gap + high, "interval": f"{own[0]['interval']}, one side"}


def _average(
    a: Side, b: Side, rows: Sequence[Mapping[str, Any]], pairs: Mapping[str, metrics.Paired]
) -> dict[str, Any]:
    """The mean of the benchmarks; its interval resamples the problems of each, its test flips them all."""
    means = {side: fmean(row[side] for row in rows) for side in ("a", "b")}
    found: dict[str, Any] = {"benchmark": f"average of {len(rows)}", **means, "p": None}
    if len(pairs) == len(rows):
        gaps = [pair.differences for pair in pairs.values()]
        found["difference"] = asdict(metrics.average(gaps, bounds=(-1.0, 1.0)))
        weighed = [gap / (len(gaps) * len(several)) for several in gaps for gap in several]
        found["p"], found["test"] = metrics.flip_test(weighed)
        return found
    side = a if a.results else b
    own = []
    if side.results:
        problems = [_rights(side, row["benchmark"]).values() for row in rows]
        own = [asdict(metrics.average([[fmean(right) for right in several] for several in problems]))]
    found["difference"] = _beside(means["a"] - means["b"], own, negated=side is b)
    return found


def _warnings(a: Side, b: Side, names: Sequence[str]) -> Iterator[str]:
    """Settings that differ, each with the benchmarks where it does."""
    differing: dict[str, list[str]] = {}
    for name in names:
        first, second = (dict(_flat(side.results[name].get("settings") or {})) for side in (a, b))
        for key in dict.fromkeys([*first, *second]):
            values = [
                _shown(settings[key]) if key in settings else "not recorded" for settings in (first, second)
            ]
            if first.get(key) != second.get(key):
                differing.setdefault(f"{key}: {values[0]} against {values[1]}", []).append(name)
    for difference, where in differing.items():
        yield f"{difference} ({', '.join(where)})"


def _flat(settings: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    """Nested keys as `a.b`, without those that may differ."""
    for key, value in settings.items():
        if key in EXPECTED_TO_DIFFER or key in ("cluster", "shards") or key.startswith("vllm_"):
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{start}{key}.")
        else:
            yield start + key, value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_LENGTH else f"{text[: SHOWN_LENGTH - 1]}…"


def _notes(a: Side, b: Side, pairs: Mapping[str, metrics.Paired]) -> Iterator[str]:
    for name, pair in pairs.items():
        if pair.left_out_a or pair.left_out_b:
            yield (
                f"{name}: compared on the {pair.num_problems} problems of both sides; left out: {pair.left_out_a} that "
                f"only A has, {pair.left_out_b} that only B has."
            )
    if not (a.results or b.results):
        yield "Published rows have no results by problem: neither test nor interval."
    elif not (a.results and b.results):
        yield (
            "A published row has no results by problem: no test; the interval is the measured side's alone, the "
            "published number taken as exact."
        )


# --------------------------------------------------------------------------------------------------- printing


def show(found: Mapping[str, Any]) -> None:
    """Print a comparison as a table in percent, and what is to be known beside it."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)  # 80 columns wide
    for head in ("benchmark", "problems", "A", "B", "A - B", "95 % interval", "p", "won/lost\n/level"):
        table.add_column(head, justify="left" if head == "benchmark" else "right", no_wrap=True)
    for row in found["rows"]:
        table.add_row(*_cells(row))
    if found["average"]:
        table.add_section()
        table.add_row(*_cells(found["average"]))
    Console().print(table)
    print(f"A: {found['a']}\nB: {found['b']}")
    print(
        "in percent; interval: bootstrap over problems, or Wilson's where all are level; p: signs flipped, two-sided"
    )
    for side, key in (("A", "only_a"), ("B", "only_b")):
        if found[key]:
            print(f"only {side} has: {', '.join(found[key])}")
    for note in found["notes"]:
        print(note)
    for warning in found["warnings"]:
        print(f"warning: the settings differ: {warning}")


def _cells(row: Mapping[str, Any]) -> list[str]:
    gap = row["difference"]
    interval = "" if gap["low"] is None else f"{100 * gap['low']:+.2f} to {100 * gap['high']:+.2f}"
    p = "" if row["p"] is None else "<0.0001" if row["p"] < 1e-4 else f"{row['p']:.4f}"
    counts = f"{row['won']}/{row['lost']}/{row['level']}" if "won" in row else ""
    scores = [f"{100 * row['a']:.2f}", f"{100 * row['b']:.2f}", f"{100 * gap['mean']:+.2f}"]
    return [row["benchmark"], str(row.get("problems", "")), *scores, interval, p, counts]
