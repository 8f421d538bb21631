"""Sampling ahead of the learner: off by default, one step behind when on, resumed bit for bit, and faster."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CONFIG, hpcgrpo, metrics, rollouts, write_config
from test_resume import PROGRAM, same

from hpcgrpo import train
from hpcgrpo.ahead import FILE, Ahead, load, packed, save, unpacked
from hpcgrpo.arithmetic import arithmetic
from hpcgrpo.balance import Cost
from hpcgrpo.config import ConfigError, parse
from hpcgrpo.exploring import Explored, Ready, Setup
from hpcgrpo.journal import read_metrics
from hpcgrpo.types import Completion, Group, Prompt, Rollout, Score

STEP, DRAFTS = (
    CONFIG.replace("generation: {{", f"generation: {{{{{option}, ")
    for option in ("async_steps: 1", "drafts_ahead: true")
)


# ---- the thread


def test_the_work_runs_beside_and_gives_its_result() -> None:
    here = threading.current_thread()
    ahead = Ahead(lambda push: threading.current_thread())
    assert ahead.result(lambda: None) is not here


def test_a_push_is_made_by_who_asks_for_the_result_before_the_work_goes_on() -> None:
    done: list[str] = []

    def work(push: Callable[[], None]) -> str:
        for turn in "ab":
            done.append(f"asks {turn}")
            push()
            done.append(f"goes on {turn}")
        return "result"

    ahead = Ahead(work)
    assert ahead.result(lambda: done.append(f"pushed on {threading.current_thread().name}")) == "result"
    main = f"pushed on {threading.current_thread().name}"
    assert done == ["asks a", main, "goes on a", "asks b", main, "goes on b"]


def test_what_the_work_raises_is_raised_where_its_result_is_asked_for() -> None:
    def work(push: Callable[[], None]) -> None:
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        Ahead(work).result(lambda: None)


# ---- what a checkpoint keeps


@dataclass
class Order:
    """An endless order of questions."""

    columns: dict[str, Any]

    def __len__(self) -> int:
        return 8

    def take(self, position: int, count: int) -> list[Prompt]:
        return [
            Prompt(
                p,
                p % 8,
                ({"role": "user", "content": f"q{p}"},),
                f"<q{p}>",
                (p, 1),
                self.columns,
                epoch=p // 8,
            )
            for p in range(position, position + count)
        ]


def rollout(prompt: Prompt, seed: int) -> Rollout:
    logprobs = (-0.1 - seed / 3, -1e-17)  # no short decimal
    completion = Completion((5, 6), logprobs, "length", "ä\u2028\n", seed, weights_version=3, hint_length=1)
    return Rollout(prompt, completion, Score(1 / 3, {"accuracy": 1.0, "judge": None}, {"accuracy": "right"}))


def explored(order: Order) -> Explored:
    groups = []
    for plain in order.take(7, 3):
        messages = ({"role": "user", "content": "refined"},)
        refined = Prompt(
            plain.position, plain.row, messages, "<refined>", (9, 9, 9), plain.columns, epoch=plain.epoch
        )
        drafts = tuple(rollout(plain, i) for i in range(2))
        groups.append(Group(refined, tuple(rollout(refined, i) for i in range(3)), drafts, rank=1))
        groups.append(Group(plain, drafts, stage="draft"))
    return Explored(tuple(groups), position=10, discarded=4, dropped=1)


@dataclass
class Asked:
    """What `load` needs of an Explorer."""

    prompts: Order
    setup: Setup


def setup(ahead: Any, prompts: int = 3) -> Setup:
    return Setup(0, prompts, 1, 1, 10, 64, 4, 8, 16, 1.0, True, ahead=ahead)


def test_groups_come_back_as_they_were_with_columns_that_no_json_holds() -> None:
    order = Order({"answer": "1", "day": time.gmtime()})
    groups = list(explored(order).groups)
    assert unpacked(json.loads(json.dumps(packed(groups))), order) == groups
    assert len(packed(groups)["prompts"]) == 2 * 3  # each once


def test_a_checkpoint_keeps_the_step_or_its_drafts_and_gives_back_what_the_run_samples_ahead(
    tmp_path: Path,
) -> None:
    order = Order({"answer": "1"})
    step = Ready(explored(order), seconds={"timing_ahead_s/generate": 1.0})
    drafts = Ready(drafts={p.position: (rollout(p, 1), rollout(p, 2)) for p in order.take(7, 3)})
    for ready, kind, other in ((step, "step", "drafts"), (drafts, "drafts", "step")):
        save(tmp_path, ready, setup(kind))
        found = load(tmp_path, Asked(order, setup(kind)))  # type: ignore[arg-type]
        assert (found.explored, found.drafts) == (ready.explored, ready.drafts)
        for now in (setup(other), setup(None), setup(kind, prompts=4)):
            assert load(tmp_path, Asked(order, now)) == Ready()  # type: ignore[arg-type]
    for spoilt in (
        "[",
        '{"stage": "drafts"}',
        "[]",
        (tmp_path / FILE).read_text().replace("token_ids", "token_idz"),
    ):
        (tmp_path / FILE).write_text(spoilt)
        with pytest.raises(ValueError, match=rf"{FILE} is damaged .* remove the folder {tmp_path} to go on"):
            load(tmp_path, Asked(order, setup("drafts")))  # type: ignore[arg-type]
    (tmp_path / FILE).unlink()
    save(tmp_path, Ready(), setup("step"))
    assert not (tmp_path / FILE).exists()
    assert load(tmp_path, Asked(order, setup("step"))) == Ready()  # type: ignore[arg-type]


# ---- the configuration


def config(generation: dict[str, Any], algorithm: dict[str, Any] | None = None, **train: Any) -> Any:
    return parse(
        {
            "name": "ahead",
            "model_name_or_path": "nowhere",
            "algorithm": algorithm or {"name": "grpo", "num_generations": 4},
            "rewards": {"accuracy": 1.0},
            "data": {"preset": "chain"},
            "generation": generation,
            "train": {"train_batch_size": 8, **train},
        }
    )


IGRPO = {"name": "igrpo", "drafts": 2, "base": {"name": "grpo", "num_generations": 4}}


def test_off_by_default_and_one_of_the_two() -> None:
    assert config({}).generation.ahead is None
    assert config({"async_steps": 1}).generation.ahead == "step"
    assert config({"drafts_ahead": True}, IGRPO).generation.ahead == "drafts"
    assert config({"drafts_ahead": True, "max_staleness": 0}, IGRPO)  # drafts are not trained on


@pytest.mark.parametrize(
    ("generation", "algorithm", "said"),
    [
        ({"async_steps": 2}, None, "generation.async_steps"),
        ({"async_steps": 1, "drafts_ahead": True}, IGRPO, "leave drafts_ahead out"),
        ({"drafts_ahead": True}, None, "algorithm grpo has no drafts"),
        ({"async_steps": 1, "max_staleness": 5}, None, "set max_staleness: 6"),  # 2 batches x 3 iterations
        (
            {"async_steps": 1},
            {"name": "grpo", "num_generations": 4, "importance_sampling_correction": "none"},
            "async_steps: 1 trains .* importance_sampling_correction",
        ),
        (
            {"drafts_ahead": True},
            IGRPO
            | {"train_drafts": True, "drafts": 4}
            | {"base": {"name": "grpo", "num_generations": 4, "importance_sampling_correction": "none"}},
            "drafts_ahead: true with the algorithm's train_drafts trains .* importance_sampling_correction",
        ),
        (
            {"drafts_ahead": True, "max_staleness": 5},
            IGRPO | {"train_drafts": True, "drafts": 4},
            "train_drafts the sampling weights are 6 optimizer steps old",
        ),
    ],
)
def test_what_cannot_be_is_refused(generation: dict[str, Any], algorithm: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(generation, algorithm, generation_batch_size=16, num_iterations=3)


@pytest.mark.parametrize(
    ("generation", "drafts_trained", "spare"),
    [
        ({"async_steps": 1}, False, 8 - 6),
        ({"drafts_ahead": True}, True, 8 - 6),
        ({"drafts_ahead": True}, False, 8),
        ({}, True, 8),
    ],
)
def test_what_sampling_ahead_leaves_of_the_staleness_for_servers(
    generation: dict[str, Any], drafts_trained: bool, spare: int
) -> None:
    """Of 8 optimizer steps, 2 batches x 3 iterations are taken where what is sampled ahead is trained on."""
    algorithm = IGRPO | {"drafts": 4, "train_drafts": drafts_trained}
    run = config(generation | {"max_staleness": 8}, algorithm, generation_batch_size=16, num_iterations=3)
    counts = arithmetic(run, run.build_algorithm(), rows=None)
    assert train.setup(run, counts, torch.device("cpu"), Cost()).spare_staleness == spare


# ---- whole runs


@pytest.fixture(scope="module", params=["step", "drafts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_config(folder, STEP if request.param == "step" else DRAFTS)
    attempts(folder, "whole", "end")
    return folder


def attempts(folder: Path, name: str, *points: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), name, *points],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("points", [["learn:5", "end"], ["explore:3", "marker:4", "end"]])
def test_a_killed_run_ends_bit_equal(folder: Path, tmp_path: Path, points: list[str]) -> None:
    name = points[0].partition(":")[0]
    attempts(folder, name, *points)
    same(folder, name, tmp_path)
    kept = folder / "logs" / "whole" / "checkpoints"
    assert [(kept / f"checkpoint-{step}" / FILE).exists() for step in (2, 4, 6)] == [True, True, False]


@pytest.mark.slow
def test_the_weights_that_sampled_lie_one_step_behind_and_no_more(folder: Path) -> None:
    run = folder / "logs" / "whole"
    rows = [[json.loads(line) for line in text.splitlines()] for text in rollouts(run).values()]
    found = [metric["sampling/staleness/max"] for metric in metrics(run)]
    updates = 2  # of a step: one batch, twice
    ahead = "step" in folder.name
    assert found == [0, *[updates * ahead] * 5]
    for step, sampled in enumerate(rows):
        versions = {
            stage: {r["weights_version"] for r in sampled if r["stage"] == stage}
            for stage in ("draft", "sample")
        }
        behind = max(0, step - 1) * updates
        assert versions == {"draft": {behind}, "sample": {behind if ahead else step * updates}}


@pytest.mark.slow
def test_two_ranks_sample_what_one_does(folder: Path) -> None:
    settings = (
        *("train.max_tokens_per_device=64", "train.learning_rate=2e-4", "train.warmup_ratio=0"),
        *("train.lr_scheduler_type=constant", "train.max_steps=3"),
    )
    runs = {}
    for ranks in (1, 2):
        done = hpcgrpo(
            "train", str(folder / "run.yaml"), f"name=ranks{ranks}", f"output_dir={folder}/logs", *settings,
            f"cluster.nproc_per_node={ranks}",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        runs[ranks] = folder / "logs" / f"ranks{ranks}"
    one, two = (
        [[json.loads(line)["token_ids"] for line in text.splitlines()] for text in rollouts(run).values()]
        for run in runs.values()
    )
    assert one == two
    for expected, found in zip(metrics(runs[1]), metrics(runs[2]), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert found["sampling/staleness/max"] == expected["sampling/staleness/max"]


@pytest.mark.slow
def test_a_run_told_to_stop_goes_on_as_if_it_had_not(folder: Path, tmp_path: Path) -> None:
    """SIGTERM is urgent; the in-process generator does not break off, so what it samples ahead is kept."""
    command = [sys.executable, "-m", "hpcgrpo.cli", "train", str(folder / "run.yaml")]
    options = ["name=stopped", f"output_dir={folder}/logs", "report_to=[]"]
    stopped = folder / "logs" / "stopped"
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as run:
        deadline = time.monotonic() + 200
        while len(read_metrics(stopped)) < 3:
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.02)
        run.terminate()
        _, said = run.communicate(timeout=200)
    if run.returncode == 143:  # else it was done before
        assert "given up" not in said
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
    same(folder, "stopped", tmp_path)
