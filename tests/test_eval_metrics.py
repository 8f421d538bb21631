"""An evaluation's numbers against enumeration, closed forms, hand computation and scipy."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from evaluation import metrics
from evaluation.samples import Outcome, Sample
from hpcgrpo.rewards.grading import Grader


def sample(
    problem: str, number: int, *, outcome: Outcome = "wrong", answer: str | None = "0", **given: object
) -> Sample:
    base = Sample(problem, number, 0, outcome, answer, "stop", 10, "")
    return replace(base, **given)  # type: ignore[arg-type]


def of(problem: str, rights: Sequence[int]) -> list[Sample]:
    return [
        sample(problem, i, outcome="right" if r else "wrong", answer="7" if r else f"{i}")
        for i, r in enumerate(rights)
    ]


# ---- pass@k


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int) -> None:
    for c in range(n + 1):
        rights = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(rights, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert metrics.pass_at_k(n, c, k) == pytest.approx(share, rel=1e-12, abs=1e-15)


def test_pass_at_k_is_the_closed_form_for_256_samples() -> None:
    n = 256
    for c in range(n + 1):
        for k in (1, 2, 3, 8, 100, 128, 255, 256):
            exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
            assert metrics.pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-11, abs=1e-15)
            if n - c < k:
                assert metrics.pass_at_k(n, c, k) == 1.0
    assert metrics.pass_at_k(n, 0, 256) == 0.0


def test_ks() -> None:
    assert metrics.ks_up_to(1) == [1]
    assert metrics.ks_up_to(5) == [1, 2, 3, 4, 5]
    assert metrics.ks_up_to(64) == [1, 2, 4, 8, 16, 32, 64]
    assert metrics.ks_up_to(100) == [1, 2, 4, 8, 16, 32, 64, 100]


# ---- maj@k


def vote(answers: Sequence[str | None], right: dict[str, float]) -> float:
    """A majority vote as it is described: the most frequent answer, tied ones by a fair choice."""
    counts = {a: answers.count(a) for a in answers if a is not None}
    tied = [a for a, count in counts.items() if count == max(counts.values())]
    return fmean([right.get(a, 0.0) for a in tied]) if tied else 0.0


@pytest.mark.parametrize(
    "answers",
    [
        "a", "b", "-", "ab", "aab", "abb", "aabb", "abc-", "aabbc", "aaabb-", "abcdef", "--aab", "aabbccd", "aabbcc--",
        "aaaaaaaa", "bbbbaaac", "--------",
    ],
)  # fmt: skip
def test_maj_at_k_is_the_mean_vote_of_all_subsets(answers: str) -> None:
    each = [None if a == "-" else a for a in answers]
    clusters = tuple(sorted((answers.count(a), float(a == "a")) for a in set(answers) - {"-"}))
    for k in range(1, len(each) + 1):
        votes = [vote(subset, {"a": 1.0}) for subset in itertools.combinations(each, k)]
        assert metrics.maj_at_k(clusters, len(each), k) == pytest.approx(fmean(votes), abs=1e-12)


def test_maj_at_k_with_two_right_clusters_and_one_half_right() -> None:
    """The grader need not be transitive: two clusters can hold right answers, and one both kinds."""
    value = {"a": 1.0, "b": 0.5, "c": 1.0, "d": 0.0}
    answers: list[str | None] = [*"aabbcdd", None]
    clusters = ((2, 1.0), (2, 0.5), (1, 1.0), (2, 0.0))
    for k in range(1, 9):
        votes = [vote(subset, value) for subset in itertools.combinations(answers, k)]
        assert metrics.maj_at_k(clusters, 8, k) == pytest.approx(fmean(votes), abs=1e-12)


def test_maj_at_k_of_many_samples_against_random_draws() -> None:
    sizes, n, k = {"a": 70, "b": 60, "c": 40}, 200, 33
    answers: list[str | None] = [a for a, size in sizes.items() for _ in range(size)] + [None] * 30
    rng = random.Random(1)
    draws = [vote(rng.sample(answers, k), {"a": 1.0}) for _ in range(4000)]
    exact = metrics.maj_at_k(((70, 1.0), (60, 0.0), (40, 0.0)), n, k)
    assert exact == pytest.approx(fmean(draws), abs=4 * float(np.std(draws)) / math.sqrt(len(draws)))
    assert 0.5 < exact < 0.9


def test_maj_at_k_of_the_largest_number_of_samples_stays_in_range() -> None:
    n = metrics.MAX_SUBSET_VOTES
    even = ((n // 2, 0.0), (n // 2, 1.0))
    for k in (2, n // 2, n - 1, n):
        assert metrics.maj_at_k(even, n, k) == pytest.approx(0.5)


def test_answers_are_clustered_by_the_grader_in_sample_order() -> None:
    asked: list[tuple[str, str]] = []

    def same(pairs: Sequence[tuple[str, str]]) -> list[bool]:
        asked.extend(pairs)
        return [abs(float(Fraction(a)) - float(Fraction(b))) <= 1 for a, b in pairs]

    # 5 is near 4, but the first answer of its cluster would be 3: so it opens its own, which 6 joins.
    assert metrics.cluster([["3", "4", "5", "6", "3"], ["10/2", "5", "$5$"]], same) == [
        [0, 0, 1, 1, 0],
        [0, 0, 0],
    ]
    assert asked[:5] == [("3", "4"), ("3", "5"), ("3", "6"), ("10/2", "5"), ("5", "6")]
    assert len(asked) == 5  # `$5$` is the text `5`, the second 3 the first


def test_the_vote_of_the_real_grader() -> None:
    with Grader(num_processes=1) as grader:
        found = metrics.cluster(
            [["0.5", "2", r"\frac{1}{2}", "x+1", "1+x", "1/2"]],
            lambda pairs: [outcome == "right" for outcome in grader.grade(pairs)],
        )
    assert found == [[0, 1, 0, 2, 2, 0]]


def test_without_a_grader_equal_text_alone_counts() -> None:
    assert metrics.cluster([["0.5", r"\dfrac{1}{2}", r"\frac{1}{2}", "1/2"], []], None) == [[0, 1, 1, 2], []]


def test_majorities_of_a_summary() -> None:
    """Unparsed and unanswered samples don't vote; what the grader broke on does, and is wrong."""
    problems = {
        "p": [
            sample("p", 0, outcome="right", answer="1/2"),
            sample("p", 1, outcome="right", answer="0.5"),
            sample("p", 2, answer="3"),
            sample("p", 3, answer="3"),
            sample("p", 4, outcome="unparsed", answer="3"),
            sample("p", 5, outcome="unanswered", answer=None, finish_reason="abort"),
        ],
        "q": [sample("q", i, outcome="timeout", answer="9^9^9") for i in range(4)]
        + [sample("q", i, outcome="right", answer="1") for i in (4, 5)],
    }
    by_text = metrics.summarize(problems, num_samples=6, same=None)
    by_value = metrics.summarize(
        problems, num_samples=6, same=lambda pairs: [{a, b} == {"1/2", "0.5"} for a, b in pairs]
    )
    assert by_text["maj@k"]["6"]["mean"] == 0.0  # p: 3 has two votes, 1/2 and 0.5 have one each
    assert by_value["maj@k"]["6"]["mean"] == 0.25  # p: tied, q: lost
    assert by_value["maj@k"]["1"]["mean"] == by_value["avg@k"]["mean"] == pytest.approx(1 / 3)
    assert (by_text["equal_answers_by"], by_value["equal_answers_by"]) == ("text", "grader")


