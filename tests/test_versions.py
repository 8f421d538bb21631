"""What a run was made with: noted at each start, whatever is missing or damaged."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from runs import hpcgrpo, write_config

import hpcgrpo as package
from hpcgrpo import versions


def git(folder: Path, *words: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", "-C", str(folder), *named, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_code_state_of_a_repository_and_of_a_copy(tmp_path: Path) -> None:
    code = tmp_path / "package"
    code.mkdir()
    (code / "__init__.py").write_text("a = 1\n")
    assert versions.code_state(code) is None
    git(tmp_path, "init", "-q")
    assert versions.code_state(code) is None, "not tracked: installed into a folder within another repository"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "notes.txt").write_text("of no import")
    assert versions.code_state(code) == {"commit": commit, "dirty": False}
    (code / "__init__.py").write_text("a = 2\n")
    assert versions.code_state(code) == {"commit": commit, "dirty": True}


def test_the_driver_is_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "version"
    monkeypatch.setattr(versions, "DRIVER", said)
    assert versions.driver() is None
    said.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build  (x@y)  Sun Apr 13\n"
        "GCC version:  gcc version 11.4.0\n"
    )
    assert versions.driver() == "570.133.20"


def test_each_start_adds_an_entry_and_a_damaged_file_begins_anew(tmp_path: Path) -> None:
    assert versions.read(tmp_path) == []
    versions.note(tmp_path, 0)
    versions.note(tmp_path, 7)
    first, second = versions.read(tmp_path)
    assert (first["step"], second["step"]) == (0, 7) and first["time"] <= second["time"]
    assert (first["hpcgrpo"], first["python"]) == (package.__version__, platform.python_version())
    assert (first["torch"], first["gpus"]) == (torch.__version__, [])
    assert socket.gethostname() not in (tmp_path / versions.FILE_NAME).read_text()
    for broken in ("[{", "{}", '"x"', "[1, 2]"):
        (tmp_path / versions.FILE_NAME).write_text(broken)
        assert versions.read(tmp_path) == []
        versions.note(tmp_path, 1)
        assert [entry["step"] for entry in versions.read(tmp_path)] == [1]


@pytest.mark.slow
def test_a_run_notes_each_of_its_starts(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    common = (f"output_dir={tmp_path}/logs", "name=noted", "train.save_steps=1")
    for steps in (1, 2):
        done = hpcgrpo("train", str(config), *common, f"train.max_steps={steps}")
        assert done.returncode == 0, done.stdout + done.stderr
    entries = json.loads((tmp_path / "logs" / "noted" / "versions.json").read_text())
    assert [entry["step"] for entry in entries] == [0, 1]
    row = json.loads((tmp_path / "logs/noted/rollouts/step-000001.jsonl").read_text().splitlines()[0])
    assert row["prompt_length"] > 0
