"""The pictures of a study: curves with bands, and the compared metrics with their intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcgrpo.study.design import Study
from hpcgrpo.study.results import Outcome
from hpcgrpo.study.statistics import grouped, mean
from hpcgrpo.study.tables import by_pair, of_label, unit_positions

# Told apart by people who see colours differently (Okabe and Ito 2008).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8a8a8a")
STYLES = ("-", "--", ":")  # the next one where all colours are taken
SMOOTHED_FROM = 60  # points of a curve, from which on it is a running mean
SMOOTHED_OVER = 10
COLUMNS = 3


def draw(study: Study, outcomes: Sequence[Outcome], table: Mapping[str, Any]) -> None:
    """Write curves.png and metrics.png into the study's folder."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    study.folder.mkdir(parents=True, exist_ok=True)
    for name, figure in (
        ("metrics", _metrics(pyplot, study, outcomes, table)),
        ("curves", _curves(pyplot, study, outcomes)),
    ):
        if figure is not None:
            figure.savefig(study.folder / f"{name}.png", dpi=140)
            pyplot.close(figure)


def _panels(pyplot: Any, count: int, height: float) -> tuple[Any, list[Any]]:
    columns = min(COLUMNS, count)
    rows = math.ceil(count / columns)
    size = (4.6 * columns, height * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    flat = list(axes.flat)
    for spare in flat[count:]:
        spare.set_visible(False)
    return figure, flat[:count]


def _metrics(pyplot: Any, study: Study, outcomes: Sequence[Outcome], table: Mapping[str, Any]) -> Any:
    """Each metric's means with their 95 % intervals, the single units as dots, the baseline as a line."""
    names = [n for n, rows in table["metrics"].items() if any(row["n"] for row in rows.values())]
    if not names:
        return None
    labels = study.labels
    figure, axes = _panels(pyplot, len(names), 1.2 + 0.35 * len(labels))
    for axis, name in zip(axes, names, strict=True):
        for i, label in enumerate(labels):
            row = table["metrics"][name][label]
            if not row["n"]:
                continue
            color = COLORS[i % len(COLORS)]
            dots = list(grouped(of_label(study, outcomes, name, label), unit_positions(study)).values())
            axis.plot(dots, [i] * len(dots), "o", color=color, alpha=0.25, markersize=4)
            half = (
                [[row["mean"] - row["low"]], [row["high"] - row["mean"]]] if row["low"] is not None else None
            )
            axis.errorbar(row["mean"], i, xerr=half, fmt="D", color=color, capsize=4, markersize=5)
        base = table["metrics"][name][study.baseline]
        if base["n"]:
            axis.axvline(base["mean"], color="#999999", linewidth=0.8, linestyle=":")
        axis.set(title=name, yticks=range(len(labels)), yticklabels=labels)
        axis.invert_yaxis()
        axis.grid(alpha=0.3, axis="x")
    return figure


def _curves(pyplot: Any, study: Study, outcomes: Sequence[Outcome]) -> Any:
    """Each curve's mean over the units, with its 95 % interval as a band."""
    names = [n for n in study.curves if any(n in line for o in outcomes for line in o.lines)]
    if not names:
        return None
    figure, axes = _panels(pyplot, len(names), 3.6)
    for axis, name in zip(axes, names, strict=True):
        smoothed = False
        for i, label in enumerate(study.labels):
            color = COLORS[i % len(COLORS)]
            points = list(_band(study, outcomes, name, label))
            steps = [p[0] for p in points]
            smoothed |= len(points) >= SMOOTHED_FROM
            mark = "" if len(points) >= SMOOTHED_FROM / 2 else "o"
            style = mark + STYLES[i // len(COLORS) % len(STYLES)]
            axis.plot(steps, [p[1] for p in points], style, color=color, label=label, markersize=3)
            low, high = [p[2] for p in points], [p[3] for p in points]
            axis.fill_between(
                steps, low, high, color=color, alpha=min(0.15, 0.6 / len(study.labels)), linewidth=0
            )
        title = f"{name} (mean of {SMOOTHED_OVER} steps)" if smoothed else name
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    columns = 2 * min(COLUMNS, len(names))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")
    return figure


def _band(
    study: Study, outcomes: Sequence[Outcome], name: str, label: str
) -> Iterator[tuple[int, float, float, float]]:
    """(step, mean, low, high) at the steps that every finished run of the label has."""
    mine = [o for o in outcomes if o.finished and study.label(o.cell) == label]
    runs = [(o.cell, curve) for o in mine if (curve := _curve(o, name))]
    steps = sorted(set.intersection(*(set(curve) for _, curve in runs))) if runs else []
    for step in steps:
        pairs = by_pair(study, [(cell, curve[step]) for cell, curve in runs])
        found = mean(list(grouped(pairs, unit_positions(study)).values()))
        assert found is not None
        low = found.mean if found.low is None else found.low
        high = found.mean if found.high is None else found.high
        yield step, found.mean, low, high


def _curve(outcome: Outcome, name: str) -> dict[int, float]:
    """Step -> value, a running mean where there are many."""
    points = [(int(line["step"]), float(line[name])) for line in outcome.lines if name in line]
    over = SMOOTHED_OVER if len(points) >= SMOOTHED_FROM else 1
    values = [value for _, value in points]
    means = [sum(values[max(0, i - over + 1) : i + 1]) / min(over, i + 1) for i in range(len(values))]
    return {step: m for (step, _), m in zip(points, means, strict=True)}
