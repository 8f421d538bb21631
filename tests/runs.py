"""Small real runs for tests: a tiny untrained model, a configuration, and what a run leaves behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

CONFIG = """
name: run
model_name_or_path: {model}
algorithm:
  name: igrpo
  drafts: 2
  refine_template: "{{question}}#{{draft}}#{{question}}"
  base: {{name: cppo, pruning_rate: 0.5, base: {{name: grpo, num_generations: 4, beta: 0.01}}}}
rewards: {{accuracy: {{weight: 1.0, require_box_or_tag: false}}, overlong: {{weight: 0.5, cache_length: 4}}}}
data: {{preset: chain, max_samples: 64, options: {{digits: 4}}}}
generation: {{max_prompt_length: 32, max_completion_length: 8}}
train: {{train_batch_size: 8, max_steps: 6, num_iterations: 2, learning_rate: 1.0e-3, save_steps: 2, warmup_ratio: 0.2,
        lr_scheduler_type: cosine_with_min_lr, save_total_limit: null}}
"""


def make_model(folder: Path) -> Path:
    """An untrained tiny model with its tokenizer, as a Hugging Face folder."""
    from hpcgrpo import tiny

    tiny.save(tiny.build_tiny_model(seed=0), tiny.build_character_tokenizer(), folder)
    return folder


def write_config(folder: Path, text: str = CONFIG) -> Path:
    """A model and `run.yaml` beside it -> the YAML's path."""
    model = make_model(folder / "model")
    path = folder / "run.yaml"
    path.write_text(text.format(model=model))
    return path


def hpcgrpo(*arguments: str, timeout_seconds: float = 200) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "hpcgrpo.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, env=os.environ)


def tensors(state: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a sharded training state, by its path in the state."""
    whole = scratch / f"{state.parent.parent.parent.name}-{state.parent.name}.pt"
    dcp_to_torch_save(state, whole)
    found: dict[str, torch.Tensor] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[prefix] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}/{key}", inner)

    walk("", torch.load(whole, weights_only=True))
    return found


def metrics(folder: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what a clock or the allocator measured."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocked = ("timing_s/", "timing_cpu_s/", "timing_ahead_s/", "perf/", "step_time", "generation/")
    return [{k: v for k, v in line.items() if not k.startswith(clocked)} for line in lines]


def rollouts(folder: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in sorted((folder / "rollouts").iterdir())}


def undocumented(names: Iterable[str]) -> list[str]:
    """The names of metrics that docs/metrics.md does not have; <any> stands for anything, another <word> for a word."""
    text = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    known = [re.escape(name) for name in re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)]
    known = [re.sub(r"<\w+>", "[^/]+", name.replace("<any>", ".+")) for name in known]
    return sorted(name for name in names if not any(re.fullmatch(k, name) for k in known))
