"""The planner's time: decoding, FLOPs, workloads by algorithm, hardware and efficiencies, calibration, sweeps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcgrpo import config as configuration
from hpcgrpo import metrics
from hpcgrpo.planner import (
    calibrate,
    command,
    decoding,
    efficiencies,
    hardware,
    prediction,
    shapes,
    speed,
    sweep,
    work,
    workload,
)
from hpcgrpo.planner.decoding import Rates, Request, Spell
from hpcgrpo.planner.hardware import Hardware
from hpcgrpo.planner.lengths import Known, Lengths, lognormal, read_lengths
from hpcgrpo.planner.shapes import Shape
from hpcgrpo.sections import RunConfig
from hpcgrpo.types import Completion, Prompt, Rollout, Score

ROOT = Path(__file__).parents[1]
A100 = hardware.find("a100-80gb")
ROUND = Hardware("round", "round numbers", "cuda", 80e9, 1e12, 1e12, 1e11, 1e11, 1e9)


def model(**changes: Any) -> Shape:
    """A model of round sizes: 1,000 weights of matrices a layer."""
    found = Shape("m", 10, 20, 2, 2, 1, 5, 100, False, False, False, "dense", 0)
    found = replace(found, **changes)
    return (
        found
        if found.parameters
        else replace(found, parameters=found.layers * found.linear_parameters + 2000)
    )


def run_config(algorithm: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    """8 completions of each of 16 questions on two learner ranks of a GPU node; another one serves with one engine."""
    values: dict[str, Any] = {
        "name": "planned",
        "model_name_or_path": "models/none",
        "algorithm": algorithm or {"name": "grpo", "num_generations": 8},
        "rewards": {"accuracy": 1.0},
        "data": {"preset": "math", "max_samples": 1600},
        "generation": {"backend": "vllm", "max_prompt_length": 64, "max_completion_length": 128},
        "train": {"train_batch_size": 128, "attn_implementation": "packed"},
        "cluster": {"nodes": 2, "vllm_nodes": 1, "gpus_per_node": 2},
    }
    for key, value in sections.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return configuration.parse(values)


def known(prompt: int = 20, completion: int = 50) -> Known:
    """Every prompt and every completion of one length."""
    return Known(Lengths((prompt,), "test"), Lengths((completion,), "test"))


# ---- lengths


@pytest.mark.parametrize(("mean", "longest"), [(50, 2048), (700, 2048), (1500, 2048), (9, 10)])
def test_a_lognormal_keeps_its_mean_after_the_cut(mean: int, longest: int) -> None:
    found = lognormal(mean, longest)
    assert found.mean == pytest.approx(mean, rel=0.02)
    assert found.longest <= longest and min(found.values) >= 1
    assert list(found.values) == sorted(found.values)


def test_a_mean_above_the_longest_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"3000 tokens with 2048 as the longest"):
        lognormal(3000, 2048)


def test_lengths_are_sampled_in_equal_parts() -> None:
    lengths = Lengths((1, 2, 3, 4), "test")
    assert lengths.sample(4) == [1, 2, 3, 4]
    assert lengths.sample(2) == [2, 4]
    assert (lengths.mean, lengths.mean_square, lengths.longest) == (2.5, 7.5, 4)


def test_lengths_from_a_file_of_means(tmp_path: Path) -> None:
    path = tmp_path / "lengths.yaml"
    path.write_text("completion: {mean: 30, longest: 64}\nprompt: {mean: 12, longest: 40, sigma: 0.2}\n")
    found = read_lengths(path)
    assert found.completion is not None and found.completion.mean == pytest.approx(30, rel=0.02)
    assert found.prompt is not None and found.prompt.mean == pytest.approx(12, rel=0.05)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.yaml", None, "no such run or file"),
        ("a.yaml", "completions: {mean: 3}", "its keys must be completion, prompt and draft"),
        ("b.yaml", "completion: {mean: 30}", "write lines such as"),
        ("c.jsonl", '{"reward": 1}\n', "tells no lengths"),
        ("d.jsonl", "what\n", "line 1: is no JSON object"),
    ],
)
def test_bad_lengths_say_what_to_give(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_lengths(path)


def written_run(folder: Path, lines: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "rollouts" / "step-000002.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_runs_own_lengths(tmp_path: Path) -> None:
    """Two drafts and two refinements of one question of 7 tokens; their prompts have 18 and 20."""
    drafts: list[dict[str, Any]] = [
        {"stage": "draft", "token_ids": [1] * n, "prompt_length": 7} for n in (4, 6)
    ]
    samples: list[dict[str, Any]] = [
        {"stage": "sample", "token_ids": [1] * n, "kept": n == 8, "prompt_length": 10 + n} for n in (8, 10)
    ]
    found = read_lengths(written_run(tmp_path / "drafted", [], [*drafts, *samples]))
    assert found.completion is not None and found.completion.values == (8, 10)
    assert found.draft is not None and found.draft.values == (4, 6)
    assert found.prompt is not None and found.prompt.values == (7, 7)
    assert found.second_prompt is not None and found.second_prompt.values == (18, 20)
    assert found.kept_share == 0.5
    alone = read_lengths(written_run(tmp_path / "alone", [], samples))
    assert alone.prompt is not None and alone.prompt.values == (18, 20)
    assert (alone.draft, alone.second_prompt) == (None, None)


def test_the_rows_that_a_run_keeps_tell_their_prompts_length() -> None:
    prompt = Prompt(0, 3, (), "q", (5, 6, 7), {"answer": "1"}, False)
    score = Score(1.0, {"accuracy": 1.0}, {"accuracy": "right"})
    rollout = Rollout(prompt, Completion((8, 9), (-0.1, -0.2), "stop", "a", seed=0), score)
    (row,) = metrics.held_out_rows({"eval": [rollout]})
    assert row["prompt_length"] == 3 and len(row["token_ids"]) == 2


# ---- decoding

FREE = Rates(0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0)


def test_spells_of_three_requests_in_two_places() -> None:
    """Lengths 2, 4, 3 from prompts of 10: the third starts when the first has ended."""
    found = list(
        decoding.spells([Request(10, 2), Request(10, 4), Request(10, 3)], max_sequences=2, max_tokens=None)
    )
    assert found == [Spell(2, 2, 22.0), Spell(2, 2, 24.0), Spell(1, 1, 12.5)]


@pytest.mark.parametrize("places", [1, 3, 7, 100])
@pytest.mark.parametrize("tokens", [None, 60, 200])
def test_every_token_is_decoded_once_whatever_the_limits(places: int, tokens: int | None) -> None:
    requests = [Request(5 + i % 3, 1 + 7 * i % 40) for i in range(50)]
    found = list(decoding.spells(requests, max_sequences=places, max_tokens=tokens))
    assert sum(s.steps * s.running for s in found) == sum(r.length for r in requests)
    assert max(s.running for s in found) <= places
    # What a sequence holds at each of its steps: its prompt and, on average, half of its own tokens.
    held = sum(r.length * (r.prompt + r.length / 2) for r in requests)
    assert sum(s.steps * s.context_tokens for s in found) == pytest.approx(held)


def test_a_cache_that_holds_one_sequence_runs_them_in_turn() -> None:
    requests = [Request(10, 10)] * 3
    found = list(decoding.spells(requests, max_sequences=8, max_tokens=25))
    assert [s.running for s in found] == [1, 1, 1] and sum(s.steps for s in found) == 30
    with pytest.raises(ValueError, match=r"20 tokens does not fit the 15 tokens"):
        list(decoding.spells(requests, max_sequences=8, max_tokens=15))


def test_a_step_is_bound_by_memory_or_by_arithmetic() -> None:
    rates = Rates(
        weight_bytes=100,
        kv_bytes=2,
        flops=50,
        flops_per_context_token=1,
        bytes_per_second=10,
        flops_per_second=100,
        step_seconds=0.5,
    )
    assert rates.seconds(1, 20) == pytest.approx((100 + 40) / 10 + 0.5)  # reads 140 bytes, computes 70
    assert rates.seconds(40, 20) == pytest.approx((2000 + 20) / 100 + 0.5)


def test_the_longest_sequence_sets_the_end() -> None:
    """The same tokens in all: 10 x 10, or 9 of 5 and one of 55."""
    even, tail = [Request(0, 10)] * 10, [Request(0, 5)] * 9 + [Request(0, 55)]
    fixed = replace(FREE, step_seconds=1.0)
    seconds = [
        decoding.total_seconds(list(decoding.spells(r, max_sequences=100, max_tokens=None)), fixed)
        for r in (even, tail)
    ]
    assert seconds == [10.0, 55.0]


def test_batches_of_the_generator_in_process() -> None:
    requests = [Request(10, 5)] * 3 + [Request(30, 5)] * 2
    assert [len(b) for b in decoding.batches(requests, room=10, max_tokens=60)] == [3, 1, 1]
    assert [len(b) for b in decoding.batches(requests, room=10, max_tokens=None)] == [5]


# ---- FLOPs


def test_packed_flops_by_hand() -> None:
    """One group of 3 completions of 4 tokens on a prompt of 6, two layers of 10 x (20 + 10 + 60) weights."""
    shape = model()
    assert shape.linear_parameters == 10 * (2 * 10 + 2 * 5 + 3 * 20) == 900
    rows = workload.Rows("actor", 1, 3, Lengths((6,), ""), Lengths((4,), ""))
    layers, head = work.packed_flops(shape, rows, shared_prefix=True)
    pairs = 6 * 6 / 2 + 3 * (6 * 4 + 4 * 4 / 2)
    assert layers == 2 * (6 + 12) * 2 * 900 + 4 * pairs * 10 * 2
    assert head == 2 * 12 * 100 * 10
    alone, _ = work.packed_flops(shape, rows, shared_prefix=False)
    assert alone - layers == pytest.approx(2 * (2 * 6 * 2 * 900 + 4 * 18 * 10 * 2))  # two more prompts


@pytest.mark.slow
def test_flops_against_those_that_torch_counts() -> None:
    """A real model's forward pass: its matrices, and the scores and values of attention without a mask."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from hpcgrpo import tiny

    built = tiny.build_tiny_model(hidden=64, layers=3, heads=2)
    built.set_attn_implementation("eager")
    shape = model(hidden=64, intermediate=192, layers=3, heads=2, kv_heads=1, head_dim=32)
    shape = replace(shape, vocabulary=tiny.VOCABULARY_SIZE)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        built(torch.zeros(1, 40, dtype=torch.int64))
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    attention = counts.pop("aten.bmm")
    rows = workload.Rows("actor", 1, 1, Lengths((0,), ""), Lengths((40,), ""))
    layers, head = work.packed_flops(shape, rows, shared_prefix=True)
    causal = work.attention_flops(shape, 40 * 40 / 2)
    assert attention == pytest.approx(2 * causal, rel=0.02)  # rotary angles are a product too
    assert layers - causal + head == sum(counts.values())


