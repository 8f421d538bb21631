"""hpcgrpo's learner on given completions, holding still between steps until `learner_step.py` orders some."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from _learner_inputs import load
from _our_side import settings
from _side import StepClock

from hpcgrpo import batching
from hpcgrpo.config import parse
from hpcgrpo.running import Run
from hpcgrpo.sections import RunConfig
from hpcgrpo.train import assemble, join
from hpcgrpo.types import Completion, Group, Prompt, Rollout, Score


def groups(folder: Path) -> list[Group]:
    """The given completions as the loop holds them once they are graded."""
    made = []
    for position, given in enumerate(load(folder)):
        prompt = Prompt(position, position, (), "", tuple(given["prompt"]))
        parts = zip(given["completions"], given["rewards"], given["old"], strict=True)
        rollouts = [
            Rollout(
                prompt, Completion(tuple(ids), tuple(old), "length", "", i), Score(reward, {}), tuple(old)
            )
            for i, (ids, reward, old) in enumerate(parts)
        ]
        made.append(Group(prompt, tuple(rollouts)))
    return made


def alone(credited: batching.Credited) -> batching.Credited:
    """Every completion as a group of its own with the advantage it has: packed, and no prompt shared."""
    rows = [
        (Group(g.prompt, (rollout,)), (advantage,))
        for g, advantages in zip(credited.groups, credited.advantages, strict=True)
        for rollout, advantage in zip(g.rollouts, advantages, strict=True)
    ]
    return batching.Credited(tuple(g for g, _ in rows), tuple(a for _, a in rows), ((0,),) * len(rows))


def configured(case: Mapping[str, Any], **train: Any) -> RunConfig:
    """A run of one rank on the given model and completions; `train` sets further keys of that section."""
    rows = case["prompts"] * case["generations"]
    options = settings({**case, "rows_per_micro_batch": rows, "learning_rate": 1e-6})
    options["generation"]["max_prompt_length"] = case["prompt_tokens"]
    options["train"] |= {"max_tokens_per_device": case.get("token_budget"), **train}
    return parse(options | {"name": case["side"]})


def assembled(config: RunConfig) -> Run:
    """Ready to learn, at a learning rate of 0: every step has the same loss."""
    config.folder.mkdir(parents=True, exist_ok=True)
    run = assemble(config, *join(config), None)
    run.trainer.check_parity = None  # there is no generator whose log-probs these are
    run.trainer.learning_rate = lambda update: 0.0
    return run


def main() -> None:
    case = json.loads(sys.argv[1])
    config = configured(case)
    versions = {name: version(name) for name in ("hpcgrpo", "torch", "transformers")}
    clock = StepClock({"versions": versions, "settings": config.model_dump(mode="json")}, case["device"])
    run = assembled(config)
    trainer = run.trainer
    sampled = groups(Path(case["folder"]))
    clock.ready(attention=config.train.attn_implementation, token_budget=trainer.setup.token_budget)
    more = clock.boundary()
    while more:
        credited = batching.credit(sampled, trainer.algorithm)
        metrics = trainer.learn(alone(credited) if case["side"] == "packed" else credited)
        clock.note(loss=metrics["loss"], grad_norm=metrics["grad_norm"])
        more = clock.boundary()
    run.rewards.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
