"""After a pass of log-probs no rank holds weights of others, with FSDP2 and with ZeRO-3, on two real gloo ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "programs" / "gathered_weights.py"
pytestmark = pytest.mark.slow
VOCABULARY, HIDDEN = 51, 60  # sizes that two ranks do not share evenly


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["fsdp", "deepspeed"])
def test_log_probs_leave_nothing_gathered(kind: str, tied: bool, tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if kind == "deepspeed":
        pytest.importorskip("deepspeed", reason="pip install 'hpcgrpo[deepspeed]'")
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        intermediate_size=97, tie_word_embeddings=tied, initializer_range=0.1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", PROGRAM, tmp_path, kind],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[{")))
    assert len(ranks) == 2
    for found in ranks:
        assert max(found["reference"], found["policy"]) <= 0, ranks
        root = 4 * (VOCABULARY * HIDDEN * (1 if tied else 2) + HIDDEN)
        if kind == "fsdp":  # what is measured is there where it stays
            assert found["forward alone"] >= root
