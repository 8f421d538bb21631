"""What a step samples: every rank asks for its own prompts, grades the answers, and all ranks get all groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.balance import Cost
from hpcgrpo.generation.hints import hinted
from hpcgrpo.profiler import Profile
from hpcgrpo.rewards import Grading
from hpcgrpo.types import (
    Arrived,
    Completion,
    Group,
    Prompt,
    Request,
    Rollout,
    Sampling,
    Stopped,
    stable_seed,
)

Stage = Literal["drafts", "step"]
Drafts = Mapping[int, tuple[Rollout, ...]]  # by Prompt.position


class Generator(Protocol):
    """Samples completions from the policy's weights as last pushed."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived | None = None
    ) -> list[Completion]: ...

    def metrics(self) -> dict[str, float]:
        """Of what was sampled since the last call."""

    def update_weights(self, tensors: Callable[[], Iterable[tuple[str, Any]]], version: int) -> None:
        """Take new weights; collective. `tensors` may be asked for more than once, by all ranks together."""


class Prompts(Protocol):
    """The run's endless order of questions."""

    def __len__(self) -> int: ...

    def take(self, position: int, count: int) -> list[Prompt]: ...


class Ranks(Protocol):
    """The learner ranks, for small things on a group with a time limit of its own."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def wait(self) -> None:
        """Return once every rank is here."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""


def gather(ranks: Ranks, profile: Profile, value: Any) -> list[Any]:
    """Every rank's value on every rank; the time until the slowest one has come counts as `wait`."""
    with profile.phase("wait"):
        ranks.wait()
    return ranks.gather(value)


@dataclass(frozen=True)
class Setup:
    """Counts and limits of a run that the loop needs, all computed from its configuration."""

    seed: int
    prompts_per_step: int
    batches_per_step: int  # optimizer steps a pass over what a step sampled
    num_iterations: int
    max_steps: int
    token_budget: int
    rows_per_device: int
    max_completion_length: int
    max_refine_prompt_length: int  # tokens of a prompt with a draft in it
    temperature: float
    shared_prefix: bool
    cost: Cost = field(
        default_factory=Cost
    )  # of training on a row, by which steps are shared out over the ranks
    ahead: Stage | None = None  # what of the next step is sampled while this one is learnt
    spare_staleness: int = 0  # optimizer steps that a server may lie behind the weights as last pushed


@dataclass(frozen=True)
class Explored:
    """What one step sampled, on every rank the same."""

    groups: tuple[Group, ...]  # in the prompts' order
    position: int  # of the next prompt that nobody has taken
    discarded: int = 0  # completions whose groups were not taken (refill)
    dropped: int = 0  # prompts that the generator could not answer
    metrics: Mapping[str, float] = field(default_factory=dict)  # the generator's own; each rank has its own


@dataclass(frozen=True)
class Ready:
    """What is there of a step before it begins."""

    explored: Explored | None = None
    drafts: Drafts = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)  # what it took, by metric


