"""The FSDP2 learner in one process: equal to plain transformers code, whole and in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_batching import made_groups
from torch.distributed.device_mesh import init_device_mesh

from hpcgrpo import batching
from hpcgrpo.algorithms import build
from hpcgrpo.balance import share_out
from hpcgrpo.learning import checkpoint
from hpcgrpo.learning.fsdp import FsdpLearner, export
from hpcgrpo.learning.packing import FirstPass
from hpcgrpo.learning.passes import Computed
from hpcgrpo.pretrained import Pretrained
from hpcgrpo.types import Completion, Group, Rollout

TEMPERATURE = 0.7
VOCAB = 50


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, tie_word_embeddings=request.param, initializer_range=0.1,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def learner(model: Path, **changes: object) -> FsdpLearner:
    settings: dict = {
        "mesh": init_device_mesh("cpu", (1,)),
        "device": torch.device("cpu"),
        "temperature": TEMPERATURE,
        "bf16": False,
        "gradient_checkpointing": False,
        "attn_implementation": "packed",
        "chunk_bytes": 2**16,
        "weight_decay": 0.0,
        "betas": (0.9, 0.999),
        "epsilon": 1e-8,
        "max_grad_norm": 1e9,
        "with_reference": True,
    }
    return FsdpLearner(str(model), **{**settings, **changes})


SPEC = {"name": "dapo", "num_generations": 4, "beta": 0.1, "zero_variance": "keep"}


def planned(budget: int, shared: bool = True, groups: list[Group] | None = None) -> list[batching.MicroBatch]:
    algorithm = build(SPEC)
    plan = batching.plan(
        batching.credit(groups or made_groups(3, 4), algorithm), algorithm, ranks=1, token_budget=budget,
        max_completion_length=40, rows_per_device=4, shared_prefix=shared,
    )  # fmt: skip
    return list(plan.micro_batches[0])


def gradients(
    one: FsdpLearner, micro_batches: list[batching.MicroBatch]
) -> tuple[float, dict[str, torch.Tensor]]:
    loss = 0.0
    for row in one.prepare(micro_batches, old=False, reference=True):
        logprobs, _ = one.model(row)
        assert row.batch is not None
        total, _ = build(SPEC).loss(logprobs, row.batch)
        total.backward()
        loss += total.item()
    found = {n: p.grad.full_tensor().clone() for n, p in one.lm.named_parameters()}
    one.optimizer.zero_grad()
    return loss, found


def plain(model: Path, micro_batches: list[batching.MicroBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Every sequence alone through transformers' own attention, log_softmax of all logits, autograd; no project code
    but the loss formula written out: dapo's token mean with ratio 1, importance weight old/behavior <= 3, k3."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    total = torch.zeros(())
    for piece in (p for m in micro_batches for p in m):
        for row in piece.rows:
            ids = torch.tensor([*piece.prefix, *row.token_ids])[None]
            logits = lm(input_ids=ids).logits[0, len(piece.prefix) - 1 : -1] / TEMPERATURE
            new = logits.log_softmax(-1)[torch.arange(len(row.token_ids)), torch.tensor(row.token_ids)]
            ratio = (new - new.detach()).exp()
            weight = (new.detach() - torch.tensor(row.behavior)).exp().clamp(max=3.0)
            rho = new.detach() - new  # the reference is the initial model
            k3 = rho.exp() - rho - 1
            total = total + (weight * (-ratio * row.advantage + 0.1 * k3) * row.weight).sum()
    total.backward()
    return total.item(), {n: p.grad for n, p in lm.named_parameters()}


@pytest.mark.parametrize(
    ("budget", "shared", "changes"),
    [
        (10**6, True, {}),
        (60, True, {}),
        (10**6, True, {"gradient_checkpointing": True}),
        (1, False, {"attn_implementation": "sdpa"}),
    ],
    ids=["whole", "pieces", "checkpointed", "sequence by sequence"],
)
def test_loss_and_every_gradient_equal_the_plain_computation(
    model: Path, budget: int, shared: bool, changes: dict
) -> None:
    micro_batches = planned(budget, shared)
    expected_loss, expected = plain(model, micro_batches)
    loss, found = gradients(learner(model, **changes), micro_batches)
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert (gradient - found[name]).abs().max() <= 2e-6, name


def test_every_pass_over_the_rows_is_counted_once(model: Path) -> None:
    """Old and reference log-probs are forward passes, an update is a forward and a backward one; each is timed."""
    seen: list[str] = []

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        seen.append(part)
        yield

    micro_batches = planned(60)
    pieces = [p for m in micro_batches for p in m]
    tokens = sum(len(p.prefix) + sum(len(r.token_ids) - 1 for r in p.rows) for p in pieces)
    targets = sum(len(r.token_ids) for p in pieces for r in p.rows)
    one = learner(model, timed=timed)
    rows = one.prepare(micro_batches, old=True, reference=True)
    one.update(rows, build(SPEC).loss, learning_rate=0.0)
    found = one.take_computed()
    assert (found.trained.tokens, found.trained.targets) == (tokens, targets)
    assert (found.forward.tokens, found.forward.targets) == (2 * tokens, 2 * targets)
    assert found.forward.pairs == 2 * found.trained.pairs == 2 * sum(r.layout.plan.pairs for r in rows)
    assert seen == ["old", "reference", "forward_backward", "optimizer"]
    one.as_peer(rows)
    assert one.take_computed() == Computed(forward=found.trained) and seen[-1] == "peer"


@pytest.mark.parametrize(("ranks", "budget"), [(2, 10**6), (5, 10**6), (3, 60), (4, 0)])
def test_gradients_of_all_shares_of_a_step_add_up_to_the_plain_ones(
    model: Path, ranks: int, budget: int
) -> None:
    """However groups are cut and dealt out by cost: here their pieces are, to more ranks than there are groups."""
    one = learner(model)
    cost = Pretrained("", None, one.lm.config.to_dict()).training_cost
    pieces, _ = batching.weighed(
        batching.credit(made_groups(3, 4), build(SPEC)),
        build(SPEC),
        max_completion_length=40,
        rows_per_device=4,
    )
    shares = [[m for m in share if m] for share in share_out(pieces, ranks, budget, cost)]
    assert sum(len(m) for share in shares for m in share) > len(pieces)
    parts = [gradients(one, share) for share in shares]
    expected_loss, expected = plain(model, planned(10**6))
    assert sum(loss for loss, _ in parts) == pytest.approx(expected_loss, abs=1e-6)
    for name, gradient in expected.items():
        assert (gradient - sum(g[name] for _, g in parts)).abs().max() <= 2e-6, name


def test_single_token_completions_and_empty_micro_batches_are_served(model: Path) -> None:
    groups = [
        Group(g.prompt, tuple(Rollout(r.prompt, Completion((7,), (-2.0,), "stop", "", 0), r.score) for r in g.rollouts))
        for g in made_groups(2, 4)
    ]  # fmt: skip
    micro_batches = planned(10**6, groups=groups)
    expected_loss, expected = plain(model, micro_batches)
    loss, found = gradients(learner(model), micro_batches)
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    assert all((expected[n] - found[n]).abs().max() <= 2e-6 for n in expected)
    one = learner(model)
    before = {n: t.clone() for n, t in one.full_parameters()}
    rows = one.prepare([()], old=True, reference=True)
    sums = one.update(rows, build(SPEC).loss, learning_rate=1.0)
    assert sums["grad_norm"] == 0.0
    assert all(torch.equal(before[n], t) for n, t in one.full_parameters())


def test_the_old_stream_is_the_policy_before_the_update(model: Path) -> None:
    """At the first of several inner updates the ratio is 1; after a step it is not."""
    one = learner(model, max_grad_norm=1.0)
    rows = one.prepare(planned(10**6), old=True, reference=False)
    assert rows[0].batch is not None and rows[0].batch.old is not None
    new, _ = one.model(rows[0])
    assert torch.equal(new.detach(), rows[0].batch.old)
    one.update(rows, build({**SPEC, "beta": 0.0}).loss, learning_rate=1e-3)
    new, _ = one.model(rows[0])
    assert (new - rows[0].batch.old).abs().max() > 1e-4


def test_the_first_pass_gives_the_old_log_probs_of_later_ones(model: Path) -> None:
    """Bit by bit as a pass of their own, and the same weights after three updates."""
    loss = build({**SPEC, "beta": 0.0}).loss
    micro_batches = [*planned(60), ()]
    apart, fused = learner(model, max_grad_norm=1.0), learner(model, max_grad_norm=1.0)
    expected = apart.prepare(micro_batches, old=True, reference=False)
    rows = fused.prepare(micro_batches, old=False, reference=False)
    first = FirstPass(loss)
    fused.update(rows, first, learning_rate=1e-3)
    apart.update(expected, loss, learning_rate=1e-3)
    rows = first.rows(rows)
    for a, b in zip(expected, rows, strict=True):
        assert (a.batch is None) == (b.batch is None)
        if a.batch is not None and b.batch is not None:
            assert a.batch.old is not None and b.batch.old is not None
            assert torch.equal(a.batch.old, b.batch.old)
    for _ in range(2):
        found = [one.update(r, loss, learning_rate=1e-3) for one, r in ((apart, expected), (fused, rows))]
        assert found[0] == found[1]
    theirs = dict(fused.full_parameters())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in apart.full_parameters())


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(model: Path) -> None:
    one = learner(model)
    rows = one.prepare(planned(10**6), old=False, reference=False)
    assert rows[0].batch is not None
    broken = [replace(rows[0], batch=replace(rows[0].batch, weights=rows[0].batch.weights * float("nan")))]
    before = {n: t.clone() for n, t in one.full_parameters()}
    sums = one.update(broken, build({**SPEC, "beta": 0.0}).loss, learning_rate=1.0)
    assert sums["skipped_updates"] == 1.0
    assert all(torch.equal(before[n], t) for n, t in one.full_parameters())


def test_clipping_bounds_the_step(model: Path) -> None:
    """With plain SGD-like first steps Adam hides the scale, so the reported norm is checked against autograd's."""
    micro_batches = planned(10**6)
    _, expected = plain(model, micro_batches)
    norm = torch.cat([g.flatten() for g in expected.values()]).norm().item()
    one = learner(model, max_grad_norm=norm / 10)
    sums = one.update(
        one.prepare(micro_batches, old=False, reference=True), build(SPEC).loss, learning_rate=0.0
    )
    assert sums["grad_norm"] == pytest.approx(norm, rel=1e-5)


