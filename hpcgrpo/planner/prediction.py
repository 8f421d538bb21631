"""One configuration's prediction: memory by part, a step by phase, the run's hours, GPU-hours and disk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpcgrpo import pretrained
from hpcgrpo.planner import memory, refusals, seconds, serving_memory, shapes, speed, work, workload
from hpcgrpo.planner.efficiencies import Efficiencies, of_device
from hpcgrpo.planner.hardware import Hardware
from hpcgrpo.planner.lengths import Known
from hpcgrpo.planner.shapes import Shape
from hpcgrpo.sections import RunConfig


@dataclass(frozen=True)
class Prediction:
    """What a run takes, as far as it can be known before it starts."""

    config: RunConfig
    shape: Shape
    peer: Shape | None
    hardware: Hardware
    why: str  # this hardware is taken
    learner: memory.Parts
    server: serving_memory.Server | None  # None with the in-process generator
    load: workload.Workload
    time: speed.Estimate | None  # None: the model's speed, or that a sequence fits, is not given
    not_timed: str = ""  # why

    @property
    def room_bytes(self) -> float:
        """Of one learner device; on a CPU all ranks of a node share the machine's."""
        shared = 1 if self.hardware.device == "cuda" else self.config.cluster.ranks_per_node
        return self.hardware.memory_bytes / shared

    @property
    def over_bytes(self) -> float:
        """By how much the learner exceeds the device, with what a GPU needs beside the peak; 0 where it fits."""
        needed = self.learner.needed_bytes if self.hardware.device == "cuda" else self.learner.peak_bytes
        return max(0.0, needed - self.room_bytes)

    @property
    def fits(self) -> bool:
        return not self.over_bytes and not self.not_timed


def shape_of(name: str) -> Shape:
    """A model's sizes by its folder, the hub's cache or the table. Raises ValueError for one that nothing tells."""
    return shapes.find(name, offline=pretrained.hub_offline())


def predict(
    config: RunConfig,
    hardware: Hardware,
    *,
    why: str = "",
    numbers: Efficiencies | None = None,
    lengths: Known | None = None,
) -> Prediction:
    """Memory and time of `config` on `hardware`, at its device's efficiencies where none are given.

    Raises ValueError for a model that nothing is known of. What cannot be timed (a sequence that fits no engine, a
    model of which only the size is known) is said in the answer.
    """
    numbers = numbers if numbers is not None else of_device(hardware.device)
    shape = shape_of(config.model_name_or_path)
    peer = shape_of(config.peer.model_name_or_path) if config.peer is not None else None
    load = workload.of(config, lengths)
    learner = memory.learner(config, shape, peer=peer)
    served = config.generation.backend == "vllm"
    mean = round(load.stages[-1].prompt.mean + load.stages[-1].completion.mean)
    server = None
    if served:
        server = serving_memory.server(config, shape, int(hardware.memory_bytes), mean_tokens=mean)
    time, not_timed = None, ""
    try:
        cache = float(server.cache_tokens) if server is not None else None
        time = speed.step(config, load, shape, hardware, numbers, peer=peer, kv_tokens=cache)
    except ValueError as error:
        not_timed = str(error)
    return Prediction(config, shape, peer, hardware, why, learner, server, load, time, not_timed)


def report(found: Prediction, *, price_per_gpu_hour: float | None = None) -> dict[str, Any]:
    """`plan --json`: everything by name, bytes and seconds."""
    config, hardware = found.config, found.hardware
    return {
        "name": config.name,
        "model": found.shape.name,
        "parameters": found.shape.parameters,
        "hardware": {"name": hardware.name, "title": hardware.title, "why": found.why},
        "memory": {
            "learner": {part: int(size) for part, size in found.learner.items()},
            "peak_memory_gb": found.learner.peak_gb,
            "needed_gb": found.learner.needed_bytes / 1e9,
            "phase": found.learner.phase,
            "device_gb": found.room_bytes / 1e9,
            "fits": not found.over_bytes,
            "over_gb": found.over_bytes / 1e9,
            "server": asdict(found.server) if found.server is not None else None,
        },
        "step": _step(found),
        "time": _time(found, price_per_gpu_hour),
        "disk": _disk(found),
        "assumptions": list(found.load.assumptions),
        "notes": list(_notes(found)),
    }


def _notes(found: Prediction) -> Iterator[str]:
    yield from found.time.notes if found.time is not None else (found.not_timed,)
    if found.hardware.device == "cuda":
        said = refusals.refusal(found.config, found.shape, int(found.hardware.memory_bytes), peer=found.peer)
        if said is not None:
            yield said


def _step(found: Prediction) -> dict[str, Any]:
    load = found.load
    return {
        "stages": [
            {
                "name": s.name,
                "policy": s.policy,
                "completions": s.count,
                "prompt_tokens": s.prompt.mean,
                "completion_tokens": s.completion.mean,
            }
            for s in load.stages
        ],
        "sampled": load.sampled,
        "trained": load.kept,
        "updates": load.updates,
    }


