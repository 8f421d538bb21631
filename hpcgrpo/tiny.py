"""A model small enough to learn on a laptop CPU in minutes: its tokenizer, its shape and its warm start.

It knows single characters only. A user's message `1234` is rendered `1234=` and the model goes on from there;
a refinement prompt restates the question after the draft, `1234#36=0#1234=`.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcgrpo.checkpoint_folder import open_to_readers
from hpcgrpo.tasks import Row, fill, load_rows
from hpcgrpo.types import stable_seed

if TYPE_CHECKING:
    from torch import Tensor

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
VOCABULARY_SIZE = 128  # tokens: the special ones, printable ASCII, the newline, and spare ones
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ message['content'] }}"
    "{%- elif message['role'] == 'assistant' -%}{{ '=' + message['content'] + eos_token }}"
    "{%- else -%}{{ raise_exception('this tiny model knows no ' + message['role'] + ' messages') }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '=' }}{%- endif -%}"
)


def build_character_tokenizer() -> Any:
    """A fast transformers tokenizer, one token an ASCII character, with a chat template; pad and eos differ.

    It is a byte-level tokenizer without merges, since transformers loads every Qwen2 model's as one. Characters
    beyond ASCII are dropped.
    """
    from transformers import Qwen2Tokenizer

    # The byte-level alphabet writes a newline as Ċ and a space as Ġ.
    names = [*SPECIAL_TOKENS, "Ċ", "Ġ", *map(chr, range(33, 127))]
    names += [f"<spare{i}>" for i in range(len(names), VOCABULARY_SIZE)]
    return Qwen2Tokenizer(
        vocab={name: i for i, name in enumerate(names)},
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_tiny_model(
    *,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    max_length: int = 256,
    initializer_range: float = 0.1,
    seed: int = 0,
) -> Any:
    """A Qwen2-shaped causal language model over the character vocabulary, float32, randomly initialised.

    Heads of 32 or 64 dimensions, so that vLLM serves it too. With an `initializer_range` of 0.02 it does not
    learn at this size.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if hidden % heads or hidden // heads not in (32, 64):
        raise ValueError(f"hidden {hidden} over {heads} heads: a head must have 32 or 64 dimensions")
    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else 1,
        intermediate_size=3 * hidden,
        max_position_embeddings=max_length,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        rope_theta=10_000.0,
        bos_token_id=None,
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        eos_token_id=SPECIAL_TOKENS.index("<eos>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


@dataclass(frozen=True)
class WarmStart:
    """How a warm start ended: shares of held-out questions answered right, sampled at temperature 1."""

    steps: int
    cpu_seconds: float
    single: float  # from the question alone
    empty: float  # after an empty draft
    right: float  # after a right draft
    corrupted: float  # after a wrong one


class NotAdmitted(ValueError):
    """A warm start that is not what was asked for; `result` has what was measured."""

    def __init__(self, result: WarmStart) -> None:
        super().__init__(f"the warm start is not admitted: {result}")
        self.result = result


def warm_start(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    held_out: Sequence[Row],
    *,
    template: str,
    target_accuracy: float = 0.5,
    max_steps: int = 600,
    batch_size: int = 64,
    learning_rate: float = 3e-3,
    eval_every: int = 5,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> WarmStart:
    """Train `model` in place on worked solutions until it is right about `target_accuracy` of the time.

    Questions alone come first. Once they begin to be learned, half of each batch carry a draft laid out by
    `template`, a quarter of these empty, junk, right, wrong each, so that skill moves between the two forms
    and no draft is trusted blindly. Rows need a `solution` column. Deterministic by seed on one machine.
    ValueError if the target is not reached in `max_steps`.
    """
    import torch

    _check_solutions(rows)
    began, rng = time.process_time(), random.Random(stable_seed("warm start", seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    accuracy, error = 0.0, float("inf")
    for step in range(1, max_steps + 1):
        drafts = error < LEARNED_LOSS  # before that, drafts only slow it down
        batch = _examples(tokenizer, rng.choices(rows, k=batch_size), template, rng, drafts=drafts)
        loss = _loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        error = loss.item()
        if progress and step % 50 == 0:
            progress(f"warm start: step {step}, loss {error:.3f}")
        if step % eval_every or not drafts:
            continue
        accuracy = sampled_accuracy(model, tokenizer, held_out, template=None, seed=seed)
        if accuracy >= target_accuracy:
            return _measured(model, tokenizer, held_out, template, seed, step, time.process_time() - began)
    raise ValueError(
        f"the warm start reached accuracy {accuracy:.3f} in {max_steps} steps, short of {target_accuracy};"
        " raise max_steps or make the task easier"
    )


LEARNED_LOSS = 0.5  # nats a token; chance, with the format known, is about 1.8


def _check_solutions(rows: Sequence[Row]) -> None:
    for row in rows:
        if not isinstance(row.columns.get("solution"), str):
            raise ValueError(f"row {row.index} has no worked solution to warm-start from (column 'solution')")


Example = tuple[list[int], list[int]]  # (prompt ids, completion ids)
DRAFTS: dict[str, Callable[[str, random.Random], str]] = {
    "empty": lambda solution, rng: "",
    "junk": lambda solution, rng: "".join(rng.choices("0123456789=", k=len(solution))),
    "right": lambda solution, rng: solution,
    "corrupted": lambda solution, rng: corrupted(solution, rng),
}


def corrupted(solution: str, rng: random.Random) -> str:
    """The solution with a slip at one digit that is carried on: every later digit is off by as much."""
    start = rng.choice([m.start() for m in re.finditer(r"\d", solution)])
    slip = rng.randint(1, 9)
    return solution[:start] + re.sub(r"\d", lambda m: str((int(m[0]) + slip) % 10), solution[start:])


def _examples(
    tokenizer: Any, rows: Sequence[Row], template: str, rng: random.Random, *, drafts: bool
) -> list[Example]:
    """Questions alone, or (`drafts`) the first half alone and the rest with drafts of each kind in turn."""
    half, kinds = len(rows) // 2 if drafts else len(rows), list(DRAFTS.values())
    questions = [row.question for row in rows[:half]]
    for i, row in enumerate(rows[half:]):
        draft = kinds[i % len(kinds)](row.columns["solution"], rng)
        questions.append(fill(template, question=row.question, draft=draft))
    prompts = tokenizer([_render(tokenizer, q) for q in questions], add_special_tokens=False)["input_ids"]
    solutions = tokenizer([row.columns["solution"] for row in rows], add_special_tokens=False)["input_ids"]
    return [(p, [*s, tokenizer.eos_token_id]) for p, s in zip(prompts, solutions, strict=True)]


def _render(tokenizer: Any, question: str) -> str:
    message = {"role": "user", "content": question}
    return str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))


def _loss(model: Any, examples: Sequence[Example]) -> Tensor:
    """Mean cross-entropy of all completion tokens; examples of one shape share a pass, unpadded."""
    import torch

    shapes: dict[tuple[int, int], list[Example]] = {}
    for prompt, completion in examples:
        shapes.setdefault((len(prompt), len(completion)), []).append((prompt, completion))
    total = torch.zeros(())
    for (_, length), same in shapes.items():
        ids = torch.tensor([prompt + completion for prompt, completion in same])
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=length + 1).logits[:, :-1]
        total = total + torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, -length:].flatten(), reduction="sum"
        )
    return total / sum(len(completion) for _, completion in examples)


