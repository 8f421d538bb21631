"""Every algorithm, bare and wrapped, through the real loop: two steps on a tiny model."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from runs import undocumented, write_config

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parent / "programs" / "every_algorithm.py"
G = "num_generations: 4"
SPECS = {
    "grpo": f"{{name: grpo, {G}, beta: 0.01}}",
    "dr_grpo": f"{{name: dr_grpo, {G}}}",
    "dapo": f"{{name: dapo, {G}, max_generation_batches: 3}}",
    "gspo": f"{{name: gspo, {G}}}",
    "gmpo": f"{{name: gmpo, {G}}}",
    "bnpo": f"{{name: bnpo, {G}, reward_min: -1.0, reward_max: 1.0}}",
    "igrpo": f"{{name: igrpo, drafts: 2, base: {{name: grpo, {G}}}}}",
    "igrpo of dapo": f"{{name: igrpo, drafts: 2, base: {{name: dapo, {G}, max_generation_batches: 2}}}}",
    "igrpo of cppo of dapo": (
        f"{{name: igrpo, drafts: 2, base: {{name: cppo, pruning_rate: 0.5, base: {{name: dapo, {G}}}}}}}"
    ),
    "cppo, global": f"{{name: cppo, pruning_rate: 0.75, prune_scope: global, base: {{name: grpo, {G}}}}}",
    "cppo of gspo, no allocation": f"{{name: cppo, pruning_rate: 0.5, allocation: false, base: {{name: gspo, {G}}}}}",
    "pods": f"{{name: pods, num_train: 2, base: {{name: grpo, {G}}}}}",
    "igrpo of gfpo": f"{{name: igrpo, drafts: 2, base: {{name: gfpo, num_train: 2, base: {{name: grpo, {G}}}}}}}",
    "cppo of gfpo": (
        f"{{name: cppo, pruning_rate: 0.5, base: {{name: gfpo, num_train: 2, metric: efficiency,"
        f" base: {{name: grpo, {G}}}}}}}"
    ),
    "dapo, nothing ever varies": f"{{name: dapo, {G}, max_generation_batches: 1, mask_truncated_completions: true}}",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("every")
    write_config(folder)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), *SPECS.values()],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {name: line["steps"] for name, line in zip(SPECS, lines, strict=True)}


@pytest.mark.parametrize("name", SPECS)
def test_it_trains_and_its_numbers_are_finite(runs: dict[str, list[dict]], name: str) -> None:
    steps = runs[name]
    assert [s["step"] for s in steps] == [1, 2]
    for step in steps:
        assert all(math.isfinite(v) for v in step.values()), step
        if step["completions/kept"]:
            assert step["updates"] == 2  # num_iterations
            assert step["skipped_updates"] == 0
        else:  # a step that has nothing to learn from makes no update and the run goes on
            assert step["updates"] == 0


def test_every_number_is_explained(runs: dict[str, list[dict]]) -> None:
    assert undocumented({name for steps in runs.values() for step in steps for name in step}) == []


def test_what_each_samples_and_keeps(runs: dict[str, list[dict]]) -> None:
    """8 completions trained per step: groups of 4, or what CPPO leaves of more of them."""
    first = {name: steps[0] for name, steps in runs.items()}
    sampled_and_kept = {n: (s["completions/sampled"], s["completions/kept"]) for n, s in first.items()}
    assert sampled_and_kept["grpo"] == (8, 8)
    assert sampled_and_kept["igrpo"] == (2 * (2 + 4), 8)
    assert sampled_and_kept["cppo, global"] == (32, 8)
    assert sampled_and_kept["pods"] == (16, 8)
    assert sampled_and_kept["igrpo of gfpo"] == (4 * (2 + 4), 8)
    assert sampled_and_kept["cppo of gfpo"] == (8 * 4, 8)
    assert sampled_and_kept["cppo of gspo, no allocation"] == (8, 4)
