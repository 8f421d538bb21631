"""The policy-gradient loss: a surrogate of log-ratios, a KL penalty, importance weights, and token weights.

A loss is a sum over tokens under `Batch.weights`; which mean that is depends on `weigh` alone (`LOSS_AGG`).
Gradients flow through the new log-probs only. Tensor methods throughout, so this imports without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from hpcgrpo.algorithms.base import Loss, Metrics
from hpcgrpo.types import Batch, Totals

if TYPE_CHECKING:
    from torch import Tensor

LossAgg = Literal["seq_mean_token_mean", "token_mean", "token_mean_local", "const_len", "seq_mean_token_sum"]
KlEstimator = Literal["k1", "k2", "k3"]
Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

Ratio = Callable[["Tensor", Batch], "Tensor"]  # log-ratios [T] -> ratios [T]
# log-ratios [T] -> what to maximise [T], where it is clipped for A < 0 [T], where for A > 0 [T]
Surrogate = Callable[["Tensor", Batch], tuple["Tensor", "Tensor", "Tensor"]]

# Differences of log-probs beyond this count as this: e^20 is finite in float32, and inf * 0 would be NaN.
LOG_LIMIT = 20.0


# ---- ratios and surrogates


def token_ratio(log_ratio: Tensor, batch: Batch) -> Tensor:
    """r_t = new / old of each token (PPO, GRPO)."""
    return log_ratio.exp()


def sequence_ratio(log_ratio: Tensor, batch: Batch) -> Tensor:
    """s_i = exp(mean_t log r_t) of the token's row (GSPO, arXiv 2507.18071)."""
    return row_mean(log_ratio, batch).exp()


