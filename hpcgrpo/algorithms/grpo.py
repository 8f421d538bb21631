"""GRPO and its relatives: each is a `replace(grpo(...), ...)` of what differs.

`explore` and `select` are pure Python, and so give the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from hpcgrpo.algorithms.base import Algorithm, Explore, Loss, Rollouts, Select
from hpcgrpo.algorithms.credit import ScaleRewards, beta_normalise, is_uniform, standardise
from hpcgrpo.algorithms.loss import (
    LOSS_AGG,
    Correction,
    KlEstimator,
    LossAgg,
    Surrogate,
    clipped,
    geometric,
    policy_loss,
    sequence_ratio,
)
from hpcgrpo.algorithms.schema import check_types, require
from hpcgrpo.types import Group, Prompt

ZeroVariance = Literal["keep", "drop", "refill"]


def grpo(
    *,
    num_generations: int = 8,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    scale_rewards: ScaleRewards = "group",
    std_ddof: Literal[0, 1] = 1,
    std_eps: float = 1e-4,
    loss_agg: LossAgg = "seq_mean_token_mean",
    importance_sampling_correction: Correction = "token_truncate",
    importance_sampling_cap: float = 3.0,
    mask_truncated_completions: bool = False,
    zero_variance: ZeroVariance = "keep",
    max_generation_batches: int = 10,
) -> Algorithm:
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300).

    Options:
        num_generations: completions of each prompt (G), over which advantages are formed; 1 only under opd
        epsilon: lower clip range; ratios below 1 - epsilon gain nothing
        epsilon_high: upper clip range; null: equal to epsilon
        delta: upper bound of the unclipped ratio (two-sided clipping); null: none
        beta: weight of the KL penalty to the initial model; 0: no reference model is kept
        kl_estimator: k1 | k2 | k3 (see loss.py for what the gradient of each is)
        scale_rewards: divide centred rewards by the std of the group, of the batch, or not
        std_ddof: 1: sample std (n - 1), 0: population std (n)
        std_eps: added to the std
        loss_agg: which mean over tokens and completions the loss is
        importance_sampling_correction: weight old / behavior, per token or completion, cut or masked
        importance_sampling_cap: where those weights are cut (truncate) or set to 0 (mask)
        mask_truncated_completions: leave completions that ran into the length limit out of the loss
        zero_variance: groups of equal rewards: keep, drop, or sample further prompts in their place (refill)
        max_generation_batches: with refill: how often a step samples at most, the first time included

    A group of equal rewards has advantages of exactly 0. Raises ValueError for a value that is not allowed.
    """
    options = dict(locals())
    check_types(grpo, options)
    _check_ranges(options)
    explore = _sample(num_generations)
    if zero_variance == "refill":
        explore = refill(explore, max_generation_batches)
    return Algorithm(
        name="grpo",
        explore=explore,
        credit=standardise(scale_rewards, std_ddof, std_eps),
        select=_leave_out(uniform_groups=zero_variance != "keep", truncated=mask_truncated_completions),
        weigh=LOSS_AGG[loss_agg],
        loss=_loss(clipped(epsilon, epsilon_high, delta), options),
        num_generations=num_generations,
        batch_share=num_generations,
        streams=frozenset({"reference"} if beta else ()),
        options={"name": "grpo", **options},
    )


def dr_grpo(
    *,
    num_generations: int = 8,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    importance_sampling_correction: Correction = "token_truncate",
    importance_sampling_cap: float = 3.0,
    mask_truncated_completions: bool = False,
    zero_variance: ZeroVariance = "keep",
    max_generation_batches: int = 10,
) -> Algorithm:
    """GRPO with A = R - mean and token sums over a constant length (Dr. GRPO, arXiv 2503.20783)."""
    options = dict(locals())
    base = grpo(**options, scale_rewards="none", loss_agg="const_len")
    return replace(base, name="dr_grpo", options={"name": "dr_grpo", **options})


