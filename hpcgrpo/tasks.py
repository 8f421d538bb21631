"""Rows of a data set, or of a generated task, and the prompts they become.

`load_rows` reads and checks rows; a `Renderer` turns a row into a `Prompt` through the model's chat template;
`Prompts` is the endless, resumable order in which a run sees them. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpcgrpo.rewards.answers import last_box
from hpcgrpo.types import Message, Prompt, stable_seed

Columns = Mapping[str, Any]

logger = logging.getLogger(__name__)

# --- rows -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One question with its answer, checked."""

    index: int  # place in the file or data set, from 0
    messages: tuple[Message, ...]  # the last one is the user's; a question in plain text is one message
    columns: Columns  # everything the row holds; the answer also stands under "answer", as text
    conversational: bool = False  # the row gave a chat, not text

    @property
    def question(self) -> str:
        return self.messages[-1]["content"]


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
    Raises ValueError that names file and line for anything a row lacks.
    """
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples is {max_samples}; it must be at least 1, or null for all rows")
    if preset in GENERATED:
        if path or name:
            raise ValueError(f"preset {preset!r} generates its rows; drop path and name, or the preset")
        return _generate(str(preset), split=split, seed=seed, size=max_samples, options=options)
    if options:
        raise ValueError(
            f"unknown data option {', '.join(map(repr, sorted(options)))}: only the generated tasks"
            f" ({', '.join(GENERATED)}) take options"
        )
    known = _preset(preset)
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


class _Unanswered(ValueError):
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
                raise ValueError(
                    f"{label} {number}: {error} (skip_unanswered: true leaves such rows out)"
                ) from None
            skipped.append(number)
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
        raise ValueError(f"holds {_kind(record)}; every line must be an object, such as " + EXAMPLE_LINE)
    column = next((c for c in prompt_columns if c in record), None)
    if column is None:
        raise ValueError(
            f"no column {' or '.join(map(repr, prompt_columns))} (columns: {', '.join(record) or 'none'});"
            " set prompt_column to the one that holds the question"
        )
    messages = _messages(record[column], column)
    answer = preset.gold(record, answer_column)
    columns = {c: v for c, v in record.items() if c in preset.keep or not preset.keep}
    if record.get(answer_column) != answer and isinstance(record.get(answer_column), str):
        columns.setdefault("solution", record[answer_column])
    columns["answer"] = answer
    return Row(index, messages, columns, conversational=not isinstance(record[column], str))


EXAMPLE_LINE = '{"prompt": "What is 2 + 3?", "answer": "5"}'
JSON_KINDS = {
    list: "a list",
    dict: "an object",
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def _kind(value: Any) -> str:
    return JSON_KINDS.get(type(value), type(value).__name__)


def _messages(value: Any, column: str) -> tuple[Message, ...]:
    """A prompt column's value as a chat whose last message is the user's."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"column {column!r} is empty; it must hold the question")
        return ({"role": "user", "content": value},)
    if not isinstance(value, list):
        raise ValueError(f"column {column!r} holds {_kind(value)}; it must be text or a list of messages")
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
    """(line number from 1, value); lines end with a newline alone, since JSON text may hold U+2028."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason})") from None
            if not text.strip():
                raise ValueError(f"{path}, line {number}: empty line; remove it")
            yield number, _json(text, f"{path}, line {number}")


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply") from None
    except ValueError as error:
        hint = " (a JSON array? expected one object a line)" if text.strip() in ("[", "{") else ""
        raise ValueError(f"{where}: malformed JSON: {error}{hint}") from None


def _from_hub(name: str, config_name: str | None, split: str) -> tuple[str, Iterator[tuple[int, Any]]]:
    datasets = _datasets()
    try:
        data = datasets.load_dataset(name, config_name, split=split)
    except (OSError, ValueError) as error:  # what datasets raises for no network, no such name, no such split
        raise ValueError(
            f"data set {name!r} ({config_name or 'default'}, {split}) cannot be loaded:"
            f" {' '.join(str(error).split())}. On a machine without internet, load it once where there is one"
            " (the cache is in HF_HOME), or set path to a JSONL file or a folder written by save_to_disk"
        ) from None
    return f"{name} ({split}), row", enumerate(data, 1)


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
            f"no column {column!r} (columns: {', '.join(columns)}); set answer_column to the one that holds"
            " the answer"
        )
    value = columns[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise ValueError(f"column {column!r} holds {_kind(value)}; an answer is text or a number")
    if value is None or not str(value).strip():
        raise _Unanswered(f"column {column!r} is empty; every row needs an answer to grade against")
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

# --- generated tasks --------------------------------------------------------------------------------------

HELD_OUT_SHARE = 8  # one question in so many belongs to the split "test"
MAX_FRUITLESS_DRAWS = 2000  # in a row; then the task is taken to be exhausted
GENERATED_SIZE = 4096  # rows, unless max_samples or size says otherwise

Draw = Callable[[random.Random], dict[str, str]]


def chain(*, digits: int = 8) -> Draw:
    """Running sums modulo 10 of a row of digits: `1234` -> `36=0`; the answer is the last sum."""
    if digits < 3:
        raise ValueError(f"chain: digits is {digits}; at least 3 are needed for a sum to reason about")

    def draw(rng: random.Random) -> dict[str, str]:
        numbers = [rng.randrange(10) for _ in range(digits)]
        sums = [sum(numbers[: i + 1]) % 10 for i in range(1, digits)]
        text = "".join(map(str, sums))
        return {
            "prompt": "".join(map(str, numbers)),
            "answer": text[-1],
            "solution": f"{text[:-1]}={text[-1]}",
        }

    return draw


ADDITION_NAMES = (
    "Ana", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Kira", "Leo",
    "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tara", "Victor",
)  # fmt: skip
ADDITION_OBJECTS = (
    "apples", "books", "buttons", "cards", "coins", "cookies", "crayons", "eggs", "flowers", "keys",
    "lemons", "marbles", "pears", "pencils", "plums", "shells", "stamps", "stickers", "stones", "toys",
)  # fmt: skip
ADDITION_TEMPLATES = (
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "There are {a} {things} in one box and {b} {things} in another box. How many {things} are there in all?",
    "{name} found {a} {things} on Monday and {b} {things} on Tuesday. How many {things} did {name} find?",
    "{name} has {a} {things}. {friend} has {b} {things}. How many {things} do they have together?",
    "{name} bought {a} {things} in the morning and {b} in the evening. How many {things} did {name} buy?",
    "A shelf holds {a} {things}. {name} puts {b} more {things} on it. How many {things} are on the shelf?",
)


def addition(*, largest: int = 9) -> Draw:
    """Word problems that add two numbers from 1 to `largest`; the answer is an integer."""
    if largest < 1:
        raise ValueError(f"addition: largest is {largest}; it must be at least 1")

    def draw(rng: random.Random) -> dict[str, str]:
        name, friend = rng.sample(ADDITION_NAMES, 2)
        a, b = rng.randint(1, largest), rng.randint(1, largest)
        question = rng.choice(ADDITION_TEMPLATES).format(
            name=name, friend=friend, things=rng.choice(ADDITION_OBJECTS), a=a, b=b
        )
        return {"prompt": question, "answer": str(a + b), "solution": f"{a} + {b} = {a + b}"}

    return draw


GENERATED: dict[str, Callable[..., Draw]] = {"chain": chain, "addition": addition}


def _generate(name: str, *, split: str, seed: int, size: int | None, options: Mapping[str, Any]) -> list[Row]:
    """Distinct rows; which split a question belongs to depends on its text alone, so splits never meet."""
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}; the generated task {name!r} has 'train' and 'test'")
    chosen = dict(options)
    count = int(size if size is not None else chosen.pop("size", GENERATED_SIZE))
    chosen.pop("size", None)
    accepted = inspect.signature(GENERATED[name]).parameters
    unknown = sorted(set(chosen) - set(accepted))
    if unknown:
        raise ValueError(
            f"task {name!r} has no option {', '.join(map(repr, unknown))} (options:"
            f" {', '.join([*accepted, 'size'])})"
        )
    draw, rng = GENERATED[name](**chosen), random.Random(stable_seed(name, split, seed))
    found: dict[str, dict[str, str]] = {}
    fruitless = 0
    while len(found) < count and fruitless < MAX_FRUITLESS_DRAWS:
        record = draw(rng)
        new = record["prompt"] not in found and _is_held_out(name, record["prompt"]) == (split == "test")
        fruitless = 0 if new else fruitless + 1
        if new:
            found[record["prompt"]] = record
    if len(found) < count:
        raise ValueError(
            f"task {name!r} gave {len(found)} different questions for split {split!r} where {count} are asked"
            " for; ask for fewer (max_samples) or for larger questions"
        )
    return [
        Row(i, ({"role": "user", "content": question},), record)
        for i, (question, record) in enumerate(found.items())
    ]


def _is_held_out(task: str, question: str) -> bool:
    return stable_seed("split", task, question) % HELD_OUT_SHARE == 0


# --- prompts ----------------------------------------------------------------------------------------------

SYSTEM_PROMPTS: dict[str, str] = {
    "r1": (
        "This is a conversation between a user and an assistant. The user asks a question and the assistant"
        " solves it. The assistant first works the solution out in its mind and then tells the user the"
        " answer. The reasoning stands inside <think> </think> tags and the answer inside <answer> </answer>"
        " tags, that is: <think>the reasoning</think><answer>the answer</answer>"
    ),
    "cppo_gsm8k": (
        "This is a conversation between a user and an assistant. The user poses a problem and the assistant"
        " solves it. The assistant reasons first, inside <think> </think> tags, and then gives the result as"
        " a number alone, inside <answer> </answer> tags on a new line, that is:\n"
        "<think>the reasoning</think>\n<answer>the number</answer>"
    ),
    "cppo_math": (
        "This is a conversation between a user and an assistant. The user poses a problem and the assistant"
        " solves it. The assistant reasons first, inside <think> </think> tags, and then gives the solution"
        " inside <answer> </answer> tags on a new line, that is:\n"
        "<think>the reasoning</think>\n<answer>the solution</answer>\n"
        "The solution must close with a sentence that states the final answer in a box, for example:"
        " So the final answer is $\\boxed{7}$."
    ),
    "igrpo": (
        "You are an assistant who gives well-reasoned and detailed responses. Before you respond, think the"
        " problem through as an internal monologue; then state the answer. Write both with these tags,"
        " exactly: <think>internal monologue</think><answer>answer</answer>\n"
        "If the prompt comes with feedback or with an earlier draft of a response, take it as guidance and"
        " not as the truth. Aim for a final answer that is strictly better than the draft: repair its"
        " mistakes, fill its gaps, justify its claims more firmly and say things more clearly. Do not repeat"
        " the draft word for word. Where the feedback is wrong or incomplete, correct it and carry on from"
        " there."
    ),
}


def system_prompt_text(value: str | None) -> str | None:
    """The text behind a name of `SYSTEM_PROMPTS`, or the value itself; None (no message) stays None."""
    if value is None or not re.fullmatch(r"[\w-]+", value):
        return value
    if value not in SYSTEM_PROMPTS:
        near = difflib.get_close_matches(value, SYSTEM_PROMPTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown system_prompt {value!r}{hint} (names: {', '.join(SYSTEM_PROMPTS)}; anything of several"
            " words is taken as the text itself)"
        )
    return SYSTEM_PROMPTS[value]


def chat_template_text(value: str) -> str:
    """A Jinja template, from the value itself or from the file it names."""
    if "{{" in value or "{%" in value:
        return value
    path = Path(value).expanduser()
    if not path.is_file():
        raise ValueError(f"chat_template {value!r} is neither a Jinja template ({{{{ ... }}}}) nor a file")
    return path.read_text(encoding="utf-8")


def check_refine_template(template: str) -> str:
    """The template itself; ValueError unless `{question}` and `{draft}` both stand in it."""
    missing = [name for name in ("{question}", "{draft}") if name not in template]
    if missing:
        raise ValueError(f"template {template!r} lacks {' and '.join(missing)}; the refinement needs both")
    return template


def fill(template: str, *, question: str, draft: str) -> str:
    """`{question}` and `{draft}` replaced in one pass: braces in either text, or elsewhere, stay."""
    values = {"{question}": question, "{draft}": draft}
    return re.sub(r"\{question\}|\{draft\}", lambda match: values[match[0]], template)


def strip_reasoning(text: str) -> str:
    """Text without its `<think>…</think>` parts; the opening tag may have stood in the prompt.

    A part that is never closed stays: what follows it may be all there is.
    """
    closed = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    return closed.rpartition("</think>")[2].strip() if closed != text or "</think>" in text else text


@dataclass(frozen=True)
class Renderer:
    """How rows become prompts: one tokenizer, one chat template, one system prompt. See `build_renderer`."""

    tokenizer: Any  # of transformers, with a chat template
    system_prompt: str | None = None  # the text
    template_options: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template
    control_tokens: tuple[str, ...] = ()  # never let through from a draft, longest first

    def chat(self, row: Row) -> tuple[Message, ...]:
        """The row's messages after the system prompt."""
        if self.system_prompt is None:
            return row.messages
        if row.messages[0]["role"] == "system":
            raise ValueError(
                f"row {row.index} brings a system message of its own; set system_prompt to null, or remove it"
                " from the data"
            )
        return ({"role": "system", "content": self.system_prompt}, *row.messages)

    def text(self, messages: Sequence[Message]) -> str:
        """What the chat template makes of the messages, up to where the assistant begins."""
        from jinja2 import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(m) for m in messages],
                    tokenize=False,
                    add_generation_prompt=True,
                    **self.template_options,
                )
            )
        except TemplateError as error:
            roles = ", ".join(m["role"] for m in messages)
            raise ValueError(
                f"the chat template refuses messages of {roles}: {error}. Where it is the system message, set"
                " system_prompt to null; else give a chat_template"
            ) from None

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of rendered texts; the template has written the special tokens, so none are added."""
        ids = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [list(row) for row in ids]

    def render(self, row: Row, position: int) -> Prompt:
        """The prompt of a row; `position` is its place in the run's order."""
        return self.render_all([row], [position])[0]

    def render_all(self, rows: Sequence[Row], positions: Sequence[int]) -> list[Prompt]:
        chats = [self.chat(row) for row in rows]
        texts = [self.text(chat) for chat in chats]
        return [
            Prompt(position, row.index, chat, text, tuple(ids), row.columns, row.conversational)
            for position, row, chat, text, ids in zip(
                positions, rows, chats, texts, self.token_ids(texts) if texts else [], strict=True
            )
        ]

    def draft_text(self, draft: str | Sequence[int], *, keep_reasoning: bool = True) -> str:
        """A draft as it may stand in a prompt: no control tokens, on request no reasoning."""
        text = draft if isinstance(draft, str) else self._decode(draft)
        while any(
            token in text for token in self.control_tokens
        ):  # removing one may join the parts of another
            for token in self.control_tokens:
                text = text.replace(token, "")
        return text if keep_reasoning else strip_reasoning(text)

    def refine(
        self,
        prompt: Prompt,
        draft: str | Sequence[int],
        *,
        template: str,
        max_length: int | None = None,
        keep_reasoning: bool = True,
    ) -> Prompt:
        """The prompt with a draft in its last message, laid out by `template` (iGRPO's q', arXiv 2602.09000).

        `draft` is text or token ids. A prompt over `max_length` tokens loses the beginning of the draft,
        since its end holds the answer, and never any of the question. ValueError where even no draft fits.
        """
        check_refine_template(template)
        text = self.draft_text(draft, keep_reasoning=keep_reasoning)
        refined = self._with_draft(prompt, text, template)
        if max_length is None or len(refined.token_ids) <= max_length:
            return refined
        pieces, cut = self.token_ids([text])[0], 0
        while (excess := len(refined.token_ids) - max_length) > 0:
            if cut == len(pieces):
                raise ValueError(
                    f"row {prompt.row}: the question with an empty draft is {len(refined.token_ids)} tokens,"
                    f" over the refinement's limit of {max_length}; raise it or lower max_prompt_length"
                )
            cut = min(cut + excess, len(pieces))
            # A cut inside a character leaves a replacement sign at the front.
            refined = self._with_draft(prompt, self._decode(pieces[cut:]).lstrip("\ufffd"), template)
        return refined

    def _with_draft(self, prompt: Prompt, draft: str, template: str) -> Prompt:
        *before, last = prompt.messages
        content = fill(template, question=last["content"], draft=draft)
        messages = (*before, {**last, "content": content})
        text = self.text(messages)
        ids = tuple(self.token_ids([text])[0])
        return Prompt(prompt.position, prompt.row, messages, text, ids, prompt.columns, prompt.conversational)

    def _decode(self, ids: Sequence[int]) -> str:
        decoded = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(decoded)


