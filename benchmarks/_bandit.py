"""Questions with K answers of one token each, and the package's own algorithms on them.

Everything that `controlled.py` measures has a closed form here, derived by hand and independent of the package.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.types import Batch, Completion, Group, Prompt, Rollout, Score, Totals

RIGHT = 0  # the arm that the one-right-answer tasks reward
PLAIN, EMPTY = -2, -1  # what a prompt shows besides an arm: the question alone, or an empty draft


@dataclass
class Bandits:
    """R independent policies over K arms, each with a plain prompt form and a draft form.

    Plain logits: sqrt(tau) shared + sqrt(1 - tau) plain. Draft logits: sqrt(tau) shared + sqrt(1 - tau) draft,
    plus `copy` on the arm that the draft shows. So a gradient step through one form moves that form's own
    logits by learning rate x gradient, and the other's by tau times that (the transfer).
    """

    tau: Tensor  # [R] float64, 0 to 1
    copy: Tensor  # [R] float64
    parts: dict[str, Tensor]  # shared, plain, draft: [R, K]

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.parts.values(), self.copy]

    def logits(self, replica: Tensor, shown: Tensor) -> Tensor:
        """[B] replicas, [B] what each prompt shows -> [B, K]."""
        tau = self.tau[replica, None]
        own = torch.where(
            (shown == PLAIN)[:, None], self.parts["plain"][replica], self.parts["draft"][replica]
        )
        logits = tau.sqrt() * self.parts["shared"][replica] + (1 - tau).sqrt() * own
        arms = torch.arange(logits.shape[1])
        return logits + self.copy[replica, None] * (shown[:, None] == arms)

    @torch.no_grad()
    def probabilities(self, shown: int) -> Tensor:
        """[R, K] of every replica, for one kind of prompt."""
        replica = torch.arange(len(self.tau))
        return self.logits(replica, torch.full_like(replica, shown)).softmax(-1)

    @torch.no_grad()
    def accuracies(self) -> tuple[Tensor, Tensor]:
        """Success rates [R] in one pass, and in two (a sampled answer, shown as the draft of a second)."""
        one, empty = self.probabilities(PLAIN), self.probabilities(EMPTY)
        more = self.copy.exp()[:, None] - 1  # by how much a draft's copy bonus raises its arm's weight
        right = empty[:, RIGHT, None] / (1 + empty * more)  # [R, K] success after each draft
        right[:, RIGHT] *= self.copy.exp()
        return one[:, RIGHT], (one * right).sum(1)


def start(*, arms: int, accuracy: float, tau: Tensor, copy: float, learn_copy: bool = False) -> Bandits:
    """Policies that are right with `accuracy` in both forms (empty draft), the wrong arms being equally likely."""
    z = torch.zeros(len(tau), arms, dtype=torch.float64)
    z[:, RIGHT] = math.log(accuracy * (arms - 1) / (1 - accuracy))
    divisor = tau.sqrt()[:, None] + (1 - tau).sqrt()[:, None]
    parts = {name: (z / divisor).requires_grad_() for name in ("shared", "plain", "draft")}
    return Bandits(tau, torch.full_like(tau, copy).requires_grad_(learn_copy), parts)


# ---- the Rollouts that an algorithm's `explore` asks


@dataclass
class BanditRollouts:
    """Samples answers (or says those of a script) and grades them with a reward for each arm."""

    bandits: Bandits
    rewards: Sequence[float]  # [K]
    generator: torch.Generator | None = None
    script: Callable[[int, str], Sequence[int]] | None = (
        None  # (position, stage) -> the arms that are "sampled"
    )
    seeds: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.scores = [Score(float(r), {}) for r in self.rewards]

    def __call__(
        self, prompts: Sequence[Prompt], num: int, stage: str = "sample", *, hint_tokens: int = 0
    ) -> list[tuple[Rollout, ...]]:
        assert not hint_tokens, "nobody writes hints here"
        if self.script is not None:
            arms = [self.script(p.position, stage) for p in prompts]
            assert all(len(row) == num for row in arms)
        else:
            p = self.bandits.logits(*where(prompts)).detach().softmax(-1)
            arms = torch.multinomial(p, num, replacement=True, generator=self.generator).tolist()
        return [tuple(self._rollout(q, arm) for arm in row) for q, row in zip(prompts, arms, strict=True)]

    def _rollout(self, prompt: Prompt, arm: int) -> Rollout:
        answer = Completion((arm,), (0.0,), "stop", "", next(self.seeds))
        return Rollout(prompt, answer, self.scores[arm])

    def refine(self, prompt: Prompt, draft: Completion, **_: Any) -> Prompt:
        return replace(prompt, token_ids=draft.token_ids or (EMPTY,))

    def more(self) -> list[Prompt]:
        raise AssertionError("dynamic sampling has no meaning for a single question")

    def total(self, count: int) -> int:
        return count


def questions(replicas: int, each: int) -> list[Prompt]:
    """`each` plain prompts for every replica; `Prompt.row` is the replica."""
    return [Prompt(i, i % replicas, (), "", (PLAIN,)) for i in range(replicas * each)]


def where(prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
    """-> [B] replica and [B] what is shown."""
    return torch.tensor([p.row for p in prompts]), torch.tensor([p.token_ids[0] for p in prompts])


# ---- the package's five functions, put together


def loss_of(
    bandits: Bandits,
    algorithm: Algorithm,
    groups: Sequence[Group],
    probability: Callable[[Group], float] = lambda group: 1.0,
) -> Tensor:
    """The step's loss, the mean over the groups weighted with `probability`, from credit to loss."""
    advantages = algorithm.credit(groups)
    kept = algorithm.select(groups, advantages)
    chosen = [(g, i) for g, indices in enumerate(kept) for i in indices]
    rows = [groups[g].rollouts[i] for g, i in chosen]
    sampled = sum(len(g.rollouts) for g in groups)
    weights = algorithm.weigh([1] * len(rows), Totals(len(rows), len(rows), sampled, sampled, 1, len(rows)))
    factors = [probability(g) for g in groups]
    arms = torch.tensor([r.completion.token_ids[0] for r in rows])
    new = bandits.logits(*where([r.prompt for r in rows])).log_softmax(-1).gather(1, arms[:, None])[:, 0]
    batch = Batch(
        row=torch.arange(len(rows)),
        lengths=torch.ones(len(rows), dtype=torch.int64),
        advantages=torch.tensor([advantages[g][i] for g, i in chosen], dtype=torch.float64),
        weights=torch.tensor(
            [w * factors[g] for w, (g, _) in zip(weights, chosen, strict=True)], dtype=torch.float64
        ),
    )
    return algorithm.loss(new, batch)[0]


