"""DeepSpeed's learner against FSDP2's on the same ranks; under torchrun. usage: deepspeed_ranks.py FOLDER

On two ranks: three steps of both in several settings, then saving, resuming and a step that is not finite.
On one rank: the two ranks' checkpoint, resharded. Rank 0 leaves what it measured in FOLDER/ranks<n>.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_batching import made_groups

from hpcgrpo import batching
from hpcgrpo.algorithms import build
from hpcgrpo.launch.one_rank import then_leave
from hpcgrpo.learning import checkpoint, deepspeed
from hpcgrpo.learning.deepspeed import DeepSpeedLearner
from hpcgrpo.learning.fsdp import FsdpLearner, export

ALGORITHM = build({"name": "dapo", "num_generations": 4, "beta": 0.1, "zero_variance": "keep"})
Tensors = dict[str, torch.Tensor]


def learner(kind: Any, model: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "device": torch.device("cpu"),
        "temperature": 0.7,
        "bf16": False,
        "gradient_checkpointing": False,
        "attn_implementation": "packed",
        "chunk_bytes": 2**16,
        "weight_decay": 0.01,
        "betas": (0.9, 0.999),
        "epsilon": 1e-8,
        "max_grad_norm": 0.05,  # below the norms that occur
        "with_reference": True,
    }
    return kind(str(model), **{**settings, **changes})


def share() -> tuple[batching.MicroBatch, ...]:
    """This rank's part of a step."""
    plan = batching.plan(
        batching.credit(made_groups(3, 4), ALGORITHM), ALGORITHM, ranks=dist.get_world_size(), token_budget=60,
        max_completion_length=40, rows_per_device=4,
    )  # fmt: skip
    return plan.micro_batches[dist.get_rank()]


def step(one: Any, *, broken: bool = False) -> dict[str, float]:
    """One optimizer step; `broken` makes rank 1's weights of it NaN."""
    rows = one.prepare(share(), old=True, reference=True)
    if broken and dist.get_rank() == 1:
        rows[0] = replace(rows[0], batch=replace(rows[0].batch, weights=rows[0].batch.weights * float("nan")))
    return one.update(rows, ALGORITHM.loss, learning_rate=1e-3)


def weights(one: Any) -> Tensors:
    return {name: tensor.clone() for name, tensor in one.full_parameters()}


def moments(one: Any, key: str) -> Tensors:
    """Adam's, whole: after the first step the first is a tenth of the clipped gradient."""
    if isinstance(one, DeepSpeedLearner):
        state = one.state()["optimizer"][key]
        shapes = {name: p.ds_shape for name, p in one.lm.named_parameters()}
        return {name: shard.full_tensor().view(shapes[name]) for name, shard in state.items()}
    found = {name: one.optimizer.state[p][key] for name, p in one.lm.named_parameters()}
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in found.items()}


def apart(a: Tensors, b: Tensors) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def equal(a: Tensors, b: Tensors) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def compared(model: Path, **changes: Any) -> tuple[dict[str, Any], Any]:
    """Three steps of both learners -> the largest differences, and DeepSpeed's."""
    theirs, ours = (learner(kind, model, **changes) for kind in (FsdpLearner, DeepSpeedLearner))
    found: dict[str, Any] = {"at the start": apart(weights(theirs), weights(ours)), "metrics": {}}
    begun = weights(ours)
    for n in range(3):
        a, b = step(theirs), step(ours)
        assert a.keys() == b.keys()
        differences = {name: abs(a[name] - b[name]) for name in a}
        found["metrics"] = {k: max(v, found["metrics"].get(k, 0.0)) for k, v in differences.items()}
        if n == 0:
            found["first moments"] = apart(moments(theirs, "exp_avg"), moments(ours, "exp_avg"))
            found["grad_norm"] = b["grad_norm"]
    found["second moments"] = apart(moments(theirs, "exp_avg_sq"), moments(ours, "exp_avg_sq"))
    found["weights"] = apart(weights(theirs), weights(ours))
    found["moved"] = apart(begun, weights(ours))
    warm = [one.logprobs_at(one.prepare(share(), old=False, reference=False), 1.3) for one in (theirs, ours)]
    found["warmer"] = max((a - b).abs().max().item() for a, b in zip(*warm, strict=True))
    return found, ours


def resumed(one: DeepSpeedLearner, model: Path, folder: Path) -> dict[str, Any]:
    """Save `one` after its third step, go on, and do the fourth again from the checkpoint, after one that is broken."""
    from hpcgrpo.tiny import build_character_tokenizer

    checkpoints = checkpoint.Checkpoints(folder / "checkpoints", None, dist.new_group(backend="gloo"))
    if dist.get_rank() == 0:
        save_file({k: v.contiguous() for k, v in weights(one).items()}, folder / "third.safetensors")
    else:
        weights(one)
    checkpoints.start(
        3,
        state=one.state(),
        extra={},
        export=lambda to: export(one, to, torch.float32, build_character_tokenizer()),
        wait=False,
    )
    step(one)  # while it is being written
    checkpoints.finish()
    whole = weights(one)
    if dist.get_rank() == 0:
        save_file({k: v.contiguous() for k, v in whole.items()}, folder / "fourth.safetensors")
    other = learner(DeepSpeedLearner, model)
    load(other, folder)
    third = weights(other)
    sums = step(other, broken=True)
    untouched = equal(third, weights(other))
    step(other)
    return {
        "skipped": sums["skipped_updates"],
        "untouched": untouched,
        "weights": equal(whole, weights(other)),
        "moments": all(equal(moments(one, key), moments(other, key)) for key in deepspeed.MOMENTS),
        "steps": [other.state()["optimizer"]["step"].item(), one.state()["optimizer"]["step"].item()],
    }


def load(one: DeepSpeedLearner, folder: Path) -> None:
    state, _ = checkpoint.load(folder / "checkpoints" / "checkpoint-3", one.state())
    one.load_state(state)


def two_ranks(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["tied, checkpointed"], _ = compared(folder / "tied", gradient_checkpointing=True)
    found["bf16"], _ = compared(folder / "untied", bf16=True)
    deepspeed.PERSISTENT_ELEMENTS = (
        0  # every parameter is gathered for each use, the head's from outside it as well
    )
    found["nothing whole"], one = compared(folder / "untied")
    found["resumed"] = resumed(one, folder / "untied", folder)
    try:
        deepspeed.library(torch.device("cuda"))
    except ValueError as error:
        found["other device"] = str(error)
    return found


def one_rank(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    one = learner(DeepSpeedLearner, folder / "untied")
    load(one, folder)
    third = apart(load_file(folder / "third.safetensors"), weights(one))
    step(one)
    return {"third": third, "fourth": apart(load_file(folder / "fourth.safetensors"), weights(one))}


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    found = one_rank(folder) if dist.get_world_size() == 1 else two_ranks(folder)
    if dist.get_rank() == 0:
        (folder / f"ranks{dist.get_world_size()}.json").write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    then_leave(main)
