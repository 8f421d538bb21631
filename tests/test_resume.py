"""N steps + kill -9 + N steps = 2N steps, bit for bit, wherever the kill falls (DESIGN promise 2)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import hpcgrpo, metrics, rollouts, tensors, write_config

PROGRAM = Path(__file__).parent / "programs" / "killed_runs.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_config(folder)
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


def same(folder: Path, name: str, scratch: Path) -> None:
    whole, killed = folder / "logs" / "whole", folder / "logs" / name
    for step in (2, 4, 6):
        expected = tensors(whole / f"checkpoints/checkpoint-{step}/state", scratch)
        found = tensors(killed / f"checkpoints/checkpoint-{step}/state", scratch)
        assert expected.keys() == found.keys()
        assert any("exp_avg_sq" in key for key in expected)
        for key, tensor in expected.items():
            assert torch.equal(tensor, found[key]), (step, key)
    assert metrics(killed) == metrics(whole)
    assert rollouts(killed) == rollouts(whole)
    assert not list((killed / "checkpoints").glob(".checkpoint-*.tmp"))


@pytest.mark.parametrize(
    ("name", "points"),
    [
        ("explore", ["explore:3", "end"]),
        ("learn", ["learn:5", "end"]),
        ("save", ["save:4", "end"]),
        ("marker", ["marker:4", "end"]),
        ("twice", ["learn:3", "explore:5", "end"]),
        ("before-any-checkpoint", ["explore:1", "learn:2", "end"]),
    ],
)
def test_a_killed_run_ends_bit_equal(folder: Path, tmp_path: Path, name: str, points: list[str]) -> None:
    attempts(folder, name, *points)
    same(folder, name, tmp_path)


def test_the_whole_run_wrote_each_step_once_and_moved_the_weights(folder: Path, tmp_path: Path) -> None:
    run = folder / "logs" / "whole"
    assert [m["step"] for m in metrics(run)] == [1, 2, 3, 4, 5, 6]
    first, last = (tensors(run / f"checkpoints/checkpoint-{s}/state", tmp_path) for s in (2, 6))
    moved = [k for k in first if k.startswith("/model/") and not torch.equal(first[k], last[k])]
    assert len(moved) > 10


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(folder: Path) -> None:
    """Two ranks; what is left of the run stays as it is."""
    command = [
        "train",
        str(folder / "run.yaml"),
        "name=lost",
        f"output_dir={folder}/logs",
        "cluster.nproc_per_node=2",
    ]
    assert hpcgrpo(*command, "train.max_steps=2").returncode == 0
    run = folder / "logs" / "lost"
    (run / "checkpoints" / "checkpoint-2" / "config.json").unlink()
    before = (run / "metrics.jsonl").read_text()
    done = hpcgrpo(*command, "train.max_steps=4")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "none of its checkpoints is whole (checkpoint-2)" in done.stderr and "--fresh" in done.stderr
    assert (run / "metrics.jsonl").read_text() == before
