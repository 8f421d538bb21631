"""A policy small enough to enumerate: a table of logits per context, and the Rollouts protocol over it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hpcgrpo.algorithms.base import Algorithm, Metrics
from hpcgrpo.types import Batch, Completion, FinishReason, Group, Prompt, Rollout, Score, Totals, stable_seed

VOCAB, END, MAX_LENGTH = 4, 0, 4
ROWS_PER_DEVICE = 3
Context = tuple[int, ...]  # the prompt's tokens, then those of the completion so far


@dataclass
class Tabular:
    """pi(token | context) = softmax of that context's row, which starts from a seed of its own."""

    seed: int = 0
    table: dict[Context, Tensor] = field(default_factory=dict)

    def logits(self, context: Context) -> Tensor:
        if context not in self.table:
            generator = torch.Generator().manual_seed(stable_seed(self.seed, *context))
            row = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
            self.table[context] = row.requires_grad_()
        return self.table[context]

    def logprobs(self, prompt: Prompt, token_ids: Sequence[int]) -> Tensor:
        """[C] log-probs of a completion after a prompt."""
        contexts = [prompt.token_ids + tuple(token_ids[:t]) for t in range(len(token_ids))]
        rows = torch.stack([self.logits(c) for c in contexts]).log_softmax(-1)
        return rows[torch.arange(len(contexts)), torch.tensor(token_ids)]

    def sample(
        self, prompt: Prompt, seed: int, peer: Tabular | None = None, hint_tokens: int = 0
    ) -> Completion:
        """A completion, whose first `hint_tokens` tokens the peer writes."""
        rng = random.Random(seed)
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < MAX_LENGTH and (not tokens or tokens[-1] != END):
            writer = peer if peer is not None and len(tokens) < hint_tokens else self
            p = writer.logits(prompt.token_ids + tuple(tokens)).detach().softmax(-1)
            tokens.append(rng.choices(range(VOCAB), p.tolist())[0])
            logprobs.append(p[tokens[-1]].log().item())
        reason: FinishReason = "stop" if tokens[-1] == END else "length"
        text, hint = " ".join(map(str, tokens)), min(hint_tokens, len(tokens))
        return Completion(tuple(tokens), tuple(logprobs), reason, text, seed, hint_length=hint)

    def gradient(self) -> dict[Context, Tensor]:
        return {c: row.grad if row.grad is not None else torch.zeros(VOCAB) for c, row in self.table.items()}


def prompt(position: int) -> Prompt:
    text = f"question {position}"
    return Prompt(position, position, ({"role": "user", "content": text},), text, (10 + position,))


def completion(
    tokens: Sequence[int] = (1, END), *, seed: int = 0, reason: FinishReason = "stop"
) -> Completion:
    return Completion(tuple(tokens), (-1.0,) * len(tokens), reason, " ".join(map(str, tokens)), seed)


def group(
    rewards: Sequence[float], *, position: int = 0, rank: int = 0, lengths: Sequence[int] = ()
) -> Group:
    """A group with these rewards; completions differ in seed, and in length where `lengths` says so."""
    q, sizes = prompt(position), lengths or [2] * len(rewards)
    rows = [
        Rollout(q, completion((1,) * size, seed=stable_seed(position, i)), Score(float(r), {}))
        for i, (r, size) in enumerate(zip(rewards, sizes, strict=True))
    ]
    return Group(q, tuple(rows), rank=rank)


def ones(q: Prompt, c: Completion) -> float:
    """The reward of these tests: 1 for a first token 1, or 2, plus 0.5 for an end within the limit."""
    return float(c.token_ids[0] in (1, 2)) + 0.5 * (c.finish_reason == "stop")


@dataclass
class TableRollouts:
    """Rollouts of one rank of `ranks`, sampled from a Tabular; counts its collective calls."""

    policy: Tabular
    reward: Callable[[Prompt, Completion], float] = ones
    batch: int = 4  # prompts per round over all ranks
    rank: int = 0
    ranks: int = 1
    reduce: Callable[[int], int] = lambda count: count  # sum over ranks
    collective: list[str] = field(default_factory=list)
    asked: list[tuple[int, int, str]] = field(default_factory=list)  # (position, num, stage)
    round: int = 0
    peer: Tabular | None = None  # writes hints

    def first(self) -> list[Prompt]:
        start = self.round * self.batch
        return [prompt(i) for i in range(start, start + self.batch) if i % self.ranks == self.rank]

    def __call__(
        self, prompts: Sequence[Prompt], num: int, stage: str = "sample", *, hint_tokens: int = 0
    ) -> list[tuple[Rollout, ...]]:
        assert not hint_tokens or self.peer is not None, "hints need a peer"
        self.asked += [(q.position, num, stage) for q in prompts]
        return [tuple(self._rollout(q, i, stage, hint_tokens) for i in range(num)) for q in prompts]

    def _rollout(self, q: Prompt, sample: int, stage: str, hint_tokens: int) -> Rollout:
        c = self.policy.sample(q, stable_seed(0, q.position, stage, sample), self.peer, hint_tokens)
        return Rollout(q, c, Score(self.reward(q, c), {}))

    def refine(
        self,
        prompt: Prompt,
        draft: Completion,
        *,
        template: str,
        max_length: int | None,
        keep_reasoning: bool,
    ) -> Prompt:
        text = template.replace("{question}", prompt.text).replace("{draft}", draft.text)
        header = template != "{question}{draft}"
        ids = prompt.token_ids + ((9,) if header else ()) + draft.token_ids
        return replace(prompt, text=text, messages=({"role": "user", "content": text},), token_ids=ids)

    def more(self) -> list[Prompt]:
        self.collective.append("more")
        self.round += 1
        return self.first()

    def total(self, count: int) -> int:
        self.collective.append("total")
        return self.reduce(count)


