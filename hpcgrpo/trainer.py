"""The training loop: explore, learn, sync. What it needs of its parts is said by the Protocols here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from hpcgrpo import batching
from hpcgrpo.algorithms.base import Algorithm, Loss
from hpcgrpo.algorithms.codistill import kd_metrics
from hpcgrpo.generation.hints import hinted
from hpcgrpo.metrics import Update, learning_metrics, rollout_metrics
from hpcgrpo.profiler import Profile
from hpcgrpo.rewards import Grading
from hpcgrpo.types import (
    Arrived,
    Completion,
    Group,
    MicroBatch,
    Prompt,
    Request,
    Rollout,
    Sampling,
    Stopped,
    stable_seed,
)


class Generator(Protocol):
    """Samples completions from the policy's weights as last pushed."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived | None = None
    ) -> list[Completion]: ...

    def metrics(self) -> dict[str, float]: ...

    def update_weights(self, tensors: Callable[[], Iterable[tuple[str, Any]]], version: int) -> None:
        """Take new weights; collective. `tensors` may be asked for more than once, by all ranks together."""


class Learner(Protocol):
    """One policy in training; every method is collective over the learner ranks."""

    def prepare(
        self, micro_batches: Sequence[MicroBatch], *, old: bool, reference: bool, progress: float
    ) -> Any: ...

    def logprobs_of(self, micro_batches: Sequence[MicroBatch]) -> dict[int, tuple[float, ...]]:
        """Log-probs of every row's tokens at the present weights, by `Row.index`."""

    def as_peer(self, rows: Any) -> Any:
        """Another learner's prepared rows with this policy's log-probs as their `peer` stream."""

    def update(self, rows: Any, loss: Loss, *, learning_rate: float) -> dict[str, float]: ...

    def full_parameters(self) -> Iterator[tuple[str, Any]]: ...


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

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""


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


@dataclass
class Progress:
    """What changes from step to step besides the weights: all that a resume needs."""

    step: int = 0
    position: int = 0  # of the next prompt
    updates: int = 0  # optimizer steps taken
    num_tokens: int = 0  # prompt and completion tokens sampled so far
    num_completions: int = 0
    trained_completions: int = 0
    elapsed_seconds: float = 0.0


@dataclass(frozen=True)
class StepRecord:
    """One step as it is written down."""

    step: int
    metrics: Mapping[str, float]
    credited: batching.Credited | None  # None: an evaluation alone
    held_out: Mapping[str, Sequence[Rollout]] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """The other policy: CoDistill's large one, or a frozen teacher."""

    learner: Learner
    learning_rate: Callable[[int], float]  # of the n-th optimizer step, where it trains
    generator: Generator | None = None  # samples from it, where it writes hints


