"""What must hold for every algorithm and every nesting of wrappers, on a policy that can be enumerated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tabular import TableRollouts, Tabular, group, step, totals_of
from torch import Tensor

from hpcgrpo.algorithms import build
from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.types import Batch, Completion, Group, Prompt

BASES = ("grpo", "dr_grpo", "dapo", "gspo", "gmpo", "bnpo")
Gradient = dict[tuple[int, ...], Tensor]


def explored(algorithm: Algorithm, seed: int = 0, batch: int = 4) -> tuple[list[Group], Tabular]:
    policy = Tabular(seed)
    rollouts = TableRollouts(policy, half, batch=batch)
    return algorithm.explore(rollouts.first(), rollouts), policy


def half(q: Prompt, c: Completion) -> float:
    """A reward in {0, 0.5, 1} with spread in most groups."""
    return 0.5 * (c.token_ids[0] in (1, 2)) + 0.5 * (c.finish_reason == "stop")


def same(a: Gradient, b: Gradient, tolerance: float = 1e-13) -> bool:
    assert a.keys() == b.keys()
    return all(torch.allclose(a[c], b[c], rtol=0, atol=tolerance) for c in a)


def size(gradient: Gradient) -> float:
    return sum(g.abs().sum().item() for g in gradient.values())


# ---- 1: at ratio 1 GRPO is REINFORCE with the group's baseline


def test_at_ratio_1_the_gradient_is_minus_the_mean_of_a_grad_log_pi() -> None:
    algorithm = build({"name": "grpo", "num_generations": 6, "importance_sampling_correction": "none"})
    groups, policy = explored(algorithm)
    loss, _, gradient = step(groups, algorithm, policy)
    for row in policy.table.values():
        row.grad = None
    rows = [
        (r, a)
        for g, advantages in zip(groups, algorithm.credit(groups), strict=True)
        for r, a in zip(g.rollouts, advantages, strict=True)
    ]
    terms = [a * policy.logprobs(r.prompt, r.completion.token_ids).mean() for r, a in rows]
    (-torch.stack(terms).mean()).backward()
    assert size(gradient) > 0.1 and same(gradient, policy.gradient())
    assert abs(loss.item()) < 1e-12  # minus the mean of centred advantages


# ---- 2: k3


def test_the_numeric_gradient_of_k3_is_that_of_equation_29() -> None:
    """With A = 0 and beta = 1 the loss is the penalty alone: -(rho - 1) for each log pi."""
    loss = build({"name": "grpo", "beta": 1.0}).loss
    new = torch.tensor([-0.3, -1.2, -2.5, -0.9], dtype=torch.float64)
    ref = torch.tensor([-0.9, -1.2, -0.4, -1.0], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    batch = Batch(
        torch.zeros(4, dtype=torch.int64), torch.tensor([4]), 0 * ones, ones, old=new, reference=ref
    )
    for t, h in enumerate(1e-6 * torch.eye(4, dtype=torch.float64)):
        slope = (loss(new + h, batch)[0] - loss(new - h, batch)[0]).item() / 2e-6
        assert slope == pytest.approx(1 - (ref - new).exp()[t].item(), abs=1e-8)
    assert loss(new, replace(batch, reference=new))[0] == 0 < loss(new, batch)[0]


# ---- 3, 4: CPPO


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("options", [
    {}, {"prune_scope": "global"}, {"prune_scope": "rank", "tie_break": "balanced"},
    {"normalise_by": "group"}, {"prune_metric": "random"}, {"prune_metric": "largest_raw"},
], ids=str)  # fmt: skip
def test_cppo_that_prunes_nothing_is_its_base_bit_by_bit(name: str, options: dict[str, Any]) -> None:
    base = {"name": name, "num_generations": 6, "beta": 0.04, "zero_variance": "drop"}
    algorithm = build({"name": "cppo", "pruning_rate": 0.0, "base": base, **options})
    results = []
    for a in (build(base), algorithm):
        groups, policy = explored(a)
        results.append(step(groups, a, policy, reference=Tabular(1)))
    (loss, metrics, gradient), (loss0, metrics0, gradient0) = results
    assert torch.equal(loss, loss0) and size(gradient) > 0
    assert all(torch.equal(metrics[k], metrics0[k]) for k in metrics | metrics0)
    assert all(torch.equal(gradient[c], gradient0[c]) for c in gradient | gradient0)


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("tie_break", ["first", "balanced"])
def test_nothing_pruned_outweighs_what_is_kept(rate: float, tie_break: str) -> None:
    algorithm = build({"name": "cppo", "pruning_rate": rate, "tie_break": tie_break})
    rng = random.Random(0)
    for _ in range(50):
        groups = [group([rng.choice([0, 0.3, 0.7, 1, rng.random()]) for _ in range(8)])]
        advantages = algorithm.credit(groups)
        (kept,) = algorithm.select(groups, advantages)
        sizes = [abs(a) for a in advantages[0]]
        dropped = [a for i, a in enumerate(sizes) if i not in kept]
        assert len(kept) == algorithm.batch_share
        assert min(sizes[i] for i in kept) >= max(dropped) - 1e-12
        weights = algorithm.weigh([2] * len(kept), totals_of(groups, [2] * len(kept)))
        loss = -sum(2 * w * advantages[0][i] for w, i in zip(weights, kept, strict=True))
        assert abs(loss) <= max(sizes) + 1e-12


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.75, 0.875])
def test_allocation_keeps_the_completions_of_a_step_constant(rate: float) -> None:
    """A batch of 64 completions of G = 16: 4 / (1 - P) questions, 64 trained; an epoch samples as many."""
    spec = {"name": "cppo", "pruning_rate": rate, "base": {"name": "grpo", "num_generations": 16}}
    algorithm, batch, epoch = build(spec), 64, 960
    questions = batch // algorithm.batch_share
    assert questions == 4 / (1 - rate)
    groups, _ = explored(algorithm, batch=questions)
    kept = algorithm.select(groups, algorithm.credit(groups))
    assert sum(map(len, kept)) == batch
    assert epoch // questions * questions * algorithm.num_generations == epoch * 16


# ---- 5: iGRPO


def test_igrpo_with_an_empty_draft_and_the_same_prompt_is_its_base() -> None:
    for base in BASES:
        spec = {"name": base, "num_generations": 4, "zero_variance": "keep"}
        empty = {
            "name": "igrpo",
            "draft_choice": "empty",
            "refine_template": "{question}{draft}",
            "base": spec,
        }
        results = []
        for algorithm in (build(spec), build(empty)):
            groups, policy = explored(algorithm)
            results.append(step(groups, algorithm, policy))
        (loss, _, gradient), (loss1, _, gradient1) = results
        trained = {c: g for c, g in gradient1.items() if c in gradient}  # drafts visit further contexts
        assert torch.equal(loss, loss1) and size(gradient) > 0 and same(gradient, trained, 0.0)
        assert size(gradient1) == size(trained)


@pytest.mark.parametrize("base", BASES)
def test_igrpo_trains_the_second_prompt_and_nothing_of_the_first(base: str) -> None:
    algorithm = build(
        {"name": "igrpo", "drafts": 3, "base": {"name": base, "num_generations": 5, "beta": 0.1}}
    )
    groups, policy = explored(algorithm)
    assert all(len(g.drafts) + len(g.rollouts) == 3 + 5 for g in groups)
    _, _, gradient = step(groups, algorithm, policy, reference=Tabular(1))
    drafted = {
        c for c in gradient if 9 not in c
    }  # 9 separates the question from the draft in the second prompt
    assert drafted and all(torch.equal(gradient[c], torch.zeros(4)) for c in drafted)
    assert size(gradient) > 0.01
    # the ratios too are those of the second prompt: a change of the policy there, and only there, clips
    for context, row in policy.table.items():
        if context in drafted:
            row.data += 5 * torch.arange(4)
    before = Tabular(0)
    _, metrics, _ = step(groups, algorithm, policy, old=before, reference=Tabular(1))
    assert metrics["clip_ratio/region_mean"] == 0
    for context, row in policy.table.items():
        if context not in drafted:
            row.data += 5 * torch.arange(4)
    _, metrics, _ = step(groups, algorithm, policy, old=before, reference=Tabular(1))
    assert metrics["clip_ratio/region_mean"] > 0


def test_training_the_drafts_adds_their_step_to_that_of_the_refinements() -> None:
    """The loss is the mean over 5 + 3 completions: gradients add up as 5/8 and 3/8 of each stage's own step."""
    base = {"name": "grpo", "num_generations": 5}
    both = build({"name": "igrpo", "drafts": 3, "train_drafts": True, "base": base})
    groups, policy = explored(both)
    whole = step(groups, both, policy)
    refined, drafted = (step(groups[i::2], build(base), policy) for i in (0, 1))
    assert whole[0].item() == pytest.approx((5 * refined[0] + 3 * drafted[0]).item() / 8, abs=1e-13)
    assert same(whole[2], {c: (5 * refined[2][c] + 3 * drafted[2][c]) / 8 for c in whole[2]})
    first = {c: g for c, g in whole[2].items() if 9 not in c}  # contexts of the first prompt
    assert size(first) > 0.01 and size(whole[2]) > size(first) + 0.01
    alone = build({"name": "igrpo", "drafts": 3, "base": base})
    groups, policy = explored(alone)
    assert same({c: g for c, g in refined[2].items() if size({c: g})}, {
        c: g for c, g in step(groups, alone, policy)[2].items() if size({c: g})
    })  # fmt: skip