def test_padding_costs_the_whole_width() -> None:
    shape, rows = model(), workload.Rows("actor", 4, 8, Lengths((5,), ""), Lengths((10,), ""))
    narrow, wide = (work.padded_flops(shape, rows, work.Padding(p, 20, 4)) for p in (10, 40))
    assert wide[0] - narrow[0] == 2 * 32 * 30 * 2 * 900 and wide[1] == narrow[1] == 2 * 32 * 20 * 1000


# ---- workloads


def test_grpo_samples_and_trains_every_completion_once() -> None:
    load = workload.of(run_config(), known())
    (stage,), (rows,) = load.stages, load.trained
    assert (stage.prompts, stage.completions, rows.groups, rows.rows) == (16, 8, 16, 8)
    assert (load.sampled, load.kept, load.updates, load.max_steps) == (128, 128, 1, 100)
    assert not load.forward and not load.compared


def test_igrpo_has_two_stages_and_a_longer_second_prompt() -> None:
    algorithm = {"name": "igrpo", "drafts": 4, "base": {"name": "grpo", "num_generations": 4}}
    load = workload.of(run_config(algorithm), known(20, 50))
    draft, sample = load.stages
    assert (draft.name, draft.prompts, draft.completions, draft.prompt.mean) == ("draft", 32, 4, 20)
    assert (sample.prompts, sample.completions) == (32, 4)
    assert sample.prompt.mean == 20 + 50 + workload.SECOND_PROMPT_FORM
    assert (load.sampled, load.kept) == (256, 128)
    capped = workload.of(run_config({**algorithm, "max_refine_prompt_length": 33}), known(20, 50))
    assert capped.stages[1].prompt.longest == 33