def build_renderer(
    tokenizer: Any,
    *,
    system_prompt: str | None = None,
    chat_template: str | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> Renderer:
    """A Renderer for a tokenizer; `system_prompt` is a name of `SYSTEM_PROMPTS`, text or None.

    `chat_template` (Jinja text or a file) becomes the tokenizer's own, so that what is saved with a
    checkpoint renders alike. ValueError for a tokenizer without any.
    """
    if chat_template is not None:
        tokenizer.chat_template = chat_template_text(chat_template)
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'!r} has no chat template (a base"
            " model?); set chat_template to a Jinja template or to a file that holds one"
        )
    plain = Renderer(tokenizer, system_prompt_text(system_prompt), dict(template_options or {}))
    skeleton = plain.text([{"role": "user", "content": PROBE}])
    return Renderer(
        tokenizer, plain.system_prompt, plain.template_options, _control_tokens(tokenizer, skeleton)
    )


PROBE = "Zq7vK"  # a question that no template contains


def _control_tokens(tokenizer: Any, skeleton: str) -> tuple[str, ...]:
    """Special tokens, and those the template marks its turns with although they are not flagged special."""
    added = tokenizer.added_tokens_decoder.values()
    marks = {str(t) for t in added if t.special or (str(t) in skeleton and "think>" not in str(t))}
    return tuple(sorted(marks | set(tokenizer.all_special_tokens), key=lambda t: (-len(t), t)))


