"""Rows become prompts: one tokenizer, one chat template, and the order in which a run sees them."""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpcgrpo.tasks.row import Row
from hpcgrpo.types import Message, Prompt, stable_seed

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
        return replace(prompt, messages=messages, text=text, token_ids=ids)

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
    if not plain.token_ids([skeleton])[0]:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'!r} makes no tokens of a prompt: its files are"
            " incomplete; copy tokenizer.json along with the model"
        )
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
        prompts = self.renderer.render_all([self.row(p) for p in positions], positions)
        return [replace(p, epoch=p.position // len(self.rows)) for p in prompts]

    def row(self, position: int) -> Row:
        epoch, index = divmod(position, len(self.rows))
        return self.rows[epoch_order(self.seed, epoch, len(self.rows))[index] if self.shuffle else index]


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    """The permutation of an epoch's rows, which seed and epoch alone decide."""
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
