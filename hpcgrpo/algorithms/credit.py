"""Rewards of groups -> advantages: pure Python on floats with exact sums, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from hpcgrpo.algorithms.base import Credit
from hpcgrpo.algorithms.schema import require
from hpcgrpo.types import Group

ScaleRewards = Literal["group", "batch", "none"]

TINY = 1e-12  # rewards of a group that differ by less, relative to their size, are equal
MAX_BETA_WEIGHT = 1e6  # BNPO's bound on 1 / f(p)


def is_uniform(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group are all equal (up to rounding), so that it teaches nothing."""
    return max(rewards) - min(rewards) <= TINY * max(TINY, *map(abs, rewards))


def standardise(scale: ScaleRewards, ddof: int, eps: float) -> Credit:
    """(R - mean) / (std + eps) in each group; exactly 0 where its rewards are equal. DeepSeekMath 4.1.2."""
    divisors = SCALES[scale]

    def credit(groups: Sequence[Group]) -> list[tuple[float, ...]]:
        rewards = [group.rewards for group in groups]
        return [
            tuple(0.0 if is_uniform(rs) else c / divisor for c in _centred(rs))
            for rs, divisor in zip(rewards, divisors(rewards, ddof, eps), strict=True)
        ]

    return credit


def beta_normalise(reward_min: float, reward_max: float, ddof: int) -> Credit:
    """(x - p) / f(p): x the reward mapped to [0, 1], p its group mean, f a Beta density over the batch's p.

    Moments of p give Beta(a, b); f has alpha = max(1, 1 + a/3), beta = max(1, 1 + b/3). Where p has no spread
    (one prompt, or all alike) alpha = beta = 1, which leaves x - p. 1/f is at most 1e6. Raises ValueError for
    a reward outside [reward_min, reward_max]. Source: BNPO's released code; ALGORITHMS section 6.
    """

    def credit(groups: Sequence[Group]) -> list[tuple[float, ...]]:
        mapped = [[_unit(r, reward_min, reward_max) for r in group.rewards] for group in groups]
        rates = [_mean(xs) for xs in mapped]
        alpha, beta = _beta_parameters(rates, ddof)
        return [
            tuple(0.0 if is_uniform(xs) else (x - p) * _inverse_density(p, alpha, beta) for x in xs)
            for xs, p in zip(mapped, rates, strict=True)
        ]

    return credit


def _unit(reward: float, low: float, high: float) -> float:
    require(
        low <= reward <= high,
        "reward",
        reward,
        f"bnpo maps rewards from [reward_min, reward_max] = [{low}, {high}] to [0, 1]; "
        "set both to the least and greatest total that the rewards can give",
    )
    return (reward - low) / (high - low)


def _beta_parameters(rates: Sequence[float], ddof: int) -> tuple[float, float]:
    if len(rates) < 2 or is_uniform(rates):
        return 1.0, 1.0
    mean, variance = _mean(rates), _std(rates, ddof) ** 2
    concentration = mean * (1 - mean) / variance - 1
    return max(1.0, 1 + concentration * mean / 3), max(1.0, 1 + concentration * (1 - mean) / 3)


def _inverse_density(p: float, alpha: float, beta: float) -> float:
    """1 / f(p; alpha, beta) for 0 < p < 1, at most MAX_BETA_WEIGHT."""
    norm = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
    log_inverse = norm - (alpha - 1) * math.log(p) - (beta - 1) * math.log1p(-p)
    return math.exp(min(log_inverse, math.log(MAX_BETA_WEIGHT)))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _centred(values: Sequence[float]) -> list[float]:
    mean = _mean(values)
    return [value - mean for value in values]


def _std(values: Sequence[float], ddof: int) -> float:
    squares = math.fsum(c * c for c in _centred(values))
    return math.sqrt(squares / max(len(values) - ddof, 1))


def _group_std(rewards: Sequence[Sequence[float]], ddof: int, eps: float) -> list[float]:
    return [_std(rs, ddof) + eps for rs in rewards]


def _batch_std(rewards: Sequence[Sequence[float]], ddof: int, eps: float) -> list[float]:
    everything = [r for rs in rewards for r in rs]
    return [_std(everything, ddof) + eps] * len(rewards) if everything else []


def _one(rewards: Sequence[Sequence[float]], ddof: int, eps: float) -> list[float]:
    return [1.0] * len(rewards)


# What the centred rewards of each group are divided by.
SCALES: dict[str, Callable[[Sequence[Sequence[float]], int, float], list[float]]] = {
    "group": _group_std,
    "batch": _batch_std,
    "none": _one,
}