def test_refill_trains_the_drafts_of_the_prompts_it_keeps() -> None:
    base = {"name": "dapo", "num_generations": 5}
    groups, _ = explored(build({"name": "igrpo", "drafts": 3, "train_drafts": True, "base": base}))
    assert [g.stage for g in groups] == ["sample", "draft"] * 4
    assert [g.prompt.position for g in groups[::2]] == [g.prompt.position for g in groups[1::2]]


# ---- 9: scale invariance


@pytest.mark.parametrize("spec", [
    {"name": "grpo", "std_eps": 0.0}, {"name": "grpo", "std_eps": 0.0, "scale_rewards": "batch"},
    {"name": "dapo"}, {"name": "dr_grpo"}, {"name": "gspo"}, {"name": "gmpo"},
], ids=str)  # fmt: skip
def test_a_constant_added_to_all_rewards_changes_nothing(spec: dict[str, Any]) -> None:
    rewards = [[1.0, 0.0, 0.5, 0.25], [0.0, 0.0, 1.0, 1.0]]
    plain = build(spec).credit([group(r) for r in rewards])
    moved = build(spec).credit([group([x + 3 for x in r]) for r in rewards])
    assert [x for a in moved for x in a] == pytest.approx([x for a in plain for x in a], abs=1e-12)


