"""A benchmark's numbers: avg@k, pass@k, maj@k, their 95 % intervals, and the paired test between two models.

Every interval takes the problems for a random draw from problems of their kind, and says how far the score could lie
off on others. It doesn't cover what another training seed, another prompt or a seen problem would change.
scipy is imported where it computes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from statistics import fmean, median
from typing import Any, Literal, get_args

import numpy as np

from evaluation.samples import Outcome, Sample
from hpcgrpo.rewards.answers import tidy

LEVEL = 0.95  # of all intervals
RESAMPLES = 10_000  # of the bootstrap
NO_SPREAD = 1e-3  # scores that lie closer together count as the same
FLIPS = 20_000  # random signs, where trying all of them takes too long
MAX_EXACT_OPERATIONS = 5 * 10**8  # additions of the exact sign-flip test
EVERY_K_UP_TO = 16  # samples; of more, the powers of two and all of them
MAX_SUBSET_VOTES = (
    512  # samples; of more, maj@k is told for one and for all, as binomials leave float's range
)
SILENT = ("unparsed", "unanswered")  # outcomes that don't vote
NORMAL_97_5 = 1.959963984540054  # 97.5 % quantile of the normal distribution

Same = Callable[[Sequence[tuple[str, str]]], list[bool]]


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with two intervals of 95 %, which differ where problems are few or scores near 0 or 1.

    low, high: percentile bootstrap over problems. It stays within what scores can be and leans where they do, but is
    somewhat narrow below some 30 problems. Where all problems score the same there is nothing to resample: then
    Wilson's bound (1927, z = 1.96) on the share of problems that are unlike all that were seen, and `interval` is
    "wilson".
    standard_error, t_low, t_high: clustered by problem (Miller 2024, "Adding Error Bars to Evals", section 2.2, with
    the factor P/(P - 1) for P problems) and Student's t for its width. Honest about few problems; symmetric, so that
    near 0 or 1 it can reach beyond. None where all problems score the same, which tells nothing of their spread.
    """

    mean: float
    low: float
    high: float
    interval: Literal["bootstrap", "wilson"]
    standard_error: float | None
    t_low: float | None
    t_high: float | None


@dataclass(frozen=True)
class Paired:
    """Model A against model B on the problems that both have. `difference` is A - B."""

    num_problems: int
    mean_a: float
    mean_b: float
    difference: Estimate  # of the problems' means
    p: float  # two-sided, of flipped signs
    test: str  # "exact" or how many random flips
    won: int  # problems on which A's mean is higher
    lost: int
    level: int
    left_out_a: int  # problems that A alone has
    left_out_b: int
    differences: tuple[float, ...]  # [P]


# ------------------------------------------------------------------------------------------ pass@k and maj@k


