"""CoDistill-GRPO (arXiv 2605.08873): a small policy samples for a large one, which is its teacher meanwhile.

phi is the small policy (the actor), theta the large one (the peer). Every rollout carries both policies' log-probs
from before the step (`Rollout.old`, `Rollout.peer`), so `credit` can compare them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Literal

from hpcgrpo.algorithms.base import Algorithm, Credit, Explore, Loss, Metrics, Rollouts
from hpcgrpo.algorithms.credit import standardise
from hpcgrpo.algorithms.downsample import Downsample, Kept, credit_kept, subset
from hpcgrpo.algorithms.loss import (
    KL,
    LOG_LIMIT,
    LOSS_AGG,
    Correction,
    LossAgg,
    Ratio,
    Surrogate,
    bounded,
    clipped,
    policy_loss,
    sequence_ratio,
    token_ratio,
    truncated,
    unclipped,
)
from hpcgrpo.algorithms.schema import check_types, layers, require
from hpcgrpo.types import Batch, Group, Prompt, Rollout

if TYPE_CHECKING:
    from torch import Tensor

KdEstimator = Literal["log_ratio", "k3"]
KdLenNorm = Literal["max_len", "seq_len", "none"]
KdPlacement = Literal["reward_pre_norm", "advantage_post_norm", "loss"]
AdvScale = Literal["none", "std"]
IsLevel = Literal["token", "sequence"]
IsClip = Literal["ppo", "truncate", "none"]
LargeReward = Literal["task", "effective"]
LargeRatio = Literal["step_start", "after_small"]

STD_DDOF, STD_EPS = 1, 1e-4  # as grpo's defaults, for adv_scale std
KdReward = Callable[[Rollout], float]
Choose = Callable[[Group], Kept]


def codistill(
    *,
    num_rollouts: int = 14,
    num_train: int = 8,
    downsample: Downsample = "max_variance",
    kd_alpha: float = 1.0,
    kd_estimator: KdEstimator = "log_ratio",
    kd_len_norm: KdLenNorm = "max_len",
    kd_placement: KdPlacement = "reward_pre_norm",
    adv_scale: AdvScale = "none",
    loss_agg: LossAgg = "const_len",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    large_epsilon: float | None = None,
    large_delta: float | None = None,
    large_is_level: IsLevel = "token",
    large_is_clip: IsClip = "ppo",
    large_reward: LargeReward = "task",
    large_ratio: LargeRatio = "step_start",
    hint_tokens: int = 0,
    hint_epochs: int = 1,
    max_completion_length: int | None = None,
    importance_sampling_correction: Correction = "token_truncate",
    importance_sampling_cap: float = 3.0,
) -> Algorithm:
    """Two policies learn from what the small one samples (CoDistill-GRPO, arXiv 2605.08873).

    Options:
        num_rollouts: completions of each prompt that the small policy samples (M)
        num_train: how many of them both policies train on (G)
        downsample: which, by r + kd reward; max_variance, as the paper cites PODS; its rule is not recorded
        kd_alpha: weight of the kd reward; 1 in the main runs, 2 gained more on Minerva; 0: none
        kd_estimator: log_ratio, the paper's; k3 as a reward pushes apart, which fits that theirs was unstable
        kd_len_norm: N in the kd reward; max_len, as mean-only advantages are the Dr. GRPO pattern; or seq_len
        kd_placement: in the reward before the group's mean (the paper), after it, or as a k2 | k3 term of the loss
        adv_scale: none, as the equation that is handed down has no std; std divides by the group's
        loss_agg: const_len, for the same 1/N in both equations, which a constant fits best
        epsilon: lower clip range; not recorded, 0.2 is the field's
        epsilon_high: upper clip range; null: equal to epsilon
        large_epsilon: clip range of the large policy on both sides; null: the same as the small one's
        large_delta: upper bound of the large ratio at negative advantages; null, as the equation has none
        large_is_level: token, as the equation has it; sequence: the geometric mean over a completion (GSPO)
        large_is_clip: ppo, as the equation has it; truncate: cut weights, no gradient lost; none
        large_reward: task, as the paper writes the large advantage apart; effective: with the kd reward
        large_ratio: over the small policy at step_start, whose own samples they are, or after_small's update
        hint_tokens: tokens the large policy writes first; off, for it takes a second generator; the paper has 50
        hint_epochs: passes over the data with hints; 1, as hints in all of them destabilised
        max_completion_length: N of kd_len_norm max_len in tokens; null: generation.max_completion_length

    r~_i = r_i + (kd_alpha / N) sum_t log(theta / phi). Of M rollouts G are kept, over which A~ = r~ - mean trains
    the small policy and A^ = r - mean the large one, both with the clipped loss; the large one's ratio is
    theta / phi_old. A hint's tokens count in all of it like others. No KL to a
    reference. That ratio has no upper bound where A^ < 0: a hint's token that phi would hardly write makes it, and
    the gradient, huge, which `large_delta` (4, say) prevents. Reconstructed from
    secondary sources: ALGORITHMS section 5. Raises ValueError for a value that is not allowed.
    """
    options = dict(locals())
    check_types(codistill, options)
    _check_ranges(options)
    kd = _kd_reward(options)

    def choose(group: Group) -> Kept:
        return subset(group, _effective(group, kd, kd_alpha).rewards, num_train, downsample)

    small = Algorithm(
        name="codistill",
        explore=_explore(num_rollouts, hint_tokens, hint_epochs),
        credit=credit_kept(_small_credit(options, kd), choose),
        select=lambda groups, advantages: [choose(group) for group in groups],
        weigh=LOSS_AGG[loss_agg],
        loss=_small_loss(options),
        num_generations=num_rollouts,
        batch_share=num_train,
        streams=frozenset({"peer"} if kd_placement == "loss" else ()),
        compares=True,
        hint_tokens=hint_tokens,
        hint_epochs=hint_epochs if hint_tokens else 0,
        options={"name": "codistill", **options},
    )
    return replace(small, peer=_large(small, options, kd, choose), peer_after=large_ratio == "after_small")


def kd_metrics(groups: Sequence[Group], options: Mapping[str, Any]) -> dict[str, float]:
    """What the two policies' log-probs say of a step's rollouts; {} where no codistill layer compares them.

    kd/reverse_kl: nats a token, an estimate of KL(small || large). kd/reward, kd/reward_std: the kd reward over
    completions, without kd_alpha. kd/effective_reward: the mean of r~. `options`: the algorithm's.
    """
    found = [layer for layer in layers(options) if layer["name"] == "codistill"]
    rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.old and rollout.peer]
    if not found or not rollouts:
        return {}
    kd = _kd_reward(found[0])
    rewards, alpha = [kd(rollout) for rollout in rollouts], found[0]["kd_alpha"]
    return {
        "kd/reverse_kl": fmean(
            o - p for r in rollouts for o, p in zip(r.old or (), r.peer or (), strict=True)
        ),
        "kd/reward": fmean(rewards),
        "kd/reward_std": pstdev(rewards),
        "kd/effective_reward": fmean(
            r.reward + alpha * reward for r, reward in zip(rollouts, rewards, strict=True)
        ),
    }


# ---- explore


def _explore(num: int, hint_tokens: int, hint_epochs: int) -> Explore:
    def explore(prompts: Sequence[Prompt], rollouts: Rollouts) -> list[Group]:
        hinted = [p for p in prompts if hint_tokens and p.epoch < hint_epochs]
        alone = [p for p in prompts if not hint_tokens or p.epoch >= hint_epochs]
        sampled: dict[int, tuple[Rollout, ...]] = {}
        for some, length in ((hinted, hint_tokens), (alone, 0)):
            rows = rollouts(some, num, hint_tokens=length) if some else []
            sampled |= {p.position: r for p, r in zip(some, rows, strict=True)}
        return [Group(p, sampled[p.position]) for p in prompts]

    return explore


# ---- credit


def _kd_reward(options: Mapping[str, Any]) -> KdReward:
    """The kd reward of a rollout before kd_alpha: minus the KL estimate, over N."""
    estimate, norm, length = (
        ESTIMATORS[options["kd_estimator"]],
        LENGTHS[options["kd_len_norm"]],
        options["max_completion_length"],
    )

    def kd(rollout: Rollout) -> float:
        assert rollout.old is not None and rollout.peer is not None, "codistill compares two policies"
        return estimate(rollout.old, rollout.peer) / norm(len(rollout.old), length)

    return kd


def _effective(group: Group, kd: KdReward, alpha: float) -> Group:
    """The group with r~ for its rewards."""
    rollouts = tuple(
        replace(r, score=replace(r.score, reward=r.reward + alpha * kd(r) if alpha else r.reward))
        for r in group.rollouts
    )
    return replace(group, rollouts=rollouts)


def _normalise(options: Mapping[str, Any]) -> Credit:
    return standardise("group" if options["adv_scale"] == "std" else "none", STD_DDOF, STD_EPS)


def _effective_credit(options: Mapping[str, Any], kd: KdReward) -> Credit:
    """Advantages of r~."""
    normalise, alpha = _normalise(options), options["kd_alpha"]
    return lambda groups: normalise([_effective(group, kd, alpha) for group in groups])


def _added_credit(options: Mapping[str, Any], kd: KdReward) -> Credit:
    """Advantages of r, and the kd reward added to them."""
    normalise, alpha = _normalise(options), options["kd_alpha"]

    def credit(groups: Sequence[Group]) -> list[tuple[float, ...]]:
        return [
            tuple(a + alpha * kd(r) if alpha else a for a, r in zip(advantages, group.rollouts, strict=True))
            for group, advantages in zip(groups, normalise(groups), strict=True)
        ]

    return credit


def _task_credit(options: Mapping[str, Any], kd: KdReward) -> Credit:
    """Advantages of r."""
    return _normalise(options)


def _small_credit(options: Mapping[str, Any], kd: KdReward) -> Credit:
    return PLACEMENTS[options["kd_placement"]](options, kd)


# ---- losses


def _policy_loss(surrogate: Surrogate, options: Mapping[str, Any]) -> Loss:
    return policy_loss(
        surrogate,
        beta=0.0,
        kl_estimator="k3",
        importance_sampling_correction=options["importance_sampling_correction"],
        importance_sampling_cap=options["importance_sampling_cap"],
    )


def _small_loss(options: Mapping[str, Any]) -> Loss:
    base = _policy_loss(clipped(options["epsilon"], options["epsilon_high"]), options)
    if options["kd_placement"] != "loss":
        return base
    estimate, alpha = KL[PULLS[options["kd_estimator"]]], options["kd_alpha"]

    def loss(new: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        assert batch.peer is not None, "kd_placement loss needs the large policy's log-probs"
        value, metrics = base(new, batch)
        pull = alpha * estimate(bounded(batch.peer.detach() - new))
        return value + (pull * batch.weights).sum(), metrics | {"kd/loss": pull.detach().sum()}

    return loss


def _large(small: Algorithm, options: Mapping[str, Any], kd: KdReward, choose: Choose) -> Algorithm:
    """The large policy's rule: the same rollouts, its own advantages, the ratio theta / phi_old."""
    credit = (_effective_credit if options["large_reward"] == "effective" else _task_credit)(options, kd)
    low, high = options["epsilon"], options["epsilon_high"]
    if options["large_epsilon"] is not None:
        low, high = options["large_epsilon"], None
    surrogate = CLIPS[options["large_is_clip"]](
        low, high, RATIOS[options["large_is_level"]], options["large_delta"]
    )
    return replace(
        small,
        name="codistill_large",
        credit=credit_kept(credit, choose),
        loss=_policy_loss(surrogate, options),
        streams=frozenset(),
        options={},
    )


