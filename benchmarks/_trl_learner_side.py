"""TRL's GRPOTrainer on given completions, holding still until `learner_step.py` orders steps; in TRL's environment.

Its own training loop, with sampling and rewards replaced by what is given; `prepare` (padding and advantages, once a
step) is timed apart, so that it can be left out.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from _learner_inputs import load
from _side import StepClock
from _trl_side import Boundaries, settings
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def feed(trainer: GRPOTrainer, given: list[dict[str, Any]], clock: StepClock) -> None:
    """Hand the trainer the given completions and their log-probs before the step where it would sample."""
    old = {tuple(ids): row for g in given for ids, row in zip(g["completions"], g["old"], strict=True)}

    def generate(prompts: list[str]) -> tuple[Any, ...]:
        taken: Counter[int] = Counter()
        prompt_ids, completion_ids = [], []
        for group in map(int, prompts):
            prompt_ids.append(given[group]["prompt"])
            completion_ids.append(given[group]["completions"][taken[group]])
            taken[group] += 1
        return prompt_ids, completion_ids, None, [""] * len(prompts), None, {}, None, None

    prepare = trainer._generate_and_score_completions

    def prepared(inputs: Any) -> dict[str, Any]:
        made = prepare(inputs)
        ids, mask = made["completion_ids"], made["completion_mask"].bool()
        made["old_per_token_logps"] = torch.zeros(ids.shape, device=ids.device)
        for row, (tokens, real) in enumerate(zip(ids, mask, strict=True)):
            values = old[tuple(tokens[real].tolist())]
            made["old_per_token_logps"][row, : len(values)] = torch.tensor(values)
        return made

    trainer._generate = generate
    trainer._generate_and_score_completions = clock.timed(prepared, "prepare")


def watch(trainer: GRPOTrainer, clock: StepClock) -> None:
    """Note the loss of every pass and the gradient's norm before it is clipped."""
    compute, clip = trainer._compute_loss, trainer.accelerator.clip_grad_norm_

    def noting_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        value: torch.Tensor = compute(*args, **kwargs)
        clock.note(loss=value.item())
        return value

    def noting_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        norm: torch.Tensor = clip(*args, **kwargs)
        clock.note(grad_norm=norm.item())
        return norm

    trainer._compute_loss = noting_loss
    trainer.accelerator.clip_grad_norm_ = noting_norm


def main() -> None:
    case = json.loads(sys.argv[1])
    torch.set_num_threads(case["threads"])
    folder = Path(case["folder"])
    given = load(folder)
    options = settings({**case, "learning_rate": 0.0}) | {"shuffle_dataset": False}
    versions = {name: version(name) for name in ("trl", "torch", "transformers")}
    clock = StepClock({"versions": versions, "settings": options}, case["device"])
    rewards = {tuple(ids): r for g in given for ids, r in zip(g["completions"], g["rewards"], strict=True)}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [rewards[tuple(ids)] for ids in completion_ids]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(folder / "trl"), report_to=[], **options),
        train_dataset=Dataset.from_list([{"prompt": str(i % len(given))} for i in range(1000 * len(given))]),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Boundaries(clock)],
    )
    feed(trainer, given, clock)
    watch(trainer, clock)
    clock.ready(attention=trainer.model.config._attn_implementation)
    trainer.train()


if __name__ == "__main__":
    main()
