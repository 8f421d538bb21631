"""Models as ranks load them, each its own shards, beside rank 0's whole model; under torchrun.

usage: loading_ranks.py FOLDER ...: rank 0 prints a JSON list, for every folder whether weights and buffers are equal,
how many bytes of weights this rank holds, and how many the model has.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hpcgrpo.launch.one_rank import then_leave
from hpcgrpo.learning import fsdp
from hpcgrpo.learning.weights import Weights, find_weights


def loaded(folder: str) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fsdp.sharded_policy(
        folder, mesh=mesh, device=torch.device("cpu"), dtype=torch.float32, temperature=1.0, chunk_bytes=2**20,
        attn_implementation="packed", gradient_checkpointing=False,
    ).lm  # fmt: skip


def whole(name: str) -> Any:
    raise AssertionError(f"{name} was read whole")


def compared(folder: str) -> dict[str, Any]:
    own, get = fsdp.find_weights, Weights.__getitem__
    Weights.__getitem__ = lambda self, name: whole(name)  # type: ignore[method-assign]
    ours = loaded(folder)
    Weights.__getitem__ = get  # type: ignore[method-assign]
    assert find_weights(folder, ours) is not None
    fsdp.find_weights = lambda *_: None
    theirs = loaded(folder)
    fsdp.find_weights = own
    pairs = [(a, dict(theirs.named_parameters())[n]) for n, a in ours.named_parameters()]
    shards = [(a.to_local(), b.to_local()) for a, b in pairs if isinstance(a, DTensor)]
    assert len(shards) == len(pairs)
    buffers = dict(theirs.named_buffers())
    shards += [(buffer, buffers[name]) for name, buffer in ours.named_buffers()]
    equal = torch.tensor(float(all(torch.equal(a, b) for a, b in shards)))
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    held = sum(p.to_local().nbytes for p in ours.parameters())
    return {"equal": bool(equal), "held": held, "all": sum(p.numel() * 4 for p in ours.parameters())}


def main() -> int:
    dist.init_process_group("gloo")
    found = [compared(folder) for folder in sys.argv[1:]]
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    then_leave(main)