def _ppo(low: float, high: float | None, ratio: Ratio, delta: float | None) -> Surrogate:
    return clipped(low, high, delta, ratio)


def _truncate(low: float, high: float | None, ratio: Ratio, delta: float | None) -> Surrogate:
    return truncated(low if high is None else high, ratio)


def _unclipped(low: float, high: float | None, ratio: Ratio, delta: float | None) -> Surrogate:
    return unclipped(ratio)


def _log_ratio(small: Sequence[float], large: Sequence[float]) -> float:
    """sum_t log theta - log phi: its mean over phi is -KL(phi || theta), its score-function gradient that of it."""
    return math.fsum(large) - math.fsum(small)


def _minus_k3(small: Sequence[float], large: Sequence[float]) -> float:
    """sum_t -(e^d - 1 - d). Its mean over phi is -KL(phi || theta) too, but not its score-function gradient.

    That is the gradient of KL(theta || phi) - KL(phi || theta).
    """
    differences = [max(-LOG_LIMIT, min(LOG_LIMIT, x - y)) for x, y in zip(large, small, strict=True)]
    return math.fsum(d - math.expm1(d) for d in differences)


def _max_len(length: int, max_length: int | None) -> float:
    rule = "kd_len_norm max_len divides by it; give the tokens that a completion has at most"
    require(max_length is not None, "max_completion_length", max_length, rule)
    assert max_length is not None
    return float(max_length)


