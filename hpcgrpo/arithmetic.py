"""The counts that follow from a configuration: per step, per epoch and per run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.sections import GenerationConfig, RunConfig, TrainConfig


@dataclass(frozen=True)
class Arithmetic:
    """What follows from a configuration: counts per step and per run."""

    ranks: int
    rows_per_device: int  # per_device_train_batch_size
    train_batch_size: int  # completions trained per optimizer step, all ranks
    generation_batch_size: int  # completions trained per step, all ranks
    prompts_per_step: int
    completions_per_step: int  # sampled, drafts included
    updates_per_step: int  # optimizer steps per step
    steps_per_epoch: int
    max_steps: int
    max_model_length: int  # tokens, the longest prompt and completion together
    max_refine_prompt_length: int | None

    @property
    def total_updates(self) -> int:
        return self.max_steps * self.updates_per_step


def arithmetic(config: RunConfig, algorithm: Algorithm, rows: int | None) -> Arithmetic:
    """The counts that follow; `rows` is the number of usable questions (None: not known yet).

    Raises ValueError for batches that do not divide, naming the nearest ones that do.
    """
    train, ranks, share = (
        config.train,
        config.cluster.ranks,
        algorithm.batch_share or algorithm.num_generations,
    )
    batch, rows_per_device = _train_batch(train, ranks)
    generation = train.generation_batch_size or batch
    if train.steps_per_generation:
        if train.generation_batch_size:
            raise ValueError(
                "train: generation_batch_size and steps_per_generation say the same thing; keep one"
            )
        generation = rows_per_device * ranks * train.steps_per_generation
    _divides("train.generation_batch_size", generation, batch, "train_batch_size")
    _divides("the batch of completions per optimizer step", batch, share, _share_text(algorithm, share))
    prompts = generation // share
    updates = generation // batch * train.num_iterations
    epoch = prompts if rows is None else rows
    if prompts > epoch:
        raise ValueError(
            f"data: {rows} questions, but one step takes {prompts}; give more data or a smaller"
            f" train.train_batch_size (at most {epoch * share})"
        )
    max_steps = train.max_steps or max(1, math.floor(epoch // prompts * train.num_train_epochs))
    refine = _refine_length(config)
    prompt = max(config.generation.max_prompt_length, refine or 0)
    return Arithmetic(
        ranks=ranks,
        rows_per_device=rows_per_device,
        train_batch_size=batch,
        generation_batch_size=generation,
        prompts_per_step=prompts,
        completions_per_step=prompts * (algorithm.num_generations + algorithm.num_drafts),
        updates_per_step=updates,
        steps_per_epoch=epoch // prompts,
        max_steps=max_steps,
        max_model_length=prompt + config.generation.max_completion_length,
        max_refine_prompt_length=refine,
    )


def updates_behind(generation: GenerationConfig, algorithm: Algorithm, updates_per_step: int) -> int:
    """Optimizer steps that the weights which sampled what is trained on lie behind the learner's, sampling ahead."""
    drafts_trained = generation.ahead == "drafts" and algorithm.options.get("train_drafts")
    return updates_per_step if generation.ahead == "step" or drafts_trained else 0


def _train_batch(train: TrainConfig, ranks: int) -> tuple[int, int]:
    """Completions per optimizer step over all ranks, and per rank and pass."""
    passes = ranks * train.gradient_accumulation_steps
    if train.train_batch_size is None:
        rows = train.per_device_train_batch_size or 8
        return rows * passes, rows
    rows = train.per_device_train_batch_size or -(-train.train_batch_size // passes)
    if train.per_device_train_batch_size and rows * passes != train.train_batch_size:
        raise ValueError(
            f"train.train_batch_size {train.train_batch_size} is not per_device_train_batch_size {rows} x"
            f" {ranks} ranks x gradient_accumulation_steps {train.gradient_accumulation_steps} = {rows * passes};"
            " leave one of them out"
        )
    return train.train_batch_size, rows


def _divides(what: str, value: int, by: int, why: str) -> None:
    if value % by:
        near = sorted({max(1, value // by) * by, (value // by + 1) * by})
        raise ValueError(
            f"{what} is {value}, which is no multiple of {by} ({why}); the nearest that are: "
            + " and ".join(map(str, near))
        )


def _share_text(algorithm: Algorithm, share: int) -> str:
    if share == algorithm.num_generations + algorithm.num_drafts and algorithm.num_drafts:
        return f"num_generations {algorithm.num_generations} + drafts {algorithm.num_drafts}, trained on too"
    if share == algorithm.num_generations:
        return f"num_generations {share}"
    return f"completions kept of each prompt's {algorithm.num_generations}"


def _refine_length(config: RunConfig) -> int | None:
    """iGRPO's limit for the second prompt in tokens: its option, or question + draft + 64 for the template."""
    spec: Any = config.algorithm
    while isinstance(spec, Mapping):
        if spec.get("name") == "igrpo":
            generation = config.generation
            room = generation.max_prompt_length + generation.max_completion_length + 64
            return spec.get("max_refine_prompt_length") or room
        spec = spec.get("base")
    return None
