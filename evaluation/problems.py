"""A benchmark's problems: from the user's folder, from a file of their own or from the hub, checked row by row."""

from __future__ import annotations

import csv
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evaluation.benchmarks import LETTERS, Benchmark, Hub, Kind, Problem
from hpcgrpo.tasks import Row, hub, jsonl, load_rows
from hpcgrpo.tasks.rows import Unusable, gsm8k_gold, math_gold
from hpcgrpo.types import stable_seed

logger = logging.getLogger(__name__)

# --- data -------------------------------------------------------------------------------------------------


def load(
    benchmark: Benchmark,
    *,
    data_dir: str | Path | None = None,
    max_problems: int | None = None,
    seed: int = 0,
) -> list[Problem]:
    """The problems, in the data's order; with `max_problems` a random subset by `seed`, a smaller one in a larger.

    From the user's file, else from `data_dir`, else from the hub (or its cache). Another number of rows than the
    published one is a warning. Raises ValueError that says where what was looked for and how to get it, and that
    names the line of a row that cannot be used.
    """
    label, rows = _rows(benchmark, data_dir)
    unit = "line" if Path(label).is_file() and Path(label).suffix != ".csv" else "row"
    problems = []
    for number, row in enumerate(rows):
        try:
            problems.append(_problem(benchmark, number, row))
        except ValueError as error:
            raise ValueError(f"{label}, {unit} {row.index + 1}: {error}") from None
    _check_ids(f"{label}: {unit}s", problems, rows)
    if benchmark.size and len(problems) != benchmark.size:
        logger.warning(
            "%s: %s has %d problems, published are %d", label, benchmark.name, len(problems), benchmark.size
        )
    if max_problems is None or max_problems >= len(problems):
        return problems
    ranked = sorted(problems, key=lambda p: stable_seed("max_problems", seed, p.id))
    chosen = {p.id for p in ranked[:max_problems]}
    return [p for p in problems if p.id in chosen]


def _rows(benchmark: Benchmark, data_dir: str | Path | None) -> tuple[str, list[Row]]:
    """Where the rows are from, and the rows."""
    if benchmark.task is not None:
        size = benchmark.size
        return benchmark.title, load_rows(
            preset=benchmark.task, split="test", max_samples=size, **benchmark.options
        )
    if benchmark.path is not None:
        path = Path(benchmark.path).expanduser()
        return str(path), _from_file(benchmark, path)
    if data_dir is not None:
        path = _find(benchmark, Path(data_dir).expanduser())
        return str(path), _from_folder(benchmark, path) if path.is_dir() else _from_file(benchmark, path)
    assert benchmark.hub is not None
    return benchmark.hub.name, _from_hub(benchmark, benchmark.hub)