def ks_up_to(n: int) -> list[int]:
    """Every k of 1 … n up to 16 samples; of more 1, 2, 4, … and n."""
    if n <= EVERY_K_UP_TO:
        return list(range(1, n + 1))
    return sorted({*(2**i for i in range(n.bit_length())), n})


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, c of them right, hold a right one: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021 (arXiv 2107.03374), equation 1, as a product of n - c + 1 … n; exactly 1 if fewer than k are wrong.
    """
    assert 0 <= c <= n and 1 <= k <= n, f"{k} of {n} samples, {c} of them right"
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def cluster(answers: Sequence[Sequence[str]], same: Same | None) -> list[list[int]]:
    """The number of each answer's cluster, by problem.

    An answer joins the first cluster whose first answer it equals: as tidied text, else by `same` (first, answer),
    which is asked for all problems at once. Without `same`, by text alone.
    """
    texts = [[tidy(a) for a in several] for several in answers]
    # Of answers with one text the first is shown to `same`.
    raw = [
        dict(zip(ts[::-1], several[::-1], strict=True)) for ts, several in zip(texts, answers, strict=True)
    ]
    left = [list(dict.fromkeys(ts)) for ts in texts]
    found: list[dict[str, int]] = [{} for _ in texts]
    while any(left):
        pairs = [(raw[i][ts[0]], raw[i][t]) for i, ts in enumerate(left) for t in ts[1:]]
        verdicts = iter(same(pairs) if same and pairs else [False] * len(pairs))
        for i, ts in enumerate(left):
            joined = [*ts[:1], *(t for t in ts[1:] if next(verdicts))]
            number = len(set(found[i].values()))
            found[i].update(dict.fromkeys(joined, number))
            left[i] = [t for t in ts if t not in found[i]]
    return [[of[t] for t in ts] for ts, of in zip(texts, found, strict=True)]


@lru_cache(maxsize=4096)
def maj_at_k(clusters: tuple[tuple[int, float], ...], n: int, k: int) -> float:
    """The expected share of right majority votes among k of n samples, over all C(n, k) draws: exact, not resampled.

    clusters: (samples, share of them that is right) of every cluster of equal answers; the samples beside them don't
    vote. Tied clusters win equally often. A draw without votes is wrong. 1 for k = n means: the vote of all is right.
    """
    assert 1 <= k <= n and sum(size for size, _ in clusters) <= n
    if k == 1:
        return sum(size * value for size, value in clusters) / n
    if k == n:
        most = max((size for size, _ in clusters), default=0)
        tied = [value for size, value in clusters if size == most]
        return fmean(tied) if tied else 0.0
    return float(_wins(clusters, n)[k]) / math.comb(n, k)


@lru_cache(maxsize=4096)
def _wins(clusters: tuple[tuple[int, float], ...], n: int) -> Any:
    """[n + 1]: of the subsets of each size, how many a right cluster wins; tied ones count in parts."""
    silent = n - sum(size for size, _ in clusters)
    won = np.zeros(n + 1)
    for (size, value), times in Counter(clusters).items():
        if not value:
            continue
        others = [s for s, _ in clusters]
        others.remove(size)
        for votes in range(1, size + 1):
            ways = _ways(silent, others, votes, n)
            parts = (ways / np.arange(1, len(ways) + 1)[:, None]).sum(0)
            won[votes:] += times * value * math.comb(size, votes) * parts[: n + 1 - votes]
    return won


def _ways(silent: int, others: Sequence[int], votes: int, n: int) -> Any:
    """[ties + 1, n + 1]: in how many ways x samples leave no other cluster above `votes`, and so many level."""
    # Small clusters can't reach `votes`, however many of theirs are drawn: as good as silent.
    pool = silent + sum(size for size in others if size < votes)
    ways = np.array([[float(math.comb(pool, x)) for x in range(n + 1)]])
    for size in (size for size in others if size >= votes):
        longer = np.zeros((len(ways) + 1, n + 1))
        for x in range(votes):
            longer[:-1, x:] += math.comb(size, x) * ways[:, : n + 1 - x]
        longer[1:, votes:] += math.comb(size, votes) * ways[:, : n + 1 - votes]
        ways = longer
    return ways


# ------------------------------------------------------------------------------------------------ intervals


def estimate(values: Sequence[float], *, seed: int = 0, bounds: tuple[float, float] = (0.0, 1.0)) -> Estimate:
    """The mean of a benchmark's problems, each a value within `bounds`, and its intervals. See `Estimate`."""
    return average([values], seed=seed, bounds=bounds)


def average(
    benchmarks: Sequence[Sequence[float]], *, seed: int = 0, bounds: tuple[float, float] = (0.0, 1.0)
) -> Estimate:
    """The mean of several benchmarks' means, each benchmark's problems resampled by themselves.

    Degrees of freedom of the t interval: Welch and Satterthwaite's. Among others, a benchmark whose problems all
    score the same adds no spread. The order of problems doesn't matter.
    """
    arrays = [np.asarray(values, dtype=float) for values in benchmarks]
    assert arrays and all(len(a) for a in arrays)
    means = [math.fsum(a) / len(a) for a in arrays]
    mean = fmean(means)
    if all(_level(a) for a in arrays):
        ends = [_wilson(m, len(a), bounds) for m, a in zip(means, arrays, strict=True)]
        low, high = (fmean(end) for end in zip(*ends, strict=True))
        return Estimate(mean, low, high, "wilson", None, None, None)
    rng = np.random.default_rng(seed)
    drawn = sum(_resampled(a, rng) for a in arrays) / len(arrays)
    low, high = np.clip(np.quantile(drawn, ((1 - LEVEL) / 2, (1 + LEVEL) / 2)), *bounds).tolist()
    error, half = _clustered(arrays)
    t_low, t_high = (None, None) if half is None else (mean - half, mean + half)
    return Estimate(mean, low, high, "bootstrap", error, t_low, t_high)


def _level(values: Any) -> bool:
    return bool(np.ptp(values) < NO_SPREAD)


def _wilson(mean: float, n: int, bounds: tuple[float, float]) -> tuple[float, float]:
    """Wilson's bound for 0 of n: so large may the share of problems be that score differently, up to the bounds."""
    unseen = NORMAL_97_5**2 / (n + NORMAL_97_5**2)
    return mean + unseen * (bounds[0] - mean), mean + unseen * (bounds[1] - mean)


