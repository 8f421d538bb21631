"""The controlled experiments' results as Markdown tables and one picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

COLORS = {
    "GRPO 8": "#2d6fc2",
    "GRPO 4": "#8fb4dd",
    "iGRPO 4+4": "#c2452d",
    "iGRPO empty draft": "#e0a090",
    "both stages": "#2f8f4e",
}
DASHED = {"GRPO 8, no std": "#2d6fc2", "iGRPO 4+4, no std": "#c2452d"}


def tables(results: Mapping[str, Any]) -> str:
    """Every part that is there, as Markdown."""
    return "\n\n".join(TABLES[name](results[name]) for name in TABLES if name in results) + "\n"


def grid(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return f"**{title}**\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in lines)


def pm(value: Sequence[float]) -> str:
    return f"{value[0]:.3f} ± {value[1]:.3f}"


def _one_step(part: Mapping[str, Any]) -> str:
    rows = [[name, f"{error:.1e}", ""] for name, error in part["enumerated"].items()]
    rows += [[name, "", f"{z:.1f}"] for name, z in part["sampled_z"].items()]
    head = ["", "largest difference, all outcomes", "largest difference in standard errors, 4,000 groups"]
    return grid("Expected gradient through the package's functions against the closed form", head, rows)


def _gains(part: Mapping[str, Any]) -> str:
    head = ["copy bonus", *[f"p = {p:g}" for p in part["accuracies"]]]
    shown = []
    for key in (
        "best, std, 10 arms",
        "best, std, 100 arms",
        "best, std, 1000 arms",
        "best, no std, 100 arms",
    ):
        rows = [
            [f"{copy:g}", *[f"{x:.2f}" for x in row]]
            for copy, row in zip(part["copies"], part["by"][key], strict=True)
        ]
        shown.append(
            grid(f"First-step single-pass gain, iGRPO 4+4 / GRPO 8, full transfer: {key}", head, rows)
        )
    rows = [[name, *[f"{x:.2f}" for x in values]] for name, values in part["noise"].items()]
    title = "Standard deviation over mean of one question's single-pass gain (full transfer, copy bonus 3)"
    shown.append(grid(title, ["", "start .05", ".1", ".3", ".5"], rows))
    rows = [[name, f"{best:.2f}", f"{p:g}", f"{copy:g}"] for name, (best, p, copy) in part["splits"].items()]
    shown.append(grid("Largest ratio of each split", ["N + G", "ratio", "at p", "at copy bonus"], rows))
    return "\n\n".join(shown)


def _learning(part: Mapping[str, Any]) -> str:
    shown = []
    for label, starts in part.items():
        for accuracy, arms in starts.items():
            taus = list(next(iter(arms.values())))
            rows = [[name, *[pm(by_tau[t]["one_pass"]) for t in taus]] for name, by_tau in arms.items()]
            head = [f"{label}, start {accuracy}", *[f"tau = {t}" for t in taus]]
            shown.append(grid("Single-pass success, mean over the run", head, rows))
            rows = [[name, *[pm(by_tau[t]["two_pass"]) for t in taus]] for name, by_tau in arms.items()]
            shown.append(grid("Two-pass success, mean over the run", head, rows))
    return "\n\n".join(shown)


def _predicted(part: Mapping[str, Any]) -> str:
    rows = [[name, *map(pm, values)] for name, values in part.items() if " " in name]
    title = (
        f"Single-pass success where the first step promises most: start {part['accuracy']}, copy bonus"
        f" {part['copy']:g}, tau 1, learning rate {part['learning_rate']:g}"
    )
    return grid(title, ["", *[f"step {n}" for n in part["steps"]]], rows)


def _cppo(part: Mapping[str, Any]) -> str:
    head = ["", "scale", "cosine", "noise", "noise with allocation", "gain"]

    def rows(given: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
        keys = ("scale", "cosine", "noise", "noise_with_allocation", "gain")
        return [[name, *[f"{row[k]:.3f}" for k in keys]] for name, row in given.items()]

    exact = part["exact"]
    shown = [
        grid(f"CPPO, G = 16, binary rewards, p = {p}, by rate", head, rows(v))
        for p, v in exact["binary_g16"].items()
    ]
    shown += [
        grid(f"CPPO, G = 8, graded rewards, {k} policy, by what is pruned", head, rows(v))
        for k, v in exact["graded_g8"].items()
    ]
    learning = [
        [
            name,
            str(row["updates"]),
            f"{row['learning_rate']:g}",
            pm(row["area"]),
            *map(pm, row["by_learning_rate"]),
        ]
        for name, row in part["learning"].items()
    ]
    title = "CPPO, mean reward (of 3) over the run at equal rollouts"
    return "\n\n".join(
        [*shown, grid(title, ["", "updates", "best rate", "at it", "0.3", "1", "3"], learning)]
    )


def _codistill(part: Mapping[str, Any]) -> str:
    errors = ", ".join(f"alpha {a}: {e:.1e}" for a, e in part["enumerated"].items())
    shown = [f"Theorem 1, largest difference over all outcomes: {errors}"]
    for label, arms in part["learning"].items():
        rows = [
            [name, *[pm(row[k]) for k in ("small", "small_end", "large", "large_end")]]
            for name, row in arms.items()
        ]
        shown.append(
            grid(f"CoDistill, {label}", ["", "small, mean", "small, end", "large, mean", "large, end"], rows)
        )
    return "\n\n".join(shown)


TABLES: dict[str, Callable[[Any], str]] = {
    "one_step": _one_step,
    "gains": _gains,
    "learning": _learning,
    "predicted": _predicted,
    "cppo": _cppo,
    "codistill": _codistill,
}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """First-step ratio by start; single-pass and two-pass success by tau; CPPO's scale and noise by rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(17, 4), layout="constrained")
    if "gains" in results:
        _draw_gains(axes[0], results["gains"])
    if "learning" in results:
        _draw_learning(axes[1:3], results["learning"])
    if "cppo" in results:
        _draw_cppo(axes[3], results["cppo"]["exact"]["binary_g16"])
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_gains(axis: Any, part: Mapping[str, Any]) -> None:
    for label, style in (("std", "-"), ("no std", "--")):
        for arms, color in ((10, "#999999"), (100, "#c2452d"), (1000, "#7a2c9a")):
            best = [max(column) for column in zip(*part["by"][f"best, {label}, {arms} arms"], strict=True)]
            axis.plot(part["accuracies"], best, style, color=color, label=f"{arms} answers, {label}")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(
        xscale="log",
        xlabel="start accuracy",
        title="first step, iGRPO 4+4 / GRPO 8,\nfull transfer, best copy bonus",
    )
    axis.legend(frameon=False, fontsize=8)


