"""CoDistill-GRPO: hand-worked values, its theorem by exact enumeration, and its limits in Dr. GRPO."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import stdev
from typing import Any

import pytest
import torch
from tabular import TableRollouts, Tabular, compared, completion, group, prompt, step, totals_of
from torch import Tensor

from hpcgrpo.algorithms import build
from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.algorithms.codistill import kd_metrics
from hpcgrpo.types import Batch, Group, Rollout, Score

# E6: four completions of two tokens, their probabilities under both policies and their rewards.
REWARDS = (1.5, 0.5, 0.0, 1.0)
SMALL = ((0.5, 0.2), (0.4, 0.4), (0.3, 0.3), (0.6, 0.5))
LARGE = ((0.6, 0.3), (0.2, 0.4), (0.3, 0.6), (0.3, 0.5))


def spec(num: int = 4, **options: Any) -> dict[str, Any]:
    """Without down-sampling, N = 4 tokens."""
    defaults = {"num_rollouts": num, "num_train": num, "downsample": "none", "max_completion_length": 4}
    return {"name": "codistill", **defaults, **options}


def logs(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(math.log, values))


def worked() -> Group:
    rollouts = [
        Rollout(prompt(0), completion((1, 2), seed=i), Score(r, {}), logs(small), logs(large))
        for i, (r, small, large) in enumerate(zip(REWARDS, SMALL, LARGE, strict=True))
    ]
    return Group(prompt(0), tuple(rollouts))


def large_of(algorithm: Algorithm) -> Algorithm:
    assert algorithm.peer is not None
    return algorithm.peer


# ---- E6: the kd reward and the advantages

MEAN_LOG_RATIOS = (0.2938933, -0.3465736, 0.3465736, -0.3465736)


def kd_rewards(**options: Any) -> list[float]:
    """Read off the advantages, where the kd reward is added to them and the rewards are equal."""
    algorithm = build(spec(kd_placement="advantage_post_norm", **options))
    g = worked()
    equal = replace(g, rollouts=tuple(replace(r, score=Score(1.0, {})) for r in g.rollouts))
    return list(algorithm.credit([equal])[0])


def test_e6_kd_rewards() -> None:
    assert kd_rewards(kd_len_norm="seq_len") == pytest.approx(MEAN_LOG_RATIOS, abs=1e-7)
    assert kd_rewards() == pytest.approx([x / 2 for x in MEAN_LOG_RATIOS], abs=1e-7)
    assert kd_rewards(kd_len_norm="none") == pytest.approx([2 * x for x in MEAN_LOG_RATIOS], abs=1e-6)
    assert kd_rewards(kd_alpha=0.0) == [0.0] * 4


def test_e6_kd_rewards_by_k3() -> None:
    """-(w - 1 - log w) of the ratios (1.2, 1.5), (0.5, 1), (1, 2), (0.5, 1); N = 4."""
    k3 = {w: -(w - 1 - math.log(w)) / 4 for w in (1.2, 1.5, 0.5, 2.0)}
    expected = [k3[1.2] + k3[1.5], k3[0.5], k3[2.0], k3[0.5]]
    assert kd_rewards(kd_estimator="k3") == pytest.approx(expected)


@pytest.mark.parametrize(("alpha", "expected"), [
    (0.0, (0.75, -0.25, -0.75, 0.25)),
    (0.5, (0.9035317, -0.4167018, -0.5701282, 0.0832982)),
    (1.0, (1.0570634, -0.5834035, -0.3902563, -0.0834035)),
    (2.0, (1.3641268, -0.9168071, -0.0305127, -0.4168071)),
])  # fmt: skip
def test_e6_advantages(alpha: float, expected: tuple[float, ...]) -> None:
    algorithm = build(spec(kd_alpha=alpha, kd_len_norm="seq_len"))
    assert algorithm.credit([worked()])[0] == pytest.approx(expected, abs=1e-7)
    std = build(spec(kd_alpha=alpha, kd_len_norm="seq_len", adv_scale="std")).credit([worked()])[0]
    assert std == pytest.approx([a / (stdev(expected) + 1e-4) for a in expected], abs=1e-6)
    large = large_of(algorithm)
    assert large.credit([worked()])[0] == pytest.approx((0.75, -0.25, -0.75, 0.25))
    effective = large_of(build(spec(kd_alpha=alpha, kd_len_norm="seq_len", large_reward="effective")))
    assert effective.credit([worked()])[0] == pytest.approx(expected, abs=1e-7)


def test_where_the_kd_reward_is_placed() -> None:
    """After the mean it is not centred: A^ + kd; in the loss it leaves the advantages alone."""
    a = build(spec(kd_placement="advantage_post_norm", kd_len_norm="seq_len")).credit([worked()])[0]
    assert a == pytest.approx(
        [x + kd for x, kd in zip((0.75, -0.25, -0.75, 0.25), MEAN_LOG_RATIOS, strict=True)], abs=1e-7
    )
    algorithm = build(spec(kd_placement="loss"))
    assert algorithm.credit([worked()])[0] == (0.75, -0.25, -0.75, 0.25)
    assert algorithm.streams == {"peer"}
    assert build(spec()).streams == large_of(algorithm).streams == frozenset()


def test_e6_the_kd_reward_is_minus_the_reverse_kl_in_expectation() -> None:
    rows = [
        Rollout(prompt(0), completion((t,), seed=t), Score(0.0, {}), logs([small]), logs([large]))
        for t, (small, large) in enumerate(((0.7, 0.4), (0.3, 0.6)))
    ]
    for estimator in ("log_ratio", "k3"):
        options = {"kd_placement": "advantage_post_norm", "kd_len_norm": "seq_len", "kd_estimator": estimator}
        a = build(spec(2, **options)).credit([Group(prompt(0), tuple(rows))])[0]
        assert 0.7 * a[0] + 0.3 * a[1] == pytest.approx(-0.1837869, abs=1e-7)


def test_what_a_user_sees_of_both_policies() -> None:
    """Log-ratios: (log 1.2, log 1.5), (log .5, 0), (0, log 2), (log .5, 0): their mean over 8 tokens."""
    total = math.log(1.2) + math.log(1.5) - math.log(2)
    nested = {"name": "igrpo", "base": spec(kd_alpha=2.0)}
    found = kd_metrics([worked()], build(nested).options)
    assert found["kd/reverse_kl"] == pytest.approx(-total / 8)
    assert found["kd/reward"] == pytest.approx(total / 16)  # over N = 4, mean of 4 completions
    assert found["kd/effective_reward"] == pytest.approx(0.75 + 2 * total / 16)
    assert kd_metrics([worked()], build({"name": "grpo"}).options) == {}
    assert kd_metrics([group([1, 0])], build(spec()).options) == {}


# ---- E6: the losses


def large_loss(**options: Any) -> tuple[float, Tensor, dict[str, Tensor]]:
    """The large loss, minus its gradient over the token weights, and its metrics."""
    algorithm = large_of(build(spec(**options)))
    (advantages,) = algorithm.credit([worked()])
    weights = algorithm.weigh([2] * 4, totals_of([worked()], [2] * 4))

    def tokens(values: Sequence[Sequence[float]]) -> Tensor:
        return torch.tensor(list(itertools.chain(*values)), dtype=torch.float64)

    new, w = tokens(LARGE).log().requires_grad_(), tokens([[x, x] for x in weights])
    batch = Batch(
        row=torch.arange(4).repeat_interleave(2),
        lengths=torch.full((4,), 2),
        advantages=tokens([[a, a] for a in advantages]),
        weights=w,
        old=tokens(SMALL).log(),
        behavior=tokens(SMALL).log(),
    )
    loss, metrics = algorithm.loss(new, batch)
    loss.backward()
    assert new.grad is not None
    return loss.item(), -new.grad / w, metrics


MEAN = {"loss_agg": "seq_mean_token_mean"}


@pytest.mark.parametrize(("options", "expected"), [
    (MEAN, 0.065625), ({}, 0.0328125), ({**MEAN, "large_is_clip": "none"}, 0.028125),
    # cut at 1.2: means .9, -.1875, -.825, .1875
    ({**MEAN, "large_is_clip": "truncate"}, -0.01875),
    ({**MEAN, "large_is_clip": "truncate", "epsilon_high": 0.1}, -0.009375),  # .825, -.1875, -.7875, .1875
    # ratios sqrt(1.8), sqrt(.5), sqrt(2), sqrt(.5): gains .9, -.2, -.75 sqrt 2, .25 sqrt .5
    ({**MEAN, "large_is_level": "sequence"}, -(0.7 - 0.75 * 2**0.5 + 0.25 * 0.5**0.5) / 4),
    # 1 +- 0.6 leaves (1.2, 1.5), (.5, 1), (1, 2), (.5, 1) as they are for these signs
    ({**MEAN, "large_epsilon": 0.6, "epsilon_high": 0.1}, 0.028125),
    # the 2 of the third becomes 1.5: means .9, -.225, -.9375, .1875
    ({**MEAN, "large_delta": 1.5}, 0.01875),
])  # fmt: skip
def test_e6_the_large_loss(options: dict[str, Any], expected: float) -> None:
    assert large_loss(**options)[0] == pytest.approx(expected, abs=1e-9)


def test_e6_which_tokens_of_the_large_policy_gain() -> None:
    """w A, but nothing for 1.5 with A > 0 and 0.5 with A < 0; truncation keeps all, with weights up to 1.2."""
    a = (0.75, 0.75, -0.25, -0.25, -0.75, -0.75, 0.25, 0.25)
    w = (1.2, 1.5, 0.5, 1, 1, 2, 0.5, 1)
    _, gains, metrics = large_loss(epsilon_high=0.25)
    expected = [x * y for x, y in zip(a, w, strict=True)]
    expected[1] = expected[2] = 0
    assert gains.tolist() == pytest.approx(expected)
    assert metrics["clip_ratio/high_mean"] == 1 and metrics["clip_ratio/low_mean"] == 1
    _, gains, metrics = large_loss(epsilon_high=0.25, large_is_clip="truncate")
    assert gains.tolist() == pytest.approx([x * min(y, 1.25) for x, y in zip(a, w, strict=True)])
    assert metrics["clip_ratio/high_mean"] == 2 and metrics["clip_ratio/low_mean"] == 0


def test_the_kd_term_of_the_loss() -> None:
    """kd_alpha k2(log large - log new) under the weights of the loss, beside the surrogate at ratio 1."""
    g, new = worked(), [torch.tensor(x).double().log() for x in SMALL]
    for estimator, term in (("log_ratio", lambda d: d * d / 2), ("k3", lambda d: math.exp(d) - 1 - d)):
        algorithm = build(spec(kd_placement="loss", kd_alpha=2.0, kd_estimator=estimator))
        weights = algorithm.weigh([2] * 4, totals_of([g], [2] * 4))
        lp = torch.cat(new)
        batch = Batch(
            row=torch.arange(4).repeat_interleave(2),
            lengths=torch.full((4,), 2),
            advantages=torch.zeros(8).double(),
            weights=torch.tensor(weights).double().repeat_interleave(2),
            peer=torch.tensor(LARGE).double().log().flatten(),
        )
        ratios = (1.2, 1.5, 0.5, 1, 1, 2, 0.5, 1)
        expected = 2 * sum(term(math.log(w)) for w in ratios) / (4 * 4)
        loss, metrics = algorithm.loss(lp, batch)
        assert loss.item() == pytest.approx(expected)
        assert metrics["kd/loss"].item() == pytest.approx(16 * expected)


# ---- Theorem 1, by exact enumeration

VOCABULARY, LENGTH = (0, 1, 2), 2  # 0 ends a completion
COMPLETIONS = [(0,), *((a, b) for a in (1, 2) for b in VOCABULARY)]
REWARD = dict(zip(COMPLETIONS, (0.3, 1.0, -0.5, 0.7, 0.0, 2.0, 0.9), strict=True))
ONE_TOKEN = [(t,) for t in VOCABULARY]


class Policy:
    """Logits for the first token and for the second one after 1 and after 2."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(3, 3, generator=generator, dtype=torch.float64).requires_grad_()

    def tokens(self, c: tuple[int, ...]) -> Tensor:
        rows = self.logits.log_softmax(-1)
        return torch.stack([rows[0 if t == 0 else c[0], token] for t, token in enumerate(c)])

    def gradient(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.logits)[0]


