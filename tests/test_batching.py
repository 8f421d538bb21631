"""Groups -> micro-batches: nothing lost, nothing twice, even shares, the same loss however it is cut."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hpcgrpo import batching
from hpcgrpo.algorithms import build
from hpcgrpo.types import Completion, Group, Prompt, Rollout, Score


def made_groups(count: int, size: int, *, seed: int = 0, longest: int = 40) -> list[Group]:
    rng = random.Random(seed)
    groups = []
    for position in range(count):
        prompt = Prompt(
            position, position, (), "", tuple(rng.randrange(50) for _ in range(rng.randint(3, 20)))
        )
        rollouts = []
        for i in range(size):
            ids = tuple(rng.randrange(50) for _ in range(rng.randint(1, longest)))
            completion = Completion(ids, (-1.0,) * len(ids), "stop", "", seed=i)
            rollouts.append(Rollout(prompt, completion, Score(float(rng.random() < 0.5), {})))
        groups.append(Group(prompt, tuple(rollouts)))
    return groups


def planned(
    groups: list[Group], spec: dict, *, ranks: int, budget: int, shared: bool = True
) -> batching.Plan:
    algorithm = build(spec)
    return batching.plan(
        batching.credit(groups, algorithm),
        algorithm,
        ranks=ranks,
        token_budget=budget,
        max_completion_length=40,
        rows_per_device=4,
        shared_prefix=shared,
    )


def rows_in(plan: batching.Plan) -> list:
    return [r for rank in plan.micro_batches for m in rank for p in m for r in p.rows]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("budget", [30, 100, 10**6])
def test_every_row_once_and_equally_many_micro_batches(ranks: int, budget: int, shared: bool) -> None:
    plan = planned(
        made_groups(5, 4), {"name": "grpo", "num_generations": 4}, ranks=ranks, budget=budget, shared=shared
    )
    assert Counter(r.index for r in rows_in(plan)) == Counter(range(20))
    assert len(plan.micro_batches) == ranks
    assert len({len(rank) for rank in plan.micro_batches}) == 1


def test_micro_batches_keep_to_the_token_budget_unless_one_sequence_is_longer() -> None:
    plan = planned(made_groups(8, 4), {"name": "grpo", "num_generations": 4}, ranks=2, budget=64)
    for rank in plan.micro_batches:
        for micro_batch in rank:
            tokens = sum(p.tokens for p in micro_batch)
            assert tokens <= 64 or (len(micro_batch) == 1 and len(micro_batch[0].rows) == 1)


def test_without_shared_prefixes_a_micro_batch_is_one_sequence() -> None:
    plan = planned(
        made_groups(3, 4), {"name": "grpo", "num_generations": 4}, ranks=2, budget=999, shared=False
    )
    assert {len(m) for rank in plan.micro_batches for m in rank} <= {0, 1}
    assert {len(p.rows) for rank in plan.micro_batches for m in rank for p in m} == {1}


def test_rows_carry_the_group_standardised_advantage_and_the_sequence_mean_weight() -> None:
    groups = made_groups(1, 4)
    rewards = [1.0, 0.0, 0.0, 0.0]  # E1: 1.4997001, -0.4999 with ddof 1 and eps 1e-4
    rollouts = tuple(
        Rollout(r.prompt, r.completion, Score(x, {}))
        for r, x in zip(groups[0].rollouts, rewards, strict=True)
    )
    plan = planned(
        [Group(groups[0].prompt, rollouts)], {"name": "grpo", "num_generations": 4}, ranks=1, budget=10**6
    )
    by_index = {r.index: r for r in rows_in(plan)}
    assert by_index[0].advantage == pytest.approx(1.4997001, abs=1e-7)
    assert by_index[1].advantage == pytest.approx(-0.4999000, abs=1e-7)
    for index, row in by_index.items():
        assert row.weight == pytest.approx(1 / (4 * len(row.token_ids)))
        assert row.token_ids == rollouts[index].completion.token_ids


def test_the_plan_of_rows_and_weights_is_the_same_for_any_number_of_ranks() -> None:
    groups = made_groups(6, 4)
    for name in ("grpo", "dapo", "dr_grpo"):
        spec = {"name": name, "num_generations": 4}
        plans = [planned(groups, spec, ranks=n, budget=b) for n, b in ((1, 10**6), (2, 80), (4, 50))]
        as_sets = [sorted((r.index, r.advantage, r.weight) for r in rows_in(p)) for p in plans]
        assert as_sets[0] == as_sets[1] == as_sets[2]
        assert plans[0].totals == plans[1].totals == plans[2].totals


def test_pruned_rows_never_reach_a_micro_batch_and_leave_the_totals() -> None:
    groups = made_groups(4, 8)
    spec = {"name": "cppo", "pruning_rate": 0.75, "base": {"name": "grpo", "num_generations": 8}}
    plan = planned(groups, spec, ranks=2, budget=200)
    assert len(rows_in(plan)) == plan.totals.rows == 8
    assert plan.totals.sampled_rows == 32
    assert plan.totals.tokens == sum(len(r.token_ids) for r in rows_in(plan))


def test_a_step_that_keeps_nothing_plans_no_rows() -> None:
    groups = [
        Group(g.prompt, tuple(Rollout(r.prompt, r.completion, Score(1.0, {})) for r in g.rollouts))
        for g in made_groups(2, 4)
    ]
    plan = planned(
        groups, {"name": "grpo", "num_generations": 4, "zero_variance": "drop"}, ranks=2, budget=100
    )
    assert plan.totals.rows == 0
    assert all(m == () for rank in plan.micro_batches for m in rank)


def test_shares_are_even_when_groups_can_be_cut() -> None:
    plan = planned(
        made_groups(16, 8, longest=200), {"name": "grpo", "num_generations": 8}, ranks=4, budget=10**6
    )
    assert plan.spread() < 1.1


def test_split_keeps_groups_whole_and_in_order() -> None:
    groups = made_groups(7, 2)
    credited = batching.credit(groups, build({"name": "grpo", "num_generations": 2}))
    parts = batching.split(credited, 3)
    assert [g.prompt.position for p in parts for g in p.groups] == list(range(7))
    assert [len(p.groups) for p in parts] == [2, 2, 3]
