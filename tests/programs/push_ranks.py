"""Under torchrun: FSDP2 ranks that push to a real engine; rank 0 compares its greedy answers with transformers'.

`push_ranks.py URL SECRET MODEL FOLDER TRANSPORT`: each rank prints one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hpcgrpo.generation.weights import WeightSync, WeightSyncError
from hpcgrpo.learning.fsdp import FsdpLearner

URL, SECRET, MODEL, FOLDER, TRANSPORT = sys.argv[1:]
PROMPTS = torch.randint(3, 90, (4, 12), generator=torch.Generator().manual_seed(1))
TOKENS = 16


def gather(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def sync_with(url: str, timeout_seconds: float) -> WeightSync:
    return WeightSync(
        [url], secret=SECRET, rank=dist.get_rank(), gather=gather, transport=TRANSPORT,  # type: ignore[arg-type]
        address="127.0.0.1", device=torch.device("cpu"), bucket_bytes=2**18, timeout_seconds=timeout_seconds,
        folder=Path(FOLDER), dtype=torch.float32,
    )  # fmt: skip


def change(learner: FsdpLearner, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.lm.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.add_(torch.randn(local.shape, generator=generator) * 0.05)


def transformers_answers(weights: dict[str, torch.Tensor]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    mask = torch.ones_like(PROMPTS)
    ids = model.generate(
        PROMPTS, attention_mask=mask, do_sample=False, max_new_tokens=TOKENS, eos_token_id=None
    )
    return ids[:, PROMPTS.shape[1] :].tolist()


def server_answers(version: int) -> list[list[int]]:
    body = {"model": "policy", "prompt": PROMPTS.tolist(), "max_tokens": TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    headers = {"Authorization": f"Bearer {SECRET}", "X-Minimum-Version": str(version)}
    answer = httpx.post(f"{URL}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.headers["X-Weights-Version"] == str(version)
    return [choice["token_ids"] for choice in answer.json()["choices"]]


torch.set_num_threads(1)
dist.init_process_group("gloo")
learner = FsdpLearner(
    MODEL, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), device=torch.device("cpu"), temperature=1.0,
    bf16=False, gradient_checkpointing=False, attn_implementation="packed", chunk_bytes=2**20, weight_decay=0.0,
    betas=(0.9, 0.999), epsilon=1e-8, max_grad_norm=1.0, with_reference=False,
)  # fmt: skip
sync = sync_with(URL, 60.0)
report: dict[str, Any] = {"rank": dist.get_rank(), "same": [], "held": []}
for version in range(3):
    change(learner, 10 * version + dist.get_rank())
    report["held"].append(sync.push(learner.full_parameters, version))
    weights = {name: tensor.clone() for name, tensor in learner.full_parameters()}
    if dist.get_rank() == 0:
        report["same"].append(server_answers(version) == transformers_answers(weights))
    dist.barrier()
sync.close()
try:
    sync_with("http://127.0.0.1:9", 2.0).push(learner.full_parameters, 9)
except WeightSyncError as error:
    report["error"] = str(error)
sys.stdout.write(json.dumps(report) + "\n")  # one write: the ranks share a pipe, and Python may be unbuffered
sys.stdout.flush()
dist.barrier()
os._exit(0)
