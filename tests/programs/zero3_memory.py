"""Bytes that a ZeRO-3 learner's tensors hold at most: `zero3_memory.py CASES.json`, under torchrun on CPUs.

A case is one of learner_memory.py with "bf16": bool. Rank 0 prints a JSON list of bytes: the most that is alive in the
second optimizer step, every storage counted whole whether it was written to or not, as a GPU's allocator does.
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
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from hpcgrpo.algorithms import build
from hpcgrpo.launch.one_rank import then_leave
from hpcgrpo.learning.deepspeed import DeepSpeedLearner
from hpcgrpo.planner import shapes
from hpcgrpo.planner.memory import Rows
from hpcgrpo.planner.trace import Bytes, fake_rows
from hpcgrpo.pretrained import Pretrained

LOSS = build({"name": "grpo", "num_generations": 4}).loss


class Allocated(Bytes):
    """The tracer's count on real tensors, which need none of its stand-ins."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.running = str(func)
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                self._count(tensor.untyped_storage(), self._part(tensor))
        return made


def alive() -> list[Tensor]:
    """Every tensor of this process."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    return [each.to_local() if isinstance(each, DTensor) else each for each in found]


def counted(case: dict[str, Any]) -> int:
    """The peak of a case."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape, rows = shapes.of(Pretrained("case", None, case["shape"])), Rows(*case["rows"])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(case["shape"]))
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
        learner = DeepSpeedLearner(
            folder,
            mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
            device=torch.device("cpu"),
            temperature=1.0,
            bf16=case["bf16"],
            gradient_checkpointing=case["checkpointing"],
            attn_implementation="packed",
            chunk_bytes=case["chunk_bytes"],
            weight_decay=0.0,
            betas=(0.9, 0.999),
            epsilon=1e-8,
            max_grad_norm=1.0,
            with_reference=False,
        )
    small = fake_rows(replace(rows, passes=1, groups=1, completions=1))
    learner.update(learner.prepare(small, old=False, reference=False), LOSS, learning_rate=1e-6)
    real = learner.prepare(fake_rows(rows), old=False, reference=False)
    count = Allocated(shape)
    with count.counting():
        count.hold("held", alive())
        count.reset()
        learner.update(real, LOSS, learning_rate=1e-6)
    return count.peak_total


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = [counted(case) for case in json.loads(Path(sys.argv[1]).read_text())]
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    then_leave(main)
