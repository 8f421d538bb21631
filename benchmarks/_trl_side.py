"""TRL's GRPOTrainer, holding still between steps until `vs_trl.py` orders some. Runs in TRL's environment."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from _side import StepClock, digits
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PHASES = {"_generate": "generate", "_calculate_rewards": "score", "_compute_loss": "forward"}


def settings(case: dict[str, Any]) -> dict[str, Any]:
    """TRL's best settings here: no checkpointing, one pass, no reference, no logging, no saving."""
    return {
        "use_cpu": case["device"] == "cpu",
        "bf16": case["device"] == "cuda",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": case["rows_per_micro_batch"],
        "gradient_accumulation_steps": case["prompts"] * case["generations"] // case["rows_per_micro_batch"],
        "num_generations": case["generations"],
        "max_completion_length": case["max_completion_length"],
        "learning_rate": case["learning_rate"],
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "temperature": 1.0,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "epsilon": 0.2,
        "beta": 0.0,
        "num_iterations": 1,
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
        "max_steps": 1_000_000,
        **case["trl"],
    }


class Boundaries(TrainerCallback):
    """A step is what lies between two `on_step_begin`: fetching, sampling, learning, logging."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.clock.boundary():
            sys.exit(0)


def watch(trainer: GRPOTrainer, clock: StepClock) -> None:
    """Put the phase clocks around the trainer's own methods and note the lengths it sampled."""
    for method, phase in PHASES.items():
        setattr(trainer, method, clock.timed(getattr(trainer, method), phase))
    trainer.accelerator.backward = clock.timed(trainer.accelerator.backward, "backward")
    generate = trainer._generate

    def noting(prompts: Any) -> Any:
        made = generate(prompts)
        clock.lengths(map(len, made[1]))
        return made

    trainer._generate = noting


def main() -> None:
    case = json.loads(sys.argv[1])
    torch.set_num_threads(case["threads"])
    folder = Path(case["folder"])
    options = settings(case)
    versions = {name: version(name) for name in ("trl", "torch", "transformers", "tokenizers")}
    clock = StepClock({"versions": versions, "settings": options}, case["device"])
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=digits,
        args=GRPOConfig(output_dir=str(folder / "trl"), report_to=[], **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Boundaries(clock)],
    )
    watch(trainer, clock)
    clock.ready(attention=model.config._attn_implementation)
    trainer.train()


if __name__ == "__main__":
    main()
