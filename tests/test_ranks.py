"""The same run on 1, 2 and 4 real ranks under torchrun: same samples, loss, gradient norm and weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import hpcgrpo, metrics, rollouts, write_config
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
RANKS = (1, 2, 4)
# Adam turns rounding noise of near-zero gradients into steps of the learning rate, unless its epsilon is above them.
COMMON = (
    "train.max_tokens_per_device=64",
    "train.learning_rate=2e-4",
    "train.adam_epsilon=1e-6",
    "train.lr_scheduler_type=constant",
    "train.warmup_ratio=0",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    config = write_config(folder)
    for ranks in RANKS:
        done = hpcgrpo(
            "train", str(config), f"name=ranks{ranks}", f"output_dir={folder}/logs", "train.max_steps=3", *COMMON,
            f"cluster.nproc_per_node={ranks}",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "logs"


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_ranks_change_nothing(folder: Path, ranks: int) -> None:
    one, many = folder / "ranks1", folder / f"ranks{ranks}"
    assert [tokens(r) for r in rollouts(one).values()] == [tokens(r) for r in rollouts(many).values()]
    for expected, found in zip(metrics(one), metrics(many), strict=True):
        for key in (
            "loss",
            "grad_norm",
            "kl",
            "entropy",
            "reward",
            "learning_rate",
            "clip_ratio/region_mean",
        ):
            assert found[key] == pytest.approx(expected[key], abs=1e-5), key
    close(*(f / "checkpoints/checkpoint-3" for f in (one, many)))


def close(one: Path, other: Path) -> None:
    weights, others = (load_file(f / "model.safetensors") for f in (one, other))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert (tensor - others[name]).abs().max() <= 1e-5, name


def tokens(lines: str) -> list[list[int]]:
    return [json.loads(line)["token_ids"] for line in lines.splitlines()]


def test_the_export_loads_in_transformers_and_is_the_trained_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = folder / "ranks2/checkpoints/checkpoint-3"
    model = AutoModelForCausalLM.from_pretrained(path)
    saved = load_file(path / "model.safetensors")
    assert all((model.state_dict()[k] == v).all() for k, v in saved.items())
    tokenizer = AutoTokenizer.from_pretrained(path)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "1234"}], tokenize=False)
    assert "1234" in chat


def test_a_checkpoint_of_two_ranks_goes_on_with_one(folder: Path) -> None:
    """Resharded; what follows equals the unbroken one-rank run within rounding."""
    for ranks, steps in ((2, 2), (1, 3)):
        done = hpcgrpo(
            "train", str(folder.parent / "run.yaml"), "name=reshard", f"output_dir={folder}", *COMMON,
            f"train.max_steps={steps}", f"cluster.nproc_per_node={ranks}",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    close(*(folder / name / "checkpoints/checkpoint-3" for name in ("ranks1", "reshard")))
