"""Weights read shard by shard: equal to transformers' loading, or left to it with its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from hpcgrpo.learning import fsdp
from hpcgrpo.learning.weights import find_weights

PROGRAM = Path(__file__).parent / "programs" / "loading_ranks.py"
SIZES = {
    "vocab_size": 53, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 5, "num_key_value_heads": 1,
    "intermediate_size": 37, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "untied": {"model_type": "qwen2", "tie_word_embeddings": False},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3, "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def saved(
    folder: Path, name: str = "untied", *, dtype: torch.dtype = torch.float32, shard: str = "1GB"
) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    kind = MODELS[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES, **kind), dtype=dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def loaded(folder: Path) -> Any:
    return fsdp.sharded_policy(
        str(folder), mesh=init_device_mesh("cpu", (1,)), device=torch.device("cpu"), dtype=torch.float32,
        temperature=1.0, chunk_bytes=2**20, attn_implementation="packed", gradient_checkpointing=False,
    ).lm  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_reads_its_own_shards_and_they_equal_those_of_the_whole_model(
    ranks: int, tmp_path: Path
) -> None:
    """No tensor is read whole; sizes that the ranks do not share evenly; one file and several; both float types."""
    folders = [saved(tmp_path / name, name) for name in MODELS]
    folders += [
        saved(tmp_path / "bf16", "tied", dtype=torch.bfloat16),
        saved(tmp_path / "files", "untied", shard="20KB"),
    ]
    assert len(list(folders[-1].glob("*.safetensors"))) > 2
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launch, PROGRAM, *folders], capture_output=True, text=True, timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for found in json.loads(done.stdout.strip().splitlines()[-1]):
        assert found["equal"]
        assert found["held"] <= 1.2 * found["all"] / ranks


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_loads_what_transformers_loads(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    lm = loaded(saved(tmp_path, name, dtype=torch.bfloat16))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs = dict(expected.named_parameters())
    assert find_weights(str(tmp_path), lm) is not None
    assert all(torch.equal(p.full_tensor(), theirs[n]) for n, p in lm.named_parameters())
    buffers = dict(expected.named_buffers())
    assert buffers and all(torch.equal(b, buffers[n]) for n, b in lm.named_buffers())


# --- what transformers is left to load, or to refuse ------------------------------------------------------


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def without(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda state: {n: t for n, t in state.items() if n != name}


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    changed(saved(tmp_path), without("model.norm.weight"))
    with pytest.raises(ValueError, match=r"1 weights are missing, such as model\.norm\.weight"):
        loaded(tmp_path)


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    changed(saved(tmp_path), lambda state: {**state, "model.norm.weight": torch.zeros(41)})
    with pytest.raises(ValueError, match="its weights cannot be loaded"):
        loaded(tmp_path)


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="its weights cannot be loaded"):
        loaded(tmp_path)


def test_a_file_of_the_index_that_is_not_there_is_refused(tmp_path: Path) -> None:
    first = min(saved(tmp_path, shard="20KB").glob("*.safetensors"))
    first.unlink()
    with pytest.raises(ValueError, match="its weights cannot be loaded"):
        loaded(tmp_path)


def test_other_names_for_the_same_weights_are_left_to_transformers(tmp_path: Path) -> None:
    """A base model's file, without the prefix and the output layer of a tied one."""
    path = saved(tmp_path, "tied") / "model.safetensors"
    before = load_file(path)
    changed(tmp_path, lambda state: {n.removeprefix("model."): t for n, t in state.items()})
    lm = loaded(tmp_path)
    assert find_weights(str(tmp_path), lm) is None
    assert all(torch.equal(p.full_tensor(), before[n]) for n, p in lm.named_parameters())


def test_a_name_that_is_nowhere_has_no_weights(tmp_path: Path) -> None:
    lm = loaded(saved(tmp_path))
    assert find_weights("nobody/nothing", lm) is None
    assert find_weights(str(tmp_path / "empty"), lm) is None
