"""Efficiencies fitted to measured runs: their timings by phase and their rollouts' real lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from hpcgrpo import config as configuration
from hpcgrpo.config_file import ConfigError
from hpcgrpo.journal import read_metrics, write_atomically
from hpcgrpo.planner import efficiencies, lengths, seconds, speed, workload
from hpcgrpo.planner.efficiencies import DEFAULTS, Efficiencies, Number
from hpcgrpo.planner.hardware import Hardware
from hpcgrpo.sections import RunConfig

if TYPE_CHECKING:
    from hpcgrpo.planner.shapes import Shape

WARM_UP_STEPS = 1  # left out: compiling, first allocations, the check of the generator's log-probs
PRIOR_WEIGHT = (
    0.05  # of a number's default against one run's relative error: decides only what the runs do not tell
)
LEAST_SPREAD = 0.05  # relative standard deviation, however well the numbers fit
FILE_NAME = "efficiencies.yaml"

# A phase -> what its time is linear in. A rate stands for its inverse; `generation_flops` moves `decode_bandwidth` too.
FITTED: dict[str, tuple[str, ...]] = {
    "generate": ("generation_flops", "decode_step_seconds", "decode_layer_seconds", "request_seconds"),
    "update": ("learner_flops", "learner_pass_seconds", "segment_seconds", "update_seconds"),
    "grade": ("grade_seconds",),
    "sync": ("sync_seconds",),
    "other": ("step_seconds",),
}
RATES = {"generation_flops": ("generation_flops", "decode_bandwidth"), "learner_flops": ("learner_flops",)}
# Phases of a run's metrics -> those of the planner; what is not named counts as `other`.
PHASES = {
    "generate": "generate",
    "grade": "grade",
    "compare": "compare",
    "logprobs": "logprobs",
    "update": "update",
    "peer_logprobs": "logprobs",
    "peer_update": "peer_update",
    "sync": "sync",
}
OUTSIDE = ("save", "evaluate", "explore")  # not of a step; explore held others in earlier versions


@dataclass(frozen=True)
class Measured:
    """A run's steps as they were measured."""

    name: str
    config: RunConfig
    steps: tuple[Mapping[str, float], ...]  # seconds by the planner's phases, warm-up left out
    cpu_seconds: bool  # of rank 0's process, in place of the clock's, which tells little on a shared machine

    def median(self, phase: str) -> float:
        return median(step.get(phase, 0.0) for step in self.steps)

    @property
    def step_seconds(self) -> float:
        """The median step."""
        return median(sum(step.values()) for step in self.steps)


@dataclass(frozen=True)
class Calibration:
    """Fitted efficiencies, and how well they give the runs that they were fitted to."""

    numbers: Mapping[str, Number]
    hardware: Hardware
    runs: tuple[str, ...]
    residuals: Mapping[str, float]  # by phase: relative standard deviation of measured over predicted
    step_ratio: Mapping[str, float]  # predicted over measured step, by run
    cpu_seconds: bool


ShapeOf = Callable[[str], "Shape"]


def measured(folder: str | Path) -> Measured:
    """A run's timings by phase. Raises ConfigError for a folder that is no finished run, with what is missing."""
    folder = Path(folder).expanduser()
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"--calibrate {folder}: no run's folder (it has no config.yaml); give one such as logs/NAME"
        )
    config = configuration.load(folder / "config.yaml")
    if config.generation.ahead:
        raise ConfigError(
            f"--calibrate {folder}: it samples ahead (generation.{speed.sampling_of(config)}), so that sampling and"
            " learning slow each other down and no phase is measured alone; give runs without that option"
        )
    lines = [m for m in read_metrics(folder) if "timing_s/update" in m]
    if len(lines) <= WARM_UP_STEPS:
        raise ConfigError(
            f"--calibrate {folder}: {len(lines)} measured steps, but the first is a warm-up and at least one more is"
            " needed; let the run go on (train.max_steps=10 is plenty)"
        )
    cpu = "timing_cpu_s/update" in lines[-1]
    prefix = "timing_cpu_s/" if cpu else "timing_s/"
    steps = tuple(_by_phase(line, prefix) for line in lines[WARM_UP_STEPS:])
    return Measured(folder.name, config, steps, cpu)