@pytest.mark.parametrize(("options", "power"), [
    ({"std_eps": 0.0}, 0), ({"std_eps": 0.0, "scale_rewards": "batch"}, 0), ({"scale_rewards": "none"}, 1),
], ids=str)  # fmt: skip
def test_a_factor_of_all_rewards(options: dict[str, Any], power: int) -> None:
    rewards = [[1.0, 0.0, 0.5, 0.25], [0.0, 0.0, 1.0, 1.0]]
    algorithm = build({"name": "grpo", **options})
    plain = algorithm.credit([group(r) for r in rewards])
    for factor in (1e-6, 7.0):
        scaled = algorithm.credit([group([factor * x for x in r]) for r in rewards])
        expected = [factor**power * x for a in plain for x in a]
        assert [x for a in scaled for x in a] == pytest.approx(expected, rel=1e-9)


# ---- 10: whole and in pieces


def wrapped(base: dict[str, Any]) -> dict[str, dict[str, Any]]:
    def cppo(inner: dict[str, Any], **options: Any) -> dict[str, Any]:
        return {"name": "cppo", "pruning_rate": 0.4, "base": inner, **options}

    def igrpo(inner: dict[str, Any]) -> dict[str, Any]:
        return {"name": "igrpo", "drafts": 2, "base": inner}

    def subset(name: str, inner: dict[str, Any], **options: Any) -> dict[str, Any]:
        return {"name": name, "num_train": 3, "base": inner, **options}

    def teacher(name: str, inner: dict[str, Any], **options: Any) -> dict[str, Any]:
        return {"name": name, "base": inner, **options}

    both = {"name": "igrpo", "drafts": 2, "train_drafts": True, "base": base}
    return {
        "plain": base,
        "igrpo": igrpo(base),
        "cppo": cppo(base),
        "cppo/group": cppo(base, normalise_by="group"),
        "cppo/global": cppo(base, prune_scope="global"),
        "igrpo(cppo)": igrpo(cppo(base)),
        "cppo(igrpo)": cppo(igrpo(base)),
        "igrpo, both stages": both,
        "igrpo(pods)": igrpo(subset("pods", base)),
        "cppo(gfpo)": cppo(subset("gfpo", base, normalise_on="group"), prune_scope="global"),
        "kdrl(igrpo, both stages)": teacher("kdrl", both),
        "pods(kdrl)": subset("pods", teacher("kdrl", base)),
        "igrpo(opd)": igrpo(teacher("opd", base, advantage_coef=0.5)),
    }


