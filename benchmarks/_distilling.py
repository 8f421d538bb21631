"""CoDistill-GRPO on a bandit: two tables, a teacher of known quality, and the expected gradient by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _bandit import PLAIN, RIGHT
from _pruning import summary
from torch import Tensor

from hpcgrpo.algorithms import build
from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.types import Batch, Completion, Group, Prompt, Rollout, Score, Totals

ARMS = 10
PROMPTS = 2  # a step


@dataclass
class Pair:
    """R pairs of a small and a large policy: [R, K] logits each."""

    small: Tensor
    large: Tensor


def pair(*, small: float, large: float, replicas: int, arms: int = ARMS) -> Pair:
    """Both right with a probability of their own, the wrong arms equally likely."""

    def table(p: float) -> Tensor:
        z = torch.zeros(replicas, arms, dtype=torch.float64)
        z[:, RIGHT] = math.log(p * (arms - 1) / (1 - p))
        return z.requires_grad_()

    return Pair(table(small), table(large))


def compared(policies: Pair, answers: Sequence[Sequence[int]], rewards: Sequence[float]) -> list[Group]:
    """One group a row of answers, of replica row % R, with both policies' log-probs from before the step."""
    old, peer = (z.detach().log_softmax(-1).tolist() for z in (policies.small, policies.large))
    scores, seeds = [Score(float(r), {}) for r in rewards], itertools.count()
    groups = []
    for i, row in enumerate(answers):
        q = Prompt(i, i % len(old), (), "", (PLAIN,))
        rollouts = [
            Rollout(
                q,
                Completion((a,), (0.0,), "stop", "", next(seeds)),
                scores[a],
                (old[q.row][a],),
                (peer[q.row][a],),
            )
            for a in row
        ]
        groups.append(Group(q, tuple(rollouts)))
    return groups