def clipped(
    epsilon: float, epsilon_high: float | None, delta: float | None = None, ratio: Ratio = token_ratio
) -> Surrogate:
    """min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A); `delta` bounds the first r from above (two-sided).

    `epsilon_high` None means `epsilon`. Source: DeepSeekMath Eq. 3, DAPO Eq. 8 (asymmetric), TRL `delta`.
    """
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)

    def surrogate(log_ratio: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        r, a = ratio(log_ratio, batch), batch.advantages
        free = r if delta is None else r.clamp(max=delta)
        gain = (free * a).minimum(r.clamp(low, high) * a)
        return gain, (r < low) & (a < 0), (r > high) & (a > 0)

    return surrogate


def geometric(clip_log: float) -> Surrogate:
    """A_i exp(mean_t m_t): the geometric mean of ratios clipped on the side that A would run off to.

    m_t = min(log r_t, clip_log) for A > 0, max(log r_t, -clip_log) for A < 0. GMPO, arXiv 2507.20673.
    """

    def surrogate(log_ratio: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        a = batch.advantages
        one_sided = log_ratio.clamp(max=clip_log).where(a > 0, log_ratio.clamp(min=-clip_log))
        gain = row_mean(one_sided, batch).exp() * a
        return gain, (log_ratio < -clip_log) & (a < 0), (log_ratio > clip_log) & (a > 0)

    return surrogate


def truncated(epsilon: float, ratio: Ratio = token_ratio) -> Surrogate:
    """min(r, 1 + epsilon) A, the truncated ratio being a weight of the gradient: no token loses its own.

    Unlike `clipped`, which takes the gradient of r itself and so that of what is clipped. Source: truncated
    importance sampling.
    """
    high = 1 + epsilon

    def surrogate(log_ratio: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        r, a = ratio(log_ratio, batch).detach(), batch.advantages
        gain = r.clamp(max=high) * a * (log_ratio - log_ratio.detach()).exp()
        return gain, r < 0, r > high

    return surrogate


def unclipped(ratio: Ratio = token_ratio) -> Surrogate:
    """r A: plain importance sampling."""

    def surrogate(log_ratio: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        r = ratio(log_ratio, batch)
        return r * batch.advantages, r < 0, r < 0

    return surrogate


# ---- KL to the reference, of d = log reference - log new


def k1(d: Tensor) -> Tensor:
    """-d. Value: unbiased for KL(new || reference), may be negative. Gradient: grad log new.

    That gradient is 0 in expectation over the policy's own tokens: in a loss k1 adds noise and no pull.
    """
    return -d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2. Value: biased, >= 0. Gradient: -d grad log new, on average that of KL(new || reference)."""
    return d * d / 2


def k3(d: Tensor) -> Tensor:
    """e^d - d - 1. Value: unbiased for KL(new || reference), >= 0. Gradient: -(e^d - 1) grad log new.

    In expectation over the policy's own tokens that gradient is the one of KL(reference || new).
    """
    return d.expm1() - d


KL: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


# ---- importance weights old / behavior, of their log-ratio


def _uncorrected(difference: Tensor, batch: Batch, cap: float) -> Tensor:
    return difference.new_ones(difference.shape)


def _token_truncate(difference: Tensor, batch: Batch, cap: float) -> Tensor:
    return bounded(difference).exp().clamp(max=cap)


def _token_mask(difference: Tensor, batch: Batch, cap: float) -> Tensor:
    weight = bounded(difference).exp()
    return weight.masked_fill(weight > cap, 0.0)


def _sequence_truncate(difference: Tensor, batch: Batch, cap: float) -> Tensor:
    return _token_truncate(row_sum(difference, batch), batch, cap)


def _sequence_mask(difference: Tensor, batch: Batch, cap: float) -> Tensor:
    return _token_mask(row_sum(difference, batch), batch, cap)


# The sequence forms weigh all tokens of a row by the product of its token ratios.
IMPORTANCE: dict[str, Callable[[Tensor, Batch, float], Tensor]] = {
    "none": _uncorrected,
    "token_truncate": _token_truncate,
    "token_mask": _token_mask,
    "sequence_truncate": _sequence_truncate,
    "sequence_mask": _sequence_mask,
}


# ---- the loss


def policy_loss(
    surrogate: Surrogate,
    *,
    beta: float,
    kl_estimator: KlEstimator,
    importance_sampling_correction: Correction,
    importance_sampling_cap: float,
) -> Loss:
    """sum_t weight_t * importance_t * (-surrogate_t + beta * KL_t), and its metrics.

    `Batch.old` None stands for the new log-probs, detached: the ratio is 1 and its gradient that of log new.
    importance = old / behavior, detached, where `Batch.behavior` is given. The metrics are sums over the
    tokens of the batch (a caller divides by the tokens of the step); names that end in /min or /max are
    extremes, of an empty batch +inf and -inf. Those of a stream are there if and only if the stream is.
    Source: ALGORITHMS sections 1 and 2 (iGRPO Eq. 5); truncated importance sampling as in TRL.
    """
    estimate, importance = KL[kl_estimator], IMPORTANCE[importance_sampling_correction]

    def loss(new: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        assert batch.reference is not None or not beta, "beta > 0 needs the reference log-probs"
        old = (new if batch.old is None else batch.old).detach()
        gain, low, high = surrogate(bounded(new - old), batch)
        values, metrics = -gain, _clip_metrics(low.to(gain.dtype), high.to(gain.dtype))
        if batch.reference is not None:
            kl = estimate(bounded(batch.reference.detach() - new))
            metrics["kl"] = kl.detach().sum()
            values = values + beta * kl if beta else values
        if batch.behavior is not None:
            difference = old - batch.behavior.detach()
            weight = importance(difference, batch, importance_sampling_cap)
            metrics |= _sampling_metrics(difference, weight)
            values = values * weight
        return (values * batch.weights).sum(), metrics

    return loss


def _clip_metrics(low: Tensor, high: Tensor) -> Metrics:
    return {
        "clip_ratio/low_mean": low.sum(),
        "clip_ratio/high_mean": high.sum(),
        "clip_ratio/region_mean": (low + high).sum(),  # a token is clipped on one side only
    }


def _sampling_metrics(difference: Tensor, weight: Tensor) -> Metrics:
    distance = difference.abs()
    return {
        "sampling/sampling_logp_difference/mean": distance.sum(),
        "sampling/sampling_logp_difference/max": _extreme(distance, -math.inf),
        "sampling/importance_sampling_ratio/mean": weight.sum(),
        "sampling/importance_sampling_ratio/min": _extreme(weight, math.inf),
        "sampling/importance_sampling_ratio/max": _extreme(weight, -math.inf),
    }


def _extreme(values: Tensor, empty: float) -> Tensor:
    """The largest value where `empty` is -inf, else the smallest; `empty` where there is none."""
    if values.numel() == 0:
        return values.new_full((), empty)
    return values.max() if empty < 0 else values.min()


def bounded(difference: Tensor) -> Tensor:
    """Differences of log-probs within +-LOG_LIMIT, so that their exponential is finite."""
    return difference.clamp(-LOG_LIMIT, LOG_LIMIT)


def row_sum(values: Tensor, batch: Batch) -> Tensor:
    """[T] -> [T]: at each token the sum over its row."""
    sums = values.new_zeros(batch.lengths.shape[0]).index_add(0, batch.row, values)
    return sums[batch.row]


def row_mean(values: Tensor, batch: Batch) -> Tensor:
    """[T] -> [T]: at each token the mean over its row."""
    return row_sum(values, batch) / batch.lengths[batch.row]


# ---- token weights: the mean that a loss is


def seq_mean_token_mean(lengths: Sequence[int], totals: Totals) -> list[float]:
    """1 / (N len_i): GRPO, iGRPO Eq. 5, CPPO Eq. 9."""
    return [1 / (totals.rows * max(length, 1)) for length in lengths]


def token_mean(lengths: Sequence[int], totals: Totals) -> list[float]:
    """1 / sum_i len_i over the whole optimizer step: DAPO."""
    return [1 / max(totals.tokens, 1) for _ in lengths]


def token_mean_local(lengths: Sequence[int], totals: Totals) -> list[float]:
    """Mean over chunks of `rows_per_device` consecutive rows of the mean over the tokens of a chunk.

    TRL's `bnpo`. The chunks are those of the global order, so the packing into micro-batches is free.
    """
    size = totals.rows_per_device
    chunks = math.ceil(totals.rows / size)
    tokens = [sum(lengths[start : start + size]) for start in range(0, len(lengths), size)]
    return [1 / (chunks * max(tokens[i // size], 1)) for i in range(len(lengths))]


def const_len(lengths: Sequence[int], totals: Totals) -> list[float]:
    """1 / (N L_max): Dr. GRPO."""
    return [1 / (totals.rows * totals.max_completion_length) for _ in lengths]


def seq_mean_token_sum(lengths: Sequence[int], totals: Totals) -> list[float]:
    """1 / N: BNPO's released recipe."""
    return [1 / totals.rows for _ in lengths]


LOSS_AGG: dict[str, Callable[[Sequence[int], Totals], list[float]]] = {
    "seq_mean_token_mean": seq_mean_token_mean,
    "token_mean": token_mean,
    "token_mean_local": token_mean_local,
    "const_len": const_len,
    "seq_mean_token_sum": seq_mean_token_sum,
}