def _find(benchmark: Benchmark, folder: Path) -> Path:
    for name in benchmark.files:
        if (folder / name).is_file():
            return folder / name
    saved = folder / benchmark.name
    if any((saved / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
        return saved
    raise ValueError(
        f"benchmark {benchmark.name}: in data_dir {folder}{'' if folder.is_dir() else ' (no such folder)'} there is"
        f" none of {', '.join(benchmark.files)}, nor a folder {benchmark.name} saved by datasets."
        f" {how_to_get(benchmark, folder)}"
    )


def how_to_get(benchmark: Benchmark, folder: str | Path) -> str:
    """What to run, where there is internet, for the benchmark's file in `folder`."""
    source = benchmark.hub
    assert source is not None
    where = repr(source.name) + (f", {source.config!r}" if source.config else "")
    target = Path(folder) / next(name for name in benchmark.files if name.endswith(".jsonl"))
    note = f" ({benchmark.note})" if benchmark.note else ""
    return (
        f'Where there is internet{note}: python -c "import datasets;'
        f' datasets.load_dataset({where}, split={source.split!r}).to_json({str(target)!r})"'
    )


def _from_hub(benchmark: Benchmark, source: Hub) -> list[Row]:
    try:
        return load_rows(
            name=source.name,
            config_name=source.config,
            split=source.split,
            prompt_column=source.question,
            answer_column=source.answer,
        )
    except ValueError as error:
        why = error.why if isinstance(error, hub.NotLoaded) else str(error)
        raise ValueError(
            f"benchmark {benchmark.name}: no data_dir is set, and {why}. Set data_dir=FOLDER, in which"
            f" {benchmark.files[0]} lies, or name the file: benchmarks={benchmark.name}=FILE.jsonl."
            f" {how_to_get(benchmark, 'FOLDER')}"
        ) from None


def _from_folder(benchmark: Benchmark, path: Path) -> list[Row]:
    source = benchmark.hub
    assert source is not None
    return _from_path(path, source.question, source.answer, split=source.split)


def _from_file(benchmark: Benchmark, path: Path) -> list[Row]:
    if path.suffix == ".csv":
        return _from_csv(benchmark, path)
    first = _first_record(path)
    question, answer = _columns(benchmark, path, first) if first else (benchmark.questions[0], "answer")
    return _from_path(path, question, answer)


def _from_path(path: Path, question: str, answer: str, split: str = "train") -> list[Row]:
    """Rows of a file or a folder. What is said of a bad one names no key, as an evaluation has none for its columns."""
    try:
        return load_rows(path=str(path), prompt_column=question, answer_column=answer, split=split)
    except Unusable as error:
        columns = f"; every row is to have {question!r} and {answer!r}" if "no column" in error.why else ""
        raise ValueError(f"{error.why}{columns}") from None


def _first_record(path: Path) -> dict[str, Any] | None:
    """None where there is none: what is wrong with the file is load_rows' to say."""
    try:
        with path.open("rb") as file:
            line = next((line for _, line in jsonl.lines(file)), b"")
        record = jsonl.value(line)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _columns(benchmark: Benchmark, path: Path, names: Iterable[str]) -> tuple[str, str]:
    """The columns of the question and of the answer."""
    names = list(names)
    found = []
    for what, candidates in (("question", benchmark.questions), ("answer", benchmark.answers)):
        column = next((c for c in candidates if c in names), None)
        if column is None:
            raise ValueError(
                f"{path}: no column for the {what}, {' or '.join(map(repr, candidates))}"
                f" (columns: {', '.join(names) or 'none'})"
            )
        found.append(column)
    return found[0], found[1]


def _from_csv(benchmark: Benchmark, path: Path) -> list[Row]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            question, answer = _columns(benchmark, path, reader.fieldnames or ())
            records = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read as CSV: {error}") from None
    if not records:
        raise ValueError(f"{path}: holds no rows")
    rows = []
    for i, record in enumerate(records):
        empty = [c for c in (question, answer) if not (record[c] or "").strip()]
        if empty:
            raise ValueError(f"{path}, row {i + 1}: column {empty[0]!r} is empty")
        columns = {**record, "answer": record[answer].strip()}
        rows.append(Row(i, ({"role": "user", "content": record[question]},), columns))
    return rows


def _check_ids(where: str, problems: Sequence[Problem], rows: Sequence[Row]) -> None:
    seen: dict[str, int] = {}
    for row, problem in zip(rows, problems, strict=True):
        if problem.id in seen:
            raise ValueError(
                f"{where} {seen[problem.id]} and {row.index + 1} have the same id {problem.id!r}; give each its own,"
                " or drop the column"
            )
        seen[problem.id] = row.index + 1


# --- a row as a problem -----------------------------------------------------------------------------------


def _problem(benchmark: Benchmark, number: int, row: Row) -> Problem:
    """`number` counts rows from 0, whatever blank lines stand between them."""
    if len(row.messages) > 1:
        raise ValueError("the question is a chat of several messages; a benchmark asks one")
    column = next((c for c in benchmark.ids if row.columns.get(c) not in (None, "")), None)
    name = f"{benchmark.name}-{number}" if column is None else str(row.columns[column])
    bare = Problem(name, row.question.strip(), "", benchmark.kind)
    if benchmark.name == "gsm8k":
        return replace(bare, gold=gsm8k_gold(row.columns, "answer"))
    return READERS[benchmark.kind](bare, row.columns)


def _math(problem: Problem, columns: Mapping[str, Any]) -> Problem:
    return replace(problem, gold=math_gold(columns, "answer"))


def _olympiad(problem: Problem, columns: Mapping[str, Any]) -> Problem:
    stated = columns.get("final_answer", columns["answer"])
    gold = ", ".join(map(str, stated)) if isinstance(stated, list) else str(stated)
    if not gold.strip():
        raise ValueError("column 'final_answer' is empty; every row needs an answer to grade against")
    return replace(
        problem,
        gold=gold.strip(),
        multiple=columns.get("is_multiple_answer") in (True, "True", "true"),
        answer_type=str(columns.get("answer_type") or ""),
        unit=str(columns.get("unit") or "").strip(),
        tolerance=_tolerance(columns.get("error")),
    )


def _tolerance(error: Any) -> tuple[float | None, ...]:
    """OlympiadBench's `error`: absolute, several separated by commas, nothing where an answer is exact."""
    if error in (None, ""):
        return ()
    try:
        return tuple(abs(float(part)) if part.strip() else None for part in str(error).split(","))
    except ValueError:
        raise ValueError(
            f"column 'error' is {error!r}; it holds numbers separated by commas, or nothing"
        ) from None


def _choice(problem: Problem, columns: Mapping[str, Any]) -> Problem:
    return _gpqa(problem, columns) if columns.get("Correct Answer") else _lettered(problem, columns)


def _gpqa(problem: Problem, columns: Mapping[str, Any]) -> Problem:
    """Choices in an order that hangs on the problem's id alone, the same wherever and whenever it is asked."""
    names = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    texts = [str(columns.get(name) or "").strip() for name in names]
    if not all(texts):
        raise ValueError(f"column {names[texts.index('')]!r} is empty or missing")
    order = list(range(len(texts)))
    random.Random(stable_seed("choices", problem.id)).shuffle(order)
    return replace(problem, choices=tuple(texts[i] for i in order), gold=LETTERS[order.index(0)])


def _lettered(problem: Problem, columns: Mapping[str, Any]) -> Problem:
    """MMLU-Pro's columns: options (or choices), and the answer's letter or its place from 0."""
    options = columns.get("options", columns.get("choices"))
    if not isinstance(options, Sequence) or isinstance(options, str) or not 2 <= len(options) <= len(LETTERS):
        raise ValueError(
            f"column 'options' holds {options!r:.80}; it must be a list of 2 to {len(LETTERS)} texts"
        )
    right = _place(columns, len(options))
    kept = [i for i, text in enumerate(options) if str(text).strip() != "N/A" or i == right]  # padding
    choices = tuple(str(options[i]).strip() for i in kept)
    return replace(problem, choices=choices, gold=LETTERS[kept.index(right)])


def _place(columns: Mapping[str, Any], count: int) -> int:
    stated = str(columns["answer"]).strip()
    place = int(stated) if stated.isdecimal() else LETTERS.find(stated) if len(stated) == 1 else -1
    if not 0 <= place < count:
        raise ValueError(f"the answer {stated!r} is none of the {count} options' letters or places")
    index = columns.get("answer_index")
    if index is not None and int(index) != place:
        raise ValueError(f"answer {stated!r} and answer_index {index!r} disagree")
    return place


READERS: dict[Kind, Callable[[Problem, Mapping[str, Any]], Problem]] = {
    "math": _math,
    "minerva": _math,
    "olympiad": _olympiad,
    "choice": _choice,
}
