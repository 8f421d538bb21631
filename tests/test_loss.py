"""The losses: hand-worked values, an independent numpy computation, and finite differences."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcgrpo.algorithms import ALGORITHMS, build
from hpcgrpo.algorithms.loss import IMPORTANCE, KL, LOSS_AGG, Correction, KlEstimator, LossAgg, k1, k2, k3
from hpcgrpo.types import Batch, Totals

ORACLE = Path(__file__).parents[2] / "shared" / "oracles" / "worked_examples.py"
BASES = ("grpo", "dr_grpo", "dapo", "gspo", "gmpo", "bnpo")

# Two completions of 3 and 1 tokens with A = (+1, -1): ratios (1.3, 1.0, 0.5), (0.6).
OLD, NEW, REF = (0.5, 0.4, 0.2, 0.25), (0.65, 0.4, 0.1, 0.15), (0.5, 0.5, 0.2, 0.30)
LENGTHS, ADVANTAGES, L_MAX = (3, 1), (1.0, -1.0), 4


def totals(lengths: Sequence[int], rows_per_device: int = 8, **changes: int) -> Totals:
    return replace(
        Totals(len(lengths), sum(lengths), len(lengths), sum(lengths), L_MAX, rows_per_device), **changes
    )


def logs(probabilities: Sequence[float]) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def make_batch(
    lengths: Sequence[int], advantages: Sequence[float], weights: Sequence[float], **streams: Tensor | None
) -> Batch:
    sizes = torch.tensor(lengths, dtype=torch.int64)

    def spread(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(sizes)

    row = torch.arange(len(lengths)).repeat_interleave(sizes)
    return Batch(row, sizes, spread(advantages), spread(weights), **streams)


def worked(spec: dict[str, Any], agg: str | None = None, **streams: Tensor) -> tuple[Tensor, Tensor, dict]:
    """Loss, gradient and metrics of the two completions, under the weights of `agg` or of the algorithm."""
    algorithm = build(spec)
    weigh = LOSS_AGG[agg] if agg else algorithm.weigh
    new = logs(NEW).requires_grad_()
    batch = make_batch(LENGTHS, ADVANTAGES, weigh(LENGTHS, totals(LENGTHS)), old=logs(OLD), **streams)
    loss, metrics = algorithm.loss(new, batch)
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad, metrics


# ---- E2: clipping, aggregation, KL, Eq. 29


@pytest.mark.parametrize(
    ("epsilon_high", "agg", "expected"),
    [
        (None, "seq_mean_token_mean", -0.05),
        (None, "token_mean", -0.475),
        (None, "const_len", -0.2375),
        (None, "seq_mean_token_sum", -0.95),
        (0.28, "seq_mean_token_mean", -0.19 / 3),
        (0.28, "token_mean", -0.495),
        (0.28, "const_len", -0.2475),
        (0.28, "seq_mean_token_sum", -0.99),
    ],
)
def test_e2_clipped_surrogate_under_every_aggregation(
    epsilon_high: float | None, agg: str, expected: float
) -> None:
    loss, _, metrics = worked({"name": "grpo", "epsilon_high": epsilon_high, "loss_agg": agg})
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    # 1.3 with A > 0 lies above the range, 0.6 with A < 0 below it; 0.5 with A > 0 is not clipped
    assert metrics["clip_ratio/high_mean"] == 1 and metrics["clip_ratio/low_mean"] == 1
    assert metrics["clip_ratio/region_mean"] == 2


def test_e2_k3_and_the_gradient_weights_of_equation_29() -> None:
    spec = {"name": "grpo", "beta": 0.04}
    loss, gradient, metrics = worked(spec, reference=logs(REF))
    assert metrics["kl"].item() == pytest.approx(0.0315950 + 0.0268564 + 0.3068528 * 2, abs=1e-6)
    assert loss.item() == pytest.approx(-0.0414276, abs=1e-7)
    weights = torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2], dtype=torch.float64)
    expected = torch.tensor([-0.0092308, 1.01, 0.54, 0.04], dtype=torch.float64)
    assert torch.allclose(-gradient / weights, expected, atol=1e-7)
    assert worked(spec, "token_mean", reference=logs(REF))[0].item() == pytest.approx(-0.4682784, abs=1e-7)


def test_delta_bounds_the_ratio_where_the_advantage_is_negative() -> None:
    """Ratio 10 with A = -1: min(-10, -1.2) = -10 without delta, -4 with delta 4, and then no gradient."""
    for delta, expected, slope in ((None, 10.0, 10.0), (4.0, 4.0, 0.0)):
        new = logs([1.0]).requires_grad_()
        batch = make_batch([1], [-1.0], [1.0], old=logs([0.1]))
        loss, _ = build({"name": "grpo", "delta": delta}).loss(new, batch)
        loss.backward()
        assert loss.item() == pytest.approx(expected) and new.grad is not None
        assert new.grad.item() == pytest.approx(slope)


# ---- E3: GSPO, GMPO


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"name": "gspo", "epsilon": 0.2, "epsilon_high": 0.2}, -0.0331196),
        ({"name": "gspo"}, 0.0667304),
        ({"name": "gmpo"}, -0.0979595),
        ({"name": "gmpo", "clip_log": 0.2}, -0.0148434),
    ],
)
def test_e3_sequence_ratios(spec: dict[str, Any], expected: float) -> None:
    assert worked(spec)[0].item() == pytest.approx(expected, abs=1e-7)


def test_gspo_gradient_is_that_of_the_mean_log_ratio() -> None:
    """Row 1 is in range at s = 0.8662391: each of its 3 tokens gets -s A / (2 * 3). Row 2 is clipped."""
    _, gradient, metrics = worked({"name": "gspo", "epsilon": 0.2, "epsilon_high": 0.2})
    expected = torch.tensor([-0.8662391 / 6] * 3 + [0.0], dtype=torch.float64)
    assert torch.allclose(gradient, expected, atol=1e-7)
    assert metrics["clip_ratio/low_mean"] == 1 and metrics["clip_ratio/high_mean"] == 0


# ---- KL estimators


def test_kl_of_equal_policies_is_zero_and_k2_and_k3_are_never_negative() -> None:
    d = torch.linspace(-8, 8, 400, dtype=torch.float64)
    for name, estimate in KL.items():
        assert estimate(torch.zeros(1)).item() == 0, name
    for values in (d, 1e-4 * d.float()):
        assert (k3(values) > 0).all() and (k2(values) > 0).all()


def test_what_the_gradient_of_each_estimator_is_in_expectation() -> None:
    """Enumerated: k1 pulls nowhere, k2 along KL(pi || ref), k3 along KL(ref || pi)."""
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    new = logits.log_softmax(-1)
    reverse, forward = (new.exp() * (new - ref)).sum(), (ref.exp() * (ref - new)).sum()
    sampled = new.exp().detach()
    expected = {"k1": torch.zeros(3, dtype=torch.float64), "k2": gradient(reverse), "k3": gradient(forward)}
    for name, estimate in KL.items():
        assert torch.allclose(gradient((sampled * estimate(ref - new)).sum()), expected[name], atol=1e-12), (
            name
        )
    for unbiased in (k1, k3):
        assert (sampled * unbiased(ref - new)).sum().item() == pytest.approx(reverse.item(), abs=1e-12)


# ---- importance correction

BEHAVIOR = (0.1, 0.4, 0.4, 0.25)  # old / behavior = (5, 1, 0.5), (1): product of the first row 2.5


@pytest.mark.parametrize(
    ("correction", "cap", "weights"),
    [
        ("none", 3.0, (1, 1, 1, 1)),
        ("token_truncate", 3.0, (3, 1, 0.5, 1)),
        ("token_mask", 3.0, (0, 1, 0.5, 1)),
        ("sequence_truncate", 3.0, (2.5, 2.5, 2.5, 1)),
        ("sequence_truncate", 2.0, (2, 2, 2, 1)),
        ("sequence_mask", 3.0, (2.5, 2.5, 2.5, 1)),
        ("sequence_mask", 2.0, (0, 0, 0, 1)),
    ],
)
def test_importance_weights(correction: str, cap: float, weights: tuple[float, ...]) -> None:
    spec = {
        "name": "grpo",
        "importance_sampling_correction": correction,
        "importance_sampling_cap": cap,
        "loss_agg": "token_mean",
    }
    loss, _, metrics = worked(spec, behavior=logs(BEHAVIOR))
    values = (-1.2, -1.0, -0.5, 0.8)
    assert loss.item() == pytest.approx(sum(v * w for v, w in zip(values, weights, strict=True)) / 4)
    name = "sampling/importance_sampling_ratio"
    assert metrics[f"{name}/mean"].item() == pytest.approx(sum(weights))
    assert metrics[f"{name}/min"].item() == pytest.approx(min(weights))
    assert metrics[f"{name}/max"].item() == pytest.approx(max(weights))
    difference = "sampling/sampling_logp_difference"
    assert metrics[f"{difference}/mean"].item() == pytest.approx(math.log(5) + math.log(2))
    assert metrics[f"{difference}/max"].item() == pytest.approx(math.log(5))


def test_the_penalty_is_weighted_too() -> None:
    """Token 1 of E2 with k3 0.0315950 and weight 3: 3 (-1.2 + 0.04 k3)."""
    batch = make_batch([1], [1.0], [1.0], old=logs([0.5]), behavior=logs([0.1]), reference=logs([0.5]))
    loss, _ = build({"name": "grpo", "beta": 0.04}).loss(logs([0.65]), batch)
    assert loss.item() == pytest.approx(3 * (-1.2 + 0.04 * 0.0315950), abs=1e-6)


def test_only_the_new_log_probs_get_a_gradient() -> None:
    streams = {
        name: logs(values).requires_grad_()
        for name, values in {"old": OLD, "reference": REF, "behavior": BEHAVIOR}.items()
    }
    new = logs(NEW).requires_grad_()
    loss, metrics = build({"name": "grpo", "beta": 0.1}).loss(
        new, make_batch(LENGTHS, ADVANTAGES, (1.0, 1.0), **streams)
    )
    loss.backward()
    assert new.grad is not None and all(s.grad is None for s in streams.values())
    assert not any(m.requires_grad for m in metrics.values())


@pytest.mark.parametrize("name", BASES)
def test_tokens_without_advantage_are_not_counted_as_clipped(name: str) -> None:
    batch = make_batch([1, 1], [0.0, 0.0], [1.0, 1.0], old=logs([0.1, 0.9]))
    _, metrics = build({"name": name}).loss(logs([0.9, 0.1]), batch)
    assert metrics["clip_ratio/region_mean"] == 0


def test_metrics_are_there_when_their_stream_is() -> None:
    clip = {f"clip_ratio/{n}_mean" for n in ("low", "high", "region")}
    assert set(worked({"name": "grpo"})[2]) == clip
    assert set(worked({"name": "grpo"}, reference=logs(REF))[2]) == clip | {"kl"}
    assert len(worked({"name": "grpo"}, behavior=logs(OLD))[2]) == 3 + 5


# ---- edges


@pytest.mark.parametrize("name", BASES)
def test_an_empty_batch_is_a_zero_that_can_be_differentiated(name: str) -> None:
    new = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    empty = {stream: torch.zeros(0, dtype=torch.float64) for stream in ("old", "behavior", "reference")}
    loss, metrics = build({"name": name, "beta": 0.1}).loss(new, make_batch([], [], [], **empty))
    loss.backward()
    assert loss.item() == 0 and new.grad is not None and new.grad.shape == (0,)
    for key, value in metrics.items():
        assert value.item() == {"min": math.inf, "max": -math.inf}.get(key.rsplit("/")[-1], 0.0), key


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_far_apart_log_probs_stay_finite_in_float32(name: str, advantage: float) -> None:
    far = torch.tensor([-300.0, 0.0])
    for new, other in ((far, far.flip(0)), (far.flip(0), far)):
        batch = make_batch([2], [advantage], [0.5])
        batch = replace(batch, advantages=batch.advantages.float(), weights=batch.weights.float())
        batch = replace(batch, old=other, behavior=new.clone(), reference=other)
        leaf = new.clone().requires_grad_()
        loss, _ = build({"name": name, "beta": 0.1}).loss(leaf, batch)
        loss.backward()
        assert loss.isfinite() and leaf.grad is not None and leaf.grad.isfinite().all()


def test_tables_hold_what_their_types_promise() -> None:
    for table, names in ((LOSS_AGG, LossAgg), (KL, KlEstimator), (IMPORTANCE, Correction)):
        assert tuple(table) == get_args(names)


# ---- aggregation


def test_token_mean_local_is_a_mean_of_chunk_means() -> None:
    """Rows of 3, 1, 2 tokens on devices of 2 rows: chunks of 4 and 2 tokens, so 1/8, 1/8, 1/4."""
    lengths = (3, 1, 2)
    weights = LOSS_AGG["token_mean_local"](lengths, totals(lengths, rows_per_device=2))
    assert weights == [1 / 8, 1 / 8, 1 / 4]


@pytest.mark.parametrize("agg", sorted(LOSS_AGG))
def test_what_the_weights_of_a_constant_loss_add_up_to(agg: str) -> None:
    lengths = (3, 1, 2, 4, 4)
    weights = LOSS_AGG[agg](lengths, totals(lengths, rows_per_device=2))
    total = sum(n * w for n, w in zip(lengths, weights, strict=True))
    expected = {"const_len": 14 / (5 * L_MAX), "seq_mean_token_sum": 14 / 5}.get(agg, 1.0)
    assert total == pytest.approx(expected, abs=1e-12)


def test_a_completion_without_tokens_has_no_infinite_weight() -> None:
    for name, weigh in LOSS_AGG.items():
        assert all(map(math.isfinite, weigh((0, 0), totals((0, 0))))), name


# ---- finite differences

OPTIONS: dict[str, tuple[Any, ...]] = {
    "epsilon": (0.1,),
    "epsilon_high": (None, 0.05),
    "delta": (1.5,),
    "beta": (0.04, 1.0),
    "clip_log": (0.1,),
    "kl_estimator": ("k1", "k2", "k3"),
    "loss_agg": tuple(LOSS_AGG),
    "importance_sampling_correction": tuple(IMPORTANCE),
    "importance_sampling_cap": (1.1,),
}


def variants() -> list[dict[str, Any]]:
    """Each base as it is, and with each option of its loss at each value."""
    specs: list[dict[str, Any]] = []
    for name in BASES:
        options = build({"name": name}).options
        specs.append({"name": name})
        for key, values in OPTIONS.items():
            specs += [{"name": name, "beta": 0.04} | {key: value} for value in values if key in options]
    return specs


def random_case(seed: int, spec: dict[str, Any]) -> tuple[Tensor, Batch]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 1, 4, 2]

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(sum(lengths), generator=generator, dtype=torch.float64)

    new = -1.5 + noise(0.3)
    weights = build(spec).weigh(lengths, totals(lengths, rows_per_device=3))
    batch = make_batch(lengths, [1.2, -0.7, 0.0, -1.9], weights)
    return new, replace(batch, old=new + noise(0.3), behavior=new + noise(0.4), reference=new + noise(0.5))


@pytest.mark.parametrize("spec", variants(), ids=lambda s: "-".join(map(str, s.values())))
def test_gradient_is_that_of_finite_differences(spec: dict[str, Any]) -> None:
    loss = build(spec).loss
    for seed in (0, 1):
        new, batch = random_case(seed, spec)
        leaf = new.clone().requires_grad_()
        loss(leaf, batch)[0].backward()
        steps = 1e-6 * torch.eye(len(new), dtype=torch.float64)
        slopes = [(loss(new + h, batch)[0] - loss(new - h, batch)[0]).item() / 2e-6 for h in steps]
        assert leaf.grad is not None
        assert torch.allclose(leaf.grad, torch.tensor(slopes, dtype=torch.float64), atol=2e-9), seed


@pytest.mark.parametrize("name", BASES)
def test_without_old_the_new_log_probs_stand_for_it(name: str) -> None:
    algorithm = build({"name": name, "beta": 0.04})
    new, batch = random_case(0, {"name": name})
    results: list[tuple[Any, Any, Any]] = []
    for old in (None, new.clone()):
        leaf = new.clone().requires_grad_()
        loss, metrics = algorithm.loss(leaf, replace(batch, old=old))
        loss.backward()
        results.append((loss.detach(), leaf.grad, metrics))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


# ---- an independent numpy computation


@pytest.fixture(scope="module")
def oracle() -> dict[str, Any]:
    if not ORACLE.is_file():
        pytest.skip(f"needs {ORACLE}, which does not come with the project")
    with contextlib.redirect_stdout(io.StringIO()):
        return runpy.run_path(str(ORACLE))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "gmpo", "bnpo"])
def test_losses_equal_the_oracle(oracle: dict[str, Any], name: str) -> None:
    spec = {"name": name, "beta": 0.07, "importance_sampling_correction": "none"}
    options = build(spec).options
    for seed in range(5):
        new, batch = random_case(seed, spec)
        assert batch.old is not None and batch.reference is not None
        ours = build(spec).loss(new, batch)[0].item()
        bounds = [0, *np.cumsum(batch.lengths.numpy())]
        theirs = 0.0
        for a, b in itertools.pairwise(bounds):
            n, o, ref, w = (x[a:b].numpy() for x in (new, batch.old, batch.reference, batch.weights))
            advantage = batch.advantages[a].item()
            low = options.get("epsilon")
            high = options.get("epsilon_high") or low
            if name == "gmpo":
                gain = np.full(b - a, oracle["gmpo"](n, o, advantage, options["clip_log"]))
            elif name == "gspo":
                gain = np.full(b - a, oracle["pg"](np.exp((n - o).mean()), advantage, low, high))
            else:
                gain = oracle["pg"](np.exp(n - o), advantage, low, high)
            theirs += (w * (-gain + 0.07 * oracle["k3"](n, ref))).sum()
        assert ours == pytest.approx(theirs, abs=1e-12)


def test_every_base_is_tested_here() -> None:
    """The others are tested by files of their own."""
    assert {*BASES, "igrpo", "cppo", "pods", "gfpo", "kdrl", "opd", "codistill"} == set(ALGORITHMS)
