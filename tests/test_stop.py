"""A SIGTERM on one machine: what is not saved is saved, and the same command goes on from there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from runs import hpcgrpo, metrics, rollouts, tensors, write_config

from hpcgrpo.journal import read_metrics
from hpcgrpo.launch.local import newest_checkpoint
from hpcgrpo.sections import TrainConfig

pytestmark = pytest.mark.slow
SLOW = Path(__file__).parent / "programs" / "slow_reward.py"


def test_sigterm_saves_and_ends(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    common = [str(path), f"output_dir={tmp_path}/logs", "train.save_steps=100", "report_to=[]"]
    hold = tmp_path / "hold"  # after two steps of two calls each
    common += [f'rewards={{"{SLOW}:slowly": {{weight: 1.0, seconds: 0.5, hold: {hold}, free: 4}}}}']
    whole, ended = tmp_path / "logs" / "whole", tmp_path / "logs" / "ended"
    assert hpcgrpo("train", *common, "name=whole").returncode == 0

    hold.touch()
    command = [sys.executable, "-m", "hpcgrpo.cli", "train", *common, "name=ended"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as run:
        deadline = time.monotonic() + 120
        while len(read_metrics(ended)) < 2:
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.1)
        run.terminate()
        hold.unlink()
        _, said = run.communicate(timeout=200)
    assert run.returncode == 143, said
    assert "ended by SIGTERM; the same command goes on from here" in said
    step, finished = newest_checkpoint(ended, TrainConfig(max_steps=6))
    assert step == len(read_metrics(ended)) and 2 <= step < 6 and not finished

    assert hpcgrpo("train", *common, "name=ended").returncode == 0
    assert metrics(ended) == metrics(whole)
    assert rollouts(ended) == rollouts(whole)
    expected, found = (tensors(run / "checkpoints/checkpoint-6/state", tmp_path) for run in (whole, ended))
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[key]) for key, tensor in expected.items())

    newest = ended / "checkpoints" / "checkpoint-6"
    (newest / "model.safetensors").write_bytes(b"cut short")
    again = hpcgrpo("train", *common, "name=ended")
    assert again.returncode == 0
    assert f"warning: {newest} is damaged or incomplete; passed over" in again.stdout + again.stderr
    assert metrics(ended) == metrics(whole)
