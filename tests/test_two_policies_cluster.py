"""CoDistill on a real Slurm: one node serves both policies with vLLM, the other one learns them on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, write_cluster_config
from safetensors.torch import load_file
from test_cluster import greedy, rows

from hpcgrpo import tiny
from hpcgrpo.journal import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]  # two engines start twice
STEPS = 3
HELD_OUT = 12
EVAL = (
    f"eval={{data: {{preset: chain, max_samples: {HELD_OUT}, seed: 1, options: {{digits: 4}}}},"
    f" num_samples: {HELD_OUT}, every_steps: 1, peer: true}}"
)
CODISTILL = "algorithm={name: codistill, num_rollouts: 6, num_train: 4, hint_tokens: 2}"


@pytest.fixture(scope="module")
def run(session_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of four questions; hints in the first pass over the data, which is two steps. A rank is killed."""
    folder = tmp_path_factory.mktemp("codistill")
    config = write_cluster_config(
        folder, name="codistill", nodes=2, vllm_nodes=1, nproc=2, backend="vllm", steps=STEPS, save_steps=1,
        step_seconds=3.0,
    )  # fmt: skip
    small = tiny.build_tiny_model(seed=3, hidden=64, layers=1, heads=2)
    tiny.save(small, tiny.build_character_tokenizer(), folder / "small")
    overrides = [
        f"model_name_or_path={folder}/small",
        f"peer={{model_name_or_path: {folder}/model}}",
        CODISTILL,
        EVAL,
        "data.max_samples=8",
        "generation.vllm_server_timeout=400",
        "train.learning_rate=5e-3",
    ]
    job = session_cluster.submit(config, *overrides)
    found = folder / "logs" / "codistill"

    def steps() -> int:
        return sum(m["step"] > 0 for m in read_metrics(found))

    session_cluster.until(lambda: steps() >= 1, "a first step", timeout_seconds=500)
    session_cluster.kill(session_cluster.processes(r"hpcgrpo\S* rank ")[:1])
    session_cluster.wait_for(job, "COMPLETED", timeout_seconds=600)
    return found


def test_both_servers_answer_as_their_learners(run: Path) -> None:
    """After every sync each policy's engine answers as plain transformers does on that policy's weights."""
    start = run.parents[1]
    for step in range(STEPS + 1):
        checkpoint = run / "checkpoints" / f"checkpoint-{step}"
        actor, peer = (start / "small", start / "model") if step == 0 else (checkpoint, checkpoint / "peer")
        answers = rows(run, f"eval-{step:06d}")
        for stage, weights in (("eval", actor), ("eval/peer", peer)):
            mine = [row for row in answers if row["stage"] == stage]
            assert len(mine) == HELD_OUT
            expected = greedy(weights, [row["prompt"] for row in mine], 8)
            assert [row["token_ids"] for row in mine] == expected, (step, stage)
    for policy in ("", "peer"):
        first, last = (
            load_file(run / f"checkpoints/checkpoint-{s}" / policy / "model.safetensors") for s in (1, 3)
        )
        assert any((first[name] != last[name]).any() for name in first), policy


def test_no_step_is_lost_and_hints_end_with_the_first_pass(run: Path) -> None:
    lines = [m for m in read_metrics(run) if m["step"] > 0]
    assert [m["step"] for m in lines] == [1, 2, 3]
    assert [m.get("completions/hinted", 0.0) for m in lines] == [1.0, 1.0, 0.0]
    samples: list[dict[str, Any]] = [row for s in (1, 2, 3) for row in rows(run, f"step-{s:06d}")]
    assert sorted({row["position"] for row in samples}) == list(range(12))
    for line in lines:
        assert line["completions/sampled"] == 24 and line["completions/kept"] == 16
        assert line["sampling/sampling_logp_difference/max"] < 1e-2
    attempts = sorted(p.name for p in (run / "slurm").glob("*.*") if p.is_dir())
    assert len(attempts) == 2  # the first one and the one after the kill
    server = json.loads((run / "slurm" / attempts[-1] / "server.json").read_text())
    assert [engine["policy"] for engine in server["engines"]] == ["actor", "peer"]
