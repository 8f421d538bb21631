"""What an evaluation's jobs run in tests of the jobs alone: quick programs with the real ones' files and exit codes.

evaluation_job.py task TASK.json     writes <benchmark>.json; what its run's file `play.json` says of it comes first
evaluation_job.py merge FOLDER       summary.json with what is there and why the rest is missing
evaluation_job.py watch FILE         every checkpoint of a run as it appears, with these programs
evaluation_job.py train FOLDER N S K [FILE]  checkpoints 1 to N in FOLDER, S seconds each, of which K stay; all but the
                                     first once there is FILE
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evaluation.task import Task

PROGRAM = str(Path(__file__).absolute())
SHOWN = ("SLURM_", "SBATCH_", "HPCGRPO_")  # of the variables that a task finds


def task(path: Path) -> int:
    """`play.json` in the results' folder: task -> {seconds, codes}, one a start; none: at once, 0."""
    found = json.loads(path.read_text())
    folder, name = Path(found["folder"]), path.stem
    play = folder / "play.json"
    role = json.loads(play.read_text()).get(name, {}) if play.exists() else {}
    with (folder / f"{name}.starts").open("a+") as file:
        file.write(json.dumps({k: v for k, v in os.environ.items() if k.startswith(SHOWN)}) + "\n")
        file.seek(0)
        start = len(file.readlines()) - 1
    seconds, code = ((role.get(key, []) + [0] * (start + 1))[start] for key in ("seconds", "codes"))
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, _: stopped.append(number))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not stopped:
        time.sleep(0.1)
    if stopped:
        return 75
    if code == 0:
        model = Path(found["source"])
        newest = max((model / "checkpoints").glob("checkpoint-*"), default=model)
        score = len((newest / "model.safetensors").read_text()) / 10
        (folder / f"{found['benchmark']}.json").write_text(json.dumps({"avg": score}))
    elif code != 75:
        print(f"ValueError: {name} was told to fail")
    return int(code)


def merge(folder: Path) -> int:
    from evaluation import jobs, rolling

    reasons = jobs.explain(folder)
    names = sorted({json.loads(p.read_text())["benchmark"] for p in (folder / "jobs").glob("*.json")})
    results = {n: json.loads(p.read_text())["avg"] for n in names if (p := folder / f"{n}.json").exists()}
    missing = {n: reasons.get(n, "nobody knows") for n in names if n not in results}
    (folder / "summary.json").write_text(json.dumps({"results": results, "missing": missing}))
    print("merged", *sorted(results), flush=True)
    for name, reason in missing.items():
        print(f"{name}: not evaluated: {reason}", flush=True)
    rolling.note(folder, results, missing)
    return 1 if missing else 0


def train(folder: Path, checkpoints: int, seconds: float, keep: int, go_on: Path | None = None) -> int:
    """Whole checkpoints as a run writes them, of which the oldest go."""
    for step in range(1, checkpoints + 1):
        while step > 1 and go_on is not None and not go_on.exists():
            time.sleep(0.1)
        time.sleep(seconds)
        draft = folder / "checkpoints" / f".checkpoint-{step}.tmp"
        (draft / "state").mkdir(parents=True)
        for name in ("config.json", "model.safetensors", "state/shard", "trainer_state.json"):
            (draft / name).write_text("w" * step)
        sizes = {str(p.relative_to(draft)): p.stat().st_size for p in draft.rglob("*") if p.is_file()}
        (draft / "COMPLETE").write_text(json.dumps(sizes))
        draft.rename(folder / "checkpoints" / f"checkpoint-{step}")
        for old in range(1, step - keep + 1):
            shutil.rmtree(folder / "checkpoints" / f"checkpoint-{old}", ignore_errors=True)
    return 0


def submit(path: Path) -> int:
    """{tasks, and what else jobs.submit takes} -> the ids on stdout."""
    from evaluation import jobs
    from evaluation.config import EvaluationConfig
    from evaluation.task import Task
    from hpcgrpo.sections import ClusterConfig

    told = json.loads(path.read_text())
    folder, cluster = Path(told.pop("folder")), ClusterConfig(**told.pop("cluster"))
    names, source = told.pop("benchmarks"), told.pop("source")
    made = [Task(source, EvaluationConfig(benchmarks=names), name, str(folder)) for name in names]
    done = jobs.submit(made, cluster=cluster, folder=folder, name="ev", commands=commands(), **told)
    print(json.dumps(done.ids))
    return 0


def watch(path: Path) -> int:
    """{run, cluster}"""
    from evaluation import jobs, rolling
    from evaluation.config import EvaluationConfig
    from evaluation.task import Task
    from hpcgrpo.sections import ClusterConfig

    told = json.loads(path.read_text())
    run, cluster = Path(told["run"]), ClusterConfig(**told["cluster"])
    code = run / "eval" / "rolling" / "slurm"

    def tasks(model: Path, step: int) -> list[Task]:
        config = EvaluationConfig(benchmarks=("a", "b"))
        folder = str(rolling.folder_of(run, step))
        return [Task(str(model), config, name, folder) for name in config.benchmarks]

    def queue(made: Sequence[Task]) -> list[str]:
        common = {"after": None, "name": "rolling", "commands": commands(), "code_root": code}
        return jobs.submit(made, cluster=cluster, folder=Path(made[0].folder), **common).ids

    return rolling.watch(
        run, tasks_for=tasks, submit=queue, alive=lambda: rolling.training_lives(run), poll_seconds=0.5
    )


def commands() -> Any:
    """In place of the command line's."""
    from evaluation.scripts import Commands

    return Commands(*(("-u", PROGRAM, what) for what in ("task", "merge", "watch")))


if __name__ == "__main__":
    what, place, *rest = sys.argv[1:]
    if what == "train":
        sys.exit(train(Path(place), int(rest[0]), float(rest[1]), int(rest[2]), *map(Path, rest[3:])))
    sys.exit({"task": task, "merge": merge, "watch": watch, "submit": submit}[what](Path(place)))