@dataclass
class Trainer:
    """Runs the loop; every rank runs the same program."""

    algorithm: Algorithm
    generator: Generator
    learner: Learner
    prompts: Prompts
    grading: Callable[[Sequence[Prompt]], Grading]
    refine: Callable[..., Prompt]
    learning_rate: Callable[[int], float]  # of the n-th optimizer step
    ranks: Ranks
    setup: Setup
    progress: Progress
    profile: Profile
    peer: Peer | None = None
    decode: Callable[[Sequence[int]], str] | None = None  # token ids -> text; of hinted completions
    urgent: Callable[[], bool] = lambda: False  # whether to stop without finishing the step
    check_parity: Callable[[Sequence[Any]], None] | None = (
        None  # of the first rows trained on after any start
    )
    peer_answers: bool = False  # the peer is being evaluated
    discarded: int = 0  # completions of the last step whose groups were not taken (refill)
    dropped: int = 0  # prompts of the last step that the generator could not answer

    def steps(self) -> Iterator[StepRecord]:
        """Train to the last step, giving each one's record once its weights are in the generator."""
        self.sync()
        while self.progress.step < self.setup.max_steps:
            with self.profile.phase("explore"):
                groups = self.explore()
            if self.algorithm.compares:
                groups = self.compare(groups)
            credited = batching.credit(groups, self.algorithm)
            metrics = self.learn(credited)
            if self.algorithm.peer is not None:
                metrics |= self.learn_peer(groups, self.algorithm.peer)
            self.progress.updates += int(metrics["updates"])
            self.progress.step += 1
            with self.profile.phase("sync"):
                self.sync()
            yield StepRecord(
                self.progress.step,
                {
                    **rollout_metrics(credited, self.progress),
                    **kd_metrics(groups, self.algorithm.options),
                    "completions/discarded": float(self.discarded),
                    "prompts/dropped": float(self.dropped),
                    **self.generator.metrics(),
                    **metrics,
                },
                credited,
            )

    def explore(self) -> list[Group]:
        """Every rank samples and grades its own prompts; all ranks get all groups, in the prompts' order.

        Raises Stopped on all ranks where one is to stop at once: nothing of the step has been learnt then.
        """
        self.generator.metrics()  # what was sampled between the steps does not count
        exploration = Exploration(self, self.progress.position)
        mine = exploration.more()
        groups = [replace(g, rank=self.ranks.rank) for g in self.algorithm.explore(mine, exploration)]
        whole = [g for g in groups if g.answered]
        with self.profile.phase("exchange"):
            shares = self.exchange((whole, exploration.sampled, len(groups) - len(whole)))
        self.progress.position = exploration.position
        everyone = sorted((g for share, _, _ in shares for g in share), key=lambda g: g.prompt.position)
        taken = sorted({g.prompt.position for g in everyone})[: self.setup.prompts_per_step]
        chosen = [g for g in everyone if taken and g.prompt.position <= taken[-1]]
        used = sum(len(g.rollouts) + len(g.drafts) for g in chosen if g.stage == "sample")
        self.discarded = sum(sampled for _, sampled, _ in shares) - used
        self.dropped = sum(dropped for _, _, dropped in shares)
        return chosen

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank. Until all have one, weights are pushed again for ranks that starve.

        Raises Stopped on all ranks where one is to stop at once.
        """
        while True:
            said = self.ranks.gather(("stop", None) if self.urgent() else ("done", value))
            if not self._settle({kind for kind, _ in said}):
                return [v for _, v in said]

    def starved(self) -> None:
        """A rank whose requests no server can take: wait for all ranks, then push the weights together."""
        kind = "stop" if self.urgent() else "starved"
        self._settle({kind for kind, _ in self.ranks.gather((kind, None))})

    def _settle(self, kinds: set[str]) -> bool:
        """Do what the ranks have agreed on -> whether weights were pushed, so that there is more to wait for."""
        if "stop" in kinds:
            raise Stopped(agreed=True)
        if "starved" in kinds:
            self.sync()
        return "starved" in kinds

    def compare(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with every rollout's log-probs under both policies; collective."""
        assert self.peer is not None, "an algorithm that compares needs a peer"
        plan = self.plan(batching.everything(groups), self.algorithm)
        mine = plan.micro_batches[self.ranks.rank]
        with self.profile.phase("compare"):
            found = self.ranks.gather((self.learner.logprobs_of(mine), self.peer.learner.logprobs_of(mine)))
        old, peer = ({i: row for share in found for i, row in share[which].items()} for which in (0, 1))
        return batching.with_logprobs(groups, old, peer)

    def learn(self, credited: batching.Credited) -> dict[str, float]:
        """Train the actor on the step's groups."""
        return self._train(self.learner, self.algorithm, self.learning_rate, credited, "")

    def learn_peer(self, groups: Sequence[Group], algorithm: Algorithm) -> dict[str, float]:
        """Train the other policy on the same groups; its ratio is over the actor at sampling time, or (`peer_after`)
        after its update. -> its metrics, under peer/."""
        assert self.peer is not None, "an algorithm for a peer needs one"
        credited = batching.credit(groups, algorithm)
        if algorithm.peer_after:
            credited = replace(credited, groups=tuple(self.compare(groups)))
        metrics = self._train(self.peer.learner, algorithm, self.peer.learning_rate, credited, "peer_")
        return {f"peer/{name}": value for name, value in metrics.items()}

    def _train(
        self,
        learner: Learner,
        algorithm: Algorithm,
        learning_rate: Callable[[int], float],
        credited: batching.Credited,
        phase: str,
    ) -> dict[str, float]:
        """`num_iterations` passes of one policy over the step's optimizer steps."""
        setup = self.setup
        plans = [self.plan(part, algorithm) for part in batching.split(credited, setup.batches_per_step)]
        plans = [p for p in plans if p.totals.rows]  # nothing kept: no gradient, no optimizer step
        with self.profile.phase(f"{phase}logprobs"):
            prepared = [self._prepared(learner, algorithm, p, len(plans)) for p in plans]
            if prepared and self.check_parity is not None and learner is self.learner:
                self.check_parity(prepared[0])
                self.check_parity = None
        done: list[Update] = []
        with self.profile.phase(f"{phase}update"):
            for _ in range(setup.num_iterations):
                for p, rows in zip(plans, prepared, strict=True):
                    rate = learning_rate(self.progress.updates + len(done))
                    sums = learner.update(rows, algorithm.loss, learning_rate=rate)
                    done.append((self.ranks.gather(sums), p.totals.tokens, rate))
        return learning_metrics(done, plans)

    def _prepared(self, learner: Learner, algorithm: Algorithm, plan: batching.Plan, plans: int) -> Any:
        """One optimizer step's rows of this rank, with every log-prob that the loss needs."""
        known = self.algorithm.compares  # the rows bring them along
        rows = learner.prepare(
            plan.micro_batches[self.ranks.rank],
            old=not known and plans * self.setup.num_iterations > 1,
            reference="reference" in algorithm.streams,
            progress=self.progress.step / self.setup.max_steps,
        )
        if "peer" in algorithm.streams and not known:
            assert self.peer is not None, "an algorithm with a teacher needs one"
            rows = self.peer.learner.as_peer(rows)
        return rows

    def plan(self, part: batching.Credited, algorithm: Algorithm) -> batching.Plan:
        """One optimizer step shared out over the ranks."""
        return batching.plan(
            part,
            algorithm,
            ranks=self.ranks.size,
            token_budget=self.setup.token_budget,
            max_completion_length=self.setup.max_completion_length,
            rows_per_device=self.setup.rows_per_device,
            shared_prefix=self.setup.shared_prefix,
        )

    def sync(self) -> None:
        """Push the policy's weights to the generator, and the peer's while it still writes hints."""
        self.generator.update_weights(self.learner.full_parameters, self.progress.updates)
        hints = self.progress.position < self.algorithm.hint_epochs * len(self.prompts)
        if hints or self.peer_answers:
            self.sync_peer()

    def sync_peer(self) -> None:
        """Push the peer's weights to its own generator, where it has one."""
        if self.peer is not None and self.peer.generator is not None:
            self.peer.generator.update_weights(self.peer.learner.full_parameters, self.progress.updates)

    def _generate(self, generator: Generator, *asked: Any) -> list[Completion]:
        try:
            return generator.generate(*asked)
        except Stopped as stop:
            if not stop.agreed:  # the other ranks are in `exchange`, or on their way there
                self.ranks.gather(("stop", None))
            raise Stopped(agreed=True) from None

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
        with self.grading(repeated) as grading:
            with self.profile.phase("generate"):
                if hint_tokens:
                    completions = self._hinted(requests, sampling, hint_tokens)
                else:
                    chosen = generator or self.generator
                    completions = self._generate(chosen, requests, sampling, grading.submit)
            with self.profile.phase("grade"):  # what is left of it
                scores = grading.scores(completions)
        made = [Rollout(*parts) for parts in zip(repeated, completions, scores, strict=True)]
        return [tuple(made[i : i + num]) for i in range(0, len(made), num)]

    def _hinted(self, requests: Sequence[Request], sampling: Sampling, length: int) -> list[Completion]:
        assert self.peer is not None and self.peer.generator is not None and self.decode is not None
        begin, go_on = (partial(self._generate, g) for g in (self.peer.generator, self.generator))
        return hinted(requests, sampling, length=length, begin=begin, go_on=go_on, decode=self.decode)


