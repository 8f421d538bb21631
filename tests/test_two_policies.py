"""Two policies through the real loop: CoDistill's small and large one, and a frozen teacher."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from runs import hpcgrpo, metrics, rollouts, tensors, undocumented
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
PROGRAMS = Path(__file__).parent / "programs"
CONFIG = """
name: run
model_name_or_path: {folder}/small
peer: {{model_name_or_path: {folder}/large, learning_rate: 5.0e-4}}
algorithm: {{name: codistill, num_rollouts: 6, num_train: 4, hint_tokens: 2}}
rewards: {{accuracy: {{weight: 1.0, require_box_or_tag: false}}, overlong: {{weight: 0.5, cache_length: 4}}}}
data: {{preset: chain, max_samples: 16, options: {{digits: 4}}}}
generation: {{max_prompt_length: 32, max_completion_length: 8}}
train: {{train_batch_size: 8, max_steps: 6, num_iterations: 2, learning_rate: 1.0e-3, save_steps: 2,
        lr_scheduler_type: constant, save_total_limit: null}}
eval: {{data: {{preset: chain, split: test, max_samples: 8, options: {{digits: 4}}}}, num_samples: 8, peer: true}}
output_dir: {folder}/logs
"""
SAME = "{name: codistill, num_rollouts: 4, num_train: 4, downsample: none, kd_alpha: 0.0}"
DR_GRPO = "{name: dr_grpo, num_generations: 4}"
FROZEN = "peer.learning_rate=null"  # a teacher does not train
ONE_UPDATE = ["train.num_iterations=1", "train.max_steps=1", "eval=null"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small and a large untrained model of one tokenizer, and `run.yaml`."""
    from hpcgrpo import tiny

    folder = tmp_path_factory.mktemp("two")
    tokenizer = tiny.build_character_tokenizer()
    tiny.save(tiny.build_tiny_model(seed=1, hidden=64, layers=1, heads=2), tokenizer, folder / "small")
    tiny.save(tiny.build_tiny_model(seed=0), tokenizer, folder / "large")
    (folder / "run.yaml").write_text(CONFIG.format(folder=folder))
    return folder


