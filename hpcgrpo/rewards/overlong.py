"""DAPO's soft penalty for overlong completions (arXiv 2503.14476, section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcgrpo.rewards.base import Reward, Run


def soft_penalty(length: int, max_length: int, cache_length: int) -> float:
    """0 up to max - cache tokens, then linear to -1 at max, -1 beyond."""
    return -min(1.0, max(0.0, (length - (max_length - cache_length)) / cache_length))


def overlong(run: Run, *, max_length: int | None = None, cache_length: int | None = None) -> Reward:
    """Defaults: the run's max_completion_length, and a fifth of it (DAPO: 20480 and 4096)."""
    limit = run.max_completion_length if max_length is None else max_length
    cache = max(1, limit // 5) if cache_length is None else cache_length
    if not 0 < cache <= limit:
        raise ValueError(
            f"overlong: cache_length={cache} must be between 1 and max_length={limit}: the last so many "
            "tokens, over which the penalty grows from 0 to -1"
        )

    def function(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[float]:
        return [soft_penalty(len(ids), limit, cache) for ids in completion_ids]

    return Reward(function, scope="completion")