def ascend(
    bandits: Bandits,
    algorithm: Algorithm,
    rollouts: BanditRollouts,
    *,
    prompts_per_step: int,
    learning_rate: Tensor,
) -> list[Group]:
    """One step of plain gradient ascent of every replica -> its groups; `learning_rate` [R].

    All replicas share one call of the package's functions: its mean over rows is theirs times their number,
    as every replica keeps equally many.
    """
    replicas = len(bandits.tau)
    groups = algorithm.explore(questions(replicas, prompts_per_step), rollouts)
    (loss_of(bandits, algorithm, groups) * replicas).backward()
    with torch.no_grad():
        for p in bandits.parameters:
            if p.grad is not None:
                p -= learning_rate.view(-1, *[1] * (p.dim() - 1)) * p.grad
                p.grad = None
    return groups


def exact_gradient(bandits: Bandits, algorithm: Algorithm, rewards: Sequence[float]) -> dict[str, Tensor]:
    """The expected ascent direction of a step of one question, over every possible outcome of its sampling.

    All K^(N+G) outcomes go through `explore` as a script and count with their probability. One replica.
    """
    arms, drafts, num = len(rewards), algorithm.num_drafts, algorithm.num_generations
    outcomes = list(itertools.product(range(arms), repeat=drafts + num))
    prompts = [Prompt(i, 0, (), "", (PLAIN,)) for i in range(len(outcomes))]

    def script(position: int, stage: str) -> Sequence[int]:
        outcome = outcomes[position]
        return outcome[:drafts] if stage == "draft" else outcome[drafts:]

    groups = algorithm.explore(prompts, BanditRollouts(bandits, rewards, script=script))
    chance = _chances(bandits, groups, drafts, outcomes)
    loss = loss_of(bandits, algorithm, groups, lambda g: chance[g.prompt.position] * len(outcomes))
    names = [name for name in bandits.parts if bandits.parts[name].requires_grad]
    gradients = torch.autograd.grad(-loss, [bandits.parts[n] for n in names], allow_unused=True)
    return {
        n: torch.zeros(arms, dtype=torch.float64) if g is None else g[0]
        for n, g in zip(names, gradients, strict=True)
    }


