"""KDRL and on-policy distillation: hand-worked values, exact gradients, and what they may stand on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tabular import TableRollouts, Tabular, step
from test_loss import LENGTHS, NEW, OLD, REF, logs, make_batch, totals
from torch import Tensor

from hpcgrpo.algorithms import build
from hpcgrpo.types import Batch

GRPO = {"name": "grpo", "num_generations": 4}
LOG_RATIOS = (-0.2623643, 0.2231436, 0.6931472, 0.6931472)  # log teacher - log new, E11


def worked(
    spec: dict[str, Any], rewards: tuple[float, float] = (0.0, 0.0), **changes: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, gradient and metrics on E2's two completions with the reference for a teacher."""
    algorithm = build(spec)
    new = logs(NEW).requires_grad_()
    reward = torch.tensor(rewards, dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))
    streams: dict[str, Any] = {"old": logs(OLD), "peer": logs(REF), "rewards": reward, **changes}
    batch = make_batch(LENGTHS, (1.0, -1.0), algorithm.weigh(LENGTHS, totals(LENGTHS)), **streams)
    loss, metrics = algorithm.loss(new, batch)
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad, metrics


# ---- E11: KDRL


def test_e11_the_teachers_term() -> None:
    """k2 is (0.0344175, 0.0248965, 0.2402265), (0.2402265), its sequence mean 0.1700368; plain loss -0.05."""
    plain, plain_gradient, _ = worked(GRPO)
    loss, gradient, metrics = worked({"name": "kdrl", "kd_beta": 0.5, "base": GRPO})
    assert plain.item() == pytest.approx(-0.05)
    assert loss.item() == pytest.approx(-0.05 + 0.5 * 0.1700368, abs=1e-7)
    weights = torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2], dtype=torch.float64)
    expected = -0.5 * torch.tensor(LOG_RATIOS, dtype=torch.float64) * weights
    assert torch.allclose(gradient - plain_gradient, expected, atol=1e-7)
    assert metrics["kd/loss"].item() == pytest.approx(0.5 * (0.0344175 + 0.0248965 + 2 * 0.2402265), abs=1e-6)
    assert metrics["kd/taught"] == 4 and metrics["kd/beta"].item() == pytest.approx(4 * 0.5)
    assert metrics["kd/reverse_kl"].item() == pytest.approx((logs(OLD) - logs(REF)).sum().item())


@pytest.mark.parametrize(("progress", "beta"), [(0.0, 0.005), (0.5, 0.003), (1.0, 0.001)])
def test_e11_its_weight_changes_linearly(progress: float, beta: float) -> None:
    loss, _, metrics = worked({"name": "kdrl", "base": GRPO}, progress=progress)
    assert loss.item() == pytest.approx(-0.05 + beta * 0.1700368, abs=1e-9)
    assert metrics["kd/beta"].item() == pytest.approx(4 * beta)


@pytest.mark.parametrize(("options", "taught"), [
    ({}, (0.0, 0.2402265 / 2)), ({"mask_right": False}, (0.1700368 - 0.2402265 / 2, 0.2402265 / 2)),
    ({"right_reward": 1.5}, (0.1700368 - 0.2402265 / 2, 0.2402265 / 2)), ({"right_reward": 0.5}, (0.0, 0.0)),
])  # fmt: skip
def test_a_right_completion_is_not_taught(options: dict[str, Any], taught: tuple[float, float]) -> None:
    """The first completion has reward 1, the second 0.5."""
    spec = {"name": "kdrl", "kd_beta": 1.0, "base": GRPO, **options}
    loss, _, metrics = worked(spec, (1.0, 0.5))
    assert loss.item() == pytest.approx(-0.05 + sum(taught), abs=1e-6)
    assert metrics["kd/taught"] == sum(n for n, t in zip(LENGTHS, taught, strict=True) if t)