def _draw_learning(axes: Sequence[Any], part: Mapping[str, Any]) -> None:
    label = "copy bonus 3" if "copy bonus 3" in part else next(iter(part))
    accuracy = "0.1" if "0.1" in part[label] else next(iter(part[label]))
    for axis, key, title in zip(axes, ("one_pass", "two_pass"), ("single-pass", "two-pass"), strict=True):
        for name, by_tau in part[label][accuracy].items():
            if name not in COLORS | DASHED:
                continue
            taus = [float(t) for t in by_tau]
            means, errors = zip(*[by_tau[t][key] for t in by_tau], strict=True)
            style = "--" if name in DASHED else "o-"
            axis.errorbar(
                taus, means, errors, fmt=style, color=(COLORS | DASHED)[name], label=name, markersize=4
            )
        axis.set(
            xlabel="transfer tau", title=f"{title} success, mean over the run\n({label}, start {accuracy})"
        )
    axes[0].legend(frameon=False, fontsize=8)


def _draw_cppo(axis: Any, part: Mapping[str, Any]) -> None:
    for p, color in zip(part, ("#2d6fc2", "#2f8f4e", "#c2452d", "#7a2c9a"), strict=True):
        rates = [float(r) for r in part[p]]
        axis.plot(rates, [part[p][r]["scale"] for r in part[p]], "o-", color=color, label=f"p = {p}")
        noise = [part[p][r]["noise"] / part[p]["0.0"]["noise"] for r in part[p]]
        axis.plot(rates, noise, "x--", color=color)
    axis.set(
        yscale="log",
        xlabel="pruning rate P",
        title="CPPO, G = 16: length of the mean gradient (o)\nand relative variance (x), beside P = 0",
    )
    axis.legend(frameon=False, fontsize=8)
