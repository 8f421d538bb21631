"""Means with their intervals, and paired tests against a baseline. scipy is imported where it computes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

LEVEL = 0.95  # of all intervals
WILCOXON_FROM = 6  # pairs: with fewer, the signed-rank test cannot reach p < 0.05 from both sides

Key = tuple[str, ...]


@dataclass(frozen=True)
class Mean:
    """A mean over independent units; spread is None for a single one."""

    n: int
    mean: float
    standard_error: float | None
    low: float | None  # of the 95 % t interval
    high: float | None


@dataclass(frozen=True)
class Difference:
    """Label minus baseline over the units that both have."""

    difference: Mean
    p_t: float | None  # paired t-test, two-sided; None for fewer than two units or equal differences
    p_wilcoxon: float | None  # signed-rank test, two-sided; from six units on
    ratio: float | None  # of the means over the same units


def mean(values: Sequence[float]) -> Mean | None:
    """Mean, its standard error and its 95 % t interval; None without values."""
    if not values:
        return None
    centre, n = fmean(values), len(values)
    if n == 1:
        return Mean(1, centre, None, None, None)
    from scipy import stats

    error = stdev(values) / math.sqrt(n)
    half = float(stats.t.ppf(0.5 + LEVEL / 2, n - 1)) * error
    return Mean(n, centre, error, centre - half, centre + half)


def grouped(values: Mapping[Key, float], positions: Sequence[int]) -> dict[Key, float]:
    """Averages over all values whose keys agree at `positions`; without any, over all values."""
    found: dict[Key, list[float]] = {}
    for key, value in values.items():
        found.setdefault(tuple(key[i] for i in positions), []).append(value)
    return {key: fmean(several) for key, several in found.items()}


def difference(
    values: Mapping[Key, float], baseline: Mapping[Key, float], positions: Sequence[int]
) -> Difference | None:
    """Compare over the pairs (equal keys) that both have, averaged by `grouped` first; None without any."""
    both = [key for key in values if key in baseline]
    if not both:
        return None
    first = grouped({key: values[key] for key in both}, positions)
    second = grouped({key: baseline[key] for key in both}, positions)
    a, b = list(first.values()), [second[key] for key in first]
    gaps = [x - y for x, y in zip(a, b, strict=True)]
    found = mean(gaps)
    assert found is not None
    ratio = fmean(a) / fmean(b) if fmean(b) else None
    return Difference(found, _paired_t(a, b, gaps), _wilcoxon(gaps), ratio)


def _paired_t(a: Sequence[float], b: Sequence[float], gaps: Sequence[float]) -> float | None:
    if len(gaps) < 2 or max(gaps) == min(gaps):
        return None
    from scipy import stats

    return float(stats.ttest_rel(a, b).pvalue)


def _wilcoxon(gaps: Sequence[float]) -> float | None:
    if len(gaps) < WILCOXON_FROM or not any(gaps):
        return None
    from scipy import stats

    return float(stats.wilcoxon(gaps).pvalue)