def test_its_gradient_is_that_of_the_reverse_kl() -> None:
    """One-token completions enumerated, each weighed by its probability: kd_beta * grad KL(policy || teacher)."""
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    new = logits.log_softmax(-1)
    p = new.exp().detach()
    batch = Batch(torch.arange(3), torch.ones(3, dtype=torch.int64), 0 * p, p, peer=teacher, rewards=0 * p)
    loss, metrics = build({"name": "kdrl", "kd_beta": 0.7, "base": GRPO}).loss(new, batch)
    reverse = (new.exp() * (new - teacher)).sum()
    (expected,) = torch.autograd.grad(0.7 * reverse, logits, retain_graph=True)
    (found,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(found, expected, atol=1e-14) and expected.abs().max() > 0.01
    assert metrics["kd/reverse_kl"].item() == pytest.approx((new - teacher).sum().item())


# ---- on-policy distillation


def test_each_token_has_the_advantage_of_its_own() -> None:
    """Teacher over old is (1, 1.25, 1), (1.2): advantages log 1.25 and log 1.2 and 0; ratios 1.3, 1, 0.5, 0.6."""
    loss, _, metrics = worked({"name": "opd", "base": GRPO})
    a, b = torch.tensor([1.25, 1.2], dtype=torch.float64).log().tolist()
    assert loss.item() == pytest.approx(-(a / 6 + 0.6 * b / 2))
    assert metrics["kd/advantage"].item() == pytest.approx(a + b)
    assert metrics["kd/reverse_kl"].item() == pytest.approx(-(a + b))


def test_the_bases_advantage_can_be_added() -> None:
    """2 A + 0.5 log-ratio: (2, 2 + a/2, 2), (-2 + b/2); 1.3 is clipped to 1.2, 0.6 with a negative one to 0.8."""
    a, b = torch.tensor([1.25, 1.2], dtype=torch.float64).log().tolist()
    loss, _, _ = worked({"name": "opd", "kd_coef": 0.5, "advantage_coef": 2.0, "base": GRPO})
    expected = (1.2 * 2 + 2 + a / 2 + 0.5 * 2) / 6 + 0.8 * (-2 + b / 2) / 2
    assert loss.item() == pytest.approx(-expected)
    loss, _, _ = worked({"name": "opd", "kd_coef": 1e-300, "advantage_coef": 1.0, "base": GRPO})
    assert loss.item() == pytest.approx(-0.05)


def test_distillation_at_ratio_1_descends_the_reverse_kl() -> None:
    """Without `old` the advantage is log teacher - log new, detached; enumerated as above."""
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    new = logits.log_softmax(-1)
    p = new.exp().detach()
    batch = Batch(torch.arange(3), torch.ones(3, dtype=torch.int64), 0 * p, p, peer=teacher)
    loss, _ = build({"name": "opd", "kd_coef": 0.7, "base": GRPO}).loss(new, batch)
    reverse = (new.exp() * (new - teacher)).sum()
    (expected,) = torch.autograd.grad(0.7 * reverse, logits, retain_graph=True)
    (found,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(found, expected, atol=1e-14) and expected.abs().max() > 0.01


def test_one_completion_a_prompt_is_enough_for_a_teacher_alone() -> None:
    spec = {"name": "opd", "base": {"name": "grpo", "num_generations": 1}}
    for algorithm in (build(spec), build({"name": "igrpo", "drafts": 2, "base": spec})):
        policy = Tabular()
        rollouts = TableRollouts(policy)
        groups = algorithm.explore(rollouts.first(), rollouts)
        assert (algorithm.batch_share, [len(g.rollouts) for g in groups]) == (1, [1] * 4)
        _, _, gradient = step(groups, algorithm, policy, peer=Tabular(1))
        assert sum(g.abs().sum().item() for g in gradient.values()) > 0.1


@pytest.mark.parametrize("name", ["kdrl", "opd"])
def test_the_order_of_igrpo_and_a_teacher_means_nothing(name: str) -> None:
    inside = {"name": "igrpo", "drafts": 2, "base": {"name": name, "base": GRPO}}
    outside = {"name": name, "base": {"name": "igrpo", "drafts": 2, "base": GRPO}}
    results = []
    for algorithm in map(build, (inside, outside)):
        assert algorithm.streams == {"peer"} and algorithm.needs_peer and algorithm.num_drafts == 2
        policy = Tabular()
        rollouts = TableRollouts(policy)
        groups = algorithm.explore(rollouts.first(), rollouts)
        results.append(step(groups, algorithm, policy, peer=Tabular(1), progress=0.3))
    assert results[0][0] == results[1][0] != 0
    assert all((results[0][2][c] == results[1][2][c]).all() for c in results[0][2])


def test_down_sampling_and_kdrl_mean_the_same_in_either_order() -> None:
    inside = {"name": "pods", "num_train": 2, "base": {"name": "kdrl", "base": GRPO}}
    outside = {"name": "kdrl", "base": {"name": "pods", "num_train": 2, "base": GRPO}}
    results = []
    for algorithm in map(build, (inside, outside)):
        assert (algorithm.batch_share, algorithm.num_generations) == (2, 4)
        policy = Tabular()
        rollouts = TableRollouts(policy)
        groups = algorithm.explore(rollouts.first(), rollouts)
        results.append(step(groups, algorithm, policy, peer=Tabular(1)))
    assert results[0][0] == results[1][0] != 0


# ---- what is refused


def of(name: str, base: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"name": name, "base": base, **options}


CPPO = {"name": "cppo", "pruning_rate": 0.5, "base": GRPO}
PODS = {"name": "pods", "num_train": 2, "base": GRPO}


@pytest.mark.parametrize(("spec", "message"), [
    (of("kdrl", GRPO, kd_beta=-1.0), r"kd_beta=-1\.0 .* not negative; 0 turns it off"),
    (of("kdrl", GRPO, kd_beta_end=-1.0), r"kd_beta_end=-1\.0"),
    (of("opd", GRPO, kd_coef=0.0), r"kd_coef=0\.0 .* use the base itself"),
    (of("opd", GRPO, advantage_coef=-1.0), r"advantage_coef=-1\.0"),
    (of("opd", GRPO, opd_kl_coef=1.0), r"our name for this is kd_coef$"),
    (of("kdrl", CPPO), r"base='cppo' .* advantage 0 still teaches"),
    (of("opd", {"name": "igrpo", "base": CPPO}), r"base='igrpo' .* advantage 0 still teaches"),
    (of("cppo", of("kdrl", GRPO), pruning_rate=0.5), r"base='kdrl' .* teaches a completion with advantage 0"),
    (of("cppo", of("opd", GRPO), pruning_rate=0.5), r"base='opd' .* teaches a completion with advantage 0"),
    (of("kdrl", of("kdrl", GRPO)), r"base='kdrl' .* has the teacher already"),
    (of("opd", of("kdrl", GRPO)), r"base='kdrl' .* has the teacher already"),
    (of("kdrl", {"name": "codistill"}), r"base='codistill' .* peer for a teacher; set its kd_placement"),
    (of("opd", PODS), r"base='pods' .* a chosen subset would bend it"),
    (of("opd", {"name": "dapo"}), r"zero_variance='refill' .* write zero_variance: keep under base:"),
    (of("opd", {"name": "grpo", "num_generations": 1}, advantage_coef=1.0), r"^base\.num_generations=1 .* 2 com"),
    (of("kdrl", {"name": "grpo", "num_generations": 1}), r"^base\.num_generations=1 .* one is enough for opd"),
])  # fmt: skip
def test_what_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(spec)


def test_opd_with_rewards_may_drop_groups() -> None:
    assert build(of("opd", {"name": "dapo"}, advantage_coef=1.0)).streams == {"peer"}