# ---- intervals


def skewed(n: int, seed: int) -> list[float]:
    return [float(c) / 8 for c in np.random.default_rng(seed).binomial(8, 0.15, size=n)]


@pytest.mark.parametrize(("n", "seed"), [(30, 1), (83, 2), (500, 3)])
def test_the_bootstrap_agrees_with_scipy(n: int, seed: int) -> None:
    values = skewed(n, seed)
    ours = metrics.estimate(values)
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(9)
    ).confidence_interval
    # The quantile of 10,000 draws scatters by some 0.03 standard errors on either side, in steps of 1/(8 n).
    near = 0.15 * float(np.std(values)) / math.sqrt(n) + 1.001 / (8 * n)
    assert ours.low == pytest.approx(theirs.low, abs=near)
    assert ours.high == pytest.approx(theirs.high, abs=near)
    assert ours.interval == "bootstrap" and ours.mean == pytest.approx(fmean(values))


def test_the_standard_error_by_hand() -> None:
    """Three problems of two samples, means 0, 1/2, 1: residual sums -1, 0, 1; (3/2) (1 + 0 + 1) / 6^2 = 1/12."""
    found = metrics.estimate([0.0, 0.5, 1.0])
    assert found.standard_error == pytest.approx(math.sqrt(1 / 12))
    assert found.t_high is not None and found.t_high - 0.5 == pytest.approx(
        4.302653 * math.sqrt(1 / 12), rel=1e-6
    )


