"""What every benchmark says with `--json`, rows of one shape that `table.py` collects, and arguments they share.

Standard library only; torch for `--device cuda`.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)


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


def at_least(least: Number, *, most: float = math.inf) -> Callable[[str], Number]:
    """The `type` of an argument that is a number (whole, if `least` is) from `least` to `most`."""
    kind = type(least)

    def checked(text: str) -> Number:
        with suppress(ValueError):
            if least <= kind(text) <= most and kind(text) != math.inf:
                return kind(text)
        whole = "whole number" if kind is int else "number"
        limits = f"of {least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a {whole} {limits}")

    return checked


positive = at_least(1)


def positives(text: str) -> list[int]:
    """The `type` of an argument that lists positive whole numbers: `2,4,8`."""
    return [positive(part) for part in text.split(",")]


def add_device(parser: argparse.ArgumentParser, *, gpus: int = 1) -> None:
    """The switch by which a script runs on GPUs (not run yet); times are then wall time, the device being idle.

    Where torch finds fewer than `gpus`, `cuda` is refused.
    """

    def found(text: str) -> str:
        if text == "cuda":
            import torch

            if torch.cuda.device_count() < gpus:
                raise argparse.ArgumentTypeError(
                    f"'cuda' needs {gpus} GPU{'s' * (gpus > 1)}, torch {torch.__version__} finds "
                    f"{torch.cuda.device_count()}; take cpu"
                )
        return text

    parser.add_argument("--device", type=found, choices=("cpu", "cuda"), default="cpu", help="default: cpu")


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