def loss_of(
    logits: Tensor, algorithm: Algorithm, groups: Sequence[Group], chances: Sequence[float] | None = None
) -> Tensor:
    """From credit to loss of one policy, `chances` weighing the groups; the ratio is over `Rollout.old`."""
    advantages = algorithm.credit(groups)
    chosen = [(g, i) for g, kept in enumerate(algorithm.select(groups, advantages)) for i in kept]
    rows = [groups[g].rollouts[i] for g, i in chosen]
    weights = algorithm.weigh(
        [1] * len(rows), Totals(len(rows), len(rows), len(rows), len(rows), 1, len(rows))
    )
    factors = [1.0] * len(groups) if chances is None else chances
    replica = torch.tensor([r.prompt.row for r in rows])
    arms = torch.tensor([r.completion.token_ids[0] for r in rows])

    def floats(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    batch = Batch(
        row=torch.arange(len(rows)),
        lengths=torch.ones(len(rows), dtype=torch.int64),
        advantages=floats([advantages[g][i] for g, i in chosen]),
        weights=floats([w * factors[g] for w, (g, _) in zip(weights, chosen, strict=True)]),
        old=floats([r.old[0] for r in rows if r.old]),
        peer=floats([r.peer[0] for r in rows if r.peer]),
    )
    return algorithm.loss(logits.log_softmax(-1)[replica, arms], batch)[0]


def codistill(*, sampled: int = 8, trained: int = 8, **options: Any) -> Algorithm:
    """The package's, with lengths of one token; all rollouts are trained on unless fewer are asked for."""
    chosen = "none" if sampled == trained else "max_variance"
    spec = {"num_rollouts": sampled, "num_train": trained, "downsample": chosen, "max_completion_length": 1}
    return build({"name": "codistill", **spec, "importance_sampling_correction": "none", **options})


def exact_gradient(policies: Pair, algorithm: Algorithm, rewards: Sequence[float]) -> Tensor:
    """[K]: the small policy's expected ascent direction, over every group it can sample. One replica."""
    pi = policies.small.detach()[0].softmax(-1).tolist()
    groups = list(itertools.product(range(len(pi)), repeat=algorithm.num_generations))
    chances = [math.prod(pi[a] for a in row) * len(groups) for row in groups]
    loss = loss_of(policies.small, algorithm, compared(policies, groups, rewards), chances)
    return -torch.autograd.grad(loss, policies.small)[0][0]


def by_hand(policies: Pair, rewards: Sequence[float], *, alpha: float, num: int) -> Tensor:
    """[K]: (1 - 1/G) (grad E[r] - alpha grad KL(small || large)), Theorem 1 with the mean baseline's factor.

    grad E[r] = pi (r - E[r]); grad KL = pi (d - KL) with d = log small - log large.
    """
    log_small, log_large = (z.detach()[0].log_softmax(-1) for z in (policies.small, policies.large))
    pi, r, d = log_small.exp(), torch.tensor(rewards, dtype=torch.float64), log_small - log_large
    return (1 - 1 / num) * (pi * (r - pi @ r) - alpha * pi * (d - pi @ d))


# ---- learning

Rule = Callable[[Pair, torch.Generator], tuple[Tensor | None, Tensor | None]]  # -> losses of small and large


def sampled(logits: Tensor, num: int, generator: torch.Generator) -> list[list[int]]:
    pi = logits.detach().softmax(-1).repeat(PROMPTS, 1)
    rows: list[list[int]] = torch.multinomial(pi, num, replacement=True, generator=generator).tolist()
    return rows


def alone(which: str) -> Rule:
    """Dr. GRPO of 8 on one policy's own samples: the same loss as CoDistill's without a teacher."""
    algorithm = build({"name": "dr_grpo", "num_generations": 8, "importance_sampling_correction": "none"})

    def rule(policies: Pair, generator: torch.Generator) -> tuple[Tensor | None, Tensor | None]:
        logits = getattr(policies, which)
        own = Pair(logits, logits)
        loss = loss_of(logits, algorithm, compared(own, sampled(logits, 8, generator), right_alone()))
        return (loss, None) if which == "small" else (None, loss)

    return rule


def together(algorithm: Algorithm, *, rewarded: bool = True, train_large: bool = True) -> Rule:
    """CoDistill's two updates on the small policy's samples; not `rewarded`: distillation alone."""

    def rule(policies: Pair, generator: torch.Generator) -> tuple[Tensor | None, Tensor | None]:
        answers = sampled(policies.small, algorithm.num_generations, generator)
        rewards = right_alone() if rewarded else [0.0] * ARMS
        groups = compared(policies, answers, rewards)
        assert algorithm.peer is not None
        large = loss_of(policies.large, algorithm.peer, groups) if train_large else None
        return loss_of(policies.small, algorithm, groups), large

    return rule


def right_alone() -> list[float]:
    return [1.0] + [0.0] * (ARMS - 1)


def rules() -> dict[str, Rule]:
    found = {"GRPO small": alone("small"), "GRPO large": alone("large")}
    for alpha in (0.0, 0.1, 0.5, 1.0):
        found[f"CoDistill alpha {alpha}"] = together(codistill(kd_alpha=alpha))
    found["CoDistill alpha 0.1, 14 to 8"] = together(codistill(sampled=14, kd_alpha=0.1))
    found["CoDistill alpha 0.1, large without clip"] = together(codistill(kd_alpha=0.1, large_is_clip="none"))
    found["distillation alone"] = together(codistill(kd_alpha=1.0), rewarded=False, train_large=False)
    return found


def learn(
    rule: Rule, *, small: float, large: float, seeds: int, steps: int, learning_rate: float
) -> dict[str, Any]:
    """Success of both policies, mean over the run and end, by plain gradient ascent."""
    policies = pair(small=small, large=large, replicas=seeds)
    generator = torch.Generator().manual_seed(0)
    history = []
    for _ in range(steps):
        losses = rule(policies, generator)
        for logits, loss in zip((policies.small, policies.large), losses, strict=True):
            if loss is not None:
                (gradient,) = torch.autograd.grad(loss * seeds, logits)
                logits.data -= learning_rate * gradient
        history.append([z.detach().softmax(-1)[:, RIGHT] for z in (policies.small, policies.large)])
    area = [torch.stack([h[i] for h in history]).mean(0) for i in (0, 1)]
    return {
        "small": summary(area[0]),
        "small_end": summary(history[-1][0]),
        "large": summary(area[1]),
        "large_end": summary(history[-1][1]),
    }


def study(*, seeds: int, steps: int) -> dict[str, Any]:
    """Gradients against the closed form, and learning from three starts of the pair."""
    policies = pair(small=0.2, large=0.6, replicas=1, arms=3)
    policies.small.data += torch.tensor([0.3, -0.2, 0.5])
    rewards = (1.0, 0.4, 0.0)
    errors = {}
    for alpha in (0.0, 0.5, 2.0):
        algorithm = codistill(sampled=4, trained=4, kd_alpha=alpha)
        want = by_hand(policies, rewards, alpha=alpha, num=4)
        errors[str(alpha)] = float((exact_gradient(policies, algorithm, rewards) - want).abs().max())
    starts = {"teacher .5": (0.1, 0.5), "teacher .9": (0.1, 0.9), "teacher no better": (0.3, 0.3)}
    return {
        "enumerated": errors,
        "learning": {
            label: {
                name: learn(rule, small=s, large=t, seeds=seeds, steps=steps, learning_rate=4.0)
                for name, rule in rules().items()
            }
            for label, (s, t) in starts.items()
        },
    }