@pytest.mark.parametrize(("allocation", "prompts"), [(True, 64), (False, 16)])
def test_cppo_trains_k_of_g(allocation: bool, prompts: int) -> None:
    algorithm = {
        "name": "cppo",
        "pruning_rate": 0.75,
        "allocation": allocation,
        "base": {"name": "grpo", "num_generations": 8},
    }
    load = workload.of(run_config(algorithm), known())
    assert load.trained[0].rows == 2 and load.trained[0].groups == prompts
    assert load.sampled == 8 * prompts and load.kept == 2 * prompts


@pytest.mark.parametrize("name", ["pods", "gfpo"])
def test_down_sampling_trains_its_subset(name: str) -> None:
    load = workload.of(
        run_config({"name": name, "num_train": 4, "base": {"name": "grpo", "num_generations": 16}}), known()
    )
    assert (load.stages[0].prompts, load.sampled, load.kept) == (32, 512, 128)


def test_a_reference_a_teacher_and_an_old_policy_are_forward_passes() -> None:
    base = {"name": "grpo", "num_generations": 8, "beta": 0.1}
    teacher = {"model_name_or_path": "models/teacher"}
    assert [r.policy for r in workload.of(run_config(base), known()).forward] == ["actor"]
    two = workload.of(run_config(base, train={"num_iterations": 2}), known())
    assert [r.policy for r in two.forward] == ["actor", "actor"] and (two.passes, two.updates) == (2, 2)
    distilled = run_config({"name": "kdrl", "base": {"name": "grpo", "num_generations": 8}}, peer=teacher)
    assert [r.policy for r in workload.of(distilled, known()).forward] == ["peer"]


def test_codistill_has_two_policies_and_hints_in_its_first_epoch() -> None:
    algorithm = {"name": "codistill", "num_rollouts": 14, "num_train": 8, "hint_tokens": 5}
    config = run_config(
        algorithm,
        peer={"model_name_or_path": "models/large"},
        train={"train_batch_size": 128, "num_train_epochs": 8},
        cluster={"gpus_per_node": 2},
    )
    load = workload.of(config, known())
    hint, sample = load.stages
    assert (hint.policy, hint.prompts, hint.completion.mean) == ("peer", 16 / 8, 5)
    assert (sample.policy, sample.completions, load.sampled) == ("actor", 14, 16 * 14)
    assert [(r.policy, r.rows) for r in load.trained] == [("actor", 8), ("peer", 8)]
    assert [(r.policy, r.rows) for r in load.compared] == [("actor", 14), ("peer", 14)]


def test_what_is_not_known_is_assumed_and_said() -> None:
    load = workload.of(run_config())
    assert load.stages[0].completion.mean == pytest.approx(64, rel=0.02)
    assert any("half the longest" in text for text in load.assumptions)
    assert not workload.of(run_config(), known()).assumptions


# ---- seconds


def only(**values: float) -> dict[str, efficiencies.Number]:
    """Efficiencies at which nothing costs anything but what is given; rates are reached in full."""
    full = ("learner_flops", "generation_flops", "decode_bandwidth", "network")
    exact = {name: 1.0 if name in full else 0.0 for name in efficiencies.DEFAULTS}
    return {name: efficiencies.Number(v, v, v) for name, v in {**exact, **values}.items()}


def test_a_step_by_hand() -> None:
    """128 completions of 50 tokens on one engine; the learner is two ranks; all at round rates."""
    config, shape = run_config(), model()
    numbers = only(
        decode_step_seconds=0.01,
        grade_seconds=0.5,
        sync_seconds=3.0,
        step_seconds=2.0,
        learner_pass_seconds=0.25,
        update_seconds=0.75,
    )
    config = config.model_copy(update={"grader_processes": 4})
    found = speed.step(config, workload.of(config, known()), shape, ROUND, numbers, kv_tokens=1e9)
    assert found.phases["grade"] == 128 / 2 / 4 * 0.5
    assert found.phases["generate"] == pytest.approx(
        49 * 0.01, rel=1e-3
    )  # the first token comes with the prompt
    assert found.phases["update"] == pytest.approx(0.25 + 0.75, rel=1e-3)  # one micro-batch, one update
    assert found.phases["sync"] == pytest.approx(3.0, rel=1e-6) and found.phases["other"] == 2.0
    assert found.step_seconds == pytest.approx(sum(found.phases.values()))
    assert found.samples_per_second == pytest.approx(1 * 64 * 2 / found.step_seconds)
    assert found.completions_per_second == pytest.approx(128 / found.step_seconds)
    assert found.gpu_hours == pytest.approx(4 * (100 * found.step_seconds + found.other_seconds) / 3600)