def expectation(completions: Sequence[tuple[int, ...]], policy: Policy, values: Sequence[Any]) -> Tensor:
    terms = [policy.tokens(c).sum().exp() * v for c, v in zip(completions, values, strict=True)]
    return torch.stack(terms).sum()


def kl(completions: Sequence[tuple[int, ...]], p: Policy, q: Policy) -> Tensor:
    logs = [(p.tokens(c).sum(), q.tokens(c).sum().detach()) for c in completions]
    return torch.stack([a.exp() * (a - b) for a, b in logs]).sum()


def our_gradient(
    algorithm: Algorithm,
    completions: Sequence[tuple[int, ...]],
    trained: Policy,
    small: Policy,
    large: Policy,
) -> Tensor:
    """Minus the gradient of the loss over all completions, each weighed by its probability under the small policy.

    `credit`, `weigh` and `loss` are the algorithm's. A mean over the group that is not that expectation is a
    baseline, which is 0 in expectation.
    """
    rollouts = tuple(
        Rollout(
            prompt(0),
            completion(c, seed=i),
            Score(REWARD.get(c, float(c[0])), {}),
            tuple(small.tokens(c).tolist()),
            tuple(large.tokens(c).tolist()),
        )
        for i, c in enumerate(completions)
    )
    g, lengths = Group(prompt(0), rollouts), [len(c) for c in completions]
    (advantages,), (kept,) = algorithm.credit([g]), algorithm.select([g], algorithm.credit([g]))
    assert kept == tuple(range(len(completions)))
    totals = replace(totals_of([g], lengths), max_completion_length=LENGTH)
    chances = [len(completions) * small.tokens(c).sum().exp().item() for c in completions]
    weights = [w * p for w, p in zip(algorithm.weigh(lengths, totals), chances, strict=True)]
    sizes = torch.tensor(lengths)
    new = torch.cat([trained.tokens(c) for c in completions])
    batch = Batch(
        row=torch.arange(len(completions)).repeat_interleave(sizes),
        lengths=sizes,
        advantages=torch.tensor(advantages, dtype=torch.float64).repeat_interleave(sizes),
        weights=torch.tensor(weights, dtype=torch.float64).repeat_interleave(sizes),
        old=torch.cat([small.tokens(c) for c in completions]).detach(),
        behavior=torch.cat([small.tokens(c) for c in completions]).detach(),
        peer=torch.cat([large.tokens(c) for c in completions]).detach(),
    )
    return -trained.gradient(algorithm.loss(new, batch)[0])


