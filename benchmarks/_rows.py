"""What every benchmark says with `--json`: rows of one shape, which `table.py` collects. Standard library only."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any


def row(
    name: str,
    ratio: float,
    *,
    of: str,
    bound: float | None = None,
    bound_is: str = "",
    promised: float | None = None,
    quartiles: Sequence[float] | None = None,
) -> dict[str, Any]:
    """One comparison.

    name: what is held against what. ratio: above 1 is in favour of hpcgrpo. of: the quantity that is compared
    (CPU-seconds, bytes). bound: the most that the ratio can be, `bound_is`: why. fraction: ratio over bound.
    promised: what the ratio is to be at least. quartiles: first and third, over the turns.
    """
    return {
        "name": name,
        "ratio": ratio,
        "bound": bound,
        "fraction": ratio / bound if bound else None,
        "of": of,
        "bound_is": bound_is,
        "promised": promised,
        "quartiles": list(quartiles) if quartiles else None,
    }


def compared(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Costs of the same turns -> `ratio` of medians and `quartiles` of the turns' ratios, as `row` takes them."""
    pairs = [a / b for a, b in zip(theirs, ours, strict=True)]
    low, _, high = statistics.quantiles(pairs, n=4, method="inclusive") if len(pairs) > 1 else pairs * 3
    return {"ratio": statistics.median(theirs) / statistics.median(ours), "quartiles": (low, high)}


def add_device(parser: argparse.ArgumentParser) -> None:
    """The switch by which a script runs on a GPU (not run yet); times are then wall time, the device being idle."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")


def number(value: float | None, form: str = ".2f") -> str:
    """A figure of a table, or a dash for what there is none of."""
    return "-" if value is None else f"{value:{form}}"


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows as a table of aligned columns."""
    head = ("what", "ratio", "quartiles", "promised", "bound", "reached", "compared", "bound is")
    body = [
        (
            r["name"],
            number(r["ratio"]),
            "-".join(map(number, r["quartiles"])) if r.get("quartiles") else "-",
            number(r.get("promised")),
            number(r.get("bound")),
            number(r.get("fraction"), ".0%"),
            r.get("of") or "",
            r.get("bound_is") or "",
        )
        for r in rows
    ]
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    return [
        "  ".join(f"{x:<{w}}" for x, w in zip(line, widths, strict=True)).rstrip() for line in (head, *body)
    ]
