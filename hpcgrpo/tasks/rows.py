"""Rows of a JSONL file, of a data set or of a generated task, read and checked."""

from __future__ import annotations

import difflib
import logging
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgrpo.rewards.answers import last_box
from hpcgrpo.tasks import hub, jsonl
from hpcgrpo.tasks.generated import GENERATED, generate
from hpcgrpo.tasks.row import Columns, Row
from hpcgrpo.types import Message, stable_seed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preset:
    """Where a known data set lives, which column holds the question and how its answer is found."""

    name: str  # on the Hugging Face hub
    prompt_columns: tuple[str, ...]  # the first one that a row has
    gold: Callable[[Columns, str], str]  # (columns, answer column) -> answer
    config_name: str | None = None
    keep: tuple[str, ...] = ()  # columns worth their memory; empty: all


def load_rows(
    *,
    preset: str | None = None,
    path: str | None = None,
    name: str | None = None,
    split: str = "train",
    config_name: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    max_samples: int | None = None,
    seed: int = 0,
    skip_unanswered: bool = False,
    **options: Any,
) -> list[Row]:
    """The rows of a JSONL file or a `datasets` folder (`path`), a hub data set (`name`) or a generated task.

    `preset` is a name of `PRESETS` (alone: from the hub; with `path`: a local copy) or of `GENERATED`, whose
    functions take `options`. `max_samples` keeps a random subset, by `seed`, in the file's order.
    `skip_unanswered` leaves rows without a usable answer out, with a warning, instead of refusing them.
    Blank lines of a JSONL file are left out. Raises ValueError that names file and line for anything a row lacks.
    """
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples is {max_samples}; it must be at least 1, or null for all rows")
    if preset in GENERATED:
        if path or name:
            raise ValueError(f"preset {preset!r} generates its rows; drop path and name, or the preset")
        return generate(str(preset), split=split, seed=seed, size=max_samples, options=options)
    known = _preset(preset)
    if options:
        raise ValueError(
            f"unknown data option {', '.join(map(repr, sorted(options)))}: only the generated tasks"
            f" ({', '.join(GENERATED)}) take options"
        )
    if path and name:
        raise ValueError(f"both path {path!r} and name {name!r} are given; a run has one source of rows")
    name = name or (known.name if known and not path else None)
    if not path and not name:
        raise ValueError(
            "no data: give path (a JSONL file or a folder saved by datasets), name (on the hub) or preset"
        )
    if path:
        label, records = _open(Path(path).expanduser(), split=split)
    else:
        assert name is not None
        label, records = _from_hub(name, config_name or (known.config_name if known else None), split)
    columns = (prompt_column,) if prompt_column else (known.prompt_columns if known else ("prompt",))
    rows = _checked(
        label,
        records,
        prompt_columns=columns,
        answer_column=answer_column or "answer",
        preset=known or Preset("", columns, plain_gold),
        skip_unanswered=skip_unanswered,
    )
    if max_samples is None or max_samples >= len(rows):
        return rows
    chosen = random.Random(stable_seed("max_samples", seed)).sample(range(len(rows)), max_samples)
    return [rows[i] for i in sorted(chosen)]


def _preset(name: str | None) -> Preset | None:
    if name is None:
        return None
    if name not in PRESETS:
        names = [*PRESETS, *GENERATED]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown preset {name!r}{hint} (presets: {', '.join(names)})")
    return PRESETS[name]


class Unusable(ValueError):
    """A row that cannot be used; `why` leaves out which key of a run's `data` mends it."""

    def __init__(self, why: str, way_out: str = "") -> None:
        super().__init__(f"{why}{way_out}")
        self.why, self.way_out = why, way_out


class _Unanswered(Unusable):
    """A row whose answer is missing or cannot be read."""


def _checked(
    label: str,
    records: Iterable[tuple[int, Any]],
    *,
    prompt_columns: tuple[str, ...],
    answer_column: str,
    preset: Preset,
    skip_unanswered: bool,
) -> list[Row]:
    rows: list[Row] = []
    skipped: list[int] = []
    for number, record in records:
        try:
            rows.append(_row(number - 1, record, prompt_columns, answer_column, preset))
        except _Unanswered as error:
            if not skip_unanswered:
                way_out = f"{error.way_out} (skip_unanswered: true leaves such rows out)"
                raise Unusable(f"{label} {number}: {error.why}", way_out) from None
            skipped.append(number)
        except Unusable as error:
            raise Unusable(f"{label} {number}: {error.why}", error.way_out) from None
        except ValueError as error:
            raise ValueError(f"{label} {number}: {error}") from None
    if skipped:
        logger.warning("%s %s: left out, no usable answer", label, ", ".join(map(str, skipped[:20])))
    if not rows:
        raise ValueError(
            f"{label.rpartition(',')[0]}: holds no rows" + (" with an answer" if skipped else "")
        )
    return rows


def _row(index: int, record: Any, prompt_columns: tuple[str, ...], answer_column: str, preset: Preset) -> Row:
    if not isinstance(record, dict):
        raise ValueError(f"holds {jsonl.kind(record)}; every line must be an object, such as " + EXAMPLE_LINE)
    column = next((c for c in prompt_columns if c in record), None)
    if column is None:
        raise Unusable(
            f"no column {' or '.join(map(repr, prompt_columns))} (columns: {', '.join(record) or 'none'})",
            "; set prompt_column to the one that holds the question",
        )
    messages = _messages(record[column], column)
    answer = preset.gold(record, answer_column)
    columns = {c: v for c, v in record.items() if c in preset.keep or not preset.keep}
    if record.get(answer_column) != answer and isinstance(record.get(answer_column), str):
        columns.setdefault("solution", record[answer_column])
    columns["answer"] = answer
    return Row(index, messages, columns, conversational=not isinstance(record[column], str))


