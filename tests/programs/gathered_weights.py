"""What a pass of log-probs leaves in memory: `gathered_weights.py MODEL fsdp|deepspeed`, under torchrun.

Rank 0 prints a JSON list, a rank each: bytes by which all tensors alive grew over a pass of the reference and of the
policy, their answers aside, and over a pass of the policy's own forward, after which FSDP2 keeps the root's weights.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))
from deepspeed_ranks import learner, share, step

from hpcgrpo.launch.one_rank import then_leave
from hpcgrpo.learning import deepspeed
from hpcgrpo.learning.deepspeed import DeepSpeedLearner
from hpcgrpo.learning.fsdp import FsdpLearner
from hpcgrpo.learning.packing import pack_row

KINDS: dict[str, Any] = {"fsdp": FsdpLearner, "deepspeed": DeepSpeedLearner}


def alive_bytes() -> int:
    """Of every storage that a tensor of this process points to."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and each.device.type == "cpu":
            storage = (each.to_local() if isinstance(each, DTensor) else each).untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def settled() -> int:
    """What is alive a little later: gloo's threads let go of what they gathered after the work is done."""
    time.sleep(0.5)
    return alive_bytes()


def grown(work: Callable[[], Any]) -> int:
    """Bytes that `work` leaves behind every time, its answer aside."""
    before, after = settled(), []
    for _ in range(3):
        work()
        after.append(settled())
    return min(after) - before


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    deepspeed.PERSISTENT_ELEMENTS = 0  # nothing that is meant to stay whole
    one = learner(KINDS[sys.argv[2]], Path(sys.argv[1]))
    rows = [pack_row(m, one.device) for m in share()]
    mine = {"reference": grown(lambda: one._logprobs(one.reference, rows))}
    step(one)
    mine["policy"] = grown(lambda: one._logprobs(one.model, rows))
    with torch.no_grad():
        mine["forward alone"] = grown(lambda: one.model(rows[0]))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    then_leave(main)
