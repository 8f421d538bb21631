"""The grader as a user sees it: verdicts on the rows of a file, and what is wrong with those that get none."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from hpcgrpo.rewards.answers import extract_answer, last_box, last_tag
from hpcgrpo.rewards.grading import Grader, Outcome
from hpcgrpo.tasks import jsonl

CHUNK_ROWS = 512  # graded at once, so that a file of any length fits into memory
PROGRESS_EVERY_SECONDS = 5.0
SHORT_CHARACTERS, SHORT_WORDS = 120, 8  # a text without box and tag up to here is an answer, not a solution
OUTCOMES: tuple[Outcome, ...] = ("right", "wrong", "unparsed", "timeout", "error")
MOST_PROCESSES = 8

_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_STATED = re.compile(r"\banswer(?:\s+is|\s*[:=])(?:\s*:)?\s*(\S[^\n]*?)\s*(?:\.(?=\s|$)|\n|$)", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_CUT = re.compile(r"[-+=*/,]\s*$")  # between two amounts of dollars, not a formula
_SPECIAL_TOKENS = re.compile(r"(?:\s*<\|\w+\|>\w*)+\s*$")


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a file: what is asked, and where it stands."""

    line: int
    gold: str
    answer: str | None  # None: there is none to be found in the prediction
    id: Any = None
    has_id: bool = False


@dataclass(frozen=True, slots=True)
class Unusable:
    """A line that cannot be graded, and why."""

    line: int
    why: str
    readable: bool  # a row, but one without a reference
    id: Any = None
    has_id: bool = False


class NoReference(ValueError):
    """A row with nothing to grade against."""


# --------------------------------------------------------------------------------------------- hpcgrpo grade


def run(
    path: Path,
    *,
    as_json: bool,
    processes: int | None,
    time_limit_seconds: float,
    gold_column: str = "gold",
    prediction_column: str = "prediction",
    strict: bool = False,
) -> int:
    """Grade the JSONL rows of a file (`-`: standard input) as they are read -> 0.

    Prints a table, or with `as_json` one object a row in the order of the rows; then a summary (on standard error
    with `as_json`). `strict`: a prediction without box and `<answer>` tag is unparsed. What cannot be graded is told on
    standard error with its line and has the outcome `error`; the others are graded. Raises ValueError at the end where
    a line could not be read (no JSON object, a key missing, a value that is no text), and at once where all lines lack
    the same; a reference that is null, empty or NaN is no such case.
    """
    if not 0 < time_limit_seconds < math.inf:
        raise ValueError(f"--time-limit {time_limit_seconds:g}: must be a number of seconds above 0, e.g. 2")
    counts: Counter[Outcome] = Counter()
    unusable: list[bool] = []  # of each such line, whether it was readable
    told = time.monotonic()
    with (
        _opened(path) as (lines, name),
        Grader(num_processes=num_processes(processes), time_limit_seconds=time_limit_seconds) as grader,
    ):
        found = _rows(lines, gold_column, prediction_column, strict)
        while chunk := list(islice(found, CHUNK_ROWS)):
            if counts and time.monotonic() - told >= PROGRESS_EVERY_SECONDS:  # and there is more to come
                told = time.monotonic()
                print(f"{name}: {_rows_in_words(counts.total())} read", file=sys.stderr, flush=True)
            if not counts:
                _refuse_all(chunk, name)
            if not counts and not as_json:
                print(_HEADER)
            graded = iter(outcomes([row for row in chunk if isinstance(row, Row)], grader))
            for row in chunk:
                outcome = next(graded) if isinstance(row, Row) else "error"
                counts[outcome] += 1
                if isinstance(row, Unusable):
                    unusable.append(row.readable)
                    print(f"hpcgrpo: error: {name}, line {row.line}: {row.why}", file=sys.stderr, flush=True)
                print(_json_line(row, outcome) if as_json else _table_line(row, outcome))
            sys.stdout.flush()
    if not counts:
        raise ValueError(
            f"{name}: no rows; each line holds one, e.g. {_example(gold_column, prediction_column)}"
        )
    print(_summary(counts, len(unusable)), file=sys.stderr if as_json else sys.stdout)
    if bad := unusable.count(False):
        raise ValueError(
            f"{name}: {bad} of {_rows_in_words(counts.total())} could not be read; mend or remove them"
        )
    return 0