@dataclass(frozen=True)
class Prompts:
    """The endless order of prompts: every epoch is a permutation of the rows that (seed, epoch) decides.

    It depends on nothing else, so that ranks agree and a resumed run goes on where it stopped.
    """

    rows: tuple[Row, ...]  # those whose prompt fits
    renderer: Renderer
    seed: int = 0
    shuffle: bool = True
    num_too_long: int = 0  # rows left out

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, position: int, count: int) -> list[Prompt]:
        """The prompts at `position` … `position + count - 1`; epoch e holds e·len … (e+1)·len - 1."""
        positions = range(position, position + count)
        return self.renderer.render_all([self.row(p) for p in positions], positions)

    def row(self, position: int) -> Row:
        epoch, index = divmod(position, len(self.rows))
        return self.rows[epoch_order(self.seed, epoch, len(self.rows))[index] if self.shuffle else index]


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    return random.Random(stable_seed("order", seed, epoch)).sample(range(size), size)


def build_prompts(
    rows: Sequence[Row],
    renderer: Renderer,
    *,
    seed: int = 0,
    max_prompt_length: int | None = None,
    shuffle: bool = True,
) -> Prompts:
    """The rows whose rendered prompt has at most `max_prompt_length` tokens, in the run's order.

    ValueError where none fits, with the lengths seen.
    """
    assert rows, "load_rows gives at least one row"
    kept = tuple(rows)
    if max_prompt_length is not None:
        lengths = _lengths(rows, renderer, max_prompt_length)
        kept = tuple(row for row, length in zip(rows, lengths, strict=True) if length <= max_prompt_length)
        if not kept:
            seen = _exact_lengths(
                [rows[lengths.index(max(lengths))], rows[lengths.index(min(lengths))]], renderer
            )
            raise ValueError(
                f"all {len(rows)} prompts are longer than max_prompt_length {max_prompt_length} tokens: the"
                f" longest has {seen[0]}, the shortest {seen[1]}"
            )
    return Prompts(kept, renderer, seed, shuffle, num_too_long=len(rows) - len(kept))