@pytest.mark.parametrize(
    ("option", "seconds"),
    [
        ({}, 10.12 + 7 + 5),
        ({"drafts_ahead": True}, 5.06 + max(5.06, 7) + 5),
        ({"async_steps": 1}, max(10.12, 7) + 5),
    ],
)
def test_a_step_that_samples_ahead_by_hand(option: dict[str, Any], seconds: float) -> None:
    """Stages of 49 decoding steps at 0.1 s, whose 128 completions 4 processes of 2 ranks grade at 0.01 s each: 5.06 s.

    Learning 1 + 6 s, sync and the rest 3 + 2 s.
    """
    algorithm = {"name": "igrpo", "drafts": 4, "base": {"name": "grpo", "num_generations": 4}}
    config = run_config(algorithm, generation=option, grader_processes=4)
    costs = {"decode_step_seconds": 0.1, "grade_seconds": 0.01, "sync_seconds": 3.0, "step_seconds": 2.0}
    numbers = only(network=1e6, learner_flops=1e6, learner_pass_seconds=1.0, update_seconds=6.0, **costs)
    found = speed.step(config, workload.of(config, known()), model(), ROUND, numbers, kv_tokens=1e9)
    assert found.step_seconds == pytest.approx(seconds, rel=1e-3)
    assert found.low_seconds == found.high_seconds == pytest.approx(found.step_seconds)
    assert found.completions_per_second == pytest.approx(256 / found.step_seconds)
    assert found.by_sampling == pytest.approx(
        {"in_turn": 22.12, "async_steps": 15.12, "drafts_ahead": 17.06}, rel=1e-3
    )
    assert sum(found.phases.values()) == pytest.approx(22.12, rel=1e-3)


def test_the_shorter_of_sampling_and_learning_is_what_sampling_ahead_saves() -> None:
    """GRPO: sampling 4.9 s, learning 1 s; there are no drafts."""
    numbers = only(decode_step_seconds=0.1, network=1e6, learner_flops=1e6, learner_pass_seconds=1.0)
    config = run_config(generation={"async_steps": 1})
    found = speed.step(config, workload.of(config, known()), model(), ROUND, numbers, kv_tokens=1e9)
    assert found.by_sampling == pytest.approx({"in_turn": 5.9, "async_steps": 4.9}, rel=1e-3)


def test_in_process_generation_gains_nothing_ahead_of_its_own_learner() -> None:
    generation = {"backend": "transformers", "async_steps": 1}
    config = run_config(generation=generation, cluster={"nodes": 1, "vllm_nodes": 0})
    found = speed.step(config, workload.of(config, known()), model(), A100)
    assert found.step_seconds == found.by_sampling["in_turn"] == pytest.approx(sum(found.phases.values()))
    assert any("nothing is gained by sampling ahead" in note for note in found.notes)


def test_the_learners_arithmetic_by_hand() -> None:
    """Forward, backward and recomputation of two ranks, at half of 1 TFLOP/s; the head's chunks are computed again."""
    config, shape = run_config(), model(layers=40, parameters=40 * 900 + 2000)
    load = workload.of(config, known())
    layers, head = work.packed_flops(shape, load.trained[0], shared_prefix=True)
    found = speed.step(config, load, shape, ROUND, only(learner_flops=0.5, network=1e6), kv_tokens=1e9)
    assert found.phases["update"] == pytest.approx((4 * layers + 4 * head) / 2 / 0.5e12)
    plain = run_config(train={"gradient_checkpointing": False})
    less = speed.step(plain, load, shape, ROUND, only(learner_flops=0.5, network=1e6), kv_tokens=1e9)
    assert less.phases["update"] == pytest.approx((3 * layers + 4 * head) / 2 / 0.5e12)


def test_collectives_hide_behind_arithmetic_or_bound_it() -> None:
    """Each micro-batch gathers bf16 weights twice and scatters float32 gradients: 8 bytes of half the weights."""
    config, shape = run_config(), model(parameters=10**9)
    found = speed.step(config, workload.of(config, known()), shape, ROUND, only(), kv_tokens=1e9)
    assert found.phases["update"] == pytest.approx(8 * 1e9 / 2 / 1e11)


def test_pruning_makes_the_update_shorter_and_not_the_sampling() -> None:
    base = {"name": "grpo", "num_generations": 16}
    cppo = {"name": "cppo", "pruning_rate": 0.75, "allocation": False, "base": base}
    shape = shapes.known("Qwen/Qwen2.5-7B-Instruct") or model()
    plain, pruned = (
        speed.step(c, workload.of(c, known(100, 1000)), shape, A100)
        for c in (
            run_config(a, generation={"max_completion_length": 1024, "max_prompt_length": 128})
            for a in (base, cppo)
        )
    )
    assert pruned.phases["generate"] == plain.phases["generate"]
    assert 0.2 < pruned.phases["update"] / plain.phases["update"] < 0.45


def test_a_second_peer_model_costs_its_own_passes() -> None:
    algorithm = {"name": "codistill", "num_rollouts": 8, "num_train": 8}
    config = run_config(algorithm, peer={"model_name_or_path": "models/large"})
    small, large = model(), model(layers=8)
    found = speed.step(
        config, workload.of(config, known()), small, ROUND, only(network=1e6), peer=large, kv_tokens=1e9
    )
    alone = (
        4
        * sum(work.packed_flops(large, workload.of(config, known()).trained[1], shared_prefix=True))
        / 2
        / 1e12
    )
    assert found.phases["peer_update"] == pytest.approx(alone)
    assert found.phases["compare"] > 0
    with pytest.raises(ValueError, match="has a peer, whose model is not known"):
        speed.step(config, workload.of(config, known()), small, ROUND)


