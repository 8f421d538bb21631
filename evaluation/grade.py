"""The grader as a user sees it: verdicts on a file's rows, and where two graders disagree over a run's rollouts."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

from hpcgrpo import config
from hpcgrpo.rewards.answers import extract_answer, last_tag
from hpcgrpo.rewards.grading import JUDGES, Grader, Outcome

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
    """Grade the JSONL rows of a file (`-`: standard input) as they are read; 0.

    Prints a table, or with `as_json` one object a row in the order of the rows; then a summary (on standard error
    with `as_json`). `strict`: a prediction without box and `<answer>` tag is unparsed. Raises ValueError that names
    the line for rows that can't be read.
    """
    if time_limit_seconds <= 0:
        raise ValueError(f"--time-limit {time_limit_seconds:g}: must be more than 0 seconds, e.g. 2")
    counts: Counter[Outcome] = Counter()
    told = time.monotonic()
    with (
        _opened(path) as (lines, name),
        Grader(num_processes=_processes(processes), time_limit_seconds=time_limit_seconds) as grader,
    ):
        rows = _rows(lines, name, gold_column, prediction_column, strict)
        while chunk := list(islice(rows, CHUNK_ROWS)):
            if not counts and not as_json:
                print(_HEADER)
            for row, outcome in zip(chunk, outcomes(chunk, grader), strict=True):
                counts[outcome] += 1
                print(_json_line(row, outcome) if as_json else _table_line(row, outcome))
            sys.stdout.flush()
            if time.monotonic() - told >= PROGRESS_EVERY_SECONDS:
                told = time.monotonic()
                print(f"{name}: {counts.total()} rows graded", file=sys.stderr, flush=True)
    if not counts:
        raise ValueError(
            f"{name}: no rows; each line holds one, e.g. {_example(gold_column, prediction_column)}"
        )
    print(_summary(counts), file=sys.stderr if as_json else sys.stdout)
    return 0


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


def reference_of(gold: str) -> str:
    r"""The reference of a row: the last number after `####` or the last `<answer>` block of a whole solution; a box
    in it the grader finds itself."""
    if "####" in gold:
        return gold.rpartition("####")[2].strip()
    return last_tag(gold) or gold


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
    lines: IO[bytes], name: str, gold_column: str, prediction_column: str, strict: bool
) -> Iterator[Row]:
    for number, record in _records(lines, name):
        where = f"{name}, line {number}"
        for column in (gold_column, prediction_column):
            if column not in record:
                raise ValueError(
                    f"{where}: no key {column!r}; there are: {', '.join(map(repr, record)) or 'none'}; name yours "
                    "with --gold-column and --prediction-column"
                )
        gold = _text(record[gold_column], gold_column, where)
        if gold is None:
            raise ValueError(
                f"{where}: {gold_column!r} is null; a row needs a reference, as text or a number"
            )
        prediction = _text(record[prediction_column], prediction_column, where)
        answer = None if prediction is None else answer_of(prediction, strict=strict)
        yield Row(number, reference_of(gold), answer, record.get("id"), "id" in record)


def _records(lines: IO[bytes], name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, raw in enumerate(lines, start=1):
        where = f"{name}, line {number}"
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{where}: byte {error.start + 1} is not UTF-8; convert the file, e.g. with iconv -t utf-8"
            ) from None
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where}: not JSON ({error}); each line holds one object (JSONL), {_shown(text.strip(), 40)!r} is none"
            ) from None
        if not isinstance(record, dict):
            raise ValueError(f"{where}: a {type(record).__name__}, not an object such as {_example()}")
        yield number, record


def _text(value: Any, column: str, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value)
    raise ValueError(f"{where}: {column!r} is a {type(value).__name__}; give the answer as text or a number")


def _example(gold_column: str = "gold", prediction_column: str = "prediction") -> str:
    return json.dumps({gold_column: "1/2", prediction_column: r"so \boxed{0.5}"})


def _processes(given: int | None) -> int:
    if given is not None and given < 1:
        raise ValueError(f"--processes {given}: at least 1 process is needed to grade")
    return given or min(MOST_PROCESSES, len(os.sched_getaffinity(0)))


# -------------------------------------------------------------------------------------------------- printing

_HEADER = f"{'line':>7}  {'outcome':8}  {'reference':30}  answer"


def _json_line(row: Row, outcome: Outcome) -> str:
    known = {"id": row.id} if row.has_id else {}
    return json.dumps({**known, "verdict": outcome == "right", "outcome": outcome})


def _table_line(row: Row, outcome: Outcome) -> str:
    answer = "(none)" if row.answer is None else _shown(row.answer, 50)
    return f"{row.line:7d}  {outcome:8}  {_shown(row.gold, 30):30}  {answer}".rstrip()


def _shown(text: str, width: int) -> str:
    """One line of at most `width` printable characters."""
    line = "".join(c if c.isprintable() else " " for c in text[: 4 * width])
    line = " ".join(line.split())
    shortened = line if len(line) <= width and len(text) <= 4 * width else line[: width - 1] + "…"
    encoding = sys.stdout.encoding or "utf-8"
    return shortened.encode(encoding, "replace").decode(encoding)


def _summary(counts: Counter[Outcome]) -> str:
    total = counts.total()
    parts = [f"{counts[o]} {o}" for o in OUTCOMES if counts[o]]
    return f"{total} rows: {counts['right'] / total:.1%} right ({', '.join(parts)})"


# ------------------------------------------------------------------------------------------------------ audit


@dataclass
class Seen:
    """How often a (reference, answer) pair came up in a run, and in which step first and last."""

    count: int = 0
    steps: list[int] = field(default_factory=list)  # first, last

    def add(self, step: int | None) -> None:
        self.count += 1
        if step is not None:
            self.steps = [min([step, *self.steps]), max([step, *self.steps])]


def audit(
    folder: Path, *, as_json: bool, processes: int | None, limit: int, judge: str = "math-verify"
) -> int:
    """Where this project's grader and `judge` (a key of JUDGES) disagree over the distinct (reference, answer) pairs
    of a run's rollouts, or of any JSONL rows with a reference and a text; 0.

    Lists up to `limit` disagreements, the most frequent first, then pairs, agreement and Cohen's kappa (1960) of the
    verdicts, pairs counted once; a time-out or error is no `right`. Raises ValueError where there is nothing to read.
    """
    if judge not in JUDGES:
        raise ValueError(f"judge {judge!r}: known are {', '.join(JUDGES)}")
    if limit < 0:
        raise ValueError(f"--limit {limit}: must be at least 0, which lists none")
    seen = _pairs_of(folder)
    pairs = list(seen)
    verdicts = []
    for name in ("hpcgrpo", judge):
        with Grader(num_processes=_processes(processes), judge=name) as grader:
            verdicts.append(_graded(pairs, grader, name))
    apart = [i for i, (a, b) in enumerate(zip(*verdicts, strict=True)) if (a == "right") != (b == "right")]
    apart.sort(key=lambda i: (-seen[pairs[i]].count, pairs[i]))
    rows = [_disagreement(pairs[i], seen[pairs[i]], verdicts[0][i], verdicts[1][i], judge) for i in apart]
    summary = _agreement([[v == "right" for v in one] for one in verdicts], seen, len(apart), judge)
    if as_json:
        print(json.dumps({**summary, "disagreements": rows[:limit]}))
    else:
        _print_audit(rows[:limit], summary, judge)
    return 0


def _graded(pairs: list[tuple[str, str]], grader: Grader, name: str) -> list[Outcome]:
    found: list[Outcome] = []
    told = time.monotonic()
    while len(found) < len(pairs):
        found += grader.grade(pairs[len(found) : len(found) + CHUNK_ROWS])
        if time.monotonic() - told >= PROGRESS_EVERY_SECONDS:
            told = time.monotonic()
            print(f"{name}: {len(found)} of {len(pairs)} pairs graded", file=sys.stderr, flush=True)
    return found


def _pairs_of(folder: Path) -> dict[tuple[str, str], Seen]:
    """The pairs of a run's `rollouts/*.jsonl`, else of all JSONL files below a folder, or of one file."""
    if not folder.exists():
        raise ValueError(f"{folder}: there is no such run; give its folder, e.g. logs/igrpo-7b")
    files = [folder] if folder.is_file() else sorted((folder / "rollouts").glob("*.jsonl"))
    files = files or sorted(p for p in folder.rglob("*.jsonl") if p.name != "metrics.jsonl")
    required = _box_required(folder)
    seen: dict[tuple[str, str], Seen] = {}
    rows = 0
    for path in files:
        step = re.search(r"-(\d+)\.jsonl$", path.name)
        with path.open("rb") as lines:
            for _, record in _records(lines, str(path)):
                rows += 1
                if (pair := _pair_of(record, required)) is not None:
                    seen.setdefault(pair, Seen()).add(int(step.group(1)) if step else None)
    if not seen:
        what = f"{rows} rows in {len(files)} files, none with" if rows else "no rollouts (JSONL rows) with"
        raise ValueError(
            f"{folder}: {what} a reference (answer, gold) and an answered text (completion, prediction); a run keeps "
            "its rollouts with log_completions: true"
        )
    return seen