@pytest.mark.parametrize("placement", ["reward_pre_norm", "advantage_post_norm"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 2.0])
def test_theorem_1(alpha: float, placement: str) -> None:
    """grad E_phi[r + (alpha/N) log(theta/phi)], the reward detached, = grad E[r] - (alpha/N) grad KL(phi || theta).

    Both the kd reward and the loss divide by N, the greatest length.
    """
    small, large = Policy(0), Policy(1)
    options = {"kd_alpha": alpha, "kd_placement": placement, "max_completion_length": LENGTH}
    algorithm = build(spec(len(COMPLETIONS), **options))
    objective = expectation(COMPLETIONS, small, list(REWARD.values()))
    objective = objective - alpha / LENGTH * kl(COMPLETIONS, small, large)
    expected = small.gradient(objective) / LENGTH
    found = our_gradient(algorithm, COMPLETIONS, small, small, large)
    assert torch.allclose(found, expected, rtol=0, atol=1e-14) and expected.abs().max() > 0.02
    if alpha:
        without = small.gradient(expectation(COMPLETIONS, small, list(REWARD.values()))) / LENGTH
        assert (found - without).abs().max() > 1e-3  # the teacher has its part in it


def test_what_k3_as_a_reward_does() -> None:
    """Its gradient is grad E[r] - alpha (grad KL(phi || theta) - grad KL(theta || phi)): it pushes apart."""
    small, large = Policy(0), Policy(1)
    options = {"kd_estimator": "k3", "max_completion_length": 1, "loss_agg": "seq_mean_token_mean"}
    found = our_gradient(build(spec(3, **options)), ONE_TOKEN, small, small, large)
    rewards = [0.3, 1.0, 2.0]  # (0,) has a reward of its own
    forward = torch.stack([large.tokens(c).exp().detach() * -small.tokens(c) for c in ONE_TOKEN]).sum()
    apart = expectation(ONE_TOKEN, small, rewards) - kl(ONE_TOKEN, small, large) + forward
    assert torch.allclose(found, small.gradient(apart), rtol=0, atol=1e-14)