def dapo(
    *,
    num_generations: int = 8,
    epsilon: float = 0.2,
    epsilon_high: float | None = 0.28,
    delta: float | None = None,
    beta: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    scale_rewards: ScaleRewards = "group",
    std_ddof: Literal[0, 1] = 1,
    std_eps: float = 1e-4,
    loss_agg: LossAgg = "token_mean",
    importance_sampling_correction: Correction = "token_truncate",
    importance_sampling_cap: float = 3.0,
    mask_truncated_completions: bool = True,
    zero_variance: ZeroVariance = "refill",
    max_generation_batches: int = 10,
) -> Algorithm:
    """Asymmetric clip, token mean, dynamic sampling, overlong filtering (DAPO, arXiv 2503.14476).

    Its soft overlong penalty is a reward function (`rewards:`), not an option here.
    """
    options = dict(locals())
    return replace(grpo(**options), name="dapo", options={"name": "dapo", **options})


def gspo(
    *,
    num_generations: int = 8,
    epsilon: float = 3e-4,
    epsilon_high: float | None = 4e-4,
    beta: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    scale_rewards: ScaleRewards = "group",
    std_ddof: Literal[0, 1] = 1,
    std_eps: float = 1e-4,
    importance_sampling_correction: Correction = "token_truncate",
    importance_sampling_cap: float = 3.0,
    mask_truncated_completions: bool = False,
    zero_variance: ZeroVariance = "keep",
    max_generation_batches: int = 10,
) -> Algorithm:
    """GRPO on the ratio of whole completions, s_i = exp(mean_t log r_t) (GSPO, arXiv 2507.18071).

    Options:
        epsilon: lower clip range of the sequence ratio
        epsilon_high: upper clip range of the sequence ratio; null: equal to epsilon
    """
    options = dict(locals())
    base = grpo(**options)
    loss = _loss(clipped(epsilon, epsilon_high, ratio=sequence_ratio), options)
    return replace(base, name="gspo", loss=loss, options={"name": "gspo", **options})


def gmpo(
    *,
    num_generations: int = 8,
    clip_log: float = 0.4,
    beta: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    scale_rewards: ScaleRewards = "group",
    std_ddof: Literal[0, 1] = 1,
    std_eps: float = 1e-4,
    importance_sampling_correction: Correction = "token_truncate",
    importance_sampling_cap: float = 3.0,
    mask_truncated_completions: bool = False,
    zero_variance: ZeroVariance = "keep",
    max_generation_batches: int = 10,
) -> Algorithm:
    """GRPO on the geometric mean of one-sidedly clipped token ratios (GMPO, arXiv 2507.20673).

    Options:
        clip_log: bound of each token's log-ratio on the side of its advantage
    """
    options = dict(locals())
    check_types(gmpo, options)
    require(clip_log > 0, "clip_log", clip_log, "a clip range is greater than 0; the paper's is 0.4")
    base, loss = grpo(**_without(options, "clip_log")), _loss(geometric(clip_log), options)
    return replace(base, name="gmpo", loss=loss, options={"name": "gmpo", **options})


def bnpo(
    *,
    num_generations: int = 8,
    epsilon: float = 0.2,
    epsilon_high: float | None = 0.28,
    delta: float | None = None,
    beta: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    reward_min: float = 0.0,
    reward_max: float = 1.0,
    ddof: Literal[0, 1] = 1,
    importance_sampling_correction: Correction = "token_truncate",
    importance_sampling_cap: float = 3.0,
    mask_truncated_completions: bool = False,
    zero_variance: ZeroVariance = "keep",
    max_generation_batches: int = 10,
) -> Algorithm:
    """Advantages normalised by a Beta density fitted to the batch's success rates (BNPO, arXiv 2506.02864).

    Not TRL's loss_type "bnpo", which is only a mean over tokens (here loss_agg token_mean_local).

    Options:
        reward_min: the least total reward a completion can get; mapped to 0
        reward_max: the greatest total reward a completion can get; mapped to 1
        ddof: 1: unbiased variance of the success rates over the batch (the released code), 0: population
    """
    options = dict(locals())
    check_types(bnpo, options)
    require(reward_min < reward_max, "reward_max", reward_max, f"it must exceed reward_min={reward_min!r}")
    base = grpo(**_without(options, "reward_min", "reward_max", "ddof"), loss_agg="seq_mean_token_sum")
    credit = beta_normalise(reward_min, reward_max, ddof)
    return replace(base, name="bnpo", credit=credit, options={"name": "bnpo", **options})