class Saving:
    """A learner and its checkpoints in a folder."""

    def __init__(self, model: Path, folder: Path, keep: int | None = None) -> None:
        self.learner = learner(model, with_reference=False)
        self.rows = self.learner.prepare(planned(10**6), old=False, reference=False)
        self.checkpoints = checkpoint.Checkpoints(folder, keep, dist.group.WORLD)

    def step(self) -> None:
        self.learner.update(self.rows, build({**SPEC, "beta": 0.0}).loss, learning_rate=1e-2)

    def save(self, step: int, *, wait: bool = True) -> None:
        from hpcgrpo.tiny import build_character_tokenizer

        tokenizer = build_character_tokenizer()
        self.checkpoints.start(
            step,
            state=self.learner.state(),
            extra={"step": step},
            export=lambda folder: export(self.learner, folder, torch.float32, tokenizer),
            wait=wait,
        )

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: t.clone() for n, t in self.learner.full_parameters()}


@pytest.mark.parametrize("wait", [True, False], ids=["at once", "in the background"])
def test_a_checkpoint_brings_back_weights_and_optimizer(model: Path, tmp_path: Path, wait: bool) -> None:
    one = Saving(model, tmp_path)
    one.step()
    one.save(1, wait=wait)
    one.step()  # while the save may still be going on: it must hold the state before this step
    one.checkpoints.finish()
    expected = one.weights()
    other = Saving(model, tmp_path)
    latest = other.checkpoints.latest()
    assert latest is not None and latest.name == "checkpoint-1"
    state, extra = checkpoint.load(latest, other.learner.state())
    other.learner.load_state(state)
    assert extra == {"step": 1}
    other.step()
    assert all(torch.equal(expected[n], t) for n, t in other.weights().items())


