"""What if: one configuration with some of its keys varied, what does not fit, and the cheapest that is in time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgrpo import config as configuration
from hpcgrpo.config_file import ConfigError
from hpcgrpo.planner import hardware as machines
from hpcgrpo.planner import prediction
from hpcgrpo.planner.efficiencies import Efficiencies
from hpcgrpo.planner.hardware import Hardware
from hpcgrpo.planner.lengths import Known

MOST = 500  # combinations of one sweep


@dataclass(frozen=True)
class Point:
    """One combination: what it takes, or why it cannot be."""

    settings: Mapping[str, str]
    found: prediction.Prediction | None
    refused: str = ""  # by the configuration's own rules

    @property
    def trouble(self) -> str:
        """Why it cannot run; empty where it can."""
        if self.found is None:
            return self.refused
        if self.found.over_bytes:
            part, size = max(self.found.learner.items(), key=lambda item: item[1])
            return f"the learner is {self.found.over_bytes / 1e9:.1f} GB too large, of which {part} {size / 1e9:.1f} GB"
        return self.found.not_timed


def parse(texts: Sequence[str]) -> dict[str, list[str]]:
    """`key.sub=a,b,c` -> {key.sub: [a, b, c]}. Raises ConfigError for what is written otherwise, or is too much."""
    found: dict[str, list[str]] = {}
    for text in texts:
        key, _, listed = text.partition("=")
        choices = [choice.strip() for choice in listed.split(",") if choice.strip()]
        if not re.fullmatch(r"[A-Za-z_][\w.\-]*", key) or not choices:
            raise ConfigError(f"--sweep {text}: write it as key.sub=a,b,c, such as cluster.nodes=2,3,5")
        if key in found:
            raise ConfigError(f"--sweep {text}: {key} is swept already; write all of its values in one list")
        found[key] = choices
    count = 1
    for choices in found.values():
        count *= len(choices)
    if count > MOST:
        raise ConfigError(
            f"--sweep: {count:,} combinations, but at most {MOST}; sweep fewer values at a time"
        )
    return found


def points(
    path: str,
    overrides: Sequence[str],
    axes: Mapping[str, Sequence[str]],
    *,
    hardware: Hardware | None,
    numbers: Efficiencies | None = None,
    lengths: Known | None = None,
) -> Iterator[Point]:
    """Every combination's prediction; `hardware` None takes what each names."""
    measured: dict[str, tuple[Hardware, str]] = {}
    for choice in itertools.product(*axes.values()):
        settings = dict(zip(axes, choice, strict=True))
        try:
            config = configuration.load(path, [*overrides, *(f"{k}={v}" for k, v in settings.items())])
        except ValueError as error:
            yield Point(settings, None, " ".join(str(error).split()))
            continue
        kind = repr((config.device, config.cluster.slurm_gres, bool(config.cluster.gpus_per_node)))
        if hardware is None and kind not in measured:
            measured[kind] = machines.of(config)
        machine, why = (hardware, "") if hardware is not None else measured[kind]
        yield Point(settings, _predicted(config, machine, why, numbers, lengths))


def _predicted(
    config: Any, machine: Hardware, why: str, numbers: Efficiencies | None, lengths: Known | None
) -> prediction.Prediction:
    return prediction.predict(config, machine, why=why, numbers=numbers, lengths=lengths)


def cheapest(found: Sequence[Point], within_hours: float | None) -> Point | None:
    """The fewest GPU-hours of those that fit and, at the upper end of the interval, end within the hours."""
    able = [p for p in found if not p.trouble and _in_time(p, within_hours)]
    return min(able, key=lambda p: p.found.time.gpu_hours if p.found and p.found.time else 0.0, default=None)


def _in_time(point: Point, within_hours: float | None) -> bool:
    if point.found is None or point.found.time is None:
        return False
    time = point.found.time
    return within_hours is None or time.interval(time.run_hours)[1] <= within_hours


def report(found: Sequence[Point], within_hours: float | None) -> dict[str, Any]:
    """`plan --sweep --json`."""
    best = cheapest(found, within_hours)
    return {
        "rows": [_line(point) for point in found],
        "within_hours": within_hours,
        "cheapest": dict(best.settings) if best is not None else None,
    }