def test_a_model_of_which_the_size_alone_is_known_is_refused() -> None:
    with pytest.raises(ValueError, match="state space layers, so only its parameters"):
        speed.step(run_config(), workload.of(run_config(), known()), model(kind="state space layers"), ROUND)


def test_the_interval_holds_the_value_and_widens_with_the_spread() -> None:
    config, shape = run_config(), model()
    load = workload.of(config, known())
    found = speed.step(config, load, shape, A100)
    assert found.low_seconds < found.step_seconds < found.high_seconds
    low, high = found.interval(found.samples_per_second, inverse=True)
    assert low < found.samples_per_second < high
    wide = {n: replace(v, low=v.low / 2, high=v.high * 2) for n, v in efficiencies.DEFAULTS.items()}
    wider = speed.step(config, load, shape, A100, wide)
    assert wider.low_seconds < found.low_seconds and wider.high_seconds > found.high_seconds
    exact = speed.step(config, load, shape, A100, only(step_seconds=1.0))
    assert exact.low_seconds == exact.high_seconds == pytest.approx(exact.step_seconds)


def test_two_learner_nodes_gather_over_the_network() -> None:
    """Of a ring over 2 nodes of 2, a node receives half of the weights by its two devices' network share."""
    config = run_config(cluster={"nodes": 3, "gpus_per_node": 2})
    slow = replace(ROUND, network_bytes_per_second=1e9)
    plan = speed.planned(config, workload.of(config, known()), model(), slow)
    assert plan.link_rate == pytest.approx(2 * 1e9 / 0.5)


# ---- hardware


def test_known_devices_have_sources_and_are_found_by_other_names() -> None:
    for name, found in hardware.table().items():
        assert found.sources and found.name == name
        assert all(hardware.find(match).name == name for match in found.matches)
    assert hardware.find("H200").memory_bytes > hardware.find("h100").memory_bytes


def test_an_unknown_device_gets_a_hint_and_a_file_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--hardware h20: .*did you mean h200\?"):
        hardware.find("h20")
    with pytest.raises(ValueError, match=r"nor a file\. A file has the keys"):
        hardware.find("nope")
    path = tmp_path / "own.yaml"
    text = (ROOT / "configs" / "hardware" / "example.yaml").read_text()
    path.write_text(text)
    assert hardware.find(str(path)).memory_bytes_per_second == 1.555e12
    path.write_text(text.replace("42.4e9", "-1"))
    with pytest.raises(ValueError, match=r"memory_bytes is -1, but it must be a number above 0"):
        hardware.find(str(path))
    path.write_text(text.replace("memory_bytes:", "memory_byte:"))
    with pytest.raises(
        ValueError, match=r"memory_bytes is missing; memory_byte is no key \(did you mean memory_bytes\?\)"
    ):
        hardware.find(str(path))


@pytest.mark.parametrize(
    ("cluster", "name"),
    [({"slurm_gres": "gpu:h100:2"}, "h100"), ({"slurm_constraint": "h200"}, "h200"), ({}, "a100-80gb")],
)
def test_the_device_follows_slurms_keys(cluster: dict[str, Any], name: str) -> None:
    assert hardware.of(run_config(cluster=cluster))[0].name == name


def test_a_gpu_is_named_by_a_whole_word_alone() -> None:
    """What merely looks like a device is none: a check would refuse by the memory of another."""
    for key, said, name in (
        ("slurm_gres", "gpu:nvidia_h100:8,nvme:1", "h100"),
        ("slurm_partition", "A100", "a100-80gb"),
        ("slurm_constraint", "ib&(a100_80gb|h200)", "a100-80gb"),
    ):
        found = hardware.named(run_config(cluster={key: said}))
        assert found is not None and (found[0].name, found[1]) == (name, f"cluster.{key} {said}")
    for said in ("gpu:gh200:1", "gpu:h100_nvl:4", "gpu:8"):
        assert hardware.named(run_config(cluster={"slurm_gres": said})) is None


def test_without_gpus_this_machine_is_measured() -> None:
    config = configuration.load(ROOT / "configs" / "quickstart.yaml")
    found, why = hardware.of(config)
    assert found.name == "cpu" and "measured" in why
    assert 1e8 < found.bf16_flops_per_second < 1e13 and 1e8 < found.memory_bytes_per_second < 1e13


# ---- efficiencies


def test_every_efficiency_says_what_it_is_and_lies_in_its_spread() -> None:
    for name, number in efficiencies.DEFAULTS.items():
        assert number.low < number.value < number.high, name
        assert number.what and number.source, name


