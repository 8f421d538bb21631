"""What can be checked and shown of a run before it starts, on a login node: no torch, no GPU, nothing downloaded."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcgrpo import models, pretrained, rewards, tokenizer
from hpcgrpo.algorithms.igrpo import template_of
from hpcgrpo.arithmetic import Arithmetic, arithmetic
from hpcgrpo.check_report import gigabytes, show, show_options
from hpcgrpo.config import ConfigError
from hpcgrpo.planner import refusals
from hpcgrpo.pretrained import Pretrained
from hpcgrpo.rewards.answers import settle, tidy
from hpcgrpo.sections import DataConfig, RunConfig
from hpcgrpo.tasks import GENERATED, PRESETS, Prompts, Renderer, Row, build_prompts, build_renderer, load_rows
from hpcgrpo.types import Completion, Prompt

__all__ = ["check", "inputs", "show", "show_options"]

STATE_BYTES = 12  # of a checkpoint for each parameter: the float32 master and Adam's two moments
SAMPLES = 32  # prompts of which one is graded
DRAFT = "<think>reasoning of the draft</think><answer>its answer</answer>"


@dataclass
class Notes:
    """What a check found that stops nothing, and what it could not look at."""

    warnings: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)


def inputs(run: RunConfig) -> list[Row]:
    """The model's folder, its limits, the GPUs' memory, the training and held-out rows, the disk -> the training rows.

    Raises ValueError naming what is missing or wrong; imports neither torch nor transformers, needs no tokenizer.
    """
    offline = pretrained.hub_offline(run.cluster.slurm_setup)
    model, peer = models.find(run, offline=offline)
    refusals.verdict(run, model, peer)
    rows = _loaded(run.data, "data")
    if run.eval is not None:
        _loaded(run.eval.data, "eval.data")
    counts = arithmetic(run, run.build_algorithm(), rows=len(rows))
    disk(run, model, peer, counts)
    return rows


def check(run: RunConfig) -> dict[str, Any]:
    """Everything `hpcgrpo check` shows, as plain values.

    The counts, the model, the first prompt of each stage as rendered, the rewards of a right and of a wrong answer,
    the memory of a learner GPU, the space that checkpoints take, warnings, and under `not_checked` what is not on this
    machine. Raises ValueError for what would end the run.
    """
    notes, offline = Notes(), pretrained.hub_offline(run.cluster.slurm_setup)
    model, peer = models.find(run, offline=offline)
    if peer is not None and (unlike := models.unlike(run, model, peer)):
        notes.warnings.append(unlike)
    if peer is not None and peer.folder is None:
        notes.not_checked.append(
            f"peer.model_name_or_path: {peer.name} is no folder here and not in the hub's cache, so neither its limits"
            f" nor its tokenizer were looked at; if it is a name on the hub, load it once: hf download {peer.name}"
        )
    rows = _rows(run.data, "data", offline, notes)
    if run.eval is not None:
        _rows(run.eval.data, "eval.data", offline, notes)
    renderer = _renderer(run, model, notes)
    prompts = _prompts(run, rows, renderer) if rows and renderer else None
    usable = len(prompts) if prompts else len(rows) if rows else run.data.max_samples
    algorithm = run.build_algorithm()
    counts = arithmetic(run, algorithm, usable)
    if algorithm.hint_tokens and run.generation.backend == "vllm" and run.peer:
        notes.warnings.append(
            f"algorithm.hint_tokens {algorithm.hint_tokens}: {run.peer.vllm_engines} of each serve node's engines write"
            f" hints in the first {algorithm.hint_epochs} pass(es) over the data, and idle after that"
        )
    template = template_of(algorithm.options)
    shown = _shown(prompts, template, counts) if prompts else {}
    first = prompts.take(0, SAMPLES) if prompts else [_plain(row) for row in (rows or [])[:SAMPLES]]
    if prompts:
        _compare_format(run, first[0], notes)
    return {
        "name": run.name,
        "algorithm": dict(algorithm.options),
        "counts": _counts(run, counts, usable),
        "servers": models.servers(run),
        "model": models.describe(model),
        "peer": models.describe(peer) if peer is not None else None,
        "questions": usable,
        "questions_too_long": prompts.num_too_long if prompts else None,
        "answer_of_first": str(first[0].columns.get("answer")) if first else None,
        "prompts": shown,
        "rewards": graded(run, first, renderer, notes),
        "memory": _memory(run, model, peer, notes),
        "checkpoints": _disk_report(run, model, peer, counts, notes),
        "warnings": [*notes.warnings, *_processors(run)],
        "not_checked": notes.not_checked,
    }


# ---- data and prompts


def _rows(data: DataConfig, key: str, offline: bool, notes: Notes) -> list[Row] | None:
    """The rows; None where they lie on the hub and not in its cache, since nothing is downloaded here."""
    known = PRESETS.get(data.preset or "")
    name = data.name or (known.name if known and not data.path else None)
    if name is None or data.preset in GENERATED or _cached(name):
        return _loaded(data, key)
    config_name = data.config_name or (known.config_name if known else None)
    arguments = ", ".join(repr(a) for a in (name, config_name) if a)
    once = (
        f"""python -c "from datasets import load_dataset; load_dataset({arguments}, split='{data.split}')\""""
    )
    if offline:
        raise ConfigError(
            f"{key}: the data set {name} is not in the hub's cache while HF_HUB_OFFLINE is set; load it once where"
            f" there is a network ({once}; the cache is in HF_HOME), or set {key}.path to a JSONL file"
        )
    notes.not_checked.append(
        f"{key}: {name} is not in the hub's cache, and a check downloads nothing, so neither rows nor rewards were"
        f" looked at; load it once: {once}"
    )
    return None


