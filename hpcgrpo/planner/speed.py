"""The time of a step by phase: a roofline of the work that a workload is, times efficiencies, with an interval.

Everything is closed form or a short simulation of decoding; nothing here runs a model or imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from hpcgrpo import profiler
from hpcgrpo.planner import efficiencies
from hpcgrpo.planner.efficiencies import Efficiencies
from hpcgrpo.planner.hardware import Hardware
from hpcgrpo.planner.seconds import STEPS_WHERE_UNKNOWN, Plan
from hpcgrpo.planner.work import Padding, machine_of
from hpcgrpo.planner.workload import Workload
from hpcgrpo.sections import RunConfig

if TYPE_CHECKING:
    from hpcgrpo.planner.shapes import Shape


@dataclass(frozen=True)
class Estimate:
    """A step by phase and the run that is made of such steps."""

    phases: Mapping[str, float]  # seconds of a step; they sum to one that samples in turn
    by_sampling: Mapping[str, float]  # seconds of a step: in_turn, and by the options that sample ahead
    sampling: str  # which of these the run does
    low_seconds: float  # of a step: the interval of the efficiencies' spread
    high_seconds: float
    samples_per_second: float  # Appendix D's formula: without gradient accumulation
    completions_per_second: float  # sampled, drafts included
    steps: int
    other_seconds: float  # of the run outside its steps: start, evaluation, checkpoints
    devices: int
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def step_seconds(self) -> float:
        """Of a step as the run samples."""
        return self.by_sampling[self.sampling]

    @property
    def run_hours(self) -> float:
        return (self.steps * self.step_seconds + self.other_seconds) / 3600

    @property
    def gpu_hours(self) -> float:
        """All reserved devices, the serving nodes' included."""
        return profiler.gpu_hours(self.devices, 3600 * self.run_hours)

    def interval(self, value: float, *, inverse: bool = False) -> tuple[float, float]:
        """`value`'s interval, where it is in proportion to the step's time (`inverse`: to one over it)."""
        low, high = self.low_seconds / self.step_seconds, self.high_seconds / self.step_seconds
        return (value / high, value / low) if inverse else (value * low, value * high)


def step(
    config: RunConfig,
    workload: Workload,
    shape: Shape,
    hardware: Hardware,
    numbers: Efficiencies = efficiencies.DEFAULTS,
    *,
    peer: Shape | None = None,
    kv_tokens: float | None = None,
    padding: Padding | None = None,
    prefills: int | None = None,
    threads: int | None = None,
) -> Estimate:
    """Seconds of one step by phase, and what follows for the run.

    `kv_tokens` are the tokens that one engine's cache holds (None: from weights and `hardware.memory_bytes`). With
    `padding` the learner computes padded rows instead of packed ones. `prefills` is how often a prompt is read in for
    its completions (None: once for each engine or completion, whichever is fewer). `threads` are the cores of a rank
    on a CPU (None: as configured, or 1). Raises ValueError for a model of which the planner knows the size alone, and
    where a sequence does not fit an engine.
    """
    plan = planned(
        config,
        workload,
        shape,
        hardware,
        peer=peer,
        kv_tokens=kv_tokens,
        padding=padding,
        prefills=prefills,
        threads=threads,
    )
    chosen = efficiencies.values(numbers)
    seconds, sampling = by_sampling(plan, chosen), sampling_of(config)
    total = seconds[sampling]
    low, high = _interval(plan, numbers, chosen, sampling)
    counts, machine = workload.counts, plan.machine
    return Estimate(
        phases=plan.phases(chosen),
        by_sampling=seconds,
        sampling=sampling,
        low_seconds=low,
        high_seconds=high,
        samples_per_second=profiler.samples_per_second(
            counts.updates_per_step, counts.rows_per_device, machine.ranks, total
        ),
        completions_per_second=workload.sampled / total,
        steps=workload.max_steps or STEPS_WHERE_UNKNOWN,
        other_seconds=plan.other_seconds(chosen),
        devices=machine.devices,
        notes=tuple(plan.notes()),
    )


def planned(
    config: RunConfig,
    workload: Workload,
    shape: Shape,
    hardware: Hardware,
    *,
    peer: Shape | None = None,
    kv_tokens: float | None = None,
    padding: Padding | None = None,
    prefills: int | None = None,
    threads: int | None = None,
) -> Plan:
    """The work of a step, to be timed at any efficiencies by its `phases`; arguments and errors as of `step`."""
    machine = machine_of(config, threads)
    shapes = {"actor": shape, "peer": peer}
    plan = Plan(config, workload, shapes, hardware, machine, kv_tokens, padding, prefills)
    plan.check()
    return plan


def _interval(
    plan: Plan, numbers: Efficiencies, chosen: Mapping[str, float], sampling: str
) -> tuple[float, float]:
    """Each efficiency at both ends of its spread, the others as they are; the deviations of log time in quadrature."""
    less, more, total = 0.0, 0.0, by_sampling(plan, chosen)[sampling]
    for name, number in numbers.items():
        for end in (number.low, number.high):
            if end != number.value:
                shift = math.log(by_sampling(plan, {**chosen, name: end})[sampling] / total)
                less, more = less + min(shift, 0) ** 2, more + max(shift, 0) ** 2
    return total * math.exp(-math.sqrt(less)), total * math.exp(math.sqrt(more))


def sampling_of(config: RunConfig) -> str:
    """How a run samples: in_turn with learning, or by which option ahead."""
    options = {None: "in_turn", "step": "async_steps", "drafts": "drafts_ahead"}
    return options[config.generation.ahead]


def by_sampling(plan: Plan, e: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step in turn and by each option that samples ahead; of iGRPO alone `drafts_ahead`.

    What is sampled and graded ahead costs what it takes longer than the learning beside it, so that `async_steps` is
    max(sampling, learning) and what remains, `drafts_ahead` stage 2 + max(stage 1, learning) and that. In-process
    generation shares the learners' devices and gains nothing.
    """
    phases, drafts = plan.phases(e), plan.drafts_seconds(e)
    learning = sum(phases.get(name, 0.0) for name in profiler.LEARNING)
    ahead = {"in_turn": 0.0, "async_steps": phases.get("generate", 0.0) + phases.get("grade", 0.0)}
    if drafts:
        ahead["drafts_ahead"] = drafts
    beside = learning if plan.config.generation.backend == "vllm" else 0.0
    return {name: sum(phases.values()) - min(spent, beside) for name, spent in ahead.items()}
