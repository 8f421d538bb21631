"""hpcgrpo's own training loop, one rank, holding still between steps until `vs_trl.py` orders some."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from _side import StepClock

from hpcgrpo.config import parse
from hpcgrpo.journal import Journal
from hpcgrpo.rewards import Grading
from hpcgrpo.running import Run, steps, write_profile
from hpcgrpo.sections import RunConfig
from hpcgrpo.train import assemble, join
from hpcgrpo.types import Prompt

REWARD = f"{Path(__file__).with_name('_side.py')}:digits"


def settings(case: dict[str, Any]) -> dict[str, Any]:
    """The same step as TRL's, as a user would write it; what is not named is the default."""
    rows = case["prompts"] * case["generations"]
    return {
        "name": "vs_trl",
        "model_name_or_path": f"{case['folder']}/model",
        "output_dir": case["folder"],
        "device": case["device"],
        "algorithm": {
            "name": "grpo",
            "num_generations": case["generations"],
            "epsilon": 0.2,
            "beta": 0.0,
            "scale_rewards": "group",
            "loss_agg": "seq_mean_token_mean",
            "importance_sampling_correction": "none",
        },
        "rewards": {REWARD: 1.0},
        "data": {"path": f"{case['folder']}/prompts.jsonl"},
        "generation": {"temperature": 1.0, "max_completion_length": case["max_completion_length"]},
        "train": {
            "per_device_train_batch_size": case["rows_per_micro_batch"],
            "gradient_accumulation_steps": rows // case["rows_per_micro_batch"],
            "learning_rate": case["learning_rate"],
            "lr_scheduler_type": "constant",
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "gradient_checkpointing": False,
            "max_steps": 1_000_000,
            "save_steps": 1_000_000,
        },
        "cluster": {"threads_per_rank": case["threads"]},
        "report_to": [],
        "log_completions": False,
    }


def watch(run: Run, clock: StepClock) -> None:
    """Put phase clocks around what the loop calls."""
    trainer, learner = run.trainer, run.trainer.learner
    trainer.explorer.generator.generate = clock.timed(trainer.explorer.generator.generate, "generate")  # type: ignore[method-assign]
    grading = trainer.explorer.grading

    def timed_grading(prompts: Sequence[Prompt]) -> Grading:
        made = grading(prompts)
        made.scores = clock.timed(made.scores, "score")  # type: ignore[method-assign]
        return made

    trainer.explorer.grading = timed_grading
    trainer.algorithm = replace(trainer.algorithm, loss=clock.timed(trainer.algorithm.loss, "forward"))
    time_forward(learner.model, clock)
    backward: Callable[..., Any] = clock.timed(torch.Tensor.backward, "backward")
    torch.Tensor.backward = backward  # type: ignore[method-assign]
    trainer.sync = clock.timed(trainer.sync, "sync")  # type: ignore[method-assign]


def time_forward(model: torch.nn.Module, clock: StepClock) -> None:
    """By hooks, so that FSDP's own hooks lie inside."""
    began: list[tuple[float, float]] = []

    def start(*_: Any) -> None:
        began.append(clock.now())

    def stop(*_: Any) -> None:
        wall, cpu = began.pop()
        wall_end, cpu_end = clock.now()
        clock.add_phase("forward", wall_end - wall, cpu_end - cpu)

    model.register_forward_pre_hook(start, prepend=True)
    model.register_forward_hook(stop)


def train(run: Run, config: RunConfig, clock: StepClock) -> None:
    """`train.lead` with a halt between steps: metrics.jsonl and profile.json are written as in any run."""
    journal = Journal(
        config.folder, -1, config.report_to, config.model_dump(mode="json"), config.log_completions
    )
    clock.boundary()
    for record in steps(run):
        assert record.credited is not None
        journal.metrics(record.step, record.metrics)
        write_profile(run, record.metrics)
        clock.lengths(len(r.completion.token_ids) for g in record.credited.groups for r in g.rollouts)
        if not clock.boundary():
            break


def main() -> None:
    case = json.loads(sys.argv[1])
    options = settings(case)
    versions = {
        name: version(name) for name in ("hpcgrpo", "torch", "transformers", "tokenizers", "accelerate")
    }
    clock = StepClock({"versions": versions, "settings": options}, case["device"])
    config = parse(options)
    config.folder.mkdir(parents=True, exist_ok=True)
    run = assemble(config, *join(config), None)
    watch(run, clock)
    clock.ready(attention=config.train.attn_implementation, token_budget=run.trainer.setup.token_budget)
    train(run, config, clock)
    run.rewards.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