# ---- explore


def _sample(num: int) -> Explore:
    def explore(prompts: Sequence[Prompt], rollouts: Rollouts) -> list[Group]:
        sampled = rollouts(prompts, num)
        return [Group(prompt, rows) for prompt, rows in zip(prompts, sampled, strict=True)]

    return explore


def refill(base: Explore, max_batches: int) -> Explore:
    """Dynamic sampling: explore further prompts until as many groups as there were prompts have a spread.

    Of those the first in the run's order are kept, so the step is the same on any number of ranks. After
    `max_batches` rounds the step goes on with what there is, which may be nothing. All ranks leave the loop
    together: its condition is a total over ranks. Source: DAPO section 3.2.
    """

    def explore(prompts: Sequence[Prompt], rollouts: Rollouts) -> list[Group]:
        wanted = rollouts.total(len(prompts))
        groups = _with_spread(base(prompts, rollouts))
        found = rollouts.total(len(groups))
        for _ in range(max_batches - 1):
            if found >= wanted:
                break
            groups += _with_spread(base(rollouts.more(), rollouts))
            found = rollouts.total(len(groups))
        return _earliest(groups, wanted, rollouts) if found > wanted else groups

    return explore


def _with_spread(groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if not is_uniform(group.rewards)]


def _earliest(groups: Sequence[Group], wanted: int, rollouts: Rollouts) -> list[Group]:
    """This rank's part of the `wanted` groups of all ranks that come first in the run's order."""

    def before(end: int) -> list[Group]:
        return [group for group in groups if group.prompt.position < end]

    low, high = 0, 1  # bisection: fewer than `wanted` lie before low, at least `wanted` before high
    while rollouts.total(len(before(high))) < wanted:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        enough = rollouts.total(len(before(middle))) >= wanted
        low, high = (low, middle) if enough else (middle, high)
    return before(high)


# ---- select


def _leave_out(*, uniform_groups: bool, truncated: bool) -> Select:
    def keeps(group: Group, i: int) -> bool:
        return not (truncated and group.rollouts[i].completion.finish_reason == "length")

    def select(groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> list[tuple[int, ...]]:
        return [
            ()
            if uniform_groups and is_uniform(group.rewards)
            else tuple(i for i in range(len(group.rollouts)) if keeps(group, i))
            for group in groups
        ]

    return select


# ---- options


def _loss(surrogate: Surrogate, options: dict[str, Any]) -> Loss:
    names = ("beta", "kl_estimator", "importance_sampling_correction", "importance_sampling_cap")
    return policy_loss(surrogate, **{name: options[name] for name in names})


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def _check_ranges(options: dict[str, Any]) -> None:
    num, low, high = options["num_generations"], options["epsilon"], options["epsilon_high"]
    delta, cap, rounds = (options[n] for n in ("delta", "importance_sampling_cap", "max_generation_batches"))
    require(num >= 1, "num_generations", num, "a group needs at least 2 completions to compare")
    require(0 < low <= 1, "epsilon", low, "a lower clip range exceeds 0 and is at most 1; GRPO's is 0.2")
    require(
        high is None or high > 0,
        "epsilon_high",
        high,
        "a clip range exceeds 0; null makes it equal to epsilon",
    )
    upper = 1 + (low if high is None else high)
    require(
        delta is None or delta > upper,
        "delta",
        delta,
        f"it must exceed 1 + epsilon_high = {upper:g}; null turns it off",
    )
    require(options["beta"] >= 0, "beta", options["beta"], "a KL penalty is not negative; 0 turns it off")
    require(options["std_eps"] >= 0, "std_eps", options["std_eps"], "it is added to a std; 0 or more")
    require(cap >= 1, "importance_sampling_cap", cap, "weights are 1 where the log-probs agree; 1 or more")
    require(rounds >= 1, "max_generation_batches", rounds, "a step samples at least once")
