"""CPPO on a bandit: bias and variance of the pruned gradient by enumeration, and what that does to learning."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from _bandit import PLAIN, BanditRollouts, Bandits, ascend, loss_of, start
from torch import Tensor

from hpcgrpo.algorithms import build
from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.types import Group, Prompt

METRICS = ("smallest", "random", "largest", "smallest_raw", "largest_raw")  # what is pruned
BINARY = (1.0, 0.0)
GRADED = (3.0, 1.0, 0.0)  # right and formatted, formatted only, neither (CPPO's appendix A)
LEARNING_RATES = (0.3, 1.0, 3.0)


def cppo(rate: float, num: int, **options: Any) -> Algorithm:
    """CPPO over GRPO with groups of `num`, as the package builds it; rate 0 is GRPO."""
    base = {"name": "grpo", "num_generations": num, "importance_sampling_correction": "none"}
    return build({"name": "cppo", "pruning_rate": rate, "base": base, **options})


def ordered(policy: Sequence[float], num: int) -> dict[tuple[int, ...], float]:
    """Every group of `num` answers in order, with its probability."""
    return {
        drawn: math.prod(policy[a] for a in drawn)
        for drawn in itertools.product(range(len(policy)), repeat=num)
    }


def by_front(p: float, num: int, kept: int) -> dict[tuple[int, ...], float]:
    """Two arms: groups up to the order within the first `kept` places and within the rest, with probabilities.

    Which completions of equal |A| are kept depends on no more than that, where the first win ties.
    """
    found = {}
    for m, j in itertools.product(range(num + 1), range(kept + 1)):
        ways = math.comb(kept, j) * math.comb(num - kept, m - j) if 0 <= m - j <= num - kept else 0
        if ways:
            drawn = (*[0] * j, *[1] * (kept - j), *[0] * (m - j), *[1] * (num - kept - m + j))
            found[drawn] = ways * p**m * (1 - p) ** (num - m)
    return found


def outcomes(
    policy: Sequence[float], rewards: Sequence[float], chances: dict[tuple[int, ...], float]
) -> tuple[Bandits, list[Group], Tensor]:
    """These groups of answers, each with a copy of the policy [K] of its own, and their probabilities."""
    drawn = list(chances)
    z = torch.tensor(policy, dtype=torch.float64).log().expand(len(drawn), -1)
    parts = {"shared": torch.zeros_like(z), "plain": z.clone().requires_grad_(), "draft": torch.zeros_like(z)}
    zeros = torch.zeros(len(drawn), dtype=torch.float64)
    copies = Bandits(zeros, zeros, parts)
    prompts = [Prompt(i, i, (), "", (PLAIN,)) for i in range(len(drawn))]
    rollouts = BanditRollouts(copies, rewards, script=lambda position, stage: drawn[position])
    groups = build({"name": "grpo", "num_generations": len(drawn[0])}).explore(prompts, rollouts)
    return copies, groups, torch.tensor(list(chances.values()), dtype=torch.float64)


def gradients(copies: Bandits, groups: Sequence[Group], algorithm: Algorithm) -> Tensor:
    """[outcomes, K]: the ascent direction of one question's step in each outcome, with respect to its logits."""
    loss = loss_of(copies, algorithm, groups) * len(groups)
    return -torch.autograd.grad(loss, copies.parts["plain"])[0]


def moments(given: Tensor, chance: Tensor) -> tuple[Tensor, float]:
    """Mean [K] and total variance (trace) of one question's gradient."""
    mean = chance @ given
    return mean, float(chance @ (given - mean).square().sum(1))


def pruned_pull(p: float, num: int, kept: int, *, std_eps: float = 1e-4, divisor: int | None = None) -> float:
    """By hand: c in E[gradient] = c (e_right - pi) of CPPO with binary rewards, `kept` of `num` completions.

    Of m right answers the rarer kind has the larger |A|, so it is kept first; at m = G/2 all tie and the first
    `kept` hold half of each kind on average. Scores as in `pull`. `divisor` is k (None) or G.
    """
    total = 0.0
    for m in range(1, num):
        right = kept / 2 if 2 * m == num else min(m, kept) if 2 * m < num else kept - min(num - m, kept)
        std = math.sqrt(m * (num - m) / (num * (num - 1))) + std_eps
        gain = right * (1 - m / num) / std + (kept - right) * (m / num) / std * p / (1 - p)
        total += math.comb(num, m) * p**m * (1 - p) ** (num - m) * gain / (divisor or kept)
    return total


def describe(mean: Tensor, variance: float, of: Tensor, value: Tensor, share: float) -> dict[str, float]:
    """How a pruned gradient compares with the whole one `of`; `value` [K] is grad E[r], share = k/G.

    scale: its part along `of`, over that of `of`. noise: variance over squared mean, of one question. With
    allocation a step holds 1/share as many questions, so the noise of a step is noise x share.
    """
    size, other = float(mean.norm()), float(of.norm())
    return {
        "scale": float(mean @ of) / other**2,
        "cosine": float(mean @ of) / (size * other) if size else 0.0,
        "noise": variance / size**2 if size else math.inf,
        "noise_with_allocation": variance / size**2 * share if size else math.inf,
        "gain": float(mean @ value),
    }


