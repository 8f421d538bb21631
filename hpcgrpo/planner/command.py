"""`hpcgrpo plan`: which of the planner's answers is asked for, and its printing. No torch, but with --trace."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcgrpo import config as configuration
from hpcgrpo.config_file import ConfigError
from hpcgrpo.planner import calibrate, efficiencies, hardware, paper, prediction, sweep
from hpcgrpo.planner.efficiencies import Efficiencies
from hpcgrpo.planner.hardware import Hardware
from hpcgrpo.planner.lengths import Known, read_lengths
from hpcgrpo.planner.shapes import Shape
from hpcgrpo.sections import RunConfig


def plan(arguments: argparse.Namespace) -> int:
    """Answer `hpcgrpo plan`; 0 where it could. Raises ValueError for what the user can mend.

    `arguments` has config (a file, a run's folder or None), overrides, hardware, efficiencies, lengths, trace, sweep,
    within, paper, calibrate, output, price_per_gpu_hour and json.
    """
    _check(arguments)
    if arguments.config and Path(arguments.config).is_dir():
        arguments.config = _of_run(Path(arguments.config))
    numbers, extra = _efficiencies(arguments.efficiencies)
    if arguments.paper:
        return _paper(arguments, numbers or efficiencies.DEFAULTS)
    if arguments.calibrate:
        return _calibrate(arguments)
    known = read_lengths(arguments.lengths) if arguments.lengths else None
    machine = _machine(arguments, extra)
    if arguments.sweep:
        return _sweep(arguments, machine, numbers, known)
    config = configuration.load(arguments.config, arguments.overrides)
    chosen, why = machine or hardware.of(config)
    chosen = calibrate.machine_of(extra, chosen) if extra else chosen
    found = prediction.predict(config, chosen, why=why, numbers=numbers, lengths=known)
    said = prediction.report(found, price_per_gpu_hour=arguments.price_per_gpu_hour)
    if arguments.trace:
        said["trace"] = _trace(config, found)
    _say(said, arguments.json, prediction.show)
    if arguments.trace and not arguments.json:
        _show_trace(said["trace"])
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """What goes with what."""
    modes = [m for m in ("paper", "calibrate", "sweep", "trace") if getattr(arguments, m)]
    if len(modes) > 1:
        raise ConfigError(f"plan: --{' and --'.join(modes)} are different questions; ask one at a time")
    if not arguments.config and not (arguments.paper or arguments.calibrate):
        raise ConfigError(
            "plan: which run? give its YAML file (hpcgrpo plan configs/igrpo_7b.yaml), or --paper, or --calibrate RUN"
        )
    if arguments.config and arguments.paper:
        raise ConfigError(f"plan: --paper has its own configurations; leave {arguments.config} out")
    if arguments.within is not None and not arguments.sweep:
        raise ConfigError(
            "plan: --within chooses among the rows of a --sweep; add one, such as cluster.nodes=2,3,5"
        )
    if arguments.within is not None and not arguments.within > 0:
        raise ConfigError(f"plan: --within {arguments.within}: a number of hours above 0")
    price = arguments.price_per_gpu_hour
    if price is not None and not price >= 0:
        raise ConfigError(f"plan: --price-per-gpu-hour {price}: a price of 0 or more")


def _of_run(folder: Path) -> str:
    """The configuration of a run by its folder. Raises ConfigError for a folder of anything else."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"plan: {folder} is a folder without config.yaml; give a YAML file, or the folder of a run"
            " (output_dir/name)"
        )
    return str(folder / "config.yaml")


def _efficiencies(path: str | None) -> tuple[Efficiencies | None, Mapping[str, Any]]:
    return efficiencies.read(path) if path else (None, {})


def _machine(arguments: argparse.Namespace, extra: Mapping[str, Any]) -> tuple[Hardware, str] | None:
    """The hardware that the command line names, or that the efficiencies were fitted on."""
    if arguments.hardware:
        return hardware.find(arguments.hardware), f"by --hardware {arguments.hardware}"
    name = (extra.get("machine") or {}).get("name") if extra else None
    return (hardware.find(name), "that of the calibration") if name else None