def test_the_term_of_the_loss_has_the_gradient_of_the_reverse_kl_too() -> None:
    """Of one-token completions; of longer ones it is that of each token alone."""
    small, large = Policy(0), Policy(1)
    options = {"kd_placement": "loss", "kd_alpha": 0.5, "loss_agg": "seq_mean_token_mean"}
    found = our_gradient(build(spec(3, **options)), ONE_TOKEN, small, small, large)
    objective = expectation(ONE_TOKEN, small, [0.3, 1.0, 2.0]) - 0.5 * kl(ONE_TOKEN, small, large)
    assert torch.allclose(found, small.gradient(objective), rtol=0, atol=1e-14)


def test_unclipped_the_large_policy_learns_without_bias_from_the_small_ones_samples() -> None:
    """E_phi[(theta / phi) A grad log theta] = grad E_theta[r], for completions of one token."""
    small, large = Policy(0), Policy(1)
    options = {"large_is_clip": "none", "loss_agg": "seq_mean_token_mean"}
    found = our_gradient(large_of(build(spec(3, **options))), ONE_TOKEN, large, small, large)
    expected = large.gradient(expectation(ONE_TOKEN, large, [0.3, 1.0, 2.0]))
    assert torch.allclose(found, expected, rtol=0, atol=1e-14) and expected.abs().max() > 0.02