def test_a_checkpoint_from_before_the_first_step_changes_nothing(model: Path, tmp_path: Path) -> None:
    """A run that is told to stop in its first step leaves one; neither the run that goes on from it nor the learner
    that wrote it differs from one that never saved."""
    alone, one, other = (Saving(model, tmp_path) for _ in range(3))
    alone.step()
    alone.step()
    one.save(0)
    state, _ = checkpoint.load(tmp_path / "checkpoint-0", other.learner.state())
    other.learner.load_state(state)
    for each in (one, other):
        each.step()
        each.step()
        assert all(torch.equal(expected, each.weights()[n]) for n, expected in alone.weights().items())


def test_half_written_checkpoints_are_never_loaded_and_old_ones_go(model: Path, tmp_path: Path) -> None:
    one = Saving(model, tmp_path, keep=2)
    for step in (1, 2, 3):
        one.save(step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    (tmp_path / "checkpoint-3" / "model.safetensors").write_bytes(b"cut off")
    assert one.checkpoints.latest() == tmp_path / "checkpoint-2"
    (tmp_path / "checkpoint-2" / checkpoint.MARKER).unlink()
    assert one.checkpoints.latest() is None


def test_a_full_disk_ends_the_save_and_keeps_the_last_checkpoint(model: Path, tmp_path: Path) -> None:
    """On a real file system of 6 MB."""
    import os
    import subprocess

    small = tmp_path / "small"
    small.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", small]).returncode
    ):
        pytest.skip("needs root to mount a small file system")
    try:
        one = Saving(model, small)
        one.save(1)
        (small / "ballast").write_bytes(b"0" * (os.statvfs(small).f_bavail * os.statvfs(small).f_bsize))
        with pytest.raises(OSError, match="No space left"):
            one.save(2)
        assert one.checkpoints.latest() == small / "checkpoint-1"
        assert not list(small.glob(".checkpoint-*"))
        (small / "ballast").unlink()
        one.save(3)
        assert one.checkpoints.latest() == small / "checkpoint-3"
    finally:
        subprocess.run(["umount", small], check=True)