def in_order(count: int) -> Callable[[int], list[list[int]]]:
    return lambda rows: [list(range(rows))[i : i + count] for i in range(0, rows, count)]


def shuffled(seed: int) -> Callable[[int], list[list[int]]]:
    """Rows dealt at random to five pieces, one of which may be empty."""

    def pieces(rows: int) -> list[list[int]]:
        rng, dealt = random.Random(seed), [[] for _ in range(5)]  # type: ignore[var-annotated]
        for row in rng.sample(range(rows), rows):
            rng.choice(dealt).append(row)
        return [*dealt, []]

    return pieces


BASE_SPECS = [{"name": name, "num_generations": 5, "beta": 0.04} for name in BASES]
BASE_SPECS += [{**BASE_SPECS[0], "loss_agg": agg} for agg in ("token_mean_local", "const_len", "token_mean")]
BASE_SPECS += [
    {**BASE_SPECS[0], "importance_sampling_correction": c} for c in ("sequence_mask", "token_mask")
]


@pytest.mark.parametrize("wrapping", list(wrapped({})))
@pytest.mark.parametrize("base", BASE_SPECS, ids=lambda s: "-".join(map(str, s.values())))
def test_any_nesting_gives_the_same_whole_and_in_pieces(wrapping: str, base: dict[str, Any]) -> None:
    algorithm = build(wrapped(base)[wrapping])
    groups, policy = explored(algorithm)
    streams: Any = {"old": Tabular(2), "reference": Tabular(1), "peer": Tabular(3), "progress": 0.5}
    loss, metrics, gradient = step(groups, algorithm, policy, **streams)
    assert size(gradient) > 1e-3
    for pieces in (in_order(1), in_order(3), shuffled(0)):
        loss1, metrics1, gradient1 = step(groups, algorithm, policy, pieces, **streams)
        assert loss1.item() == pytest.approx(loss.item(), abs=1e-13)
        assert same(gradient, gradient1)
        assert metrics.keys() == metrics1.keys()
        for key in metrics:
            assert metrics1[key].item() == pytest.approx(metrics[key].item(), abs=1e-12), key


@pytest.mark.parametrize("base", BASE_SPECS[:6], ids=lambda s: s["name"])
def test_the_two_orders_of_nesting_mean_the_same(base: dict[str, Any]) -> None:
    specs = wrapped(base)
    results = []
    for order in ("igrpo(cppo)", "cppo(igrpo)"):
        algorithm = build(specs[order])
        assert (algorithm.batch_share, algorithm.num_drafts) == (3, 2)
        groups, policy = explored(algorithm)
        results.append(step(groups, algorithm, policy, reference=Tabular(1)))
    assert torch.equal(results[0][0], results[1][0]) and same(results[0][2], results[1][2], 0.0)
