"""What a run takes: memory, throughput and time, as Appendix D of the iGRPO paper (arXiv 2602.09000) defines them."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

# Where a step's time goes. Each second counts to one of them, the innermost that was begun; `docs/metrics.md`.
PHASES = (
    *("generate", "grade", "exchange", "wait"),
    *("compare", "logprobs", "update", "peer_logprobs", "peer_update"),
    *("sync", "evaluate", "save", "journal", "start", "other"),
)
PARTS = (  # of phases; named phase/part, and counted in the phase too
    *("stage_1", "stage_2"),  # of generate, where drafts come first
    *("old", "reference", "peer"),  # of compare and logprobs
    *("forward_backward", "optimizer"),  # of update
)
WHOLE = ("evaluate",)  # what happens inside counts to it, whatever it is
LEARNING = ("compare", "logprobs", "update", "peer_logprobs", "peer_update")  # in which a learner computes


def samples_per_second(
    global_step: int, per_device_batch: int, devices: int, elapsed_seconds: float
) -> float:
    """Appendix D's throughput: optimizer steps x per-device batch x data-parallel devices / elapsed seconds.

    Gradient accumulation is not in the published formula, so it undercounts by that factor.
    """
    return global_step * per_device_batch * devices / elapsed_seconds


def gpu_hours(devices: int, elapsed_seconds: float) -> float:
    """All reserved devices, the generation node's included, times the hours they were held."""
    return devices * elapsed_seconds / 3600


def reset_peak_memory() -> None:
    """Start of training: later peaks count from here (GPU allocator; on a CPU the kernel's high-water mark)."""
    if _cuda():
        import torch

        torch.cuda.reset_peak_memory_stats()
    # Not Linux, or not allowed: the peak then counts from the start of the process.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_gb() -> float:
    """Peak since `reset_peak_memory` in GB of 10^9 bytes: allocated on the GPU, resident on a CPU.

    Appendix D says GB and prints four decimals of it. 10^9 is what the letters mean (2^30 is a GiB), and GB are what
    memory is sold and planned in; were the paper's figures GiB, its 54.93 would be 58.98 GB.
    """
    if _cuda():
        import torch

        return torch.cuda.max_memory_allocated() / 1e9
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e9
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_initialized()


@dataclass(frozen=True)
class Spent:
    """Seconds by phase, which sum to the whole, and by part, as phase/part, which lie in their phases."""

    phases: Mapping[str, float]
    parts: Mapping[str, float]

    @classmethod
    def of(cls, seconds: Mapping[str, float]) -> Spent:
        """From seconds that each count to one name alone: a phase's own, or a part's."""
        phases: dict[str, float] = {}
        for name, spent in seconds.items():
            phase = name.partition("/")[0]
            phases[phase] = phases.get(phase, 0.0) + spent
        return cls(phases, {name: spent for name, spent in seconds.items() if "/" in name})

    @property
    def seconds(self) -> float:
        """The whole."""
        return sum(self.phases.values())

    def named(self, prefix: str) -> dict[str, float]:
        """As metrics: prefix/phase and prefix/phase/part."""
        return {f"{prefix}/{name}": spent for name, spent in {**self.phases, **self.parts}.items()}


@dataclass
class Profile:
    """A clock that always counts to one phase: of the step at hand, and in total over all attempts of the run."""

    moved: Callable[[], None] = lambda: None  # called where a phase begins or ends
    settle: Callable[[], None] = lambda: None  # waits until a device has computed what it was given
    clock: Callable[[], float] = time.perf_counter
    cpu_clock: Callable[[], float] = time.process_time  # of this process, all its threads
    elapsed_before_seconds: float = 0.0  # earlier attempts, up to their last checkpoint
    held_before_seconds: float = 0.0  # earlier attempts, to their ends
    counts: dict[str, float] = field(default_factory=dict)  # sums over all steps and attempts, by name
    _step: dict[str, float] = field(default_factory=dict)
    _step_cpu: dict[str, float] = field(default_factory=dict)
    _total: dict[str, float] = field(default_factory=dict)
    _now: str = "start"

    def __post_init__(self) -> None:
        self.started = self._since = self.clock()
        self._since_cpu = self.cpu_clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time to `name`, a phase or phase/part, and stop the clock of the one around it."""
        phase, _, part = name.partition("/")
        assert phase in PHASES and (not part or part in PARTS), name
        outer = self._now
        if outer in WHOLE:
            yield
            return
        self._count()
        self._now = name
        try:
            yield
        finally:
            self._count()
            self._now = outer

    def part(self, name: str) -> AbstractContextManager[None]:
        """Count the block to a part of the phase that is running."""
        return self.phase(f"{self._now.partition('/')[0]}/{name}")

    def _count(self) -> None:
        """Add the time since the last call to what is running."""
        self.moved()
        self.settle()
        now, now_cpu = self.clock(), self.cpu_clock()
        self._step[self._now] = self._step.get(self._now, 0.0) + now - self._since
        self._step_cpu[self._now] = self._step_cpu.get(self._now, 0.0) + now_cpu - self._since_cpu
        self._since, self._since_cpu = now, now_cpu

    def begin_steps(self) -> None:
        """What was before was the start; from here on every second is of a step."""
        self.end_step()
        self._now = "other"

    def end_step(self) -> tuple[Spent, Spent]:
        """The step since the last end -> its seconds and CPU-seconds, the former added to the totals."""
        self._count()
        self._total = _added(self._total, self._step)
        done, done_cpu = Spent.of(self._step), Spent.of(self._step_cpu)
        self._step, self._step_cpu = {}, {}
        return done, done_cpu

    @property
    def step(self) -> Spent:
        """Of the step at hand, up to now."""
        self._count()
        return Spent.of(self._step)

    def add(self, sums: Mapping[str, float]) -> None:
        """Add to the counts."""
        self.counts = _added(self.counts, sums)

    @property
    def total(self) -> Spent:
        """Over all attempts, up to now; the phases sum to `elapsed_seconds`."""
        self._count()
        return Spent.of(_added(self._total, self._step))

    @property
    def elapsed_seconds(self) -> float:
        """Of this attempt, and of the earlier ones up to their last checkpoints: what the run's steps took."""
        return self.elapsed_before_seconds + self.clock() - self.started

    @property
    def held_seconds(self) -> float:
        """Of all attempts, what was lost after their last checkpoints included: what devices were reserved for."""
        return self.held_before_seconds + self.clock() - self.started

    def state(self) -> dict[str, dict[str, float]]:
        """What a checkpoint keeps of it."""
        return {
            "phase_seconds": dict(self.total.phases),
            "part_seconds": dict(self.total.parts),
            "counts": dict(self.counts),
        }

    def load_state(self, state: Mapping[str, Mapping[str, float]], elapsed_seconds: float) -> None:
        """Go on from a checkpoint's `state`, after `elapsed_seconds` of earlier attempts.

        In the checkpoints of earlier versions `explore` held `generate`, `grade` and `exchange` as well.
        """
        phases, parts = dict(state["phase_seconds"]), state.get("part_seconds", {})
        if "explore" in phases:
            inner = sum(phases.get(name, 0.0) for name in ("generate", "grade", "exchange"))
            phases["other"] = phases.get("other", 0.0) + max(0.0, phases.pop("explore") - inner)
        for name, spent in parts.items():
            phases[name.partition("/")[0]] -= spent
        self._total = {**phases, **parts}
        self.counts = dict(state.get("counts", {}))
        self.elapsed_before_seconds = elapsed_seconds


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}