@dataclass
class Exploration:
    """One step's sampling as `explore` sees it (algorithms.base.Rollouts)."""

    trainer: Trainer
    position: int  # of the next prompt that nobody has taken
    sampled: int = 0  # completions of this rank, drafts included

    def __call__(
        self, prompts: Sequence[Prompt], num: int, stage: str = "sample", *, hint_tokens: int = 0
    ) -> list[tuple[Rollout, ...]]:
        setup = self.trainer.setup
        sampling = Sampling(setup.temperature, setup.max_completion_length)
        self.sampled += len(prompts) * num
        return self.trainer.rollouts(prompts, num, stage, sampling, hint_tokens)

    def refine(
        self,
        prompt: Prompt,
        draft: Completion,
        *,
        template: str,
        max_length: int | None,
        keep_reasoning: bool,
    ) -> Prompt:
        limit = max_length or self.trainer.setup.max_refine_prompt_length
        return self.trainer.refine(
            prompt, draft.token_ids, template=template, max_length=limit, keep_reasoning=keep_reasoning
        )

    def more(self) -> list[Prompt]:
        """This rank's share of the next prompts: every size-th of them."""
        taken = self.trainer.prompts.take(self.position, self.trainer.setup.prompts_per_step)
        self.position += len(taken)
        return taken[self.trainer.ranks.rank :: self.trainer.ranks.size]

    def total(self, count: int) -> int:
        return sum(self.trainer.exchange(count))