def _resampled(values: Any, rng: np.random.Generator) -> Any:
    """[RESAMPLES] means of as many problems drawn with replacement; equal ones are drawn as one multinomial cell."""
    cells, counts = np.unique(values, return_counts=True)
    shares = counts / len(values)
    parts = [rng.multinomial(len(values), shares, size=RESAMPLES // 10) @ cells for _ in range(10)]
    return np.concatenate(parts) / len(values)


def _clustered(benchmarks: Sequence[Any]) -> tuple[float | None, float | None]:
    """(standard error of the mean of means, half the t interval); None for a benchmark of one problem."""
    from scipy import stats

    if any(len(a) == 1 for a in benchmarks):
        return None, None
    variances = [float(np.var(a, ddof=1)) / len(a) for a in benchmarks]
    error = math.sqrt(sum(variances)) / len(benchmarks)
    spread = sum(v**2 / (len(a) - 1) for v, a in zip(variances, benchmarks, strict=True))
    return error, float(stats.t.ppf((1 + LEVEL) / 2, sum(variances) ** 2 / spread)) * error


# -------------------------------------------------------------------------------------------- paired test


def paired(
    a: Mapping[str, Sequence[int]],
    b: Mapping[str, Sequence[int]],
    *,
    common_only: bool = False,
    seed: int = 0,
) -> Paired:
    """Compare two models on the same problems. a, b: problem -> 1 for each right sample, 0 for each other.

    The test flips the signs of the problems' differences: all 2^P ways by dynamic programming, else 20,000 random
    ones and (found + 1) / (20,000 + 1). Raises ValueError where one side has problems that the other lacks, unless
    `common_only`.
    """
    ids = _shared(a, b, common_only=common_only)
    means = [[fmean(side[i]) for i in ids] for side in (a, b)]
    unit = math.lcm(*{len(side[i]) for side in (a, b) for i in ids})
    units = [round((x - y) * unit) for x, y in zip(*means, strict=True)]
    gaps = [u / unit for u in units]
    p, test = flip_test(units, seed=seed)
    return Paired(
        num_problems=len(ids),
        mean_a=fmean(means[0]),
        mean_b=fmean(means[1]),
        difference=estimate(gaps, seed=seed, bounds=(-1.0, 1.0)),
        p=p,
        test=test,
        **{"won": sum(u > 0 for u in units), "lost": sum(u < 0 for u in units), "level": units.count(0)},
        left_out_a=len(a) - len(ids),
        left_out_b=len(b) - len(ids),
        differences=tuple(gaps),
    )


def _shared(a: Mapping[str, Any], b: Mapping[str, Any], *, common_only: bool) -> list[str]:
    ids = sorted(set(a) & set(b))
    if not ids:
        raise ValueError(f"no problem is on both sides, of {len(a)} and {len(b)}: not the same benchmark")
    alone = [sorted(set(x) - set(y)) for x, y in ((a, b), (b, a))]
    told = [f"{len(x)} only in {name} (e.g. {x[0]})" for name, x in zip("AB", alone, strict=True) if x]
    if told and not common_only:
        raise ValueError(
            f"the problems differ: {len(ids)} on both sides, {', '.join(told)}; a paired comparison needs the same "
            f"ones: evaluate the rest, or compare the {len(ids)} with --common-only"
        )
    return ids


def flip_test(differences: Sequence[float], *, seed: int = 0) -> tuple[float, str]:
    """Two-sided p of |sum| under random signs, and how it was found: "exact" (integers alone) or "20000 flips"."""
    sizes = np.sort(np.abs(np.asarray(differences)))
    sizes = sizes[sizes > 0]
    if not len(sizes):
        return 1.0, "exact"
    observed = abs(math.fsum(differences))
    if sizes.dtype.kind == "i":
        unit = int(np.gcd.reduce(sizes))
        if len(sizes) * int(sizes.sum()) // unit <= MAX_EXACT_OPERATIONS:
            return _exact(sizes // unit, observed / unit), "exact"
    cells, counts = np.unique(np.round(sizes, 12), return_counts=True)
    rng = np.random.default_rng(seed)
    signs = [2 * rng.binomial(count, 0.5, size=FLIPS) - count for count in counts]
    flipped = sum(cell * sign for cell, sign in zip(cells, signs, strict=True))
    # A sum that equals the observed one counts, whatever rounding did to it.
    extreme = int(np.sum(np.abs(flipped) >= observed * (1 - 1e-9) - 1e-9 * cells[0]))
    return (extreme + 1) / (FLIPS + 1), f"{FLIPS} flips"


def _exact(sizes: Any, observed: float) -> float:
    total = int(sizes.sum())
    chances = np.zeros(total + 1)  # of the sum of those with a plus
    chances[0] = 1.0
    reach = 0
    for size in map(int, sizes):
        kept = chances[: reach + 1] / 2
        chances[: reach + 1] = kept
        chances[size : size + reach + 1] += kept
        reach += size
    sums = np.abs(2 * np.arange(total + 1) - total)
    return min(1.0, float(chances[sums >= observed - 0.5].sum()))


# ---------------------------------------------------------------------------------------------- the summary


def summarize(
    problems: Mapping[str, Sequence[Sample]], *, num_samples: int, same: Same | None, seed: int = 0
) -> dict[str, Any]:
    """A benchmark's numbers, ready for JSON; shares and scores in [0, 1], the order of problems and samples no matter.

    problems: id -> its samples (`samples.by_problem`), of which 0 … num_samples - 1 count. same: decides pairs of
    answers for maj@k; without it equal text does. What isn't right is wrong: unparsed, timed out and unanswered
    samples too. `truncated` goes by the finish reason, the other counts by the outcome, so that a sample can be both
    truncated and unparsed. Raises ValueError that counts missing samples.
    """
    kept = _complete(problems, num_samples)
    right = [sum(s.right for s in several) for several in kept]
    ks = ks_up_to(num_samples)
    passes = {k: [pass_at_k(num_samples, c, k) for c in right] for k in ks}
    avg = {"k": num_samples, **asdict(estimate([c / num_samples for c in right], seed=seed))}
    avg["rerun_standard_error"] = _rerun_error(right, num_samples)
    return {
        "num_problems": len(kept),
        "num_samples": num_samples,
        **_counts([s for several in kept for s in several]),
        "avg@k": avg,
        "pass@k": {str(k): asdict(estimate(values, seed=seed)) for k, values in passes.items()},
        "maj@k": {str(k): asdict(estimate(v, seed=seed)) for k, v in _majorities(kept, ks, same).items()},
        "equal_answers_by": "grader" if same else "text",
        "intervals": {"level": LEVEL, "resamples": RESAMPLES, "seed": seed},
    }


def _complete(problems: Mapping[str, Sequence[Sample]], num_samples: int) -> list[list[Sample]]:
    """Samples 0 … num_samples - 1 of every problem, sorted by problem and number."""
    if not problems:
        raise ValueError("no problem has a sample: the evaluation was stopped before its first; run it again")
    numbered = {i: {s.sample: s for s in problems[i] if s.sample < num_samples} for i in sorted(problems)}
    short = {i: num_samples - len(several) for i, several in numbered.items() if len(several) < num_samples}
    if short:
        first = next(iter(short))
        raise ValueError(
            f"{sum(short.values())} of {len(numbered) * num_samples} samples are missing, in {len(short)} of "
            f"{len(numbered)} problems (e.g. {first}: {num_samples - short[first]} of {num_samples}): "
            f"the evaluation was interrupted; run it again and it continues"
        )
    return [[several[n] for n in range(num_samples)] for several in numbered.values()]


def _counts(samples: Sequence[Sample]) -> dict[str, Any]:
    outcomes = Counter(s.outcome for s in samples)
    counts = {
        **{outcome: outcomes[outcome] for outcome in get_args(Outcome)},
        "truncated": sum(s.truncated for s in samples),
        "truncated_and_unparsed": sum(s.truncated and s.outcome == "unparsed" for s in samples),
    }
    tokens = [s.num_tokens for s in samples if s.outcome != "unanswered"]
    return {
        "counts": {"problems": len({s.problem for s in samples}), "samples": len(samples), **counts},
        "shares": {name: count / len(samples) for name, count in counts.items()},
        "completion_tokens": {"mean": fmean(tokens), "median": float(median(tokens))} if tokens else None,
    }


def _rerun_error(right: Sequence[int], n: int) -> float | None:
    """How far avg@k scatters (standard deviation) when the same problems are sampled again; needs two samples."""
    if n < 2:
        return None
    return math.sqrt(sum(c * (n - c) / (n * n * (n - 1)) for c in right)) / len(right)


def _majorities(
    problems: Sequence[Sequence[Sample]], ks: Sequence[int], same: Same | None
) -> dict[int, list[float]]:
    """k -> [P] values of maj@k."""
    voters = [
        [s for s in several if s.answer is not None and s.outcome not in SILENT] for several in problems
    ]
    numbers = cluster([[str(s.answer) for s in several] for several in voters], same)
    composed = []
    for several, of in zip(voters, numbers, strict=True):
        rights = [[s.right for s, n in zip(several, of, strict=True) if n == number] for number in set(of)]
        composed.append(tuple(sorted((len(r), fmean(r)) for r in rights)))
    n = len(problems[0])
    told = ks if n <= MAX_SUBSET_VOTES else [1, n]
    return {k: [maj_at_k(clusters, n, k) for clusters in composed] for k in told}
