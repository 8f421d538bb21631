"""ZeRO-3 on two real gloo ranks: the same steps as FSDP2's, exact resume, resharding, an export that loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import hpcgrpo, metrics, tensors, write_config
from safetensors.torch import load_file

from hpcgrpo.learning import deepspeed

PROGRAM = Path(__file__).parent / "programs" / "deepspeed_ranks.py"
CASES = ("tied, checkpointed", "nothing whole", "bf16")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, and what the program measured on two ranks and then on one."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    pytest.importorskip("deepspeed", reason="pip install 'hpcgrpo[deepspeed]'")
    folder = tmp_path_factory.mktemp("deepspeed")
    for name, tied in (("untied", False), ("tied", True)):
        torch.manual_seed(0)
        config = Qwen2Config(  # sizes that two ranks do not share evenly
            vocab_size=51, hidden_size=60, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
            intermediate_size=97, tie_word_embeddings=tied, initializer_range=0.1, pad_token_id=0,
        )  # fmt: skip
        Qwen2ForCausalLM(config).save_pretrained(folder / name)
    run(folder, ranks=2)
    run(folder, ranks=1)
    return folder


def run(folder: Path, ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, PROGRAM, folder], capture_output=True, text=True, timeout=280, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def measured(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "ranks2.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_those_of_fsdp(measured: dict[str, Any], case: str) -> None:
    """The weights are float32 masters in bfloat16 as well: at the start the model's own values."""
    found = measured[case]
    assert found["at the start"] == 0.0
    assert found["grad_norm"] > 0.06, "clipping must take part"
    assert found["moved"] > 1e-3
    differences = found["metrics"]
    assert max(differences[name] for name in ("loss", "grad_norm", "skipped_updates")) <= 1e-5
    assert max(differences.values()) <= 1e-3, differences  # sums over some hundred tokens
    assert found["first moments"] <= 1e-8 and found["second moments"] <= 1e-8
    assert found["warmer"] <= 1e-5  # log-probs at another temperature
    assert found["weights"] <= 1e-5


@pytest.mark.slow
def test_a_resumed_run_is_bit_equal_and_a_broken_step_leaves_no_trace(measured: dict[str, Any]) -> None:
    assert measured["resumed"] == {
        "skipped": 1.0,
        "untouched": True,
        "weights": True,
        "moments": True,
        "steps": [4.0, 4.0],
    }


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_with_one(folder: Path) -> None:
    found = json.loads((folder / "ranks1.json").read_text())
    assert found["third"] == 0.0
    assert found["fourth"] <= 1e-5


@pytest.mark.slow
def test_the_export_loads_in_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "checkpoint-3")
    trained = load_file(folder / "third.safetensors")
    loaded = dict(model.named_parameters())
    assert trained.keys() == loaded.keys()
    assert all(torch.equal(trained[name], loaded[name]) for name in trained)


@pytest.mark.long
@pytest.mark.slow
def test_a_run_on_the_command_line_resumes_and_equals_one_with_fsdp(tmp_path: Path) -> None:
    """Two ranks with ZeRO-3, ended after two steps and taken up again, against three steps of one rank with FSDP2."""
    pytest.importorskip("deepspeed", reason="pip install 'hpcgrpo[deepspeed]'")
    config = write_config(tmp_path)
    common = (
        f"output_dir={tmp_path}/logs", "train.max_tokens_per_device=64", "train.learning_rate=2e-4",
        "train.lr_scheduler_type=constant", "train.warmup_ratio=0",
    )  # fmt: skip
    for name, ranks, steps in (("fsdp", 1, 3), ("deepspeed", 2, 2), ("deepspeed", 2, 3)):
        done = hpcgrpo(
            "train", str(config), *common, f"name={name}", f"train.learner={name}", f"train.max_steps={steps}",
            f"cluster.nproc_per_node={ranks}", timeout_seconds=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    one, other = (tmp_path / "logs" / name for name in ("fsdp", "deepspeed"))
    for expected, found in zip(metrics(one), metrics(other), strict=True):
        for key in ("loss", "grad_norm", "kl", "entropy", "reward"):
            assert found[key] == pytest.approx(expected[key], abs=1e-5), key
    state = tensors(other / "checkpoints/checkpoint-3/state", tmp_path)
    assert any(key.startswith("/optimizer/exp_avg_sq/") for key in state), "ZeRO's own state"
    weights, others = (load_file(run / "checkpoints/checkpoint-3/model.safetensors") for run in (one, other))
    assert weights.keys() == others.keys()
    assert all((weights[name] - others[name]).abs().max() <= 1e-5 for name in weights)


@pytest.mark.slow
def test_another_kind_of_device_is_refused(measured: dict[str, Any]) -> None:
    assert "set DS_ACCELERATOR=cuda" in measured["other device"]


def test_where_deepspeed_is_missing_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # what an import finds where it is not installed
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(ValueError, match=r"pip install 'hpcgrpo\[deepspeed\]'"):
        deepspeed.library(torch.device("cpu"))