# ---- its limits


def explored(algorithm: Algorithm, small: Tabular, large: Tabular, **options: Any) -> list[Group]:
    rollouts = TableRollouts(small, peer=large, **options)
    return compared(algorithm.explore(rollouts.first(), rollouts), small, large)


def test_without_the_kd_reward_and_with_equal_models_it_is_dr_grpo() -> None:
    """Small loss and gradient are Dr. GRPO's, bit by bit; the large ratios are 1 and its step the same."""
    base, algorithm = build({"name": "dr_grpo", "num_generations": 6}), build(spec(6, kd_alpha=0.0))
    small, large = Tabular(3), Tabular(3)
    groups = explored(algorithm, small, large)
    expected = step(groups, base, small, old=Tabular(3))
    found = step(groups, algorithm, small, old=Tabular(3))
    other = step(groups, large_of(algorithm), large, old=small)
    for loss, metrics, gradient in (found, other):
        assert torch.equal(loss, expected[0])
        assert all(torch.equal(gradient[c], expected[2][c]) for c in gradient | expected[2])
        assert metrics["clip_ratio/region_mean"] == 0
        assert metrics["sampling/importance_sampling_ratio/min"].item() == pytest.approx(1)
    assert sum(g.abs().sum().item() for g in found[2].values()) > 0.1


def test_equal_models_have_no_kd_reward() -> None:
    algorithm = build(spec(6, kd_alpha=3.0))
    groups = explored(algorithm, Tabular(3), Tabular(3))
    assert algorithm.credit(groups) == build({"name": "dr_grpo"}).credit(groups)


# ---- down-sampling


