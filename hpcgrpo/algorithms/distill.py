"""A frozen teacher beside the reward: KDRL (arXiv 2506.02208) and on-policy distillation, as wrappers.

Both compare log-probs of sampled tokens; GKD's divergence of whole distributions is not offered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpcgrpo.algorithms.base import Algorithm, Loss, Metrics
from hpcgrpo.algorithms.downsample import OF_A_SUBSET
from hpcgrpo.algorithms.loss import bounded, k2
from hpcgrpo.algorithms.schema import check_types, layers, refuse, require
from hpcgrpo.types import Batch

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1e-6  # of a reward that is a sum of parts, in float32
REFUSED = {
    "cppo": "a completion with advantage 0 still teaches through the teacher's term, so it must not be pruned",
    "kdrl": "kdrl has the teacher already; change its options instead",
    "opd": "opd has the teacher already; change its options instead",
    "codistill": "codistill has its peer for a teacher; set its kd_placement and kd_alpha",
}


def kdrl(
    *,
    base: Algorithm,
    kd_beta: float = 5e-3,
    kd_beta_end: float = 1e-3,
    mask_right: bool = True,
    right_reward: float = 1.0,
) -> Algorithm:
    """Add a pull to a frozen teacher to the loss of any base: J - kd_beta * k2 (KDRL, arXiv 2506.02208).

    Options:
        base: the algorithm whose loss the teacher's term is added to
        kd_beta: weight of the teacher's term at the start of the run
        kd_beta_end: its weight at the end of the run; between them it changes linearly
        mask_right: no teacher's term for completions that are right already
        right_reward: the least reward of a completion that counts as right

    k2 = (log teacher - log policy)^2 / 2 has the gradient of the reverse KL, token by token. It stands under
    the token weights of `base`, without ratio or importance weight. Raises ValueError for a value that is not
    allowed, for a base that prunes by advantage or has a teacher already.
    """
    options = dict(locals())
    check_types(kdrl, options)
    refuse(base.name, base.options, REFUSED)
    for name, value in (("kd_beta", kd_beta), ("kd_beta_end", kd_beta_end)):
        require(value >= 0, name, value, "the weight of the teacher's term is not negative; 0 turns it off")
    right = right_reward if mask_right else None
    return replace(
        base,
        name="kdrl",
        loss=_pulled(base.loss, kd_beta, kd_beta_end, right),
        streams=base.streams | {"peer"},
        options={"name": "kdrl", **options, "base": dict(base.options)},
    )


def opd(*, base: Algorithm, kd_coef: float = 1.0, advantage_coef: float = 0.0) -> Algorithm:
    """On-policy distillation: each token's advantage is how much likelier the teacher finds it.

    Options:
        base: the algorithm whose ratio, clipping and mean over tokens apply
        kd_coef: weight of log teacher - log policy in a token's advantage
        advantage_coef: weight of the base's advantage; 0: the teacher alone teaches, also groups of one

    A_t = advantage_coef * A + kd_coef * (log teacher - log old), detached; no discount over tokens. Raises
    ValueError for a value that is not allowed, for a base that leaves completions out by their reward or has a
    teacher already.
    """
    options = dict(locals())
    check_types(opd, options)
    refuse(base.name, base.options, {**REFUSED, "pods": OF_A_SUBSET, "gfpo": OF_A_SUBSET})
    require(kd_coef > 0, "kd_coef", kd_coef, "it exceeds 0; without a teacher use the base itself")
    require(advantage_coef >= 0, "advantage_coef", advantage_coef, "it is not negative; 0 leaves rewards out")
    filters = [
        v for v in (layer.get("zero_variance", "keep") for layer in layers(base.options)) if v != "keep"
    ]
    rule = (
        "with advantage_coef 0 groups of equal rewards teach as well; write zero_variance: keep under base:"
    )
    require(not filters or advantage_coef > 0, "zero_variance", filters[0] if filters else "keep", rule)
    return replace(
        base,
        name="opd",
        loss=_distilled(base.loss, kd_coef, advantage_coef),
        streams=base.streams | {"peer"},
        options={"name": "opd", **options, "base": dict(base.options)},
    )


def learns_from_one(algorithm: Algorithm) -> bool:
    """Whether a group of one completion teaches: under a teacher alone, without a comparison of rewards."""
    found = [layer for layer in layers(algorithm.options) if layer["name"] == "opd"]
    return bool(found) and found[0]["advantage_coef"] == 0


def _pulled(base: Loss, start: float, end: float, right: float | None) -> Loss:
    def loss(new: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        assert batch.peer is not None and batch.rewards is not None, "kdrl needs a teacher and rewards"
        value, metrics = base(new, batch)
        beta = start + (end - start) * batch.progress
        taught = batch.weights.new_ones(batch.weights.shape)
        if right is not None:
            taught = taught * (batch.rewards < right - ROUNDING)
        pull = beta * taught * k2(bounded(batch.peer.detach() - new))
        own = {"kd/loss": pull.detach().sum(), "kd/beta": taught.new_full((), beta * len(taught))}
        own |= {"kd/taught": taught.sum(), "kd/reverse_kl": (_old(new, batch) - batch.peer).detach().sum()}
        return value + (pull * batch.weights).sum(), metrics | own

    return loss


def _distilled(base: Loss, kd_coef: float, advantage_coef: float) -> Loss:
    def loss(new: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        assert batch.peer is not None, "opd needs a teacher"
        difference = batch.peer.detach() - _old(new, batch)
        advantages = advantage_coef * batch.advantages + kd_coef * bounded(difference)
        value, metrics = base(new, replace(batch, advantages=advantages))
        own = {"kd/reverse_kl": -difference.sum(), "kd/advantage": advantages.sum()}
        return value, metrics | own

    return loss


def _old(new: Tensor, batch: Batch) -> Tensor:
    return (new if batch.old is None else batch.old).detach()