def cluster_robust(rights: Sequence[Sequence[int]]) -> float:
    """The sandwich estimate of a regression on a constant: X'X = N, the meat from each cluster's summed residuals."""
    scores = np.concatenate([np.asarray(r, float) for r in rights])
    groups = np.repeat(np.arange(len(rights)), [len(r) for r in rights])
    residuals = scores - scores.mean()
    meat = sum(
        residuals[i] * residuals[j]
        for i in range(len(scores))
        for j in range(len(scores))
        if groups[i] == groups[j]
    )
    g = len(rights)
    return math.sqrt(g / (g - 1) * meat / len(scores) ** 2)


def test_the_standard_error_is_the_cluster_robust_one() -> None:
    rng = np.random.default_rng(4)
    rights = [rng.binomial(1, q, size=8).tolist() for q in rng.beta(0.5, 0.5, size=25)]
    summary = metrics.summarize(
        {f"p{i}": of(f"p{i}", r) for i, r in enumerate(rights)}, num_samples=8, same=None
    )
    found = summary["avg@k"]
    assert found["standard_error"] == pytest.approx(cluster_robust(rights))
    naive = math.sqrt(found["mean"] * (1 - found["mean"]) / (25 * 8))
    assert found["standard_error"] > 1.5 * naive  # samples of one problem go together
    again = [np.var(r, ddof=1) / 8 for r in rights]
    assert found["rerun_standard_error"] == pytest.approx(math.sqrt(sum(again)) / 25)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 0), (30, 30), (30, 0), (500, 500)])
def test_all_right_and_all_wrong_get_wilsons_interval(n: int, k: int) -> None:
    found = metrics.estimate([float(k > 0)] * n)
    expected = stats.binomtest(k, n).proportion_ci(0.95, method="wilson")
    assert found.interval == "wilson"
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.standard_error is found.t_low is found.t_high is None


def test_an_interval_never_has_no_width() -> None:
    for values in ([0.5], [0.25, 0.25], [0.0, 0.5, 1.0]):
        found = metrics.estimate(values)
        assert 0 <= found.low < found.mean < found.high <= 1
    nearly = metrics.estimate([1.0, 1 - 1e-9])  # as pass@k is, short of all samples
    assert nearly.interval == "wilson" and nearly.low == pytest.approx(metrics.estimate([1.0, 1.0]).low)
    same = metrics.estimate([0.0] * 500, bounds=(-1.0, 1.0))
    assert same.low == -same.high and 0.007 < same.high < 0.008  # at most 0.76 % of problems differ


def test_intervals_cover_what_they_say() -> None:
    """Problems drawn from a known kind, four samples each: both intervals hold its mean in some 95 % of cases."""
    rng = np.random.default_rng(5)
    cases, hits = 200, np.zeros(2)
    for _ in range(cases):
        q = rng.beta(0.6, 1.2, size=60)
        found = metrics.estimate((rng.binomial(4, q) / 4).tolist())
        assert found.t_low is not None and found.t_high is not None
        hits += (found.low <= 1 / 3 <= found.high, found.t_low <= 1 / 3 <= found.t_high)
    assert all(0.90 <= h / cases <= 0.985 for h in hits)


def test_an_average_weighs_benchmarks_not_problems() -> None:
    large, small = [0.0, 1.0] * 200, [1.0, 1.0, 0.5]
    found = metrics.average([large, small])
    assert found.mean == pytest.approx((0.5 + 2.5 / 3) / 2)
    variances = [np.var(v, ddof=1) / len(v) for v in (large, small)]
    assert found.standard_error == pytest.approx(math.sqrt(sum(variances)) / 2)
    welch = sum(variances) ** 2 / (variances[0] ** 2 / 399 + variances[1] ** 2 / 2)
    half = stats.t.ppf(0.975, welch) * math.sqrt(sum(variances)) / 2
    assert found.t_high == pytest.approx(found.mean + half)


# ---- the paired test


def one_sample(values: Sequence[int]) -> dict[str, list[int]]:
    return {f"p{i}": [v] for i, v in enumerate(values)}