def _chances(
    bandits: Bandits, groups: Sequence[Group], drafts: int, outcomes: Sequence[Sequence[int]]
) -> dict[int, float]:
    """Probability of each outcome: of its drafts in the plain form, of its answers to the prompt they lead to."""
    tables: dict[int, list[float]] = {}
    for g in groups:
        if g.stage == "sample":
            tables[g.prompt.token_ids[0]] = []
    tables = {shown: bandits.probabilities(shown)[0].tolist() for shown in (*tables, PLAIN)}
    return {
        g.prompt.position: math.prod(tables[PLAIN][a] for a in outcomes[g.prompt.position][:drafts])
        * math.prod(tables[g.prompt.token_ids[0]][a] for a in outcomes[g.prompt.position][drafts:])
        for g in groups
        if g.stage == "sample"
    }


# ---- closed forms, for a reward of 1 on one arm and 0 on the others


def pull(p: Tensor, num: int, *, std_eps: float | None = 1e-4) -> Tensor:
    """[...]: c in E[gradient with respect to the logits] = c (e_right - pi), for groups of `num`, success rate p.

    m right answers of a group (binomial) have advantage (1 - m/G)/s each and the others -(m/G)/s, where
    s = sqrt(m(G - m)/(G(G - 1))) + eps. The mean score of a right answer is u = e_right - pi, that of a wrong one
    -p/(1 - p) u, as scores have mean 0. So c = E[m(G - m)/(G^2 s)]/(1 - p). `std_eps` None: s = 1, and then
    c = (1 - 1/G) p, the gradient of p but for the baseline's factor.
    """
    if std_eps is None:
        return (1 - 1 / num) * p
    total = torch.zeros_like(p)
    for m in range(1, num):
        std = math.sqrt(m * (num - m) / (num * (num - 1)))
        total += math.comb(num, m) * p**m * (1 - p) ** (num - m) * m * (num - m) / num**2 / (std + std_eps)
    return total / (1 - p)


def shown_drafts(plain: Sequence[float], num: int, choice: str) -> dict[int, float]:
    """Chance of each arm (or of EMPTY) to be the draft in the prompt, of `num` drafts from `plain` [K], arm 0 right.

    best: right with 1 - (1-p)^N (Proposition 3.1), worst: with p^N; a wrong one is distributed as wrong answers
    are, since equally graded drafts are taken in the order in which they were drawn.
    """
    p = plain[RIGHT]
    if choice == "empty":
        return {EMPTY: 1.0}
    right = {"best": 1 - (1 - p) ** num, "worst": p**num, "random": p}[choice]
    wrong = {a: (1 - right) * q / (1 - p) for a, q in enumerate(plain) if a != RIGHT}
    return {RIGHT: right, **wrong}


def closed_gradient(
    bandits: Bandits,
    *,
    drafts: int,
    num: int,
    choice: str = "best",
    std_eps: float | None = 1e-4,
    train_drafts: bool = False,
) -> dict[str, Tensor]:
    """By hand: the expected ascent direction of iGRPO (`drafts` N > 0) or GRPO (0), by part, [K] each. One replica.

    With `train_drafts` the drafts are a group of N too, and the mean is over N + G completions.
    """
    tau = float(bandits.tau[0])
    plain = bandits.probabilities(PLAIN)[0]

    def direction(pi: Tensor, size: int) -> Tensor:
        return pull(pi[..., RIGHT, None], size, std_eps=std_eps) * (_one_hot(RIGHT, len(plain)) - pi)

    first, second = torch.zeros_like(plain), torch.zeros_like(plain)
    if drafts:
        chances = shown_drafts(plain.tolist(), drafts, choice)
        shown = torch.tensor(list(chances))
        after = bandits.logits(torch.zeros_like(shown), shown).detach().softmax(-1)  # [drafts, K]
        second = torch.tensor(list(chances.values()), dtype=torch.float64) @ direction(after, num)
    else:
        first = direction(plain, num)
    if train_drafts:
        first, second = drafts / (drafts + num) * direction(plain, drafts), num / (drafts + num) * second
    shared, own = math.sqrt(tau), math.sqrt(1 - tau)
    return {"shared": shared * (first + second), "plain": own * first, "draft": own * second}


def single_pass_gain(bandits: Bandits, gradient: dict[str, Tensor]) -> float:
    """First-order change of the single-pass success rate per unit of learning rate under that direction."""
    tau = float(bandits.tau[0])
    plain = bandits.probabilities(PLAIN)[0]
    moved = math.sqrt(tau) * gradient["shared"] + math.sqrt(1 - tau) * gradient["plain"]
    return float(plain[RIGHT] * (_one_hot(RIGHT, len(plain)) - plain) @ moved)


def _one_hot(arm: int, arms: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(arm), arms).double()