VARIANTS: dict[str, Sequence[str]] = {
    "as the paper": ["train.max_steps=4", "data.max_samples=4"],
    "in the loss, after the small update": [
        "algorithm={name: codistill, num_rollouts: 6, num_train: 4, kd_placement: loss, large_ratio: after_small}",
        "train.max_steps=2",
    ],
    "after the norm, sequence level": [
        "algorithm={name: codistill, num_rollouts: 6, num_train: 4, kd_placement: advantage_post_norm, adv_scale: std,"
        " large_is_level: sequence, large_is_clip: truncate, kd_estimator: k3, large_reward: effective}",
        "train.max_steps=2",
    ],
    "igrpo of codistill": [
        "algorithm={name: igrpo, drafts: 2, base: {name: codistill, num_rollouts: 6, num_train: 4, hint_tokens: 3}}",
        "train.max_steps=2",
    ],
    "kdrl": [
        "algorithm={name: kdrl, base: {name: grpo, num_generations: 4}}",
        FROZEN,
        "train.max_steps=2",
        "eval=null",
    ],
    "opd": [
        "algorithm={name: opd, base: {name: grpo, num_generations: 4, epsilon_high: 0.28}}",
        FROZEN,
        "train.max_steps=2",
        "eval=null",
    ],
    "opd of itself": [
        "algorithm={name: opd, base: {name: dr_grpo, num_generations: 4}}",
        FROZEN,
        "peer.model_name_or_path={folder}/small",
        *ONE_UPDATE,
    ],
    "same models": [f"algorithm={SAME}", "peer.model_name_or_path={folder}/small", *ONE_UPDATE],
    "dr_grpo": [f"algorithm={DR_GRPO}", "peer=null", *ONE_UPDATE],
    "both stages": [
        "algorithm={name: igrpo, drafts: 4, train_drafts: true, base: {name: grpo, num_generations: 4}}",
        "peer=null",
        "eval=null",
        "train.max_steps=2",
    ],
}


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, tuple[Path, list[dict]]]:
    """Every variant's folder and metrics lines with a learning step, from one process."""
    filled = [[o.replace("{folder}", str(folder)) for o in overrides] for overrides in VARIANTS.values()]
    done = subprocess.run(
        [
            sys.executable,
            str(PROGRAMS / "two_policies.py"),
            str(folder / "run.yaml"),
            *map(json.dumps, filled),
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {
        name: (Path(line["folder"]), [s for s in line["steps"] if s["step"]])
        for name, line in zip(VARIANTS, lines, strict=True)
    }


def test_every_number_is_explained(runs: dict[str, tuple[Path, list[dict]]]) -> None:
    assert undocumented({name for _, lines in runs.values() for line in lines for name in line}) == []


def weights(run: Path, step: int, policy: str = "") -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/checkpoint-{step}" / policy / "model.safetensors")


def test_every_variant_trains_and_its_numbers_are_finite(runs: dict[str, tuple[Path, list[dict]]]) -> None:
    for name, (_, steps) in runs.items():
        assert steps, name
        for step in steps:
            assert all(math.isfinite(v) for v in step.values()), (name, step)
            assert step["skipped_updates"] == 0, name


def test_both_policies_move_and_the_small_one_samples(
    folder: Path, runs: dict[str, tuple[Path, list[dict]]]
) -> None:
    run, steps = runs["as the paper"]
    for policy, start in (("", "small"), ("peer", "large")):
        before, after = load_file(folder / start / "model.safetensors"), weights(run, 4, policy)
        assert before.keys() == after.keys()
        assert sum(not torch.equal(before[k], after[k]) for k in before) > 5, policy
    for step in steps:
        assert (step["completions/sampled"], step["completions/kept"]) == (12, 8)
        assert step["updates"] == step["peer/updates"] == 2
        assert step["learning_rate"] == pytest.approx(1e-3)
        assert step["peer/learning_rate"] == pytest.approx(5e-4)
        assert step["kd/reverse_kl"] > 0  # two models that were never trained together
    clipped = [step["peer/clip_ratio/region_mean"] for step in steps if step["reward_std"] > 0]
    assert clipped and max(clipped) > 0  # active at once: the ratio is over another policy
    assert {"eval/accuracy", "eval/peer/accuracy"} <= steps[-1].keys()


def test_hints_are_of_the_first_pass_over_the_data_only(runs: dict[str, tuple[Path, list[dict]]]) -> None:
    """4 questions, 2 a step: the first two of four steps are the first pass."""
    run, steps = runs["as the paper"]
    assert [step.get("completions/hinted", 0.0) for step in steps] == [1.0, 1.0, 0.0, 0.0]
    rows = [json.loads(line) for line in (run / "rollouts/step-000001.jsonl").read_text().splitlines()]
    assert all(row["hint_length"] == min(2, len(row["token_ids"])) for row in rows)


def test_with_equal_models_and_no_kd_both_are_dr_grpo(runs: dict[str, tuple[Path, list[dict]]]) -> None:
    """Section 8, invariant 7: small loss = Dr. GRPO's, large ratios 1, large loss = small loss."""
    run, (step,) = runs["same models"]
    _, (plain,) = runs["dr_grpo"]
    assert step["kd/reverse_kl"] == 0
    for key in ("loss", "grad_norm", "reward", "entropy"):
        assert step[key] == pytest.approx(plain[key], abs=1e-6), key
        if key != "reward":
            assert step[f"peer/{key}"] == pytest.approx(step[key], abs=1e-6), key
    assert step["peer/clip_ratio/region_mean"] == 0
    assert step["grad_norm"] > 1e-3
    dr = weights(runs["dr_grpo"][0], 1)
    small = weights(run, 1)
    for name, tensor in small.items():
        assert torch.allclose(tensor, dr[name], atol=1e-6), name


def test_a_teacher_is_frozen_and_one_that_is_the_student_teaches_nothing(
    runs: dict[str, tuple[Path, list[dict]]],
) -> None:
    run, steps = runs["opd"]
    assert not (run / "checkpoints/checkpoint-2/peer").exists()
    assert steps[0]["kd/reverse_kl"] > 0
    _, (own,) = runs["opd of itself"]
    assert own["kd/reverse_kl"] == pytest.approx(0, abs=1e-6)
    assert own["grad_norm"] == pytest.approx(0, abs=1e-5)


def test_both_stages_train_twice_as_many_completions(runs: dict[str, tuple[Path, list[dict]]]) -> None:
    _, steps = runs["both stages"]
    for step in steps:
        assert (step["completions/sampled"], step["completions/kept"]) == (8, 8)


def test_two_ranks_change_nothing_for_either_policy(folder: Path) -> None:
    common = ("train.max_steps=2", "train.learning_rate=2e-4", "peer.learning_rate=2e-4", "eval=null",
              "train.max_tokens_per_device=96")  # fmt: skip
    for ranks in (1, 2):
        done = hpcgrpo(
            "train",
            str(folder / "run.yaml"),
            f"name=ranks{ranks}",
            *common,
            f"cluster.nproc_per_node={ranks}",
        )
        assert done.returncode == 0, done.stdout + done.stderr
    one, two = folder / "logs/ranks1", folder / "logs/ranks2"
    for expected, found in zip(metrics(one), metrics(two), strict=True):
        for key in ("loss", "grad_norm", "kd/reward", "peer/loss", "peer/grad_norm", "peer/entropy"):
            assert found[key] == pytest.approx(expected[key], abs=1e-5), key
    for policy in ("", "peer"):
        a, b = weights(one, 2, policy), weights(two, 2, policy)
        assert all((a[k] - b[k]).abs().max() <= 1e-5 for k in a), policy


def test_a_killed_run_ends_bit_equal_for_both_policies(folder: Path, tmp_path: Path) -> None:
    for name, points in (("whole", ["end"]), ("killed", ["learn:3", "explore:5", "end"])):
        done = subprocess.run(
            [sys.executable, str(PROGRAMS / "killed_runs.py"), str(folder), name, *points],
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    whole, killed = folder / "logs/whole", folder / "logs/killed"
    expected, found = (tensors(run / "checkpoints/checkpoint-6/state", tmp_path) for run in (whole, killed))
    assert expected.keys() == found.keys()
    assert sum(key.startswith("/peer/optimizer") for key in expected) > 10
    for key, tensor in expected.items():
        assert torch.equal(tensor, found[key]), key
    assert metrics(killed) == metrics(whole)
    assert rollouts(killed) == rollouts(whole)