def _say(said: Mapping[str, Any], as_json: bool, show: Any) -> None:
    if as_json:
        print(json.dumps(said, indent=1))
    else:
        show(said)


def _paper(arguments: argparse.Namespace, numbers: Efficiencies) -> int:
    from hpcgrpo.planner import memory

    def peak_gb(config: RunConfig, shape: Shape, original: bool) -> float:
        stack = replace(memory.ORIGINAL, prompt_width=paper.PROMPT_LENGTH) if original else memory.OURS
        return float(memory.learner(config, shape, stack=stack).peak_gb)

    _say(paper.table(prediction.shape_of, peak_gb, numbers), arguments.json, paper.show)
    return 0


def _sweep(
    arguments: argparse.Namespace,
    machine: tuple[Hardware, str] | None,
    numbers: Efficiencies | None,
    known: Known | None,
) -> int:
    axes = sweep.parse(arguments.sweep)
    points = sweep.points(
        arguments.config,
        arguments.overrides,
        axes,
        hardware=machine[0] if machine else None,
        numbers=numbers,
        lengths=known,
    )
    found = sweep.checked(list(points))
    said = sweep.report(found, arguments.within)
    folder = next(p.found.config.folder for p in found if p.found is not None)
    picture = Path(arguments.output or folder / sweep.FILE_NAME)
    sweep.draw(said, picture)
    _say(said, arguments.json, sweep.show)
    if not arguments.json:
        print(f"wrote {picture}")
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    folders = [Path(folder) for folder in arguments.calibrate]
    first = calibrate.measured(folders[0])
    machine = hardware.find(arguments.hardware) if arguments.hardware else hardware.of(first.config)[0]
    found = calibrate.fit(folders, machine, prediction.shape_of)
    path = Path(arguments.output) if arguments.output else folders[0] / calibrate.FILE_NAME
    calibrate.write(found, path)
    said = {
        "file": str(path),
        "seconds": "cpu" if found.cpu_seconds else "clock",
        "residuals": dict(found.residuals),
        "predicted_over_measured": dict(found.step_ratio),
        "efficiencies": {
            k: {"value": n.value, "low": n.low, "high": n.high} for k, n in found.numbers.items()
        },
    }
    _say(said, arguments.json, _show_calibration)
    return 0


def _show_calibration(said: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("efficiency", "value", "low", "high", "default", "what")
    for name, number in said["efficiencies"].items():
        default = efficiencies.DEFAULTS[name]
        shown = (f"{number[key]:.3g}" for key in ("value", "low", "high"))
        table.add_row(name, *shown, f"{default.value:g}", default.what)
    console.print(table)
    for name, ratio in said["predicted_over_measured"].items():
        console.print(f"{name}: a step predicted at {ratio:.2f} of what was measured", highlight=False)
    console.print(
        f"wrote {said['file']}; use it with: hpcgrpo plan CONFIG --efficiencies {said['file']}",
        markup=False,
        highlight=False,
    )


def _trace(config: RunConfig, found: prediction.Prediction) -> dict[str, Any]:
    """The learner's peak as the real code under fake tensors has it; takes seconds to minutes and says so."""
    from hpcgrpo.planner import trace

    print(
        "tracing the learner's own code without its numbers; up to a minute ...", file=sys.stderr, flush=True
    )
    counted = trace.learner(config, found.shape)
    return {
        "peak_memory_gb": counted.peak_gb,
        "phase": counted.phase,
        "learner": dict(counted.items()),
        "closed_form_over_traced": found.learner.peak_gb / counted.peak_gb,
    }


def _show_trace(said: Mapping[str, Any]) -> None:
    parts = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in said["learner"].items())
    print(
        f"traced: {said['peak_memory_gb']:.2f} GB in {said['phase']} ({parts}); the closed form gives"
        f" {said['closed_form_over_traced']:.3f} of that"
    )
