"""What if: one configuration with some of its keys varied, what does not fit, and the cheapest that is in time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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

FILE_NAME = "plan-sweep.png"  # in the run's folder
MOST = 500  # combinations of one sweep
BATCH_KEYS = tuple(
    f"train.{key}"
    for key in ("train_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
)


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
            return f"the configuration does not take it: {self.refused}"
        if self.found.over_bytes:
            part, size = max(self.found.learner.items(), key=lambda item: item[1])
            return f"the learner is {self.found.over_bytes / 1e9:.1f} GB too large, of which {part} {size / 1e9:.1f} GB"
        return self.found.not_timed


def parse(texts: Sequence[str]) -> dict[str, list[str]]:
    """`key.sub=a,b,c` -> {key.sub: [a, b, c]}, each value once.

    Raises ConfigError for what is written otherwise, or is too much.
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        key, _, listed = text.partition("=")
        choices = list(dict.fromkeys(choice.strip() for choice in listed.split(",") if choice.strip()))
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


def checked(found: Sequence[Point]) -> Sequence[Point]:
    """The points. Raises ConfigError where the configuration takes none of them: a wrong key, or wrong values alone."""
    if all(point.found is None for point in found):
        said = dict.fromkeys(point.refused for point in found)
        raise ConfigError("\n".join(f"--sweep: {text}" for text in said))
    return found


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
        "notes": list(_notes(found)),
    }


def _notes(found: Sequence[Point]) -> Iterator[str]:
    """Whether the rows are of one training: nodes change the batch where it is given for each device."""
    named = [p.found for p in found if p.found is not None]
    batches = {p.load.counts.train_batch_size for p in named}
    if len(batches) > 1 and not any(key in BATCH_KEYS for point in found for key in point.settings):
        held = named[0].load.counts.train_batch_size
        yield (
            f"the rows differ in their batch ({min(batches):,} to {max(batches):,} completions an optimizer step):"
            " train.per_device_train_batch_size counts for each device, so these are different trainings, of different"
            f" step counts; to hold it, add train.train_batch_size={held} train.per_device_train_batch_size=null"
        )


def _line(point: Point) -> dict[str, Any]:
    line: dict[str, Any] = {
        "settings": dict(point.settings),
        "valid": point.found is not None,
        "fits": not point.trouble,
        "why_not": point.trouble,
    }
    if point.found is None:
        return line
    line |= {
        "train_batch_size": point.found.load.counts.train_batch_size,
        "peak_memory_gb": point.found.learner.peak_gb,
        "over_gb": point.found.over_bytes / 1e9,
    }
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
    """Print the table (where the terminal is too narrow, a line for each row), what does not fit, and the cheapest."""
    from rich.console import Console

    console, table = Console(), _table(said)
    if console.measure(table, options=console.options.update(width=1000)).maximum <= console.width:
        console.print(table)
    else:
        for line in said["rows"]:
            told = ", ".join(
                f"{name} {text}" for name, text in zip(COLUMNS, _cells(line, said), strict=True) if text
            )
            console.print(
                f"{_settings(line)}: {told}", markup=False, highlight=False, style=_style(line, said)
            )
    for line in said["rows"]:
        if not line["fits"]:
            console.print(f"{_settings(line)}: {line['why_not']}", markup=False, highlight=False, style="red")
    for text in said["notes"]:
        console.print("note: " + text, markup=False, highlight=False, style="yellow")
    console.print(_verdict(said), markup=False, highlight=False)


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {  # what a column shows, and how
    "batch": ("train_batch_size", prediction.shown),
    "peak GB": ("peak_memory_gb", "{:.1f}".format),
    "s/step": ("step_seconds", prediction.shown),
    "samples/s": ("samples_per_second", prediction.shown),
    "steps": ("steps", prediction.shown),
    "hours": ("run_hours", prediction.shown),
    "GPU-hours": ("gpu_hours", prediction.shown),
    "": ("", str),
}


def _table(said: Mapping[str, Any]) -> Any:
    from rich import box
    from rich.table import Column, Table

    keys = [key.rpartition(".")[2].replace("_", "\n") for key in said["rows"][0]["settings"]]
    heads = [*keys, *(re.sub(r"(?<=-)| |(?=/)", "\n", name) for name in COLUMNS)]
    columns = (Column(head, no_wrap=True) for head in heads)
    table = Table(*columns, title="what if", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for line in said["rows"]:
        table.add_row(*line["settings"].values(), *_cells(line, said), style=_style(line, said))
    return table


def _cells(line: Mapping[str, Any], said: Mapping[str, Any]) -> Iterator[str]:
    for key, form in COLUMNS.values():
        if not key:
            yield "cheapest" if line["settings"] == said["cheapest"] else _mark(line)
        else:
            yield form(line[key]) if key in line else "-"


def _settings(line: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in line["settings"].items())


def _style(line: Mapping[str, Any], said: Mapping[str, Any]) -> str | None:
    if line["settings"] == said["cheapest"]:
        return "bold green"
    return None if line["fits"] else "red"


def _mark(line: Mapping[str, Any]) -> str:
    if line["fits"]:
        return ""
    if not line["valid"]:
        return "not valid"
    return f"+{line['over_gb']:.1f} GB" if line["over_gb"] else "cannot run"


def _verdict(said: Mapping[str, Any]) -> str:
    limit = said["within_hours"]
    within = f" that ends within {limit:g} h, at the upper end of its interval" if limit is not None else ""
    if said["cheapest"] is None:
        return f"none of them fits{' and' if within else ''}{within.removeprefix(' that')}"
    return f"cheapest{within}: {_settings({'settings': said['cheapest']})}"


def draw(said: Mapping[str, Any], path: Path) -> None:
    """GPU-hours against hours of every combination, and the peak memory of each. Raises ConfigError for a bad path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [line for line in said["rows"] if line["valid"]]
    names = [f"{_settings(line)}  ({number})" for number, line in enumerate(lines, 1)]
    height = max(4.6, 1.2 + 0.3 * len(lines))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, height), layout="constrained")
    for number, line in enumerate(lines, 1):
        if "run_hours" in line:
            marker, color = ("o", "#0072b2") if line["fits"] else ("x", "#d55e00")
            place = (line["run_hours"], line["gpu_hours"])
            left.scatter(*place, marker=marker, color=color, zorder=3)
            left.annotate(str(number), place, xytext=(5, 4), textcoords="offset points", fontsize=8)
    if said["within_hours"] is not None:
        left.axvline(said["within_hours"], color="#8a8a8a", linestyle="--", linewidth=1)
    left.set(
        xlabel="hours", ylabel="GPU-hours", title="time and cost by the numbers beside; crosses do not fit"
    )
    colors = ["#0072b2" if line["fits"] else "#d55e00" for line in lines]
    right.barh(range(len(lines)), [line["peak_memory_gb"] for line in lines], color=colors)
    right.set_yticks(range(len(lines)), names, fontsize=7)
    right.invert_yaxis()
    right.set(xlabel="peak memory of a learner device, GB", title="memory")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--output {path}: {error}; name a .png file that can be written") from None
    finally:
        pyplot.close(figure)