def test_a_cpu_has_numbers_of_its_own_and_a_gpu_the_defaults() -> None:
    assert efficiencies.of_device("cuda") is efficiencies.DEFAULTS
    own = efficiencies.of_device("cpu")
    assert own.keys() == efficiencies.DEFAULTS.keys()
    assert own["sync_seconds"].high < efficiencies.DEFAULTS["sync_seconds"].low
    assert all(n.low < n.value < n.high for n in own.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file; make one with"),
        ("a: 1", "has no mapping `efficiencies`"),
        (
            "efficiencies: {learner_flop: 0.3}",
            r"learner_flop is no efficiency \(did you mean learner_flops\?\)",
        ),
        ("efficiencies: {learner_flops: high}", "learner_flops: 'high' is no number"),
        ("efficiencies: {learner_flops: {value: 0.3, low: 0.4}}", "needs 0 <= low <= value <= high"),
    ],
)
def test_a_bad_file_of_efficiencies_says_what_is_wrong(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "e.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=said):
        efficiencies.read(path)


# ---- calibration


TRUE = {
    "learner_flops": 0.31,
    "learner_pass_seconds": 0.013,
    "update_seconds": 0.04,
    "generation_flops": 0.22,
    "decode_step_seconds": 0.0035,
    "decode_layer_seconds": 0.0005,
    "request_seconds": 0.0007,
    "grade_seconds": 0.003,
    "sync_seconds": 0.05,
    "step_seconds": 0.03,
}
CPU = Hardware("cpu", "round", "cpu", 8e9, 2e10, 1e10, 1e10, 1e9, 1e9)


def cpu_run(folder: Path, *, name: str, batch: int, length: int, ranks: int) -> tuple[Path, RunConfig]:
    config = configuration.parse(
        {
            "name": name,
            "model_name_or_path": "models/none",
            "algorithm": {"name": "grpo", "num_generations": 8},
            "rewards": {"accuracy": 1.0},
            "data": {"preset": "chain", "max_samples": 4000},
            "generation": {"max_prompt_length": 32, "max_completion_length": length},
            "train": {"train_batch_size": batch},
            "cluster": {"nproc_per_node": ranks},
        }
    )
    (folder / name).mkdir(parents=True)
    (folder / name / "config.yaml").write_text(configuration.to_yaml(config))
    return folder / name, config


def test_calibration_recovers_the_numbers_that_made_the_timings(tmp_path: Path) -> None:
    shape = model(layers=4, hidden=100, intermediate=300, vocabulary=1000, parameters=10**6)
    truth = {**efficiencies.values(efficiencies.DEFAULTS), **efficiencies.CPU, **TRUE}
    prior = efficiencies.CPU
    truth["decode_bandwidth"] = (
        prior["decode_bandwidth"] * truth["generation_flops"] / prior["generation_flops"]
    )
    folders = []
    for i, (batch, length, ranks) in enumerate([(64, 20, 2), (256, 60, 2), (512, 30, 1), (64, 200, 1)]):
        folder, config = cpu_run(tmp_path, name=f"run-{i}", batch=batch, length=length, ranks=ranks)
        phases = speed.planned(config, workload.of(config), shape, CPU, threads=1).phases(truth)
        names = {"other": "exchange"}
        line = {f"timing_cpu_s/{names.get(k, k)}": v for k, v in phases.items()}
        line |= {"timing_cpu_s/update/optimizer": 99.0}  # a part of its phase
        line |= {"timing_s/update": 1.0, "timing_cpu_s/explore": 99.0, "timing_cpu_s/save": 99.0}
        warm_up = {key: 10 * value for key, value in line.items()}
        steps = [{"step": n, **(warm_up if n == 1 else line)} for n in (1, 2, 3)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
        folders.append(folder)
    found = calibrate.fit(folders, CPU, lambda name: shape)
    assert all(ratio == pytest.approx(1, rel=0.03) for ratio in found.step_ratio.values())
    for name in ("learner_flops", "grade_seconds", "step_seconds"):
        assert found.numbers[name].value == pytest.approx(TRUE[name], rel=0.15), name
        assert found.numbers[name].low < found.numbers[name].value < found.numbers[name].high
    # Models of one depth tell only the sum of what a decoding step and its layers cost.
    decoding_step = (
        found.numbers["decode_step_seconds"].value + 4 * found.numbers["decode_layer_seconds"].value
    )
    assert decoding_step == pytest.approx(
        TRUE["decode_step_seconds"] + 4 * TRUE["decode_layer_seconds"], rel=0.15
    )
    path = tmp_path / "e.yaml"
    calibrate.write(found, path)
    numbers, extra = efficiencies.read(path)
    assert numbers["grade_seconds"].value == pytest.approx(found.numbers["grade_seconds"].value, rel=1e-4)
    assert calibrate.machine_of(extra, replace(CPU, bf16_flops_per_second=1.0)).bf16_flops_per_second == 2e10


def test_one_run_fixes_each_phases_sum(tmp_path: Path) -> None:
    """What one run cannot tell apart keeps the defaults' proportion; the phase's time is met all the same."""
    folder, config = cpu_run(tmp_path, name="one", batch=64, length=20, ranks=1)
    lines = [
        {"step": n, "timing_s/update": 2.0, "timing_cpu_s/update": 2.0, "timing_cpu_s/generate": 3.0}
        for n in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shape = model(parameters=10**5)
    found = calibrate.fit([folder], CPU, lambda name: shape)
    plan = speed.planned(config, workload.of(config), shape, CPU, threads=1)
    phases = plan.phases(efficiencies.values(found.numbers))
    assert phases["update"] == pytest.approx(2.0, rel=0.02) and phases["generate"] == pytest.approx(
        3.0, rel=0.02
    )


def test_calibration_needs_a_run_with_measured_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run's folder"):
        calibrate.measured(tmp_path)
    folder, _ = cpu_run(tmp_path, name="short", batch=64, length=20, ranks=1)
    (folder / "metrics.jsonl").write_text('{"step": 1, "timing_s/update": 1.0}\n')
    with pytest.raises(ValueError, match="1 measured steps, but the first is a warm-up"):
        calibrate.measured(folder)


def test_calibration_needs_phases_that_were_measured_alone(tmp_path: Path) -> None:
    folder, config = cpu_run(tmp_path, name="ahead", batch=64, length=20, ranks=1)
    ahead = config.model_copy(update={"generation": config.generation.model_copy(update={"async_steps": 1})})
    (folder / "config.yaml").write_text(configuration.to_yaml(ahead))
    with pytest.raises(ValueError, match=r"samples ahead \(generation.async_steps\)"):
        calibrate.measured(folder)


# ---- sweeps and the command


@pytest.mark.parametrize("text", ["nodes", "cluster.nodes=", "=3", "a b=1,2"])
def test_a_sweep_is_written_as_key_and_values(text: str) -> None:
    with pytest.raises(ValueError, match=r"write it as key\.sub=a,b,c"):
        sweep.parse([text])


def test_a_sweep_of_too_many_or_one_key_twice_is_refused() -> None:
    many = ",".join(map(str, range(30)))
    with pytest.raises(ValueError, match="900 combinations"):
        sweep.parse([f"a={many}", f"b={many}"])
    with pytest.raises(ValueError, match="a is swept already"):
        sweep.parse(["a=1", "a=2"])
    assert sweep.parse(["a=2,3,2", "b=1"]) == {"a": ["2", "3"], "b": ["1"]}


def asked(config: str | None = None, **changes: Any) -> Namespace:
    values: dict[str, Any] = {
        "config": config,
        "overrides": [],
        "hardware": None,
        "efficiencies": None,
        "lengths": None,
        "trace": False,
        "sweep": [],
        "within": None,
        "paper": False,
        "calibrate": [],
        "output": None,
        "price_per_gpu_hour": None,
        "json": True,
    }
    return Namespace(**{**values, **changes})


IGRPO = str(ROOT / "configs" / "igrpo_7b.yaml")


def test_plan_says_memory_time_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.plan(asked(IGRPO, price_per_gpu_hour=2.0)) == 0
    said = json.loads(capsys.readouterr().out)
    learner = said["memory"]
    assert sum(learner["learner"].values()) / 1e9 == pytest.approx(learner["peak_memory_gb"], rel=1e-3)
    time = said["time"]
    assert sum(time["phase_seconds"].values()) == pytest.approx(time["step_seconds"])
    assert time["cost"] == pytest.approx(2 * time["gpu_hours"]) and time["devices"] == 16
    assert said["disk"]["checkpoint_bytes"] == 14 * said["parameters"]
    assert said["assumptions"]


def test_plan_takes_the_configuration_of_a_run_by_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.plan(asked(IGRPO)) == 0
    said = capsys.readouterr().out
    (tmp_path / "config.yaml").write_text(configuration.to_yaml(configuration.load(IGRPO)))
    assert command.plan(asked(str(tmp_path))) == 0
    assert capsys.readouterr().out == said
    with pytest.raises(
        configuration.ConfigError,
        match=r"is a folder without config\.yaml; give a YAML file, or the folder of",
    ):
        command.plan(asked(str(tmp_path.parent)))


def test_plan_prints_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.plan(asked(IGRPO, json=False)) == 0
    said = capsys.readouterr().out
    assert "GPU-hours" in said.replace("gpu-hours", "GPU-hours") and "assumed: completions of" in said


def test_a_sweep_names_what_does_not_fit_and_the_cheapest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "s.png"
    axes = ["cluster.nodes=2,3,5", "cluster.gpus_per_node=1,8"]
    assert command.plan(asked(IGRPO, sweep=axes, within=30.0, output=str(picture))) == 0
    said = json.loads(capsys.readouterr().out)
    rows = {(r["settings"]["cluster.nodes"], r["settings"]["cluster.gpus_per_node"]): r for r in said["rows"]}
    one = rows["2", "1"]  # 7.6 G parameters x 16 bytes on a single GPU
    assert not one["fits"] and one["over_gb"] > 30 and "GB too large" in one["why_not"]
    able = [r for r in said["rows"] if r["fits"] and r["run_hours_interval"][1] <= 30]
    assert said["cheapest"] == min(able, key=lambda r: r["gpu_hours"])["settings"]
    assert rows["5", "8"]["run_hours"] < rows["2", "8"]["run_hours"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("axis", "said"),
    [
        ("cluster.node=2,3", "cluster.node: unknown key; did you mean nodes"),
        ("algorithm.base.epsilonn=0.1,0.2", "base.epsilonn: grpo has no such option .did you mean epsilon"),
        (
            "train.learning_rate=-1,many",
            "learning_rate: Input should be greater than 0.*learning_rate: .*a valid number",
        ),
    ],
)
def test_a_sweep_of_which_no_value_is_taken_is_an_error_and_draws_nothing(
    axis: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(configuration.ConfigError, match=re.compile(said, re.DOTALL)):
        command.plan(asked(IGRPO, sweep=["seed=0,1", axis]))
    assert not list(tmp_path.iterdir())


def test_a_value_that_is_not_valid_is_told_from_one_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    changes = {
        "overrides": ["train.per_device_train_batch_size=null"],
        "sweep": ["train.train_batch_size=1020,1024"],
    }
    assert command.plan(asked(IGRPO, **changes)) == 0
    wrong, right = json.loads(capsys.readouterr().out)["rows"]
    assert (wrong["valid"], wrong["fits"], right["valid"], right["fits"]) == (True, True, True, True)
    changes["sweep"] = ["train.train_batch_size=1022,1024"]  # no multiple of four
    assert command.plan(asked(IGRPO, **changes, json=False)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "train.train_batch_size=1022: the configuration does not take it: " in said and "not valid" in said
    assert "cheapest: train.train_batch_size=1024" in said
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.png")] == ["logs/igrpo-7b/plan-sweep.png"]


def test_a_sweep_whose_rows_are_of_unlike_batches_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 completions x 8 passes of each of 8 and 32 ranks."""
    asking = {"sweep": ["cluster.nodes=2,5"], "output": str(tmp_path / "s.png")}
    assert command.plan(asked(IGRPO, **asking)) == 0
    said = json.loads(capsys.readouterr().out)
    assert [row["train_batch_size"] for row in said["rows"]] == [1024, 4096]
    assert "1,024 to 4,096 completions" in said["notes"][0]
    held = [text for text in said["notes"][0].split() if text.startswith("train.") and "=" in text]
    assert command.plan(asked(IGRPO, **asking, overrides=held)) == 0
    said = json.loads(capsys.readouterr().out)
    assert [row["train_batch_size"] for row in said["rows"]] == [1024, 1024] and not said["notes"]
    assert {row["steps"] for row in said["rows"]} == {29}


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_sweeps_table_is_never_cut(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(tmp_path)
    axes = ["cluster.nodes=2,3", "generation.max_completion_length=2048,16384"]
    assert command.plan(asked(IGRPO, sweep=axes, output="s.png", json=False)) == 0
    said = capsys.readouterr().out
    assert "…" not in said and all(len(line) <= max(width, 80) for line in said.splitlines())
    assert ("what if" in said) == (width >= 80)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "which run"),
        ({"config": IGRPO, "paper": True}, "has its own configurations"),
        ({"config": IGRPO, "within": 3.0}, "chooses among the rows of a --sweep"),
        ({"paper": True, "calibrate": ["logs/x"]}, "different questions"),
        ({"config": IGRPO, "price_per_gpu_hour": -1.0}, "a price of 0 or more"),
        ({"config": IGRPO, "hardware": "b300"}, "neither a known device"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        command.plan(asked(**{"config": None, **changes}))


def test_plan_takes_less_than_two_seconds_and_no_torch() -> None:
    """Of CPU time, start of Python included: the clock of a shared machine tells little."""
    code = (
        "import sys, time; from argparse import Namespace; from hpcgrpo.planner import command;"
        f" command.plan(Namespace(**{vars(asked(IGRPO))!r}));"
        " print(time.process_time(), 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_quiet())
    assert done.returncode == 0, done.stderr
    seconds, torch_loaded = done.stderr.split()[-2:]
    assert torch_loaded == "False" and float(seconds) < 2.0


def _quiet() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}


# ---- on this CPU, for real

FITTED_TO: tuple[dict[str, Any], ...] = (
    {"model": "small", "batch": 64, "length": 16},
    {"model": "wide", "batch": 128, "length": 32},
    {"model": "deep", "batch": 64, "length": 32, "drafts": True},
    {"model": "small", "batch": 64, "length": 16, "drafts": True},
)
HELD_OUT: tuple[dict[str, Any], ...] = (
    {"model": "broad", "batch": 128, "length": 48},
    {"model": "small", "batch": 128, "length": 24, "drafts": True},
    {"model": "wide", "batch": 64, "length": 24, "pruning": 0.5},
    {"model": "small", "batch": 256, "length": 16, "ranks": 1},
    {"model": "deep", "batch": 64, "length": 64, "iterations": 2},
)
MODELS = {
    "small": (128, 2, 4),
    "wide": (256, 4, 4),
    "deep": (128, 4, 2),
    "broad": (256, 2, 8),
}  # hidden, layers, heads


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(
    not os.environ.get("HPCGRPO_CALIBRATE"),
    reason="nine trainings whose times other work on the cores shifts: set HPCGRPO_CALIBRATE=1 on an idle machine",
)
def test_steps_are_predicted_within_a_quarter_after_calibration(tmp_path: Path) -> None:
    """Real runs under torchrun; CPU-seconds of rank 0, medians over steps, since other work shares the cores."""
    from hpcgrpo import tiny

    for name, (hidden, layers, heads) in MODELS.items():
        built = tiny.build_tiny_model(hidden=hidden, layers=layers, heads=heads)
        tiny.save(built, tiny.build_character_tokenizer(), tmp_path / name)
    folders: dict[str, Path] = {}
    for i in range(
        max(len(FITTED_TO), len(HELD_OUT))
    ):  # in turn, so that what else the machine does meets both alike
        for kind, specs in (("fitted", FITTED_TO), ("new", HELD_OUT)):
            if i < len(specs):
                folders[f"{kind}-{i}"] = _trained(tmp_path, f"{kind}-{i}", **specs[i])
    fitted, new = ([f for n, f in folders.items() if n.startswith(kind)] for kind in ("fitted", "new"))
    machine = hardware.measured_cpu()
    found = calibrate.fit(fitted, machine, prediction.shape_of)
    ratios = {}
    for folder in new:
        seen = calibrate.measured(folder)
        guessed = calibrate.predicted(seen, folder, machine, found.numbers, prediction.shape_of)
        ratios[folder.name] = sum(guessed.values()) / seen.step_seconds
    print("predicted over measured:", {k: round(v, 2) for k, v in ratios.items()})
    assert all(abs(ratio - 1) <= 0.25 for ratio in ratios.values()), ratios


def _trained(
    folder: Path,
    name: str,
    *,
    model: str,
    batch: int,
    length: int,
    ranks: int = 2,
    iterations: int = 1,
    **method: Any,
) -> Path:
    base: dict[str, Any] = {"name": "grpo", "num_generations": 4 if "drafts" in method else 8}
    algorithm = base
    if "drafts" in method:
        algorithm = {
            "name": "igrpo",
            "drafts": 4,
            "refine_template": "{question}#{draft}#{question}",
            "base": base,
        }
    if "pruning" in method:
        algorithm = {"name": "cppo", "pruning_rate": method["pruning"], "base": base}
    values = {
        "name": name,
        "model_name_or_path": str(folder / model),
        "algorithm": algorithm,
        "rewards": {"accuracy": {"weight": 1.0, "require_box_or_tag": False}},
        "data": {"preset": "chain", "max_samples": 4000, "options": {"digits": 8}},
        "generation": {"max_prompt_length": 96, "max_completion_length": length},
        "train": {
            "train_batch_size": batch,
            "max_steps": 7,
            "num_iterations": iterations,
            "save_steps": 1000,
        },
        "cluster": {"nproc_per_node": ranks, "threads_per_rank": 1},
        "report_to": [],
        "output_dir": str(folder / "logs"),
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(values))
    done = subprocess.run(
        [sys.executable, "-m", "hpcgrpo.cli", "train", str(path)],
        capture_output=True,
        text=True,
        env=_quiet(),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "logs" / name
