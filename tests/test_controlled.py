"""The controlled experiments' gradients: the package on bandits, against closed forms derived by hand."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import _bandit
import _distilling
import _pruning
import controlled

from hpcgrpo.algorithms import build

FIRST = (1.0, 0.0, 0.0)


def one(p: float) -> torch.Tensor:
    return torch.tensor(p, dtype=torch.float64)


def test_a_step_in_one_form_moves_the_other_by_tau() -> None:
    bandits = _bandit.start(arms=3, accuracy=0.3, tau=torch.tensor([0.4]).double(), copy=0.0)
    replica = torch.zeros(1, dtype=torch.int64)
    plain, draft = (torch.tensor([shown]) for shown in (_bandit.PLAIN, _bandit.EMPTY))
    direction = torch.tensor([[1.0, -0.5, 2.0]]).double()
    before = [bandits.logits(replica, shown).detach() for shown in (plain, draft)]
    (bandits.logits(replica, plain) * direction).sum().backward()
    for part in bandits.parts.values():
        part.data += 0.1 * (0 if part.grad is None else part.grad)
    moved = [bandits.logits(replica, s) - b for s, b in zip((plain, draft), before, strict=True)]
    assert torch.allclose(moved[0], 0.1 * direction) and torch.allclose(moved[1], 0.04 * direction)


def test_the_pull_of_a_group_by_hand() -> None:
    """G = 2, p = 1/2: half of the groups are mixed, each with A = +-1/sqrt(2): c = 1/2 (1/4)/sqrt(1/2)/(1/2)."""
    assert float(_bandit.pull(one(0.5), 2, std_eps=0.0)) == pytest.approx(math.sqrt(2) / 4)
    assert float(_bandit.pull(one(0.3), 4, std_eps=None)) == pytest.approx(0.75 * 0.3)


def test_the_best_of_four_drafts_is_right_as_proposition_3_1_says() -> None:
    shown = _bandit.shown_drafts([0.3, 0.2, 0.5], 4, "best")
    assert shown == pytest.approx({0: 0.7599, 1: 0.2401 * 2 / 7, 2: 0.2401 * 5 / 7})


@pytest.mark.parametrize("spec", [
    controlled.grpo(4), controlled.grpo(4, "none"), controlled.igrpo(2, 3, train_drafts=True),
    *[controlled.igrpo(2, 3, s, draft_choice=c) for s in ("group", "none") for c in ("best", "worst", "empty")],
], ids=str)  # fmt: skip
def test_the_expected_gradient_is_the_closed_form(spec: dict[str, Any]) -> None:
    bandits = controlled.policy_of(0.25, 0.6, 1.3, arms=3)
    got, want = _bandit.exact_gradient(bandits, build(spec), FIRST), controlled.by_hand(bandits, spec)
    assert got["shared"].norm() > 0.05
    assert all(torch.allclose(got[name], want[name], rtol=0, atol=1e-12) for name in want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iGRPO 4+4", "iGRPO random draft", "GRPO 8", "both stages"])
def test_the_shipped_group_sizes_agree_with_it_over_sampled_groups(name: str) -> None:
    bandits = controlled.policy_of(0.3, 0.6, 2.0, arms=5)
    spec = controlled.specifications()[name]
    assert controlled.sampled_z(bandits, spec, groups=2000) < 4.5
    wrong = spec | {"base": {**spec["base"], "num_generations": 3}} if "base" in spec else controlled.grpo(4)
    far = controlled.by_hand(bandits, wrong)["shared"] - controlled.by_hand(bandits, spec)["shared"]
    got = controlled.sampled_gradients(bandits, spec, groups=2000, seed=0)["shared"]
    assert float((far.abs() / (got.std(0) / math.sqrt(2000))).max()) > 4.5, "another group size would be seen"


def test_both_success_rates_by_hand() -> None:
    bandits = controlled.policy_of(0.2, 0.5, 1.7, arms=4)
    first = bandits.probabilities(_bandit.PLAIN)[0]
    second = sum(first[d] * bandits.probabilities(d)[0, 0] for d in range(4))
    assert [float(x) for x in bandits.accuracies()] == pytest.approx([float(first[0]), float(second)])


# ---- CPPO


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.75, 0.875])
def test_the_pruned_gradient_is_the_closed_form(rate: float) -> None:
    for p in (0.2, 0.5):
        algorithm = _pruning.cppo(rate, 8)
        moments = []
        for chances in (_pruning.ordered((p, 1 - p), 8), _pruning.by_front(p, 8, algorithm.batch_share)):
            copies, groups, chance = _pruning.outcomes((p, 1 - p), _pruning.BINARY, chances)
            assert float(chance.sum()) == pytest.approx(1)
            moments.append(_pruning.moments(_pruning.gradients(copies, groups, algorithm), chance))
        (mean, variance), (mean1, variance1) = moments
        want = _pruning.pruned_pull(p, 8, algorithm.batch_share) * (1 - p)
        assert float(mean[0]) == pytest.approx(want, abs=1e-12) == float(mean1[0])
        assert variance == pytest.approx(variance1, abs=1e-12)
        if not rate:
            assert want == pytest.approx(float(_bandit.pull(one(p), 8)) * (1 - p))


def test_pruning_the_smallest_pulls_most_and_the_largest_least() -> None:
    found = _pruning.exact_by_metric((0.4, 0.4, 0.2), num=6)
    gain = {name: row["gain"] for name, row in found.items()}
    assert gain["smallest 0.5"] > 1.1 * gain["random 0.5"] > 1.2 * gain["largest 0.5"] > 0
    assert found["random 0.5"]["scale"] == pytest.approx(1, abs=0.1)


# ---- CoDistill


@pytest.mark.parametrize("alpha", [0.0, 0.5, 2.0])
def test_the_small_policy_s_expected_gradient_is_theorem_1(alpha: float) -> None:
    policies = _distilling.pair(small=0.2, large=0.6, replicas=1, arms=3)
    policies.small.data += torch.tensor([0.3, -0.2, 0.5])
    rewards = (1.0, 0.4, 0.0)
    algorithm = _distilling.codistill(sampled=4, trained=4, kd_alpha=alpha)
    want = _distilling.by_hand(policies, rewards, alpha=alpha, num=4)
    assert torch.allclose(_distilling.exact_gradient(policies, algorithm, rewards), want, rtol=0, atol=1e-12)
    assert want.norm() > 0.05
