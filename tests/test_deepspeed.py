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
from safetensors.torch import load_file

from hpcgrpo.learning import deepspeed

PROGRAM = Path(__file__).parent / "programs" / "deepspeed_ranks.py"
CASES = ("tied, checkpointed", "nothing whole")


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
    found = measured[case]
    assert found["at the start"] == 0.0
    assert found["grad_norm"] > 0.06, "clipping must take part"
    assert found["moved"] > 1e-3
    sums = {k: v for k, v in found["metrics"].items() if k != "entropy"}
    assert {"loss", "grad_norm", "skipped_updates"} <= sums.keys()
    assert max(sums.values()) <= 1e-5, sums
    assert found["metrics"]["entropy"] <= 1e-3  # a sum over some hundred tokens
    assert found["first moments"] <= 1e-8 and found["second moments"] <= 1e-8
    assert found["weights"] <= 1e-5


@pytest.mark.slow
def test_half_precision_keeps_float32_masters(measured: dict[str, Any]) -> None:
    """The masters are the model's own float32 values, and three steps of 1e-3 stay close to FSDP2's in bfloat16."""
    found = measured["bf16"]
    assert found["at the start"] == 0.0
    assert found["metrics"]["loss"] <= 1e-2
    assert found["moved"] > 1e-3
    assert found["first moments"] <= 1e-4


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


@pytest.mark.slow
def test_another_kind_of_device_is_refused(measured: dict[str, Any]) -> None:
    assert "set DS_ACCELERATOR=cuda" in measured["other device"]


def test_where_deepspeed_is_missing_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # what an import finds where it is not installed
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(ValueError, match=r"pip install 'hpcgrpo\[deepspeed\]'"):
        deepspeed.library(torch.device("cpu"))
