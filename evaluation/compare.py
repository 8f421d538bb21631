"""`hpcgrpo eval --compare A B`: two evaluations, or one and a published row, benchmark by benchmark and on average."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from evaluation import metrics, published
from evaluation.benchmarks import resolve
from evaluation.published import Side
from hpcgrpo.algorithms.schema import nearest

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
PLACES_SHOWN = 5  # folders in an error


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
        return published.find(table, row, beside=beside)
    raise ValueError(f"{place}: {_what_else(place)}. A published row is TABLE:ROW (--list-published)")


def _what_else(place: str) -> str:
    """What a place that is none may have been meant for."""
    if rows := published.every_table().get(place, {}).get("rows"):
        return f"a table of the papers; name a row of it too, e.g. '{place}:{next(iter(rows))}'"
    with suppress(ValueError):
        benchmark = resolve([place])[0].name
        return (
            f"a benchmark, and no such folder or result file; name two folders of results, of which all benchmarks that"
            f" both have are compared, or two files, e.g. logs/RUN/eval/{benchmark}.json"
        )
    path = Path(place)
    files = [str(p) for p in path.parent.glob("*.json") if _holds_results([p])] if path.suffix else []
    near = nearest(place, [*_places_in(path.parent), *files, *published.every_table()])
    return f"no such folder or result file{near or _elsewhere()}"


def _elsewhere(folder: Path | None = None) -> str:
    """Where results lie below a folder, or where `hpcgrpo eval` writes them; nothing where there are none."""
    folders = [folder] if folder else [Path("logs"), Path("logs/eval")]
    found = [place for one in folders for place in _places_in(one)]
    if not found:
        return ""
    more = f" and {len(found) - PLACES_SHOWN} more" if len(found) > PLACES_SHOWN else ""
    return f" (results lie in {', '.join(found[:PLACES_SHOWN])}{more})"


def _places_in(folder: Path) -> list[str]:
    """Folders in a folder that hold results, themselves or in their eval/."""
    if not folder.is_dir():
        return []
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    return [str(path) for path in inside if _holds_results([*path.glob("*.json"), *path.glob("eval/*.json")])]


def _holds_results(paths: Iterable[Path]) -> bool:
    for path in paths:
        with suppress(ValueError):
            if _result(path):
                return True
    return False


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
            f"{place}: holds no results{_instead(Path(place))}; expected <benchmark>.json as `hpcgrpo eval` writes"
            " them, in it or its eval/"
        )
    results: dict[str, Mapping[str, Any]] = {}
    for name, result in files.items():
        if result["benchmark"] in results:
            raise ValueError(f"{place}: {name} is a second result of {result['benchmark']}; name one file")
        results[result["benchmark"]] = result
    scores = {benchmark: float(r["summary"]["avg@k"]["mean"]) for benchmark, r in results.items()}
    models = sorted({_model(r.get("model", "unknown model")) for r in results.values()})
    return Side(f"{place} ({', '.join(models)})", scores, results)


def _instead(path: Path) -> str:
    """What is there in place of results."""
    beside = path.with_name(f"{path.name}.json")
    if beside.is_file():
        return f" (did you mean {beside}?)"
    if any(path.glob("*/samples*.jsonl")) or any(path.glob("eval/*/samples*.jsonl")):
        return ", for its evaluation is not finished: the same `hpcgrpo eval` goes on"
    return _elsewhere(path) or _elsewhere()


def _model(model: Any) -> str:
    if not isinstance(model, Mapping):
        return str(model)
    step = model.get("step")
    return f"{model.get('name')}" if step is None else f"{model.get('name')}, step {step}"


# --------------------------------------------------------------------------------------------- the comparison


def beside_published(results: Sequence[Mapping[str, Any]], row: Side) -> dict[str, Any]:
    """A user's results beside a published row: `compare` with the results as A and the row as B."""
    return compare(_measured("results", {str(r["benchmark"]): dict(r) for r in results}), row)


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
