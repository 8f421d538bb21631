"""Learning rates as a function of the number of optimizer steps taken, so that resuming needs no state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def schedule(
    name: str, *, total: int, warmup: int, min_lr_rate: float | None, kwargs: Mapping[str, Any]
) -> Callable[[int], float]:
    """The factor on the learning rate for optimizer step u = 0 .. total - 1, from transformers' schedules.

    Two departures, so that no step is wasted: the warm-up rises as (u + 1) / (warmup + 1) instead of starting at 0,
    and `cosine_with_min_lr` reaches its minimum at the last step instead of one after it.
    """
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    options = dict(kwargs)
    if name == "cosine_with_min_lr":
        options.setdefault("min_lr_rate", 0.1 if min_lr_rate is None else min_lr_rate)
    horizon = max(warmup + 1, total - 1 if name == "cosine_with_min_lr" else total)
    if name == "warmup_stable_decay":
        options.setdefault("num_decay_steps", max(1, total // 10))
    made: Any = get_scheduler(name, optimizer, warmup, horizon, scheduler_specific_kwargs=options)
    factor = made.lr_lambdas[0] if hasattr(made, "lr_lambdas") else lambda _: 1.0

    def at(update: int) -> float:
        return (update + 1) / (warmup + 1) if update < warmup else float(factor(update))

    return at
