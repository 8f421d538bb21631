"""Trainers in processes of their own that take turns: how they are started, told to step, and ended.

Used by `vs_trl.py` and `learner_step.py`; what runs in such a process speaks through `_side.StepClock`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
TRL_VERSION = "1.16.0"
Steps = list[dict[str, Any]]


@dataclass(frozen=True)
class Side:
    """A running trainer."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    about: Mapping[str, Any]


def add_trl(parser: argparse.ArgumentParser) -> None:
    """Which TRL takes part, and how it is set."""
    parser.add_argument(
        "--trl-python", type=interpreter, help="an interpreter that has TRL, instead of --trl-env"
    )
    parser.add_argument("--trl-env", type=Path, default=REPOSITORY / ".venv-trl", help="made if absent")
    parser.add_argument("--trl", type=fields, help="GRPOConfig fields to set otherwise, as JSON")


def interpreter(text: str) -> Path:
    """The `type` of an argument that is a program to start."""
    found = shutil.which(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a program that can be started")
    return Path(found).absolute()


def fields(text: str) -> dict[str, Any]:
    """The `type` of an argument that is a JSON object."""
    with suppress(json.JSONDecodeError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object, such as " + '{"loss_type": "dapo"}')


def trl_environment(folder: Path) -> Path:
    """The interpreter of an environment with this TRL and our torch and transformers; made if absent."""
    python = folder.absolute() / "bin" / "python"  # sides are started in another folder
    if python.exists() and _trl_of(python) == TRL_VERSION:
        return python
    same = [f"{name}=={version(name).split('+')[0]}" for name in ("torch", "transformers", "accelerate")]
    print(f"making {folder} with trl=={TRL_VERSION} {' '.join(same)} (1.3 GB, about 2 min)", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [python, "-m", "pip", "install", "--quiet", f"trl=={TRL_VERSION}", "datasets", *same]
    subprocess.run(install, check=True, stdout=sys.stderr)
    return python


def _trl_of(python: Path) -> str:
    ask = "from importlib.metadata import version; print(version('trl'))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip()


@contextmanager
def side(name: str, python: Path, script: str, case: Mapping[str, Any], folder: str) -> Iterator[Side]:
    """Start a side and wait until its trainer stands; end it on leaving. `case` goes to the script as JSON."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(case["threads"]),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "DS_ACCELERATOR": case["device"],  # transformers imports DeepSpeed where it is installed
    }
    if case["device"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    log = Path(folder) / f"{name}.log"
    command = [python, HERE / script, json.dumps({**case, "side": name, "folder": folder})]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            cwd=folder,
        )
        try:
            yield Side(name, process, log, _reply(name, process, log))
        finally:
            process.kill()
            process.wait()


def _reply(name: str, process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        raise SystemExit(f"the {name} side ended early; the end of its log:\n{tail}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def order(running: Side, steps: int) -> dict[str, Any]:
    """Let a side run so many steps (0: stop) and return what it measured."""
    assert running.process.stdin is not None
    running.process.stdin.write(json.dumps({"steps": steps}) + "\n")
    running.process.stdin.flush()
    return _reply(running.name, running.process, running.log)


@dataclass(frozen=True)
class Measured:
    """What the sides of one case measured."""

    turns: list[dict[str, Steps]]  # [turns][side] steps
    memory: dict[str, dict[str, float]]  # of each side, in bytes
    about: dict[str, dict[str, Any]]  # settings and versions of each side


def interleaved(
    case: Mapping[str, Any],
    scripts: Mapping[str, tuple[Path, str]],
    folder: str,
    *,
    blocks: int,
    steps: int,
    warm_up: int,
) -> Measured:
    """Run every side (name -> interpreter, script) turn by turn, `blocks` turns of `steps` steps each."""
    with ExitStack() as stack:
        sides = [
            stack.enter_context(side(name, python, script, case, folder))
            for name, (python, script) in scripts.items()
        ]
        for warming in sides:
            order(warming, warm_up)  # caches, allocator, lazy imports
        turns = [one_turn(i, sides, steps) for i in range(blocks)]
        return Measured(turns, {s.name: order(s, 0) for s in sides}, {s.name: dict(s.about) for s in sides})


def one_turn(index: int, sides: Sequence[Side], steps: int) -> dict[str, Steps]:
    """A block of steps of each side; who goes first changes, so that a drift favours none."""
    first = index % len(sides)
    return {s.name: order(s, steps)["steps"] for s in (*sides[first:], *sides[:first])}