def _by_phase(line: Mapping[str, float], prefix: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, spent in line.items():
        name = key.removeprefix(prefix) if key.startswith(prefix) else ""
        if name and "/" not in name and name not in OUTSIDE:  # phase/part is in its phase already
            phase = PHASES.get(name, "other")
            found[phase] = found.get(phase, 0.0) + spent
    if prefix == "timing_s/":  # what the clock saw and no phase
        outside = sum(line.get(f"{prefix}{name}", 0.0) for name in ("save", "evaluate"))
        rest = line.get("step_time", 0.0) - outside - sum(found.values())
        found["other"] = found.get("other", 0.0) + max(0.0, rest)
    return found


def fit(
    folders: Sequence[str | Path], hardware: Hardware, shape_of: ShapeOf, *, kv_tokens: float | None = None
) -> Calibration:
    """Fit the efficiencies to all runs together: least squares of relative errors, no number below 0.

    Each run counts by its median step, phase by phase. What the runs cannot tell apart (one run tells a phase's sum
    alone) stays in the defaults' proportion. Raises ConfigError as `measured` does, and for runs on unlike devices.
    """
    runs = [measured(folder) for folder in folders]
    if len({run.cpu_seconds for run in runs}) > 1:
        raise ConfigError(
            "--calibrate: runs on a CPU and on GPUs were given together; fit each kind for itself"
        )
    cpu = runs[0].cpu_seconds
    prior = {**efficiencies.values(DEFAULTS), **(efficiencies.CPU if cpu else {})}
    plans = [
        plan_of(run, folder, hardware, shape_of, kv_tokens) for run, folder in zip(runs, folders, strict=True)
    ]
    found = dict(prior)
    for phase, names in FITTED.items():
        found |= _fitted(phase, names, runs, plans, prior)
    residuals = {phase: _residual(phase, runs, plans, found) for phase in FITTED}
    ratios = {
        run.name: sum(plan.phases(found).values()) / run.step_seconds
        for run, plan in zip(runs, plans, strict=True)
    }
    numbers = dict(_with_spread(found, residuals))
    return Calibration(numbers, hardware, tuple(map(str, folders)), residuals, ratios, cpu)


def plan_of(
    run: Measured, folder: str | Path, hardware: Hardware, shape_of: ShapeOf, kv_tokens: float | None = None
) -> seconds.Plan:
    """The work of a measured run's step, at its rollouts' own lengths."""
    config = run.config
    known = lengths.read_lengths(Path(folder)) if _has_rollouts(Path(folder)) else None
    peer = shape_of(config.peer.model_name_or_path) if config.peer is not None else None
    return speed.planned(
        config,
        workload.of(config, known),
        shape_of(config.model_name_or_path),
        hardware,
        peer=peer,
        kv_tokens=kv_tokens,
        threads=1 if run.cpu_seconds else None,
    )


def _has_rollouts(folder: Path) -> bool:
    return any((folder / "rollouts").glob("step-*.jsonl"))


def _fitted(
    phase: str,
    names: Sequence[str],
    runs: Sequence[Measured],
    plans: Sequence[seconds.Plan],
    prior: Mapping[str, float],
) -> dict[str, float]:
    """One phase's numbers, by non-negative least squares in units of the prior."""
    import numpy
    from scipy.optimize import nnls

    rows: list[list[float]] = []
    for run, plan in zip(runs, plans, strict=True):
        seen = run.median(phase)
        if seen > 0:
            rows.append([_alone(plan, phase, name, names, prior) / seen for name in names])
    if not rows:
        return {}
    pull = [[PRIOR_WEIGHT * (i == j) for j in range(len(names))] for i in range(len(names))]
    # The prior pulls towards proportion, not size: first one common factor, then the numbers around it.
    sums = [sum(row) for row in rows]
    factor = sum(sums) / sum(s * s for s in sums) if any(sums) else 1.0
    left = numpy.array([*rows, *pull])
    right = numpy.array([1.0] * len(rows) + [PRIOR_WEIGHT * factor] * len(names))
    solution, _ = nnls(left, right)
    return dict(_applied(names, map(float, solution), prior))


def _applied(
    names: Sequence[str], factors: Iterator[float] | map[float], prior: Mapping[str, float]
) -> Iterator[tuple[str, float]]:
    for name, factor in zip(names, factors, strict=True):
        for member in RATES.get(name, (name,)):
            yield member, prior[member] / max(factor, 1e-6) if name in RATES else prior[member] * factor


def _alone(
    plan: seconds.Plan, phase: str, name: str, names: Sequence[str], prior: Mapping[str, float]
) -> float:
    """The phase's seconds if of its numbers only `name` cost anything, at its prior."""
    free = {
        member: 1e12 if other in RATES else 0.0
        for other in names
        if other != name
        for member in RATES.get(other, (other,))
    }
    return plan.phases({**prior, **free}).get(phase, 0.0)


def _residual(
    phase: str, runs: Sequence[Measured], plans: Sequence[seconds.Plan], found: Mapping[str, float]
) -> float:
    """Root mean square of log(measured / predicted) over the runs' medians, and the noise of a run's median."""
    squares = []
    for run, plan in zip(runs, plans, strict=True):
        seen, predicted = run.median(phase), plan.phases(found).get(phase, 0.0)
        if seen > 0 and predicted > 0:
            noise = fmean(math.log(max(s.get(phase, seen), 1e-9) / seen) ** 2 for s in run.steps)
            squares.append(math.log(seen / predicted) ** 2 + noise / len(run.steps))
    return math.sqrt(fmean(squares)) if squares else 0.0


def _with_spread(found: Mapping[str, float], residuals: Mapping[str, float]) -> Iterator[tuple[str, Number]]:
    """The numbers, a fitted one between its value over and times exp(1.645 sigma): nine in ten."""
    phase_of = {
        member: phase for phase, names in FITTED.items() for n in names for member in RATES.get(n, (n,))
    }
    for name, value in found.items():
        default = DEFAULTS[name]
        if name in phase_of:
            width = math.exp(1.645 * max(LEAST_SPREAD, residuals[phase_of[name]]))
            yield name, replace(default, value=value, low=value / width, high=value * width, source="fitted")
        else:
            ratio = value / default.value
            yield name, replace(default, value=value, low=default.low * ratio, high=default.high * ratio)


def write(calibration: Calibration, path: Path) -> None:
    """Store it as YAML for `plan --efficiencies`. Raises ConfigError where it cannot be written."""
    import yaml

    machine = {
        key: getattr(calibration.hardware, key)
        for key in ("name", "bf16_flops_per_second", "memory_bytes_per_second", "link_bytes_per_second")
    }
    values: dict[str, Any] = {
        "runs": list(calibration.runs),
        "seconds": "of CPU, rank 0" if calibration.cpu_seconds else "of the clock",
        "machine": machine,
        "residuals": {k: round(v, 4) for k, v in calibration.residuals.items()},
        "predicted_over_measured": {k: round(v, 4) for k, v in calibration.step_ratio.items()},
        "efficiencies": {
            name: {"value": _short(n.value), "low": _short(n.low), "high": _short(n.high)}
            for name, n in calibration.numbers.items()
        },
    }
    try:
        write_atomically(path, yaml.safe_dump(values, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}; name a file that can be written") from None


def stored(folder: Path, hardware: Hardware) -> Path | None:
    """The calibration to predict a run by: its own, else the newest of the runs beside it on such a device."""
    own = folder / FILE_NAME
    if own.is_file():
        return own
    found = [p for p in folder.absolute().parent.glob(f"*/{FILE_NAME}") if _is_of(p, hardware)]
    return max(found, key=lambda p: p.stat().st_mtime, default=None)


def _is_of(path: Path, hardware: Hardware) -> bool:
    try:
        machine = efficiencies.read(path)[1].get("machine")
    except ConfigError:
        return False
    return isinstance(machine, Mapping) and machine.get("name") == hardware.name


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def machine_of(extra: Mapping[str, Any], hardware: Hardware) -> Hardware:
    """The hardware with the rates that a calibration measured on it, which its fractions belong to."""
    from hpcgrpo.planner import hardware as machines

    found = extra.get("machine")
    return machines.replaced(hardware, found) if isinstance(found, Mapping) else hardware


def predicted(
    run: Measured, folder: str | Path, hardware: Hardware, numbers: Efficiencies, shape_of: ShapeOf
) -> dict[str, float]:
    """A measured run's step by phase, as predicted."""
    return plan_of(run, folder, hardware, shape_of).phases(efficiencies.values(numbers))