def sampled_accuracy(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    *,
    template: str | None,
    draft: str = "empty",
    seed: int = 0,
) -> float:
    """Share of rows whose sampled completion ends in the answer (after its last `=`), at temperature 1.

    With a `template`, each question carries a draft of the kind `draft`.
    """
    rng = random.Random(stable_seed("accuracy", seed))
    questions = [
        fill(template, question=r.question, draft=DRAFTS[draft](r.columns["solution"], rng))
        if template
        else r.question
        for r in rows
    ]
    longest = max(len(r.columns["solution"]) for r in rows) + 1
    texts = _sample(model, tokenizer, questions, longest, seed)
    return sum(_is_right(text, row) for text, row in zip(texts, rows, strict=True)) / len(rows)


def _is_right(completion: str, row: Row) -> bool:
    return completion.rpartition("=")[1:] == ("=", row.columns["answer"])


def _sample(
    model: Any, tokenizer: Any, questions: Sequence[str], max_new_tokens: int, seed: int
) -> list[str]:
    import torch

    batch = tokenizer(
        [_render(tokenizer, q) for q in questions],
        add_special_tokens=False,
        padding=True,
        return_tensors="pt",
        return_token_type_ids=False,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(stable_seed("sample", seed))
        ids = model.generate(
            **batch, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens
        )
    return list(tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True))


def _measured(
    model: Any,
    tokenizer: Any,
    held_out: Sequence[Row],
    template: str,
    seed: int,
    steps: int,
    cpu_seconds: float,
) -> WarmStart:
    single = sampled_accuracy(model, tokenizer, held_out, template=None, seed=seed)
    after = {
        kind: sampled_accuracy(model, tokenizer, held_out, template=template, draft=kind, seed=seed)
        for kind in ("empty", "right", "corrupted")
    }
    return WarmStart(steps, cpu_seconds, single, **after)


def make_warm_start(
    folder: Path,
    *,
    data: Mapping[str, Any],
    seed: int,
    template: str,
    num_rows: int = 16_384,
    num_held_out: int = 512,
    hidden: int = 128,
    layers: int = 2,
    admit: Callable[[WarmStart], bool] = lambda result: True,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> WarmStart:
    """Build, warm-start and save the tiny model as a Hugging Face folder of safetensors with its tokenizer.

    `data` are keywords of `load_rows` for a generated task; the rows come from a seed of their own, and
    `options` go to `warm_start`. The folder appears whole or not at all. Raises NotAdmitted, and saves nothing,
    where `admit` is false for what was measured.
    """
    own = {**data, "seed": stable_seed("warm start rows", seed)}
    rows = load_rows(**{**own, "split": "train", "max_samples": num_rows})
    held_out = load_rows(**{**own, "split": "test", "max_samples": num_held_out})
    tokenizer, model = (
        build_character_tokenizer(),
        build_tiny_model(hidden=hidden, layers=layers, heads=max(1, hidden // 32), seed=seed),
    )
    result = warm_start(
        model, tokenizer, rows, held_out, template=template, seed=seed, progress=progress, **options
    )
    if progress:
        shown = ", ".join(f"{k} {v:.3g}" for k, v in asdict(result).items())
        progress(f"warm start done: {shown}")
    if not admit(result):
        raise NotAdmitted(result)
    save(model, tokenizer, folder)
    return result


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model and its tokenizer as a Hugging Face folder, under a temporary name first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        staged = Path(scratch) / "model"
        model.save_pretrained(staged)
        open_to_readers(staged)
        tokenizer.save_pretrained(staged)
        staged.replace(folder)