def _box_required(folder: Path) -> bool:
    """The run's own rule for finding answers: that of its accuracy reward."""
    path = folder / "config.yaml"
    rule = config.load(path).rewards.get("accuracy") if path.is_file() else None
    return bool(rule.get("require_box_or_tag", True)) if isinstance(rule, dict) else True


def _pair_of(record: dict[str, Any], required: bool) -> tuple[str, str] | None:
    """`required`: a completion without box and tag holds no answer, else its last number is one."""
    for gold_key, text_key in (("answer", "completion"), ("gold", "prediction"), ("gold", "text")):
        gold, text = record.get(gold_key), record.get(text_key)
        if gold is not None and isinstance(text, str):
            own = text_key == "completion"
            answer = extract_answer(text, require_box_or_tag=required) if own else answer_of(text)
            return None if answer is None else (reference_of(str(gold)), answer)
    return None


def _disagreement(
    pair: tuple[str, str], seen: Seen, ours: Outcome, theirs: Outcome, judge: str
) -> dict[str, Any]:
    gold, answer = pair
    return {
        "gold": gold,
        "answer": answer,
        "hpcgrpo": ours,
        judge: theirs,
        "count": seen.count,
        "steps": seen.steps,
    }


def _agreement(
    right: list[list[bool]], seen: dict[tuple[str, str], Seen], apart: int, judge: str
) -> dict[str, Any]:
    pairs = len(right[0])
    return {
        "pairs": pairs,
        "rollouts": sum(s.count for s in seen.values()),
        "agreement": 1 - apart / pairs,
        "kappa": kappa(*right),
        "right": {"hpcgrpo": sum(right[0]), judge: sum(right[1])},
        "disagreements_in_all": apart,
    }


