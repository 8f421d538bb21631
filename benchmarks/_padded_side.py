"""The best padded learner that plain PyTorch and transformers give, on the same completions as hpcgrpo's and TRL's.

Rows are padded on the right, so causal attention needs no mask (padding comes after all that counts); a micro-batch is
a group, padded to its own longest completion; only completion positions go through the head.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _learner_inputs import load
from _side import StepClock
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

EPSILON = 0.2


@dataclass(frozen=True)
class Padded:
    """A group: G rows of width T, in which N tokens are of completions."""

    ids: Tensor  # [G, T] int64
    row: Tensor  # [N] int64
    source: Tensor  # [N] int64: the position that predicts the token
    targets: Tensor  # [N] int64
    old: Tensor  # [N] log-probs before the step
    advantages: Tensor  # [N]
    weights: Tensor  # [N]: 1 / (completions of the step x tokens of the completion)


def padded(given: dict[str, Any], rows: int, device: str) -> Padded:
    """One group, of a step of so many completions."""
    prompt, completions = given["prompt"], given["completions"]
    sequences = [torch.tensor(prompt + ids[:-1]) for ids in completions]
    rewards = torch.tensor(given["rewards"])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    sizes = torch.tensor([len(ids) for ids in completions])
    made = Padded(
        ids=nn.utils.rnn.pad_sequence(sequences, batch_first=True),
        row=torch.arange(len(sizes)).repeat_interleave(sizes),
        source=torch.cat([torch.arange(len(prompt) - 1, len(prompt) - 1 + n) for n in sizes.tolist()]),
        targets=torch.tensor([t for ids in completions for t in ids]),
        old=torch.tensor([x for row in given["old"] for x in row]),
        advantages=advantages.repeat_interleave(sizes),
        weights=(1 / (rows * sizes)).repeat_interleave(sizes),
    )
    return Padded(**{name: tensor.to(device) for name, tensor in vars(made).items()})


def loss(model: Any, batch: Padded) -> Tensor:
    """GRPO's clipped loss, a sum under the weights."""
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[batch.row, batch.source]).float()
    ratio = (-F.cross_entropy(logits, batch.targets, reduction="none") - batch.old).exp()
    gain = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * batch.advantages)
    return -(gain * batch.weights).sum()


def main() -> None:
    case = json.loads(sys.argv[1])
    torch.set_num_threads(case["threads"])
    device, folder = case["device"], Path(case["folder"])
    clock = StepClock({"versions": {n: version(n) for n in ("torch", "transformers")}}, device)
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="sdpa"
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    given = load(folder)
    rows = sum(len(group["completions"]) for group in given)
    clock.ready(attention=model.config._attn_implementation)
    while clock.boundary():
        for group in given:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                value = loss(model, padded(group, rows, device))
            value.backward()
            clock.note(loss=value.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.note(grad_norm=norm.item())


if __name__ == "__main__":
    main()