@dataclass
class Explorer:
    """Samples and grades, on the main thread or beside the learner on another; one call at a time.

    Its ranks are a group of their own, so that it may talk to the other ranks' while the learners do.
    """

    algorithm: Algorithm
    generator: Generator
    prompts: Prompts
    grading: Callable[[Sequence[Prompt]], Grading]
    refine: Callable[..., Prompt]
    ranks: Ranks
    profile: Profile
    setup: Setup
    push: Callable[[], None] = lambda: None  # the weights, again, to every generator; collective
    peer_generator: Generator | None = None  # of the other policy, where it writes hints
    decode: Callable[[Sequence[int]], str] | None = None  # token ids -> text; of hinted completions
    urgent: Callable[[], bool] = lambda: False  # whether to stop without finishing the step

    def step(self, position: int, drafted: Drafts | None = None) -> Explored:
        """The groups of the step whose first prompt is at `position`; `drafted` are drafts that it has already.

        Raises Stopped on all ranks where one is to stop at once.
        """
        self.generator.metrics()  # what was sampled between the steps does not count
        exploration = Exploration(self, position, drafted or {})
        mine = exploration.more()
        groups = [replace(g, rank=self.ranks.rank) for g in self.algorithm.explore(mine, exploration)]
        whole = [g for g in groups if g.answered]
        shares = self.exchange((whole, exploration.sampled, len(groups) - len(whole)))
        everyone = sorted((g for share, _, _ in shares for g in share), key=lambda g: g.prompt.position)
        taken = sorted({g.prompt.position for g in everyone})[: self.setup.prompts_per_step]
        chosen = tuple(g for g in everyone if taken and g.prompt.position <= taken[-1])
        used = sum(len(g.rollouts) + len(g.drafts) for g in chosen if g.stage == "sample")
        return Explored(
            chosen,
            exploration.position,
            discarded=sum(sampled for _, sampled, _ in shares) - used,
            dropped=sum(dropped for _, _, dropped in shares),
            metrics=self.generator.metrics(),
        )

    def ahead(self, stage: Stage, position: int, push: Callable[[], None]) -> Ready:
        """All of the step whose first prompt is at `position`, or its drafts alone, from a thread beside the learner.

        Weights are pushed by `push`, and the time counts to a clock of its own. Where a run is to stop at once, what is
        sampled already is kept: only a generator that breaks off for it leaves nothing.
        """
        pushes, self.push = self.push, push
        urgent, self.urgent = self.urgent, lambda: False
        profile, self.profile = self.profile, Profile(moved=self.profile.moved, clock=self.profile.clock)
        self.profile.begin_steps()
        try:
            explored = self.step(position) if stage == "step" else None
            drafts = self.drafts(position) if stage == "drafts" else {}
            spent, _ = self.profile.end_step()
            return Ready(explored, drafts, spent.named("timing_ahead_s"))
        finally:
            self.push, self.profile, self.urgent = pushes, profile, urgent

    def drafts(self, position: int) -> Drafts:
        """Stage 1 alone of the step whose first prompt is at `position`: all ranks' drafts, on every rank."""
        exploration = Exploration(self, position)
        mine = exploration.more()
        sampled = exploration(mine, self.algorithm.num_drafts, "draft")
        found = {p.position: rows for p, rows in zip(mine, sampled, strict=True)}
        return {at: rows for share in self.exchange(found) for at, rows in share.items()}

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank. Until all have one, weights are pushed again for ranks that starve.

        Raises Stopped on all ranks where one is to stop at once.
        """
        while True:
            with self.profile.phase("exchange"):
                said = self._gather(("stop", None) if self.urgent() else ("done", value))
            if not self._settle({kind for kind, _ in said}):
                return [v for _, v in said]

    def starved(self) -> None:
        """A rank whose requests no server can take: wait for all ranks, then push the weights together."""
        kind = "stop" if self.urgent() else "starved"
        self._settle({kind for kind, _ in self._gather((kind, None))})

    def _gather(self, value: Any) -> list[Any]:
        return gather(self.ranks, self.profile, value)

    def _settle(self, kinds: set[str]) -> bool:
        """Do what the ranks have agreed on -> whether weights were pushed, so that there is more to wait for."""
        if "stop" in kinds:
            raise Stopped(agreed=True)
        if "starved" in kinds:
            self.push()
        return "starved" in kinds

    def rollouts(
        self,
        prompts: Sequence[Prompt],
        num: int,
        stage: str,
        sampling: Sampling,
        hint_tokens: int = 0,
        generator: Generator | None = None,
    ) -> list[tuple[Rollout, ...]]:
        """Sample and grade `num` completions of each prompt; seeds follow from (seed, position, stage, sample).

        `generator` None is the actor's.
        """
        repeated = [p for p in prompts for _ in range(num)]
        seeds = [stable_seed(self.setup.seed, p.position, stage, i % num) for i, p in enumerate(repeated)]
        rows = [None if stage.startswith("eval") else p.row for p in repeated]  # those are other data's rows
        asked = zip(repeated, seeds, rows, strict=True)
        requests = [Request(p.token_ids, seed, row) for p, seed, row in asked]
        two = self.algorithm.num_drafts > 0
        with self.grading(repeated) as grading:
            with self.profile.phase(f"generate/stage_{1 + (stage != 'draft')}" if two else "generate"):
                if hint_tokens:
                    completions = self._hinted(requests, sampling, hint_tokens)
                else:
                    chosen = generator or self.generator
                    completions = self._generate(chosen, requests, sampling, grading.submit)
            with self.profile.phase("grade"):  # what is left of it
                scores = grading.scores(completions)
        made = [Rollout(*parts) for parts in zip(repeated, completions, scores, strict=True)]
        return [tuple(made[i : i + num]) for i in range(0, len(made), num)]

    def _generate(self, generator: Generator, *asked: Any) -> list[Completion]:
        try:
            return generator.generate(*asked)
        except Stopped as stop:
            if not stop.agreed:  # the other ranks are in `exchange`, or on their way there
                self._gather(("stop", None))
            raise Stopped(agreed=True) from None

    def _hinted(self, requests: Sequence[Request], sampling: Sampling, length: int) -> list[Completion]:
        assert self.peer_generator is not None and self.decode is not None
        begin, go_on = (partial(self._generate, g) for g in (self.peer_generator, self.generator))
        return hinted(requests, sampling, length=length, begin=begin, go_on=go_on, decode=self.decode)


@dataclass
class Exploration:
    """One step's sampling as `explore` sees it (algorithms.base.Rollouts)."""

    explorer: Explorer
    position: int  # of the next prompt that nobody has taken
    drafted: Drafts = field(default_factory=dict)
    sampled: int = 0  # completions of this rank, drafts included

    def __call__(
        self, prompts: Sequence[Prompt], num: int, stage: str = "sample", *, hint_tokens: int = 0
    ) -> list[tuple[Rollout, ...]]:
        explorer = self.explorer
        self.sampled += len(prompts) * num
        if stage == "draft" and all(p.position in self.drafted for p in prompts):
            return [self.drafted[p.position] for p in prompts]
        sampling = Sampling(explorer.setup.temperature, explorer.setup.max_completion_length)
        return explorer.rollouts(prompts, num, stage, sampling, hint_tokens)

    def refine(
        self,
        prompt: Prompt,
        draft: Completion,
        *,
        template: str,
        max_length: int | None,
        keep_reasoning: bool,
    ) -> Prompt:
        limit = max_length or self.explorer.setup.max_refine_prompt_length
        return self.explorer.refine(
            prompt, draft.token_ids, template=template, max_length=limit, keep_reasoning=keep_reasoning
        )

    def more(self) -> list[Prompt]:
        """This rank's share of the next prompts: every size-th of them."""
        explorer = self.explorer
        taken = explorer.prompts.take(self.position, explorer.setup.prompts_per_step)
        self.position += len(taken)
        return taken[explorer.ranks.rank :: explorer.ranks.size]

    def total(self, count: int) -> int:
        return sum(self.explorer.exchange(count))