@pytest.mark.parametrize("seed", range(4))
def test_the_permutation_test_agrees_with_scipy(seed: int) -> None:
    """Exact: scipy tries all 2^10 signs. Numbers of samples that differ (4 and 6) make parts of twelfths."""
    rng = np.random.default_rng(seed)
    a = {f"p{i}": rng.binomial(1, 0.6, size=4).tolist() for i in range(10)}
    b = {f"p{i}": rng.binomial(1, 0.4, size=6).tolist() for i in range(10)}
    found = metrics.paired(a, b)
    gaps = np.array([round(12 * (fmean(a[i]) - fmean(b[i]))) for i in a])
    theirs = stats.permutation_test((gaps,), np.sum, permutation_type="samples", n_resamples=np.inf)
    assert found.test == "exact" and found.p == pytest.approx(theirs.pvalue)
    assert found.difference.mean == pytest.approx(gaps.mean() / 12)
    assert (found.won, found.lost, found.level) == ((gaps > 0).sum(), (gaps < 0).sum(), (gaps == 0).sum())


def test_one_sample_each_is_the_sign_test() -> None:
    """Won 9, lost 2, 389 level: McNemar's exact test, two-sided binomial of 2 in 11."""
    a, b = one_sample([1] * 9 + [0] * 2 + [1] * 389), one_sample([0] * 9 + [1] * 2 + [1] * 389)
    found = metrics.paired(a, b)
    assert found.p == pytest.approx(stats.binomtest(2, 11).pvalue) == pytest.approx(0.0654296875)
    assert (found.won, found.lost, found.level) == (9, 2, 389)
    assert found.difference.mean == pytest.approx(7 / 400)
    assert (found.mean_a, found.mean_b) == (398 / 400, 391 / 400)
    assert metrics.paired(b, a).p == found.p
    assert metrics.paired(b, a).difference.mean == -found.difference.mean


def test_random_flips_agree_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = np.random.default_rng(3).integers(-8, 11, size=60).tolist()
    exact, how = metrics.flip_test(gaps)
    assert how == "exact"
    monkeypatch.setattr(metrics, "MAX_EXACT_OPERATIONS", 0)
    drawn, how = metrics.flip_test(gaps)
    assert how == "20000 flips"
    assert drawn == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / 20_000))
    assert metrics.flip_test([g / 60 for g in gaps]) == (pytest.approx(drawn, abs=0.02), "20000 flips")
    assert metrics.flip_test([0.01] * 200) == (1 / 20_001, "20000 flips")  # never 0


def test_a_tiny_p_is_exact() -> None:
    assert metrics.flip_test([3] * 100) == (pytest.approx(2 * 0.5**100), "exact")


def test_two_equal_models() -> None:
    a = {"p": [1, 0], "q": [0, 0], "r": [1, 1]}
    found = metrics.paired(a, {k: v[::-1] for k, v in a.items()})
    assert (found.p, found.difference.mean, found.level) == (1.0, 0.0, 3)
    assert found.difference.interval == "wilson" and found.difference.low < 0 < found.difference.high


def test_the_p_value_is_uniform_where_nothing_differs() -> None:
    rng = np.random.default_rng(8)
    found = []
    for _ in range(200):
        q = rng.beta(0.6, 0.9, size=40)
        a, b = ({f"{i}": [int(x) for x in rng.random(4) < p] for i, p in enumerate(q)} for _ in range(2))
        gaps = [sum(a[i]) - sum(b[i]) for i in a]
        found.append(metrics.flip_test(gaps)[0])
    assert np.mean(np.array(found) <= 0.05) <= 0.10 and 0.4 < np.mean(found) < 0.62


def test_problems_of_one_side_are_refused_or_left_out() -> None:
    a, b = one_sample([1, 0, 1, 1]), one_sample([1, 1, 0])
    b["other"] = [1]
    with pytest.raises(
        ValueError,
        match=r"3 on both sides, 1 only in A \(e.g. p3\), 1 only in B \(e.g. other\).*--common-only",
    ):
        metrics.paired(a, b)
    found = metrics.paired(a, b, common_only=True)
    assert (found.num_problems, found.left_out_a, found.left_out_b) == (3, 1, 1)
    assert found.mean_a == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="no problem is on both sides"):
        metrics.paired(a, {"x": [1]}, common_only=True)


# ---- the summary


