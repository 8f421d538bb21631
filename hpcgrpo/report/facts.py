"""Everything that a run's folder tells, as plain values: what the page shows and `report --json` prints."""

from __future__ import annotations

import platform
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from hpcgrpo import __version__, doctor, versions
from hpcgrpo.config_file import ConfigError
from hpcgrpo.evidence import read_json
from hpcgrpo.report import evaluations, measured, samples
from hpcgrpo.report.markup import finite
from hpcgrpo.sections import RunConfig

MAX_CONFIG_CHARACTERS = 100_000
MAX_STARTS = 50
BESIDE = (
    "igrpo_table_s3",
    "igrpo_figure_3",
)  # published tables that the page shows beside the run's own numbers


def collect(folder: Path) -> dict[str, Any]:
    """What is known of the run in `folder`; long texts are cut.

    What is missing or damaged is named under `notes`. Raises ConfigError for a folder that holds no run.
    """
    state = doctor.diagnose(folder)
    notes: list[str] = []
    text, values, config = _config(folder, notes)
    lines = measured.lines_of(folder, notes)
    profile = _profile(folder, notes)
    metrics = measured.summary(lines)
    found = {
        "run": str(folder),
        "name": str(values.get("name") or folder.resolve().name),
        "made": time.time(),
        "state": {**state, "starts": state["starts"][-MAX_STARTS:], "num_starts": len(state["starts"])},
        "dates": _dates(folder, state["starts"]),
        "about": _about(values),
        "steps": _steps(values, lines, folder),
        "metrics": metrics,
        "totals": {name: _sum(lines, f"completions/{name}") for name in ("sampled", "kept")},
        "curves": {name: measured.curve(name, measured.points(lines, name)) for name in metrics},
        "phases": measured.phases(lines, profile),
        "profile": profile,
        "predicted": predicted(config, profile, folder),
        "published": _published(),
        "evaluations": evaluations.results(folder, notes),
        "rolling": evaluations.rolling(folder, notes),
        "held_out_questions": _held_out(folder),
        "samples": samples.of_run(folder, notes),
        "config": values,
        "config_text": samples.shortened(text, MAX_CONFIG_CHARACTERS),
        "versions": _versions(folder),
        "notes": notes,
    }
    return dict(measured.plain(found))