def test_both_policies_train_the_same_rollouts_chosen_by_the_effective_reward() -> None:
    """r~ with alpha 4 and N = 4 is (2.0878, -0.1931, 0.6931, 0.3069): the extremes are 0 and 1, not 0 and 2."""
    for downsample, kept in (("max_variance", (0, 1)), ("top", (0, 2)), ("top_bottom", (0, 1))):
        algorithm = build(spec(num_train=2, downsample=downsample, kd_alpha=4.0))
        assert (algorithm.num_generations, algorithm.batch_share) == (4, 2)
        for policy in (algorithm, large_of(algorithm)):
            advantages = policy.credit([worked()])
            assert policy.select([worked()], advantages) == [kept]
            assert [i for i, a in enumerate(advantages[0]) if a] == list(kept)
    assert build(spec(num_train=2, downsample="max_variance", kd_alpha=0.0)).select([worked()], [()]) == [
        (0, 2)
    ]
    a = build(spec(num_train=2, downsample="top", kd_alpha=4.0)).credit([worked()])[0]
    assert a == pytest.approx((0.6973202, 0, -0.6973202, 0), abs=1e-6)
    b = large_of(build(spec(num_train=2, downsample="top", kd_alpha=4.0))).credit([worked()])[0]
    assert b == pytest.approx((0.75, 0, -0.75, 0))


# ---- hints


def test_hints_come_in_the_first_pass_over_the_data_alone() -> None:
    """Prompts of both passes in one step: the first pass's begin with two tokens of the large policy."""
    algorithm = build(spec(3, hint_tokens=2, hint_epochs=1))
    assert (algorithm.hint_tokens, algorithm.hint_epochs, algorithm.needs_peer) == (2, 1, True)

    class Asked(TableRollouts):
        def __call__(self, prompts: Any, num: int, stage: str = "sample", *, hint_tokens: int = 0) -> Any:
            seen.append(([p.position for p in prompts], num, hint_tokens))
            return super().__call__(prompts, num, stage, hint_tokens=hint_tokens)

    seen: list[Any] = []
    prompts = [replace(prompt(i), epoch=e) for i, e in enumerate((0, 1, 0))]
    groups = algorithm.explore(prompts, Asked(Tabular(0), peer=Tabular(1)))
    assert seen == [([0, 2], 3, 2), ([1], 3, 0)]
    assert [g.prompt.position for g in groups] == [0, 1, 2]
    assert all(r.prompt.position == g.prompt.position for g in groups for r in g.rollouts)
    assert {r.completion.hint_length for r in groups[1].rollouts} == {0}
    assert {r.completion.hint_length for g in groups[::2] for r in g.rollouts} <= {1, 2}
    seen.clear()
    build(spec(3)).explore(prompts, Asked(Tabular(0)))
    assert seen == [([0, 1, 2], 3, 0)]


def test_the_tokens_of_a_hint_are_in_the_loss() -> None:
    algorithm = build(spec(4, hint_tokens=4, max_completion_length=5))
    small, large = Tabular(0), Tabular(1)
    groups = explored(algorithm, small, large)
    assert all(r.completion.hint_length == len(r.completion.token_ids) for g in groups for r in g.rollouts)
    for policy, trained in ((algorithm, small), (large_of(algorithm), large)):
        _, metrics, gradient = step(groups, policy, trained, old=small)
        assert sum(g.abs().sum().item() for g in gradient.values()) > 0.01
        assert metrics["sampling/importance_sampling_ratio/max"].item() == pytest.approx(1)


# ---- whole and in pieces, and under iGRPO


