"""Run a configuration again and again, each attempt in a forked process that is killed at a given point.

usage: killed_runs.py FOLDER NAME POINT:STEP [POINT:STEP ...]   points: explore learn save marker end
Attempts are real runs; the kill is a real SIGKILL from inside. Forking saves importing torch for each of them.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hpcgrpo import config, train
from hpcgrpo.launch import local
from hpcgrpo.learning import checkpoint
from hpcgrpo.learning.fsdp import FsdpLearner
from hpcgrpo.trainer import Trainer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str, step: int) -> None:
    """Make this process kill itself at the step-th step's `point`."""
    if point == "explore":
        explore = Trainer.explore

        def explored(self: Trainer):  # type: ignore[no-untyped-def]
            groups = explore(self)
            return die() if self.progress.step + 1 == step else groups

        Trainer.explore = explored  # type: ignore[method-assign]
    elif point == "learn":
        update, calls = FsdpLearner.update, []

        def updated(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            result = update(self, *args, **kwargs)
            calls.append(1)
            return die() if len(calls) == step else result  # here: the step-th optimizer step of the attempt

        FsdpLearner.update = updated  # type: ignore[method-assign]
    elif point in ("save", "marker"):
        fsync = checkpoint._fsync

        def synced(path: Path) -> None:
            inside = f".checkpoint-{step}.tmp" in str(path)
            if inside and (point == "save" or path.name == checkpoint.MARKER):
                die()
            fsync(path)

        checkpoint._fsync = synced
    else:
        assert point == "end", point


def main() -> int:
    folder, name, *points = sys.argv[1:]
    for attempt in points:
        point, _, step = attempt.partition(":")
        child = os.fork()
        if child == 0:
            run = config.load(Path(folder) / "run.yaml", [f"name={name}", f"output_dir={folder}/logs"])
            local.preflight(run, fresh=False)
            arm(point, int(step or 0))
            train.rank_main(run)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        expected = 0 if point == "end" else signal.SIGKILL
        if status != expected:
            print(f"attempt {attempt}: wait status {status}, expected {expected}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