def exact_by_rate(p: float, *, num: int = 16) -> dict[str, Any]:
    """CPPO at each rate beside GRPO, for a question that is answered right with probability `p`."""
    found, whole = {}, None
    for rate in (0.0, 0.5, 0.75, 0.875, 0.9375):
        algorithm = cppo(rate, num)
        copies, groups, chance = outcomes((p, 1 - p), BINARY, by_front(p, num, algorithm.batch_share))
        mean, variance = moments(gradients(copies, groups, algorithm), chance)
        whole = mean if whole is None else whole
        found[str(rate)] = describe(
            mean, variance, whole, slope((p, 1 - p), BINARY), algorithm.batch_share / num
        )
    return found


def exact_by_metric(policy: Sequence[float], *, num: int = 8) -> dict[str, Any]:
    """Every rule for what to prune, beside GRPO, with graded rewards."""
    copies, groups, chance = outcomes(policy, GRADED, ordered(policy, num))
    cases = {"none": cppo(0.0, num)}
    cases |= {f"{m} {rate}": cppo(rate, num, prune_metric=m) for rate in (0.5, 0.75) for m in METRICS}
    found = {name: moments(gradients(copies, groups, a), chance) for name, a in cases.items()}
    whole, value = found["none"][0], slope(policy, GRADED)
    return {name: describe(*found[name], whole, value, a.batch_share / num) for name, a in cases.items()}


def slope(policy: Sequence[float], rewards: Sequence[float]) -> Tensor:
    """[K]: the gradient of E[r] with respect to the logits."""
    pi, r = torch.tensor(policy, dtype=torch.float64), torch.tensor(rewards, dtype=torch.float64)
    return pi * (r - pi @ r)


def exact_tables() -> dict[str, Any]:
    """By rate with binary rewards and G = 16 (the paper's), by metric with graded rewards and G = 8."""
    policies = {"early": (0.05, 0.35, 0.6), "middle": (0.4, 0.4, 0.2), "late": (0.8, 0.15, 0.05)}
    return {
        "binary_g16": {str(p): exact_by_rate(p) for p in (0.1, 0.3, 0.5, 0.8)},
        "graded_g8": {name: exact_by_metric(policy) for name, policy in policies.items()},
    }


# ---- learning


def curves(*, seeds: int, steps: int, num: int = 16) -> dict[str, Any]:
    """Mean reward over the run and at its end at equal rollouts; the best of the learning rates for each."""
    rates = (0.5, 0.75, 0.875, 0.9375)
    cases = {"GRPO": cppo(0.0, num)}
    cases |= {f"P={r}": cppo(r, num) for r in rates}
    cases |= {f"P={r} no allocation": cppo(r, num, allocation=False) for r in rates}
    cases |= {f"P={r} {m}": cppo(r, num, prune_metric=m) for r in (0.5, 0.75) for m in METRICS[1:]}
    cases |= {f"P={r} 1/G": cppo(r, num, normalise_by="group") for r in rates}
    return {name: learn(a, seeds=seeds, steps=steps, num=num) for name, a in cases.items()}


def learn(algorithm: Algorithm, *, seeds: int, steps: int, num: int) -> dict[str, Any]:
    """`steps` x 2 questions x `num` rollouts; with allocation in fewer, larger steps."""
    rewards = (3.0, 2.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    more = num // algorithm.batch_share
    lrs = torch.tensor(LEARNING_RATES, dtype=torch.float64).repeat_interleave(seeds)
    bandits = start(arms=len(rewards), accuracy=0.1, tau=torch.zeros_like(lrs), copy=0.0)
    rollouts = BanditRollouts(bandits, rewards, torch.Generator().manual_seed(0))
    r = torch.tensor(rewards, dtype=torch.float64)
    means = []
    for _ in range(steps // more):
        ascend(bandits, algorithm, rollouts, prompts_per_step=2 * more, learning_rate=lrs)
        means.append(bandits.probabilities(PLAIN) @ r)
    every = torch.stack(means).view(len(means), len(LEARNING_RATES), seeds)
    area, end = every.mean(0), every[-1]
    best = int(area.mean(1).argmax())
    return {
        "updates": len(means),
        "by_learning_rate": [summary(a) for a in area],
        "learning_rate": LEARNING_RATES[best],
        "area": summary(area[best]),
        "end": summary(end[best]),
    }


def summary(values: Tensor) -> list[float]:
    """Mean and its standard error over seeds."""
    return [float(values.mean()), float(values.std()) / math.sqrt(len(values))]