def _time(found: Prediction, price: float | None) -> dict[str, Any] | None:
    time = found.time
    if time is None:
        return None
    hours = time.gpu_hours
    samples, completions = time.samples_per_second, time.completions_per_second
    device = "gpu_hours" if found.hardware.device == "cuda" else "cpu_rank_hours"
    return {
        "phase_seconds": dict(time.phases),
        "step_seconds": time.step_seconds,
        "step_seconds_interval": [time.low_seconds, time.high_seconds],
        "sampling": time.sampling,
        "step_seconds_by_sampling": dict(time.by_sampling),
        "samples_per_second": samples,
        "samples_per_second_interval": list(time.interval(samples, inverse=True)),
        "completions_per_second": completions,
        "completions_per_second_interval": list(time.interval(completions, inverse=True)),
        "steps": time.steps,
        "steps_known": found.load.max_steps is not None,
        "run_hours": time.run_hours,
        "run_hours_interval": list(time.interval(time.run_hours)),
        "devices": time.devices,
        device: hours,
        f"{device}_interval": list(time.interval(hours)),
        **_cost(time, price),
    }


def _cost(time: speed.Estimate, price: float | None) -> dict[str, Any]:
    if price is None:
        return {}
    return {
        "cost": price * time.gpu_hours,
        "cost_interval": [price * h for h in time.interval(time.gpu_hours)],
    }


def _disk(found: Prediction) -> dict[str, Any]:
    """Bytes of a checkpoint (float32 weights, two moments, the export) and of all that stand at once."""
    train = found.config.train
    machine = work.machine_of(found.config)
    trained = {r.policy for r in found.load.trained}
    parameters = found.shape.parameters
    if "peer" in trained and found.peer is not None:
        parameters += found.peer.parameters
    each = (seconds.STATE_BYTES + machine.item_bytes) * parameters
    saves = math.ceil((found.load.max_steps or seconds.STEPS_WHERE_UNKNOWN) / train.save_steps)
    stand = min(saves, (train.save_total_limit or saves) + 1)
    return {"checkpoint_bytes": each, "at_once": stand, "bytes": each * stand}


def show(said: Mapping[str, Any]) -> None:
    """Print a report for people."""
    from rich.console import Console

    console = Console()
    hardware = said["hardware"]
    console.print(
        f"{said['name']}: {said['model']}, {said['parameters']:,} parameters, on {hardware['title']}"
        + (f" ({hardware['why']})" if hardware["why"] else ""),
        markup=False,
        highlight=False,
    )
    for table in (_memory_table(said), _time_table(said), _run_table(said)):
        if table is not None:
            console.print(table)
    for text in said["assumptions"]:
        console.print("assumed: " + text, style="magenta", markup=False, highlight=False)
    for text in said["notes"]:
        console.print("note: " + text, style="yellow", markup=False, highlight=False)


def _memory_table(said: Mapping[str, Any]) -> Any:
    from rich.table import Table

    found = said["memory"]
    when = f", in {found['phase']}" if found["phase"] else ""
    table = Table("memory of a learner device", "GB", title=f"peak {found['peak_memory_gb']:.2f} GB{when}")
    for part, size in found["learner"].items():
        table.add_row(part.replace("_", " "), f"{size / 1e9:.3f}")
    verdict = "it fits" if found["fits"] else f"too large by {found['over_gb']:.1f} GB"
    table.add_row("of", f"{found['device_gb']:.1f}: {verdict}", end_section=True)
    for key, value in (found["server"] or {}).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            shown = f"{value / 1e9:.2f}" if key.endswith("bytes") else f"{value:,.0f}"
            table.add_row("server: " + key.removesuffix("_bytes").replace("_", " "), shown)
    return table


def _time_table(said: Mapping[str, Any]) -> Any:
    from rich.table import Table

    time = said["time"]
    if time is None:
        return None
    table = Table(
        "phase of a step", "seconds", "share", title=f"a step: {_range(time, 'step_seconds', ' s')}"
    )
    by_sampling = time["step_seconds_by_sampling"]
    for name, spent in time["phase_seconds"].items():
        table.add_row(name, shown(spent), f"{spent / by_sampling['in_turn']:.0%}")
    table.add_section()
    for option, spent in by_sampling.items():
        name = "a step, sampling in turn" if option == "in_turn" else f"with generation.{option}"
        table.add_row(name, shown(spent), "as configured" if option == time["sampling"] else "")
    return table


def _run_table(said: Mapping[str, Any]) -> Any:
    from rich.table import Table

    time, disk = said["time"], said["disk"]
    table = Table(
        "the run", "", title=f"{said['step']['sampled']:,.0f} sampled, {said['step']['trained']:,.0f} trained"
    )
    if time is not None:
        known = "" if time["steps_known"] else " (assumed)"
        table.add_row("steps", f"{time['steps']:,}{known}")
        table.add_row("samples/s (Appendix D)", _range(time, "samples_per_second"))
        table.add_row("completions/s", _range(time, "completions_per_second"))
        table.add_row("run hours", _range(time, "run_hours"))
        device = "gpu_hours" if "gpu_hours" in time else "cpu_rank_hours"
        table.add_row(f"{device.replace('_', '-')} of {time['devices']}", _range(time, device))
        if "cost" in time:
            table.add_row("cost", _range(time, "cost"))
    table.add_row("checkpoints on disk", f"{disk['bytes'] / 1e9:,.1f} GB ({disk['at_once']} at once)")
    return table


def _range(found: Mapping[str, Any], key: str, unit: str = "") -> str:
    low, high = found[f"{key}_interval"]
    return f"{shown(found[key])}{unit} ({shown(low)} to {shown(high)})"


def shown(value: float) -> str:
    """A number to three digits; whole from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