def _refuse_all(chunk: Sequence[Row | Unusable], name: str) -> None:
    """Raises ValueError where all lines lack the same: then it is not the lines that are to be mended."""
    bad = [one for one in chunk if isinstance(one, Unusable) and not one.readable]
    if len(bad) == len(chunk) > 1 and len({one.why for one in bad}) == 1:
        raise ValueError(
            f"{name}, line {bad[0].line}: {bad[0].why}. So it is with all {len(bad)} rows read so far"
        )


def outcomes(rows: Iterable[Row], grader: Grader) -> list[Outcome]:
    """One outcome a row; `unparsed` where the prediction holds no answer."""
    rows = list(rows)
    found = iter(grader.grade([(row.gold, row.answer) for row in rows if row.answer is not None]))
    return ["unparsed" if row.answer is None else next(found) for row in rows]


def answer_of(prediction: str, *, strict: bool = False) -> str | None:
    r"""The final answer of a prediction: its last `<answer>` block, else its last `\boxed{}`, else, unless `strict`,
    a short text itself, and of a long one what its last "answer is" states, or its last number. None: no answer."""
    answer = extract_answer(prediction)
    if answer is None and not strict:
        text = _SPECIAL_TOKENS.sub("", prediction).strip()
        short = len(text) <= SHORT_CHARACTERS and "\n" not in text and len(_WORD.findall(text)) <= SHORT_WORDS
        answer = _in_prose(text) or (text if short else extract_answer(text, require_box_or_tag=False))
    return answer.strip() or None if answer is not None else None


def _in_prose(text: str) -> str | None:
    """What a sentence states as its answer, else its last formula, where one stands in a sentence."""
    stated = [match.group(1).strip("* ") for match in _STATED.finditer(text)]
    scope = stated[-1] if stated else text
    formulas = [next(filter(None, found)).strip() for found in _FORMULA.findall(scope)]
    around = _WORD.findall(_FORMULA.sub(" ", scope))
    if (
        formulas
        and (len(around) > 1 or stated or re.match("answer", text, re.I))
        and not _CUT.search(formulas[-1])
    ):
        return formulas[-1]
    return scope if stated and len(scope) <= SHORT_CHARACTERS else None


def reference(value: Any, key: str) -> str:
    r"""The reference of a row by the value of its `key`: the last number after `####` or the last `<answer>` block of a
    whole solution; a box in it the grader finds itself. Raises NoReference, naming the key, where there is none."""
    gold = _text(value, key)
    if gold is None or gold.strip().casefold() == "nan":
        said = "null" if value is None else "NaN"
        raise NoReference(f"{key!r} is {said}; a row needs a reference, as text or a number")
    found = gold.rpartition("####")[2].strip() if "####" in gold else last_tag(gold) or gold
    box = last_box(found)
    if not (found if box is None else box).strip():
        said = "is empty" if not gold.strip() else f"holds no answer ({shown(gold, 40)!r})"
        raise NoReference(f"{key!r} {said}; a row needs a reference, as text or a number")
    return found


# --------------------------------------------------------------------------------------------------- reading


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    if str(path) == "-":
        yield sys.stdin.buffer, "standard input"
        return
    try:
        file = path.open("rb")
    except OSError as error:
        way_out = "; to compare graders over a run's folder add --audit" if path.is_dir() else ""
        raise ValueError(f"{path}: cannot be read: {error.strerror}{way_out}") from None
    with file:
        yield file, str(path)


