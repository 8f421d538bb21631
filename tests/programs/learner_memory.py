"""Resident memory that a real learner takes on a CPU: `learner_memory.py CASES.json`, alone or under torchrun.

A case is {"shape": a table of config.json's keys, "rows": [prefix, completions, length, groups, passes],
"checkpointing": bool, "chunk_bytes": int}. Rank 0 prints a JSON list of bytes: the kernel's high-water mark of the
second optimizer step over what was resident before the learner was built.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hpcgrpo import profiler
from hpcgrpo.algorithms import build
from hpcgrpo.launch.one_rank import then_leave
from hpcgrpo.learning.fsdp import FsdpLearner
from hpcgrpo.planner.memory import Rows
from hpcgrpo.planner.trace import fake_rows

LOSS = build({"name": "grpo", "num_generations": 4}).loss


def resident_bytes() -> int:
    """What is in memory now."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def grown(case: dict[str, Any]) -> int:
    """Bytes that the learner of a case adds at most, from its second step on."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rows = Rows(*case["rows"])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(case["shape"]))
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
        before = resident_bytes()
        learner = FsdpLearner(
            folder,
            mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
            device=torch.device("cpu"),
            temperature=1.0,
            bf16=False,
            gradient_checkpointing=case["checkpointing"],
            attn_implementation="packed",
            chunk_bytes=case["chunk_bytes"],
            weight_decay=0.0,
            betas=(0.9, 0.999),
            epsilon=1e-8,
            max_grad_norm=1.0,
            with_reference=False,
        )
    first = learner.prepare(
        fake_rows(replace(rows, passes=1, groups=1, completions=1)), old=False, reference=False
    )
    learner.update(first, LOSS, learning_rate=1e-6)
    real = learner.prepare(fake_rows(rows), old=False, reference=False)
    gc.collect()
    profiler.reset_peak_memory()
    learner.update(real, LOSS, learning_rate=1e-6)
    return int(profiler.peak_memory_gb() * 1e9) - before


def main() -> int:
    dist.init_process_group("gloo") if dist.is_torchelastic_launched() else dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    torch.set_num_threads(1)
    cases = json.loads(Path(sys.argv[1]).read_text())
    small = {**cases[0]["shape"], "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 128}
    grown({**cases[0], "shape": small, "rows": [8, 2, 8, 1, 2]})  # brings the code itself into memory
    found = [grown(case) for case in cases]
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    then_leave(main)