ESTIMATORS: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "log_ratio": _log_ratio,
    "k3": _minus_k3,
}
PULLS = {"log_ratio": "k2", "k3": "k3"}  # kd_placement loss: what stands in the loss; k1's gradient is noise
LENGTHS: dict[str, Callable[[int, int | None], float]] = {
    "max_len": _max_len,
    "seq_len": lambda length, max_length: float(max(length, 1)),
    "none": lambda length, max_length: 1.0,
}
PLACEMENTS: dict[str, Callable[[Mapping[str, Any], KdReward], Credit]] = {
    "reward_pre_norm": _effective_credit,
    "advantage_post_norm": _added_credit,
    "loss": _task_credit,
}
RATIOS: dict[str, Ratio] = {"token": token_ratio, "sequence": sequence_ratio}
CLIPS: dict[str, Callable[[float, float | None, Ratio, float | None], Surrogate]] = {
    "ppo": _ppo,
    "truncate": _truncate,
    "none": _unclipped,
}


def _check_ranges(options: Mapping[str, Any]) -> None:
    sampled, trained, low = options["num_rollouts"], options["num_train"], options["epsilon"]
    require(sampled >= 2, "num_rollouts", sampled, "a group needs at least 2 completions to compare")
    rule = f"2 to num_rollouts={sampled}"
    require(2 <= trained <= sampled, "num_train", trained, f"{rule}, of which they are chosen")
    whole = options["downsample"] != "none" or trained == sampled
    require(whole, "num_train", trained, f"with downsample none all are trained on; write {sampled}")
    require(options["kd_alpha"] >= 0, "kd_alpha", options["kd_alpha"], "it is not negative; 0 turns it off")
    require(0 < low <= 1, "epsilon", low, "a lower clip range exceeds 0 and is at most 1; 0.2 is the field's")
    for name in ("epsilon_high", "large_epsilon"):
        value = options[name]
        require(value is None or value > 0, name, value, "a clip range exceeds 0; null: as epsilon says")
    high = options["large_epsilon"] or options["epsilon_high"] or low
    delta, clips = options["large_delta"], options["large_is_clip"] == "ppo"
    rule = (
        f"it exceeds the upper clip range, 1 + {high:g}, and goes with large_is_clip ppo; null turns it off"
    )
    require(delta is None or (delta > 1 + high and clips), "large_delta", delta, rule)
    cap, hints = options["importance_sampling_cap"], options["hint_tokens"]
    require(cap >= 1, "importance_sampling_cap", cap, "weights are 1 where the log-probs agree; 1 or more")
    require(hints >= 0, "hint_tokens", hints, "0 or more; the paper's is 50")
    require(options["hint_epochs"] >= 1, "hint_epochs", options["hint_epochs"], "1 or more; the paper's is 1")
    length = options["max_completion_length"]
    rule = f"it must be below the {length} tokens that a completion has at most, or the small policy writes nothing"
    require(length is None or length > hints, "hint_tokens", hints, rule)