def problems() -> dict[str, list[Sample]]:
    rng = random.Random(6)
    return {f"p{i}": of(f"p{i}", [int(rng.random() < i / 12) for _ in range(4)]) for i in range(12)}


def test_a_summary_by_hand() -> None:
    found = metrics.summarize(
        {
            "p": [
                sample("p", 0, outcome="right", answer="7", num_tokens=10),
                sample("p", 1, outcome="unparsed", answer=None, finish_reason="length", num_tokens=100),
            ],
            "q": [
                sample("q", 0, outcome="wrong", finish_reason="length", num_tokens=40),
                sample("q", 1, outcome="unanswered", answer=None, finish_reason="abort", num_tokens=0),
            ],
        },
        num_samples=2,
        same=None,
    )
    assert found["counts"] == {
        "problems": 2, "samples": 4, "right": 1, "wrong": 1, "unparsed": 1, "timeout": 0, "error": 0, "unanswered": 1,
        "truncated": 2, "truncated_and_unparsed": 1,
    }  # fmt: skip
    assert found["shares"]["truncated"] == 0.5 and found["shares"]["unanswered"] == 0.25
    assert found["completion_tokens"] == {"mean": 50.0, "median": 40.0}  # of those that there are
    assert (found["avg@k"]["k"], found["avg@k"]["mean"]) == (2, 0.25)
    assert {k: v["mean"] for k, v in found["pass@k"].items()} == {"1": 0.25, "2": 0.5}
    assert {k: v["mean"] for k, v in found["maj@k"].items()} == {"1": 0.25, "2": 0.5}
    json.dumps(found, allow_nan=False)


def test_a_summary_does_not_depend_on_order() -> None:
    scores = skewed(50, 7)
    assert metrics.estimate(scores) == metrics.estimate(scores[::-1])
    ordered = problems()
    found = metrics.summarize(ordered, num_samples=4, same=None)
    rng = random.Random(2)
    shuffled = {i: rng.sample(ordered[i], 4) for i in rng.sample(list(ordered), len(ordered))}
    assert metrics.summarize(shuffled, num_samples=4, same=None) == found
    right = {i: [int(s.right) for s in several] for i, several in ordered.items()}
    other = {i: r[::-1] if int(i[1:]) % 2 else [1] * 4 for i, r in right.items()}
    turned = [
        {i: rng.sample(side[i], 4) for i in rng.sample(list(side), len(side))} for side in (right, other)
    ]
    a, b = metrics.paired(right, other), metrics.paired(*turned)
    assert replace(a, differences=()) == replace(b, differences=())


def test_one_sample_of_each_problem_has_both_intervals() -> None:
    found = metrics.summarize(
        {f"p{i}": of(f"p{i}", [i % 4 > 0]) for i in range(200)}, num_samples=1, same=None
    )
    avg = found["avg@k"]
    assert avg["mean"] == 0.75 and avg["low"] < avg["t_low"] + 0.01 and avg["rerun_standard_error"] is None
    assert avg["high"] - avg["low"] == pytest.approx(2 * 1.96 * math.sqrt(0.75 * 0.25 / 200), rel=0.05)
    assert list(found["pass@k"]) == list(found["maj@k"]) == ["1"]


def test_missing_samples_are_counted() -> None:
    broken = problems()
    del broken["p3"][1:], broken["p5"][0]
    with pytest.raises(
        ValueError, match=r"4 of 48 samples are missing, in 2 of 12 problems \(e.g. p3: 1 of 4\)"
    ):
        metrics.summarize(broken, num_samples=4, same=None)
    with pytest.raises(ValueError, match="no problem has a sample"):
        metrics.summarize({}, num_samples=4, same=None)


def test_samples_beyond_the_number_are_not_counted() -> None:
    found = metrics.summarize(
        {"p": of("p", [1, 0, 1, 1]), "q": of("q", [0, 0, 1, 1])}, num_samples=2, same=None
    )
    assert found["counts"]["samples"] == 4 and found["avg@k"]["mean"] == 0.25


def test_of_very_many_samples_maj_at_k_is_told_for_one_and_all() -> None:
    n = metrics.MAX_SUBSET_VOTES + 1
    found = metrics.summarize({"p": of("p", [1] * 300 + [0] * (n - 300))}, num_samples=n, same=None)
    assert {k: v["mean"] for k, v in found["maj@k"].items()} == {"1": pytest.approx(300 / n), str(n): 1.0}
    assert found["pass@k"]["256"]["mean"] == 1.0