def compared(groups: Sequence[Group], small: Tabular, large: Tabular) -> list[Group]:
    """The groups with both policies' log-probs on every rollout; a hint's tokens count as the small one's."""

    def both(r: Rollout) -> Rollout:
        old, peer = (tuple(p.logprobs(r.prompt, r.completion.token_ids).tolist()) for p in (small, large))
        hint = r.completion.hint_length
        behavior = old[:hint] + r.completion.logprobs[hint:]
        return replace(r, old=old, peer=peer, completion=replace(r.completion, logprobs=behavior))

    return [replace(g, rollouts=tuple(map(both, g.rollouts))) for g in groups]


# ---- one optimizer step, written the plain way


def step(
    groups: Sequence[Group],
    algorithm: Algorithm,
    policy: Tabular,
    pieces: Callable[[int], list[list[int]]] = lambda rows: [list(range(rows))],
    *,
    old: Tabular | None = None,
    reference: Tabular | None = None,
    peer: Tabular | None = None,
    progress: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Metrics, dict[Context, Tensor]]:
    """Loss, metrics (sums and extremes) and gradient of a step whose kept rows are cut into `pieces`."""
    streams = {"old": old, "reference": reference, "peer": peer}
    advantages = algorithm.credit(groups)
    kept = algorithm.select(groups, advantages)
    rows = [(groups[g].rollouts[i], advantages[g][i]) for g, indices in enumerate(kept) for i in indices]
    lengths = [len(r.completion.token_ids) for r, _ in rows]
    weights = algorithm.weigh(lengths, totals_of(groups, lengths))
    for row in policy.table.values():
        row.grad = None
    loss, metrics = torch.zeros((), dtype=dtype), dict[str, Tensor]()
    for piece in pieces(len(rows)):
        chosen = [(rows[i][0], rows[i][1], weights[i]) for i in piece]
        new, batch = _batch(chosen, policy, streams, dtype)
        batch = replace(batch, progress=progress)
        value, sums = algorithm.loss(new, batch)
        value.backward()
        loss = loss + value.detach()
        metrics = {k: _merge(k, metrics[k], v) if metrics else v for k, v in sums.items()}
    return loss, metrics, {c: g.clone() for c, g in policy.gradient().items()}


def totals_of(
    groups: Sequence[Group], lengths: Sequence[int], rows_per_device: int = ROWS_PER_DEVICE
) -> Totals:
    sampled = [len(r.completion.token_ids) for g in groups for r in g.rollouts]
    return Totals(len(lengths), sum(lengths), len(sampled), sum(sampled), MAX_LENGTH, rows_per_device)


def _merge(name: str, a: Tensor, b: Tensor) -> Tensor:
    if name.endswith("/max"):
        return torch.maximum(a, b)
    return torch.minimum(a, b) if name.endswith("/min") else a + b


def _batch(
    rows: Sequence[tuple[Rollout, float, float]],
    policy: Tabular,
    streams: Mapping[str, Tabular | None],
    dtype: torch.dtype,
) -> tuple[Tensor, Batch]:
    def logprobs(of: Tabular) -> Tensor:
        parts = [of.logprobs(r.prompt, r.completion.token_ids) for r, _, _ in rows]
        return torch.cat([torch.zeros(0, dtype=dtype, requires_grad=True), *parts]).to(dtype)

    lengths = torch.tensor([len(r.completion.token_ids) for r, _, _ in rows], dtype=torch.int64)
    behavior = [lp for r, _, _ in rows for lp in r.completion.logprobs]
    batch = Batch(
        row=torch.arange(len(rows)).repeat_interleave(lengths),
        lengths=lengths,
        advantages=torch.tensor([a for _, a, _ in rows], dtype=dtype).repeat_interleave(lengths),
        weights=torch.tensor([w for _, _, w in rows], dtype=dtype).repeat_interleave(lengths),
        behavior=torch.tensor(behavior, dtype=dtype),
        rewards=torch.tensor([r.reward for r, _, _ in rows], dtype=dtype).repeat_interleave(lengths),
        **{name: None if of is None else logprobs(of) for name, of in streams.items()},
    )
    return logprobs(policy), batch