def _sum(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(float(value) for line in lines if finite(value := line.get(name)))


def predicted(config: RunConfig | None, profile: Mapping[str, Any], folder: Path) -> dict[str, Any] | None:
    """What `hpcgrpo plan` says of the configuration, or {"why_not"}; None without a planner or a configuration.

    At the lengths of the run's own rollouts where there are some, and by the efficiencies of a calibration where there
    is one (`planner.calibrate.stored`), as `efficiencies` says.
    """
    if config is None:
        return None
    try:
        from hpcgrpo.planner import calibrate, hardware, prediction
    except ImportError:
        return None
    try:
        prediction.shape_of(config.model_name_or_path)  # before the CPU is measured for nothing
        machine, why = hardware.of(config)
        measured_on = profile.get("device")
        if measured_on is not None and measured_on != machine.device:
            return {"why_not": f"it ran on {measured_on}, but its configuration asks for no such device"}
        numbers, machine, said = _calibrated(calibrate.stored(folder, machine), machine)
        own = _lengths(folder)
        found = prediction.report(prediction.predict(config, machine, why=why, numbers=numbers, lengths=own))
        return {**found, "efficiencies": said}
    except (ValueError, OSError) as error:
        return {"why_not": str(error)}


def _lengths(folder: Path) -> Any:
    """Lengths as the run's rollouts have them; None where none tell any, or a line of them is cut off."""
    from hpcgrpo.planner import lengths

    try:
        return lengths.read_lengths(folder)
    except (ValueError, TypeError, OSError):
        return None


def _calibrated(path: Path | None, machine: Any) -> tuple[Any, Any, str]:
    """Efficiencies (None: the defaults), the machine they belong to, and where they are from, in words."""
    from hpcgrpo.planner import calibrate, efficiencies

    plain = "by the efficiencies' defaults, fitted to no run; hpcgrpo plan --calibrate RUN fits them"
    if path is None:
        return None, machine, plain
    try:
        numbers, extra = efficiencies.read(path)
    except ConfigError as error:
        return None, machine, f"{plain} ({error})"
    runs = extra.get("runs")
    fitted = f", fitted to {', '.join(map(str, runs))}" if isinstance(runs, list) and runs else ""
    seconds = f"; seconds {extra['seconds']}" if isinstance(extra.get("seconds"), str) else ""
    return numbers, calibrate.machine_of(extra, machine), f"by the calibration {path}{fitted}{seconds}"


# ---- the configuration


def _config(folder: Path, notes: list[str]) -> tuple[str, dict[str, Any], RunConfig | None]:
    """config.yaml as text, as plain values, and checked; no reward's module is imported for it."""
    from yaml import YAMLError, safe_load

    path = folder / "config.yaml"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        notes.append(f"config.yaml cannot be read ({error.strerror})")
        return "", {}, None
    try:
        values = safe_load(text)
    except (YAMLError, ValueError, RecursionError):  # a date that is none is a ValueError
        values = None
    if not isinstance(values, dict):
        notes.append("config.yaml holds no configuration")
        return text, {}, None
    try:
        return text, values, RunConfig.model_validate(values)
    except ValueError:
        notes.append("config.yaml is not one that this version reads, so nothing is predicted from it")
        return text, values, None


def nesting(algorithm: Any) -> list[tuple[str, dict[str, Any]]]:
    """(name, its own options) of an algorithm and of what it wraps, the outermost first."""
    found: list[tuple[str, dict[str, Any]]] = []
    while isinstance(algorithm, Mapping) and len(found) < 20:
        own = {str(k): v for k, v in algorithm.items() if k not in ("name", "base")}
        found.append((str(algorithm.get("name")), own))
        algorithm = algorithm.get("base")
    return found


def _about(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the run is, in the words of its configuration."""
    keys = ("model_name_or_path", "seed", "rewards", "data", "peer", "cluster")
    about = {key: values.get(key) for key in keys}
    return {**about, "algorithm": [[name, own] for name, own in nesting(values.get("algorithm"))]}


def section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a configuration; empty where it is none."""
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def _steps(values: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """How many steps were done, and how many were planned as far as that is known."""
    done = max((line["step"] for line in lines), default=0)
    train = section(values, "train")
    planned: Any = train.get("max_steps")
    if not isinstance(planned, int):
        notes = sorted((folder / "slurm").glob("*/status-0.json"), key=lambda p: p.name)
        planned = next((n for p in notes if isinstance(n := read_json(p).get("max_steps"), int)), None)
    if planned is None and lines:
        epochs, epoch = train.get("num_train_epochs", 1.0), lines[-1].get("epoch")
        if finite(epochs) and finite(epoch) and epoch and done:
            planned = max(done, round(epochs / epoch * done))
    return {"done": done, "planned": planned}


# ---- beside the metrics


def _profile(folder: Path, notes: list[str]) -> dict[str, Any]:
    path = folder / "profile.json"
    found = read_json(path)
    if not found:
        there = path.exists()
        notes.append(
            "profile.json is damaged" if there else "profile.json is not there: no step was finished"
        )
    return found


def _dates(folder: Path, starts: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """When it began and last moved, by its starts and its files' times, in epoch seconds."""
    files = [folder / name for name in ("config.yaml", "metrics.jsonl", "profile.json")]
    times = [p.stat().st_mtime for p in files if p.exists()]
    began = [float(s["began"]) for s in starts if finite(s.get("began"))]
    ended = [float(s["ended"]) for s in starts if finite(s.get("ended"))]
    return {
        "began": min([*began, *times], default=None),
        "last_moved": max([*ended, *times], default=None),
    }


def _held_out(folder: Path) -> int | None:
    """How many held-out questions the last evaluation within the run asked; None where no answers were kept."""
    try:
        newest = max((folder / "rollouts").glob("eval-*.jsonl"), default=None)
        if newest is None:
            return None
        with newest.open("rb") as file:
            return sum(b'"stage": "eval"' in line[:400] for line in file) or None
    except OSError:
        return None


@cache
def _published() -> dict[str, Any]:
    from yaml import safe_load

    tables = safe_load((resources.files("hpcgrpo") / "data" / "published.yaml").read_text(encoding="utf-8"))
    return {name: tables[name] for name in BESIDE}


def _versions(folder: Path) -> dict[str, Any]:
    """Of what made the report, and of what made the run: its newest start, and how earlier ones differed."""
    models = sorted((folder / "checkpoints").glob("checkpoint-*/config.json"))
    saved = next((v for p in models[::-1] if (v := read_json(p).get("transformers_version"))), None)
    starts = versions.read(folder)
    told = [_told(start) for start in starts]
    return {
        "report": {
            "hpcgrpo": __version__,
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "host": socket.gethostname(),
            **versions.installed(),
        },
        "run": {
            **(told[-1] if told else {}),
            **({"transformers, as its checkpoint says": saved} if saved else {}),
        },
        "changed": [
            {"step": new.get("step"), "what": key, "from": before.get(key), "to": after.get(key)}
            for new, before, after in zip(starts[1:], told, told[1:], strict=False)
            for key in {**before, **after}
            if before.get(key) != after.get(key)
        ][-MAX_STARTS:],
    }


def _told(start: Mapping[str, Any]) -> dict[str, str]:
    """A start's versions as text; what it has none of is left out."""
    found = {k: v for k, v in start.items() if k not in ("time", "step") and v not in (None, [], {})}
    gpus, git = found.pop("gpus", None), found.pop("git", None)
    if isinstance(gpus, list):
        counted = Counter(map(str, gpus))
        found["GPUs of rank 0's node"] = ", ".join(f"{n} x {name}" for name, n in counted.items())
    if isinstance(git, Mapping):
        changed = {True: ", with changes that were not committed", None: ", perhaps with changes"}
        found["git commit"] = f"{git.get('commit')}{changed.get(git.get('dirty'), '')}"
    return {str(k): str(v) for k, v in found.items()}
