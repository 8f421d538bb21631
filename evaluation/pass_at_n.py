"""pass@N over N (iGRPO, arXiv 2602.09000, Figure S.1): its data with intervals, its picture, and where it saturates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evaluation import metrics, published
from hpcgrpo.journal import write_atomically
from hpcgrpo.study.plots import COLORS, STYLES

DATA, PICTURE = "pass_at_n.json", "pass_at_n.png"


def study(
    results: Sequence[Mapping[str, Any]],
    folder: Path,
    *,
    beside: Mapping[str, Mapping[int, float]] | None = None,
) -> dict[str, Any]:
    """Write pass_at_n.json and pass_at_n.png of result files' contents into `folder` -> the JSON's contents.

    N is 1, 2, 4, … and the number of samples. beside: benchmark -> N -> published pass@N in [0, 1] (`figure_s1`),
    drawn as points. Scores in [0, 1]. Raises ValueError where a benchmark's problems have different numbers of samples.
    """
    found: dict[str, Any] = {"benchmarks": {str(r["benchmark"]): _curve(r) for r in results}}
    for name, points in (beside or {}).items():
        if name in found["benchmarks"]:
            found["benchmarks"][name]["published"] = [{"n": n, "mean": score} for n, score in points.items()]
    write_atomically(folder / DATA, json.dumps(found, indent=1) + "\n")
    _draw(found["benchmarks"], folder / PICTURE)
    return found


def figure_s1() -> dict[str, dict[int, float]]:
    """The points of the paper's Figure S.1: benchmark -> N -> pass@N in [0, 1] of OpenMath-Nemotron-14B + iGRPO."""
    table = published.every_table()["igrpo_figure_s1"]
    return {
        published.COLUMNS[name][0]: {
            int(n): score / 100 for n, score in zip(table["columns"], row, strict=True) if score is not None
        }
        for name, row in table["rows"].items()
    }


def saturation(points: Sequence[tuple[int, float]], num_problems: int) -> int | None:
    """The smallest N from which pass@N stays within one problem's worth (1/num_problems) of the largest N's.

    points: (N, pass@N), which never falls as N grows. None where only the largest N itself does. One problem is the
    smallest step that a benchmark can show. The interval would be the worse rule: it is the wider the fewer the
    problems, so that a small benchmark would always look saturated, when it only can't tell.
    """
    *earlier, (_, final) = points
    return next((n for n, score in earlier if final - score <= 1 / num_problems + 1e-12), None)


def _curve(result: Mapping[str, Any]) -> dict[str, Any]:
    rights = [p["right"] for p in result["problems"].values()]
    sizes = sorted({len(right) for right in rights})
    if len(sizes) != 1:
        raise ValueError(
            f"{result['benchmark']}: its problems have {' and '.join(map(str, sizes))} samples; pass@N needs as many "
            f"of each: finish the evaluation first"
        )
    n = sizes[0]
    points = []
    for k in sorted({*(2**i for i in range(n.bit_length())), n}):
        values = [metrics.pass_at_k(n, sum(right), k) for right in rights]
        points.append({"n": k, **asdict(metrics.estimate(values))})
    at = saturation([(p["n"], p["mean"]) for p in points], len(rights))
    said = f"saturated from N = {at} on" if at is not None else "not saturated"
    return {
        "model": result.get("model"),
        "num_problems": len(rights),
        "num_samples": n,
        "points": points,
        "saturation": {"n": at, "text": f"{said} (within 1/{len(rights)} of pass@{n})"},
    }


def _draw(curves: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 4.4), layout="constrained")
    for i, (name, curve) in enumerate(curves.items()):
        color, style = COLORS[i % len(COLORS)], STYLES[i // len(COLORS) % len(STYLES)]
        ns = [p["n"] for p in curve["points"]]
        low, mean, high = ([100 * p[key] for p in curve["points"]] for key in ("low", "mean", "high"))
        axis.plot(ns, mean, f"o{style}", color=color, markersize=4, label=f"{name}: {_said(curve)}")
        axis.fill_between(ns, low, high, color=color, alpha=0.12, linewidth=0)
        points = curve.get("published", ())
        if points:
            scores = [100 * p["mean"] for p in points]
            axis.plot([p["n"] for p in points], scores, "x", color=color, label=f"{name}, published")
    most = max(p["n"] for curve in curves.values() for p in [*curve["points"], *curve.get("published", ())])
    ticks = [2**i for i in range(most.bit_length())]
    axis.set_xscale("log", base=2)
    axis.set(xlabel="N", ylabel="pass@N in %", xticks=ticks, xticklabels=ticks)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _said(curve: Mapping[str, Any]) -> str:
    at = curve["saturation"]["n"]
    return "not saturated" if at is None else f"saturated from {at}"