def _loaded(data: DataConfig, key: str) -> list[Row]:
    try:
        return load_rows(**data.rows())
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def _cached(name: str) -> bool:
    """Whether a data set was loaded before: by `datasets`, or as files of the hub."""
    import os

    from huggingface_hub import constants

    def letters(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    loaded = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    places = ((loaded, ""), (Path(constants.HF_HUB_CACHE), "datasets"))
    return any(
        letters(path.name) == prefix + letters(name)
        for folder, prefix in places
        if folder.is_dir()
        for path in folder.iterdir()
    )


def _renderer(run: RunConfig, model: Pretrained, notes: Notes) -> Renderer | None:
    if model.folder is None or not (model.folder / "tokenizer_config.json").exists():
        if model.folder is not None and "snapshots" not in model.folder.parts:
            raise ConfigError(
                f"model_name_or_path {model.name}: the folder holds no tokenizer_config.json; copy the tokenizer's"
                " files along with the model"
            )
        notes.not_checked.append(
            f"model_name_or_path: {model.name} is no folder here and not in the hub's cache, so its limits, its weights"
            f" and the prompts were not looked at; if it is a name on the hub, load it once: hf download {model.name}"
        )
        return None
    found: Any = tokenizer.read(model.folder, name=run.model_name_or_path)
    if found is None:
        found = _by_transformers(run.model_name_or_path)
    return build_renderer(found, system_prompt=run.data.system_prompt, chat_template=run.data.chat_template)


def _by_transformers(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model_name_or_path {name}: its tokenizer cannot be loaded: {error}") from None


def _prompts(run: RunConfig, rows: Sequence[Row], renderer: Renderer) -> Prompts:
    limit = run.generation.max_prompt_length
    return build_prompts(rows, renderer, seed=run.seed, max_prompt_length=limit, shuffle=run.data.shuffle)


def _shown(prompts: Prompts, template: str | None, counts: Arithmetic) -> dict[str, str]:
    """The first prompt of each stage."""
    first = prompts.take(0, 1)[0]
    if template is None:
        return {"sample": first.text}
    limit = counts.max_refine_prompt_length
    refined = prompts.renderer.refine(first, DRAFT, template=template, max_length=limit)
    return {"draft": first.text, "refinement": refined.text}


def _plain(row: Row) -> Prompt:
    """A prompt for the rewards alone, where there is no tokenizer."""
    return Prompt(0, row.index, row.messages, row.question, (), row.columns, row.conversational)


def _compare_format(run: RunConfig, prompt: Prompt, notes: Notes) -> None:
    """Whether the rewards of form expect the completion to begin where the chat template has it begin."""
    opened = prompt.text.rstrip().endswith("<think>")
    for name in {"format", "cppo_format"} & set(run.rewards):
        options = run.rewards[name]
        if opened != (isinstance(options, dict) and bool(options.get("think_in_prompt"))):
            ends = "ends the prompt with <think>" if opened else "does not end the prompt with <think>"
            notes.warnings.append(
                f"rewards.{name}: the chat template {ends}, so set rewards.{name}.think_in_prompt="
                f"{str(opened).lower()}; as it is, hardly any completion has the form"
            )


def _processors(run: RunConfig) -> list[str]:
    cluster = run.cluster
    if not cluster.gpus_per_node or cluster.cpus_per_task or cluster.slurm_exclusive:
        return []
    return [
        "cluster.cpus_per_task is not set: many clusters then give a node's one task a single processor, for all its"
        " ranks or servers; set it to the node's processors, or cluster.slurm_exclusive=true"
    ]


def _counts(run: RunConfig, counts: Arithmetic, usable: int | None) -> dict[str, int | None]:
    found: dict[str, int | None] = {**asdict(counts), "total_updates": counts.total_updates}
    if usable is None:
        unknown = (
            ("steps_per_epoch",) if run.train.max_steps else ("steps_per_epoch", "max_steps", "total_updates")
        )
        found |= dict.fromkeys(unknown)
    return found


# ---- rewards

# Ways to write an answer down; the one that the run's rewards value most is shown.
FORMS = (
    "<think>The steps that lead there.</think>\n<answer>{}</answer>",
    "<think>The steps that lead there.</think>\n<answer>\\boxed{{{}}}</answer>",
    "The steps that lead there.</think>\n<answer>{}</answer>",
    "The steps that lead there: \\boxed{{{}}}",
    "The steps that lead there = {}",
)


def graded(
    run: RunConfig, prompts: Sequence[Prompt], renderer: Renderer | None, notes: Notes
) -> list[dict[str, Any]]:
    """What the rewards give for a prompt's own answer and for a wrong one, in the form they value most.

    The first prompt whose answer is told from a wrong one without a formula parser, which takes seconds to load;
    else the first. Raises ValueError naming the function that fails. A judge is not called.
    """
    spec = {key: value for key, value in run.rewards.items() if key != "judge"}
    if len(spec) < len(run.rewards):
        notes.not_checked.append("rewards: the judge, which a check does not call")
    prompts = [p for p in prompts if p.columns.get("answer") is not None]
    if not spec or not prompts:
        return []
    prompt = next((p for p in prompts if _wrong(str(p.columns["answer"]))[1]), prompts[0])
    gold = str(prompt.columns["answer"])
    answers = {"right": gold, "wrong": _wrong(gold)[0]}
    texts = [form.format(answer) for answer in answers.values() for form in FORMS]
    limit = run.generation.max_completion_length
    with (
        contextlib.redirect_stdout(sys.stderr),
        rewards.build(spec, max_completion_length=limit, num_processes=1) as functions,
    ):
        try:
            scores = functions.score([prompt] * len(texts), [_completion(t, renderer) for t in texts])
        except RuntimeError as error:  # no process to grade in
            raise ConfigError(f"rewards: {error}") from None
    best = max(range(len(FORMS)), key=lambda i: (scores[i].reward, -i))
    pair = [(kind, i * len(FORMS) + best) for i, kind in enumerate(answers)]
    if scores[pair[0][1]].reward <= scores[pair[1][1]].reward:
        notes.warnings.append(
            "rewards: a wrong answer scores as much as the right one, in every form tried, so nothing would be learnt"
            " from them; look at the sample below and at the rewards' options"
        )
    return [{"sample": kind, "text": texts[i], **asdict(scores[i])} for kind, i in pair]


def _wrong(gold: str) -> tuple[str, bool]:
    """Another answer, and whether arithmetic alone tells the two apart."""
    number = [str(int(gold) + 1)] if re.fullmatch(r"-?\d{1,18}", gold) else []
    choices = [*number, "0", "1"]
    told = next((c for c in choices if settle(tidy(gold), tidy(c)) is False), None)
    return told or choices[0], told is not None


def _completion(text: str, renderer: Renderer | None) -> Completion:
    ids = tuple(renderer.token_ids([text])[0]) if renderer else ()
    return Completion(ids, (), "stop", text, seed=0)


# ---- memory and disk


def _memory(
    run: RunConfig, model: Pretrained, peer: Pretrained | None, notes: Notes
) -> dict[str, int | str | None]:
    found = refusals.verdict(run, model, peer)
    notes.warnings += [found.warning] if found.warning else []
    notes.not_checked += [found.not_checked] if found.not_checked else []
    return {
        "learner_needed_bytes": found.needed_bytes,
        "gpu": found.gpu,
        "gpu_memory_bytes": found.gpu_memory_bytes,
    }


def disk(
    run: RunConfig, model: Pretrained, peer: Pretrained | None, counts: Arithmetic
) -> dict[str, int] | None:
    """Bytes of a checkpoint, of all that stand at once (one is being written), and free; None where that is unknown.

    Raises ConfigError where not even one fits.
    """
    saved = [model, *([peer] if peer is not None and run.build_algorithm().peer is not None else [])]
    if not all(m.parameters for m in saved):
        return None
    parameters = sum(m.parameters for m in saved)
    export = 2 if (run.train.bf16 if run.train.bf16 is not None else models.on_gpu(run)) else 4
    one = (STATE_BYTES + export) * parameters
    saves = -(-counts.max_steps // run.train.save_steps)
    stand = min(saves, (run.train.save_total_limit or saves) + 1)
    try:
        free = shutil.disk_usage(_standing(run.folder)).free + _size(run.folder / "checkpoints")
    except OSError:  # a folder that cannot be: found, with its own message, where the run is started
        return None
    if free < one:
        raise ConfigError(
            f"output_dir {run.output_dir}: a checkpoint takes {gigabytes(one)} (float32 weights, two moments of Adam"
            f" and the export of {parameters:,} parameters), but {gigabytes(free)} are free there; set output_dir"
            " to a larger file system, or make room"
        )
    return {"bytes_each": one, "at_once": stand, "bytes_needed": one * stand, "bytes_free": free}


def _disk_report(
    run: RunConfig, model: Pretrained, peer: Pretrained | None, counts: Arithmetic, notes: Notes
) -> dict[str, int] | None:
    found = disk(run, model, peer, counts)
    if found is None:
        notes.not_checked.append(
            "train.save_steps: the space that checkpoints take, without the model's weights"
        )
    elif found["bytes_needed"] > found["bytes_free"]:
        notes.warnings.append(
            f"output_dir {run.output_dir}: {found['at_once']} checkpoints stand there at once,"
            f" {gigabytes(found['bytes_needed'])}, but {gigabytes(found['bytes_free'])} are free; lower"
            " train.save_total_limit, or set output_dir to a larger file system"
        )
    return found


def _standing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