EXAMPLE_LINE = '{"prompt": "What is 2 + 3?", "answer": "5"}'


def _messages(value: Any, column: str) -> tuple[Message, ...]:
    """A prompt column's value as a chat whose last message is the user's."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"column {column!r} is empty; it must hold the question")
        return ({"role": "user", "content": value},)
    if not isinstance(value, list):
        raise ValueError(
            f"column {column!r} holds {jsonl.kind(value)}; it must be text or a list of messages"
        )
    for message in value:
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        ):
            raise ValueError(
                f"column {column!r} holds a message that is no {{'role': text, 'content': text}}:"
                f" {message!r:.80}"
            )
    if not value or value[-1]["role"] != "user" or not value[-1]["content"].strip():
        raise ValueError(
            f"the chat in column {column!r} must end with a message of the user that says something"
        )
    return tuple({"role": m["role"], "content": m["content"]} for m in value)


# --- sources ----------------------------------------------------------------------------------------------


def _open(path: Path, *, split: str) -> tuple[str, Iterator[tuple[int, Any]]]:
    if path.is_dir():
        return _from_folder(path, split)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder (the current folder is {Path.cwd()})")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: empty file; expected one JSON object a line, such as {EXAMPLE_LINE}")
    return f"{path}, line", _json_lines(path)


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number from 1, value) of the lines that are not blank."""
    with path.open("rb") as file:
        for number, line in jsonl.lines(file):
            try:
                yield number, jsonl.value(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None


def _from_hub(name: str, config_name: str | None, split: str) -> tuple[str, Iterator[tuple[int, Any]]]:
    return f"{name} ({split}), row", enumerate(hub.load(_datasets(), name, config_name, split), 1)


def _from_folder(path: Path, split: str) -> tuple[str, Iterator[tuple[int, Any]]]:
    datasets = _datasets()
    try:
        data = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: no folder saved by datasets ({' '.join(str(error).split())}); give a JSONL file or a"
            " folder written by save_to_disk"
        ) from None
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise ValueError(f"{path}: no split {split!r} (splits: {', '.join(data)})")
        data = data[split]
    return f"{path}, row", enumerate(data, 1)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            "reading a hub data set or its folder needs datasets: pip install 'hpcgrpo[datasets]'; a JSONL"
            " file needs nothing"
        ) from None
    return datasets


# --- answers ----------------------------------------------------------------------------------------------


def plain_gold(columns: Columns, column: str) -> str:
    """The answer as it stands: text, or a number written out."""
    if column not in columns:
        raise _Unanswered(
            f"no column {column!r} (columns: {', '.join(columns)})",
            "; set answer_column to the one that holds the answer",
        )
    value = columns[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise ValueError(f"column {column!r} holds {jsonl.kind(value)}; an answer is text or a number")
    if value is None or not str(value).strip():
        raise _Unanswered(f"column {column!r} is empty; every row needs an answer to grade against")
    if value != value:
        raise _Unanswered(f"column {column!r} is NaN; every row needs an answer to grade against")
    return str(value).strip()


def gsm8k_gold(columns: Columns, column: str) -> str:
    """What follows `####` in the answer (or solution) column, commas removed; a bare number is its own."""
    source = column if column in columns or "solution" not in columns else "solution"
    text = plain_gold(columns, source)
    gold = text.rpartition("####")[2].replace(",", "").strip()
    if not re.fullmatch(r"-?\d+(\.\d+)?", gold):
        raise _Unanswered(f"column {source!r} has neither a number after '####' nor is it one: {text!r:.80}")
    return gold


def math_gold(columns: Columns, column: str) -> str:
    """The answer column, unboxed where it is boxed; without one, the last box of the solution column."""
    stated = columns.get(column)
    if isinstance(stated, str) and "\\boxed" not in stated and stated.strip():
        return stated.strip()
    text = stated if isinstance(stated, str) and stated.strip() else columns.get("solution")
    if not isinstance(text, str):
        return plain_gold(columns, column)
    gold = last_box(text)
    if gold is None and (bare := re.findall(r"\\boxed\s+([^\s{}$\\.,]+)", text)):
        gold = bare[-1]  # \boxed 2, as two solutions of MATH have it
    if not gold:
        raise _Unanswered(
            f"no answer in column {column!r} and no filled \\boxed{{}} in the solution: {text!r:.80}"
        )
    return gold


QUESTION_COLUMNS = ("question", "problem", "prompt")
PRESETS: dict[str, Preset] = {
    "gsm8k": Preset("openai/gsm8k", QUESTION_COLUMNS, gsm8k_gold, config_name="main"),
    "math": Preset("DigitalLearningGmbH/MATH-lighteval", QUESTION_COLUMNS, math_gold),
    "acereason_math": Preset("nvidia/AceReason-Math", QUESTION_COLUMNS, math_gold),
    "openr1_math_220k": Preset(
        "open-r1/OpenR1-Math-220k",
        QUESTION_COLUMNS,
        math_gold,
        config_name="default",
        # Its reasoning traces (generations, messages) are gigabytes that no reward reads.
        keep=("problem", "answer", "solution", "problem_type", "question_type", "source", "uuid"),
    ),
}
