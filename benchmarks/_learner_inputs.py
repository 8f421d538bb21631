"""The completions that every side of `learner_step.py` trains on: tokens, rewards, log-probs before the step."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import torch

SPREAD = 1.0  # of the logarithm of a length
NOISE = 0.1  # of the log-probs before the step, in nats: some ratios are clipped, and the loss is not 0


def lengths(count: int, *, mean: float, most: int) -> list[int]:
    """So many lengths in tokens: log-normal, cut at `most`, `mean` in the mean (equal to `most`: all of them).

    They are the distribution's quantiles at even distances, so that a step is a typical one, in a fixed random order.
    """
    if mean >= most:
        return [most] * count
    low, high = 0.0, 20.0
    for _ in range(60):  # the median of the whole distribution under which the mean of the cut one is right
        middle = (low + high) / 2
        low, high = (low, middle) if fmean(_quantiles(count, middle, most)) > mean else (middle, high)
    found = [max(2, round(x)) for x in _quantiles(count, low, most)]
    random.Random(0).shuffle(found)
    return found


def _quantiles(count: int, median_log: float, most: int) -> list[float]:
    normal = NormalDist(median_log, SPREAD)
    return [
        min(float(most), torch.tensor(normal.inv_cdf((i + 0.5) / count)).exp().item()) for i in range(count)
    ]


def save(folder: Path, case: Mapping[str, Any]) -> list[list[int]]:
    """Write model/, prompts.jsonl and rollouts.json into a folder -> lengths [groups][G]."""
    from _tiny_model import build_model, build_tokenizer, questions
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = build_model(hidden=case["hidden"], layers=case["layers"], vocabulary=case["vocabulary"])
    model.save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    rows = questions(prompt_tokens=6, count=8)  # for the loader alone: what is trained on is below
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    num = case["generations"]
    every = lengths(
        case["prompts"] * num, mean=case["mean_completion_length"], most=case["max_completion_length"]
    )
    groups = [every[i : i + num] for i in range(0, len(every), num)]
    source = torch.Generator().manual_seed(0)
    made = [_group(model, case, sizes, source) for sizes in groups]
    (folder / "rollouts.json").write_text(json.dumps(made))
    return groups


def _group(
    model: Any, case: Mapping[str, Any], sizes: list[int], source: torch.Generator
) -> dict[str, list[Any]]:
    def tokens(count: int) -> list[int]:
        found: list[int] = torch.randint(4, case["vocabulary"], (count,), generator=source).tolist()
        return found

    prompt = tokens(case["prompt_tokens"])
    completions = [tokens(size) for size in sizes]
    return {
        "prompt": prompt,
        "completions": completions,
        "rewards": torch.rand(len(sizes), generator=source).tolist(),
        "old": [_old(model, prompt, ids, source) for ids in completions],
    }


@torch.no_grad()
def _old(model: Any, prompt: list[int], completion: list[int], source: torch.Generator) -> list[float]:
    """The completion's log-probs under this model, one sequence alone, with some noise."""
    hidden = model.model(torch.tensor([prompt + completion[:-1]]), use_cache=False).last_hidden_state
    logprobs = model.lm_head(hidden[0, len(prompt) - 1 :]).log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0]
    found: list[float] = (chosen + NOISE * torch.randn(len(completion), generator=source)).tolist()
    return found


def load(folder: Path) -> list[dict[str, Any]]:
    """The groups: `prompt` [P], `completions` [G][C], `rewards` [G], `old` [G][C]."""
    groups: list[dict[str, Any]] = json.loads((folder / "rollouts.json").read_text())
    return groups