@pytest.mark.parametrize("options", [
    {}, {"kd_placement": "loss"}, {"large_is_level": "sequence", "large_is_clip": "truncate"},
    {"adv_scale": "std", "loss_agg": "token_mean", "large_is_clip": "none"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("drafts", [False, True])
def test_it_gives_the_same_whole_and_in_pieces(options: dict[str, Any], drafts: bool) -> None:
    inner = spec(6, num_train=4, downsample="max_variance", **options)
    algorithm = build({"name": "igrpo", "drafts": 2, "base": inner} if drafts else inner)
    small, large = Tabular(0), Tabular(1)
    groups = explored(algorithm, small, large)
    assert all(len(g.drafts) == 2 * drafts for g in groups)
    before = copy.deepcopy(small)
    for row in small.table.values():  # a later pass over the step's rollouts
        row.data += 0.05 * torch.arange(4)
    for policy, trained, other in ((algorithm, small, large), (large_of(algorithm), large, None)):
        whole = step(groups, policy, trained, old=before, peer=other)
        assert sum(g.abs().sum().item() for g in whole[2].values()) > 1e-3
        for pieces in (lambda n: [[i] for i in range(n)], lambda n: [list(range(i, n, 3)) for i in range(3)]):
            cut = step(groups, policy, trained, pieces, old=before, peer=other)
            assert cut[0].item() == pytest.approx(whole[0].item(), abs=1e-13)
            assert all(torch.allclose(cut[2][c], whole[2][c], rtol=0, atol=1e-13) for c in whole[2])
            assert all(cut[1][k].item() == pytest.approx(whole[1][k].item(), abs=1e-12) for k in whole[1])


# ---- options


def test_the_defaults_are_the_papers() -> None:
    algorithm = build({"name": "codistill"})
    assert (algorithm.num_generations, algorithm.batch_share) == (14, 8)
    assert algorithm.compares and algorithm.needs_peer and not algorithm.peer_after
    assert algorithm.hint_tokens == algorithm.hint_epochs == 0  # no second generator is needed
    assert large_of(algorithm).peer is None
    assert build({"name": "codistill", "large_ratio": "after_small"}).peer_after
    assert build(algorithm.options).options == algorithm.options


def test_the_length_that_is_divided_by_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"max_completion_length=None .* kd_len_norm max_len divides by it"):
        build({"name": "codistill", "num_rollouts": 8}).credit([worked()])
    assert build({"name": "codistill", "num_rollouts": 8, "kd_len_norm": "none"}).credit([worked()])


@pytest.mark.parametrize(("options", "message"), [
    ({"num_rollouts": 1}, r"num_rollouts=1 .* at least 2"),
    ({"num_train": 15}, r"num_train=15 .* 2 to num_rollouts=14"),
    ({"num_train": 1}, r"num_train=1 .* 2 to num_rollouts=14"),
    ({"downsample": "none"}, r"num_train=8 .* all are trained on; write 14"),
    ({"kd_alpha": -1.0}, r"kd_alpha=-1\.0 .* 0 turns it off"),
    ({"epsilon": 0.0}, r"epsilon=0\.0"),
    ({"epsilon_high": 0.0}, r"epsilon_high=0\.0"),
    ({"large_epsilon": -0.1}, r"large_epsilon=-0\.1"),
    ({"large_delta": 1.1}, r"large_delta=1\.1 .* 1 \+ 0\.2"),
    ({"large_delta": 4.0, "large_is_clip": "none"}, r"large_delta=4\.0 .* large_is_clip ppo"),
    ({"importance_sampling_cap": 0.5}, r"importance_sampling_cap=0\.5"),
    ({"hint_tokens": -1}, r"hint_tokens=-1 .* the paper's is 50"),
    ({"hint_epochs": 0}, r"hint_epochs=0"),
    ({"hint_tokens": 50, "max_completion_length": 50}, r"hint_tokens=50 .* below the 50 tokens"),
    ({"kd_estimator": "k2"}, r"kd_estimator='k2' .* log_ratio \| k3"),
    ({"num_generations": 8}, r"our name for this is num_rollouts$"),
    ({"rollout.n": 8}, r"our name for this is num_rollouts$"),
    ({"base": {"name": "grpo"}}, r"codistill has no option base"),
])  # fmt: skip
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build({"name": "codistill", **options})


@pytest.mark.parametrize("wrapper", [{"name": "cppo", "pruning_rate": 0.5}, {"name": "pods", "num_train": 4}])
def test_what_may_not_stand_on_it(wrapper: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"base='codistill' .* down-samples"):
        build({**wrapper, "base": {"name": "codistill"}})