BOUNDARY_TOKENS = 16  # slack for merges and prefixes where the question meets the template


def _lengths(rows: Sequence[Row], renderer: Renderer, limit: int) -> list[int]:
    """Tokens of each prompt, exact wherever that decides whether it exceeds `limit`.

    Most rows need no exact count: an ASCII character never makes more than one token, and the template's
    share is the same for all. With 94,000 rows that is seconds instead of minutes at the start of every rank.
    """
    text = renderer.text(renderer.chat(Row(0, ({"role": "user", "content": PROBE},), {})))
    if text.count(PROBE) != 1:
        return _exact_lengths(rows, renderer)
    frame = len(renderer.token_ids([text])[0])
    lengths = [0 if _is_short(row, limit - frame - BOUNDARY_TOKENS) else -1 for row in rows]
    for chunk in _chunks([i for i, n in enumerate(lengths) if n < 0 and len(rows[i].messages) == 1]):
        for i, ids in zip(chunk, renderer.token_ids([rows[i].question for i in chunk]), strict=True):
            close = abs(frame + len(ids) - limit) <= BOUNDARY_TOKENS
            lengths[i] = -1 if close else frame + len(ids)
    unsure = [i for i, n in enumerate(lengths) if n < 0]
    for i, length in zip(unsure, _exact_lengths([rows[i] for i in unsure], renderer), strict=True):
        lengths[i] = length
    return lengths


def _is_short(row: Row, characters: int) -> bool:
    return len(row.messages) == 1 and len(row.question) <= characters and row.question.isascii()


def _exact_lengths(rows: Sequence[Row], renderer: Renderer) -> list[int]:
    texts = ([renderer.text(renderer.chat(row)) for row in chunk] for chunk in _chunks(rows))
    return [len(ids) for chunk in texts for ids in renderer.token_ids(chunk)]


def _chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[start : start + 1024] for start in range(0, len(items), 1024))