def _rows(
    lines: IO[bytes], gold_column: str, prediction_column: str, strict: bool
) -> Iterator[Row | Unusable]:
    for number, line in jsonl.lines(lines):
        found: dict[str, Any] = {}
        try:
            found = record(line)
            yield _row(number, found, gold_column, prediction_column, strict)
        except ValueError as error:
            known = isinstance(error, NoReference)
            yield Unusable(number, str(error), known, found.get("id"), "id" in found)


def _row(number: int, found: dict[str, Any], gold_column: str, prediction_column: str, strict: bool) -> Row:
    for column in (gold_column, prediction_column):
        if column not in found:
            raise ValueError(
                f"no key {column!r}; there are: {', '.join(map(repr, found)) or 'none'}; name yours with --gold-column"
                " and --prediction-column"
            )
    gold = reference(found[gold_column], gold_column)
    prediction = _text(found[prediction_column], prediction_column)
    answer = None if prediction is None else answer_of(prediction, strict=strict)
    return Row(number, gold, answer, found.get("id"), "id" in found)


def record(line: bytes) -> dict[str, Any]:
    """The object of a JSONL line. Raises ValueError that says what is wrong with it."""
    found = jsonl.value(line)
    if not isinstance(found, dict):
        raise ValueError(f"holds {jsonl.kind(found)}, not an object such as {_example()}")
    return found


def _text(value: Any, column: str) -> str | None:
    """Text or a number as text; None of null and NaN, which stand for nothing."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return None if value != value else repr(value)
    raise ValueError(f"{column!r} is {jsonl.kind(value)}; give the answer as text or a number")


def _example(gold_column: str = "gold", prediction_column: str = "prediction") -> str:
    return json.dumps({gold_column: "1/2", prediction_column: r"so \boxed{0.5}"})


def num_processes(given: int | None) -> int:
    """Grading processes: as many as were asked for, else by the cores of this machine."""
    if given is not None and given < 1:
        raise ValueError(f"--processes {given}: at least 1 process is needed to grade")
    return given or min(MOST_PROCESSES, len(os.sched_getaffinity(0)))


# -------------------------------------------------------------------------------------------------- printing

_HEADER = f"{'line':>7}  {'outcome':8}  {'reference':30}  answer"


def _json_line(row: Row | Unusable, outcome: Outcome) -> str:
    known = {"id": row.id} if row.has_id else {}
    why = {"error": row.why} if isinstance(row, Unusable) else {}
    return json.dumps({"line": row.line, **known, "verdict": outcome == "right", "outcome": outcome, **why})


def _table_line(row: Row | Unusable, outcome: Outcome) -> str:
    if isinstance(row, Unusable):
        return f"{row.line:7d}  {outcome:8}  (not graded)"
    answer = "(none)" if row.answer is None else shown(row.answer, 50)
    return f"{row.line:7d}  {outcome:8}  {shown(row.gold, 30):30}  {answer}".rstrip()


def shown(text: str, width: int) -> str:
    """One line of at most `width` printable characters."""
    line = "".join(c if c.isprintable() else " " for c in text[: 4 * width])
    line = " ".join(line.split())
    shortened = line if len(line) <= width and len(text) <= 4 * width else line[: width - 1] + "…"
    encoding = sys.stdout.encoding or "utf-8"
    return shortened.encode(encoding, "replace").decode(encoding)


def _summary(counts: Counter[Outcome], not_graded: int) -> str:
    """The share that is right is of the rows that were graded; the others stand beside it."""
    graded = counts - Counter({"error": not_graded})
    total, rows = graded.total(), _rows_in_words(counts.total())
    if not total:
        return f"{rows}, none of which could be graded"
    parts = ", ".join(f"{graded[o]} {o}" for o in OUTCOMES if graded[o])
    of = f", {not_graded} of which could not be graded; of the other {total}" if not_graded else ""
    return f"{rows}{of}: {graded['right'] / total:.1%} right ({parts})"


def _rows_in_words(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"