def kappa(first: list[bool], second: list[bool]) -> float | None:
    """Cohen's kappa of two lists of verdicts: agreement beyond chance; None where both always say the same one."""
    count = len(first)
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / count
    shares = sum(first) / count, sum(second) / count
    expected = shares[0] * shares[1] + (1 - shares[0]) * (1 - shares[1])
    return None if expected == 1 else (observed - expected) / (1 - expected)


def _print_audit(rows: list[dict[str, Any]], summary: dict[str, Any], judge: str) -> None:
    if rows:
        print(f"{'times':>7}  {'steps':>13}  {'hpcgrpo':8}  {judge:11}  {'reference':30}  answer")
    for row in rows:
        steps = "-".join(map(str, dict.fromkeys(row["steps"])))
        print(
            f"{row['count']:7d}  {steps:>13}  {row['hpcgrpo']:8}  {row[judge]:11}  "
            f"{_shown(row['gold'], 30):30}  {_shown(row['answer'], 50)}".rstrip()
        )
    hidden = summary["disagreements_in_all"] - len(rows)
    if hidden:
        print(f"... and {hidden} more; --limit {summary['disagreements_in_all']} shows all")
    beyond = "no kappa (one verdict alone)" if summary["kappa"] is None else f"kappa {summary['kappa']:.3f}"
    print(
        f"{summary['pairs']} distinct pairs of {summary['rollouts']} rollouts: {summary['agreement']:.1%} agreement, "
        f"{beyond}; right: {summary['right']['hpcgrpo']} by hpcgrpo, {summary['right'][judge]} by {judge}"
    )
