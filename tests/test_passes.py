"""What a step computes: which models see which tokens how often, and what ranks send each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcgrpo import tiny
from hpcgrpo.config import parse
from hpcgrpo.exploring import Ranks
from hpcgrpo.learning.packing import Packed
from hpcgrpo.train import assemble, join
from hpcgrpo.trainer import Trainer
from hpcgrpo.types import Group

REWARD = "def spread(completions, **_):\n    return [sum(map(ord, text)) % 7 for text in completions]\n"
GRPO = {"name": "grpo", "num_generations": 8, "beta": 0.0}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """The world of one rank that `join` makes ends with the test."""
    yield
    dist.destroy_process_group()


@dataclass
class Seen:
    """Rows that went through a model, by whether they were trained on."""

    trained: list[Packed] = field(default_factory=list)
    scored: list[Packed] = field(default_factory=list)

    def __call__(self, module: Any, arguments: tuple[Packed, ...]) -> None:
        (self.trained if torch.is_grad_enabled() else self.scored).append(arguments[0])


@dataclass
class Recorded:
    """Ranks, and what this one sends to the others."""

    ranks: Ranks
    sent: list[Any]

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size

    def wait(self) -> None:
        self.ranks.wait()

    def gather(self, value: Any) -> list[Any]:
        self.sent.append(value)
        return self.ranks.gather(value)


def trainer(folder: Path, algorithm: dict[str, Any], **train: Any) -> Trainer:
    """Of a real run with a tiny model: 2 prompts a step, 8 completions each."""
    (folder / "rewards.py").write_text(REWARD)
    tiny.save(tiny.build_tiny_model(), tiny.build_character_tokenizer(), folder / "model")
    config = parse(
        {
            "name": "run", "model_name_or_path": str(folder / "model"), "output_dir": str(folder), "device": "cpu",
            "algorithm": algorithm, "rewards": {f"{folder}/rewards.py:spread": 1.0}, "report_to": [],
            "data": {"preset": "chain", "max_samples": 64, "options": {"digits": 4}},
            "generation": {"max_prompt_length": 32, "max_completion_length": 16, "parity_check": False},
            "train": {"train_batch_size": 16, "max_steps": 2, "learning_rate": 1e-3, **train},
            "cluster": {"threads_per_rank": 1},
        }
    )  # fmt: skip
    config.folder.mkdir()
    return assemble(config, *join(config), None).trainer


def step(one: Trainer) -> tuple[Seen, Seen | None, dict[str, float], list[Any]]:
    """One step -> what actor and reference saw, the step's metrics, and what was exchanged."""
    learner: Any = one.learner
    actor, reference = Seen(), None
    learner.model.register_forward_pre_hook(actor)
    if learner.reference is not None:
        reference = Seen()
        learner.reference.register_forward_pre_hook(reference)
    sent: list[Any] = []
    one.ranks, one.explorer.ranks = Recorded(one.ranks, sent), Recorded(one.explorer.ranks, sent)
    record = next(one.steps())
    return actor, reference, dict(record.metrics), sent


def test_one_optimizer_step_makes_no_pass_for_old_log_probs_and_no_reference(tmp_path: Path) -> None:
    actor, reference, metrics, _ = step(trainer(tmp_path, GRPO))
    assert reference is None, "beta 0 must load no second model"
    assert not actor.scored
    assert len(actor.trained) == metrics["batch/micro_batches"]


def test_beta_above_zero_makes_one_pass_of_the_reference(tmp_path: Path) -> None:
    actor, reference, metrics, _ = step(trainer(tmp_path, {**GRPO, "beta": 0.1}))
    assert reference is not None and not reference.trained and not actor.scored
    assert len(reference.scored) == len(actor.trained) == metrics["batch/micro_batches"]


def test_pruned_completions_are_seen_by_no_model(tmp_path: Path) -> None:
    """CPPO with 7 of 8 pruned, a reference, and passes for the old log-probs: the kept tokens, and each prompt once."""
    spec = {"name": "cppo", "pruning_rate": 0.875, "allocation": False, "base": {**GRPO, "beta": 0.1}}
    actor, reference, metrics, sent = step(trainer(tmp_path, spec, num_iterations=2))
    assert reference is not None
    groups: list[Group] = sent[0][1][0]
    assert [len(g.rollouts) for g in groups] == [8, 8]
    assert metrics["completions/sampled"] == 16 and metrics["completions/kept"] == 2
    kept = actor.trained[0].batch
    assert kept is not None and len(actor.trained) == 2 and len(kept.lengths) == 2
    passes = [*actor.trained, *actor.scored, *reference.scored]  # packed rows are all that goes to the device
    tokens = int(kept.lengths.sum())
    prompts = sum(len(g.prompt.token_ids) for g in groups)
    for rows in passes:
        assert rows.targets.numel() == tokens
        assert rows.input_ids.numel() == prompts + tokens - 2  # the last token of each predicts nothing


def test_after_the_groups_only_sums_are_exchanged(tmp_path: Path) -> None:
    """What is pruned stands in the rollouts on disk, so that rank 0 needs it once; nothing else carries tokens."""
    spec = {"name": "cppo", "pruning_rate": 0.875, "base": GRPO}
    *_, sent = step(trainer(tmp_path, spec))
    for value in sent[1:]:
        assert isinstance(value, dict) and all(isinstance(x, float) for x in value.values())


@pytest.mark.parametrize("batches", [1, 2])
def test_old_log_probs_take_a_pass_from_the_second_optimizer_step_on(tmp_path: Path, batches: int) -> None:
    """Those of the first come with its first pass. Ratios are 1 in it, and not in the second iteration's."""
    one = trainer(tmp_path, GRPO, num_iterations=2, train_batch_size=16 // batches, generation_batch_size=16)
    actor, _, metrics, _ = step(one)
    plans = 2 * batches  # every one in two passes
    assert metrics["updates"] == plans
    assert len(actor.trained) == plans and len(actor.scored) == batches - 1
    rows = [row.batch for row in actor.trained]
    assert rows[0] is not None and rows[0].old is None
    assert all(batch is not None and batch.old is not None for batch in rows[1:])
