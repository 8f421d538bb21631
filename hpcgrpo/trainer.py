"""The training loop: explore, learn, sync. What it needs of its parts is said by the Protocols here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from hpcgrpo import batching
from hpcgrpo.ahead import Ahead
from hpcgrpo.algorithms.base import Algorithm, Loss
from hpcgrpo.algorithms.codistill import kd_metrics
from hpcgrpo.exploring import Explored, Explorer, Generator, Ranks, Ready, Setup, gather
from hpcgrpo.learning.packing import FirstPass
from hpcgrpo.metrics import Update, learning_metrics, rollout_metrics, staleness
from hpcgrpo.profiler import Profile
from hpcgrpo.types import Group, MicroBatch, Progress, Rollout, Stopped


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
    explorer: Explorer
    learner: Learner
    learning_rate: Callable[[int], float]  # of the n-th optimizer step
    ranks: Ranks
    setup: Setup
    progress: Progress
    profile: Profile
    peer: Peer | None = None
    check_parity: Callable[[Sequence[Any]], None] | None = (
        None  # of the first rows trained on after any start
    )
    peer_answers: bool = False  # the peer is being evaluated
    ready: Ready = field(default_factory=Ready)  # what was sampled of the next step already

    def steps(self) -> Iterator[StepRecord]:
        """Train to the last step, giving each one's record once its weights are in the generator."""
        self.sync()
        self.profile.begin_steps()
        while self.progress.step < self.setup.max_steps:
            explored, ahead = self.explore(), self.begin_ahead()
            groups = self.compare(explored.groups) if self.algorithm.compares else explored.groups
            credited = batching.credit(groups, self.algorithm)
            metrics = self.learn(credited)
            if self.algorithm.peer is not None:
                metrics |= self.learn_peer(groups, self.algorithm.peer)
            metrics |= staleness(groups, self.progress.updates)
            self.progress.updates += int(metrics["updates"])
            self.progress.step += 1
            metrics |= self.end_ahead(ahead)
            self.sync()
            yield StepRecord(
                self.progress.step,
                {
                    **rollout_metrics(credited, self.progress),
                    **kd_metrics(groups, self.algorithm.options),
                    "completions/discarded": float(explored.discarded),
                    "prompts/dropped": float(explored.dropped),
                    **explored.metrics,
                    **metrics,
                },
                credited,
            )

    def explore(self) -> Explored:
        """The step's groups: sampled ahead, or now.

        Raises Stopped on all ranks where one is to stop at once: nothing of the step has been learnt then.
        """
        ready = self.ready
        explored = ready.explored or self.explorer.step(self.progress.position, ready.drafts)
        self.ready, self.progress.position = Ready(), explored.position
        return explored

    def begin_ahead(self) -> Ahead[Ready] | None:
        """Begin to sample for the next step, with the weights as last pushed, where that is asked for."""
        stage = self.setup.ahead
        if stage is None or self.progress.step + 1 >= self.setup.max_steps:
            return None
        return Ahead(partial(self.explorer.ahead, stage, self.progress.position))

    def end_ahead(self, ahead: Ahead[Ready] | None) -> Mapping[str, float]:
        """Wait for what was begun -> what it took. Told to stop at once, it gives nothing: the step ends without."""
        if ahead is None:
            return {}
        with self.profile.phase("wait"), suppress(Stopped):
            self.ready = ahead.result(self.sync)
        return self.ready.seconds

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value on every rank; the time until the slowest one has come counts as `wait`."""
        return gather(self.ranks, self.profile, value)

    def compare(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with every rollout's log-probs under both policies; collective."""
        assert self.peer is not None, "an algorithm that compares needs a peer"
        plan = self.plan(batching.everything(groups), self.algorithm)
        mine = plan.micro_batches[self.ranks.rank]
        with self.profile.phase("compare/old"):
            ours = self.learner.logprobs_of(mine)
        with self.profile.phase("compare/peer"):
            theirs = self.peer.learner.logprobs_of(mine)
        with self.profile.phase("exchange"):
            found = self.gather((ours, theirs))
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
            prepared = [self._prepared(learner, algorithm, p, later=p is not plans[0]) for p in plans]
            if prepared and self.check_parity is not None and learner is self.learner:
                self._compare_once(self.check_parity, credited, prepared[0])
        done: list[Update] = []
        first = FirstPass(algorithm.loss)
        with self.profile.phase(f"{phase}update"):
            for _ in range(setup.num_iterations):
                for p, rows in zip(plans, prepared, strict=True):
                    rate = learning_rate(self.progress.updates + len(done))
                    sums = learner.update(rows, algorithm.loss if done else first, learning_rate=rate)
                    done.append((self.gather(sums), p.totals.tokens, rate))
                prepared[:1] = [first.rows(rows) for rows in prepared[:1]]
        return learning_metrics(done, plans)

    def _compare_once(
        self, check: Callable[[Sequence[Any]], None], credited: batching.Credited, rows: Sequence[Any]
    ) -> None:
        """Generator and learner side by side, once after a start: on completions of the learner's very weights."""
        if staleness(credited.groups, self.progress.updates)["sampling/staleness/max"] == 0:
            check(rows)
            self.check_parity = None

    def _prepared(self, learner: Learner, algorithm: Algorithm, plan: batching.Plan, later: bool) -> Any:
        """One optimizer step's rows of this rank, with every log-prob that the loss needs."""
        known = self.algorithm.compares  # the rows bring them along
        rows = learner.prepare(
            plan.micro_batches[self.ranks.rank],
            old=not known and later,  # those of the first optimizer step are its first pass's
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
            cost=self.setup.cost,
        )

    def sync(self) -> None:
        """Push the policy's weights to the generator, and the peer's while it still writes hints."""
        with self.profile.phase("sync"):
            self.explorer.generator.update_weights(self.learner.full_parameters, self.progress.updates)
            hints = self.progress.position < self.algorithm.hint_epochs * len(self.explorer.prompts)
            if hints or self.peer_answers:
                self.sync_peer()

    def sync_peer(self) -> None:
        """Push the peer's weights to its own generator, where it has one."""
        if self.peer is not None and self.peer.generator is not None:
            self.peer.generator.update_weights(self.peer.learner.full_parameters, self.progress.updates)