def _line(point: Point) -> dict[str, Any]:
    line: dict[str, Any] = {
        "settings": dict(point.settings),
        "fits": not point.trouble,
        "why_not": point.trouble,
    }
    if point.found is None:
        return line
    line |= {"peak_memory_gb": point.found.learner.peak_gb, "over_gb": point.found.over_bytes / 1e9}
    time = point.found.time
    if time is not None:
        line |= {
            "step_seconds": time.step_seconds,
            "samples_per_second": time.samples_per_second,
            "completions_per_second": time.completions_per_second,
            "steps": time.steps,
            "run_hours": time.run_hours,
            "run_hours_interval": list(time.interval(time.run_hours)),
            "gpu_hours": time.gpu_hours,
            "gpu_hours_interval": list(time.interval(time.gpu_hours)),
        }
    return line


def show(said: Mapping[str, Any]) -> None:
    """Print the table, what does not fit, and the cheapest."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    keys = list(said["rows"][0]["settings"])
    columns = ("peak GB", "s per step", "samples/s", "steps", "hours", "GPU-hours", "")
    table = Table(*(key.rpartition(".")[2] for key in keys), *columns, title="what if")
    for line in said["rows"]:
        chosen = line["settings"] == said["cheapest"]
        style = "bold green" if chosen else None if line["fits"] else "red"
        table.add_row(
            *line["settings"].values(), *_cells(line), "cheapest" if chosen else _mark(line), style=style
        )
    console.print(table)
    for line in said["rows"]:
        if not line["fits"]:
            which = ", ".join(f"{k}={v}" for k, v in line["settings"].items())
            console.print(f"{which}: {line['why_not']}", markup=False, highlight=False, style="red")
    console.print(_verdict(said), markup=False, highlight=False)


def _cells(line: Mapping[str, Any]) -> Iterator[str]:
    forms = {"peak_memory_gb": ".1f", "step_seconds": ".3g", "samples_per_second": ".3g"}
    forms |= {"steps": ",", "run_hours": ".3g", "gpu_hours": ",.4g"}
    for key, form in forms.items():
        yield format(line[key], form) if key in line else "-"


def _mark(line: Mapping[str, Any]) -> str:
    if line["fits"]:
        return ""
    return f"+{line['over_gb']:.1f} GB" if line.get("over_gb") else "cannot run"


def _verdict(said: Mapping[str, Any]) -> str:
    limit = said["within_hours"]
    within = f" that ends within {limit:g} h, at the upper end of its interval" if limit is not None else ""
    if said["cheapest"] is None:
        return f"none of them fits{' and' if within else ''}{within.removeprefix(' that')}"
    which = ", ".join(f"{k}={v}" for k, v in said["cheapest"].items())
    return f"cheapest{within}: {which}"


def draw(said: Mapping[str, Any], path: Path) -> None:
    """GPU-hours against hours of every combination, and the peak memory of each. Raises ConfigError for a bad path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = said["rows"]
    names = ["\n".join(f"{k.rpartition('.')[2]} {v}" for k, v in line["settings"].items()) for line in lines]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(5.5 + max(5.0, 0.5 * len(lines)), 4.6), layout="constrained"
    )
    for name, line in zip(names, lines, strict=True):
        if "run_hours" in line:
            marker, color = ("o", "#0072b2") if line["fits"] else ("x", "#d55e00")
            left.scatter(line["run_hours"], line["gpu_hours"], marker=marker, color=color, zorder=3)
            label = name.replace("\n", ", ")
            left.annotate(
                label,
                (line["run_hours"], line["gpu_hours"]),
                xytext=(5, 4),
                textcoords="offset points",
                fontsize=7,
            )
    if said["within_hours"] is not None:
        left.axvline(said["within_hours"], color="#8a8a8a", linestyle="--", linewidth=1)
    left.set(xlabel="hours", ylabel="GPU-hours", title="time and cost (crosses do not fit)")
    colors = ["#0072b2" if line["fits"] else "#d55e00" for line in lines]
    right.bar(range(len(lines)), [line.get("peak_memory_gb", 0.0) for line in lines], color=colors)
    right.set_xticks(range(len(lines)), names, fontsize=7)
    right.set(ylabel="peak memory of a learner device, GB", title="memory")
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--output {path}: {error}; name a .png file that can be written") from None
    finally:
        pyplot.close(figure)
