"""A study on Slurm: its runs as the elements of job arrays, each element a run's own job with its nodes."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcgrpo.journal import write_atomically
from hpcgrpo.launch import queue, sbatch, snapshot, submit
from hpcgrpo.launch.follow import GONE_SECONDS, INTERRUPTED, Submitted, outcome
from hpcgrpo.launch.job import Job, imports, job_for
from hpcgrpo.launch.local import newest_checkpoint
from hpcgrpo.study.cells import Cell
from hpcgrpo.study.design import Study

LARGEST = 1000  # elements of one array: Slurm's own limit where nobody has raised it
POLL_SECONDS = 5.0


@dataclass(frozen=True)
class Array:
    """Runs that ask for the same resources."""

    job: Job  # of any of them, under the study's name
    cells: tuple[Cell, ...]
    folders: tuple[str, ...]  # of the runs, as their jobs see them


def live(cells: Sequence[Cell]) -> dict[str, Submitted]:
    """The cells whose jobs are queued or running. Raises ConfigError where nobody can tell."""
    queue.require()
    found = {cell.name: submit.find_live(cell.run.folder) for cell in cells}
    return {name: job for name, job in found.items() if job is not None}


def submit_arrays(
    study: Study, cells: Sequence[Cell], *, parallelism: int | None
) -> Iterator[tuple[str, int]]:
    """Queue the runs -> (job's id, number of runs) of each array.

    All arrays are checked before the first is queued. Raises ConfigError with the key to change.
    """
    root = (Path.cwd() / study.folder / "slurm").absolute()
    arrays = [part for array in arranged(study, cells, root) for part in _parts(array)]
    scripts = [render(array, root, parallelism=parallelism) for array in arrays]
    for array, script in zip(arrays, scripts, strict=True):
        queue.check(array.job)
        queue.test_only(array.job, script)
    for number, (array, script) in enumerate(zip(arrays, scripts, strict=True)):
        write_atomically(root / f"array-{number}.sbatch", script)
        yield _queue(array, script), len(array.cells)


def arranged(study: Study, cells: Sequence[Cell], root: Path) -> list[Array]:
    """The runs by what they ask of Slurm and by the code that they need, a copy of which is made in `root`."""
    found: dict[str, Array] = {}
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for cell in cells:
        job = job_for(cell.run, directory=Path.cwd())
        code = snapshot.take(cell.run.rewards, root)
        job = replace(
            job,
            name=study.name,
            options={**job.options, "job-name": study.name},
            setup=(*job.setup, *imports(code, Path.cwd())),
            config="",
        )
        key = repr(replace(job, folder="", command=()))
        same = found.get(key, Array(job, (), ()))
        found[key] = replace(same, cells=(*same.cells, cell), folders=(*same.folders, job.folder))
    return list(found.values())


def _parts(array: Array) -> Iterator[Array]:
    for i in range(0, len(array.cells), LARGEST):
        yield replace(array, cells=array.cells[i : i + LARGEST], folders=array.folders[i : i + LARGEST])


def render(array: Array, root: Path, *, parallelism: int | None) -> str:
    """The script of an array: element i is the run in the i-th folder."""
    job, at_once = array.job, f"%{parallelism}" if parallelism else ""
    *command, _ = job.command
    lines = [
        "#!/bin/bash",
        f"# {job.name}: written by `hpcgrpo study`.",
        *sbatch.directives(job),
        f"#SBATCH --array=0-{len(array.folders) - 1}{at_once}",
        f"#SBATCH --output={sbatch.quote(sbatch.pattern(f'{root}/array-%A_%a.out'))}",
        "",
        "umask 077",
        "folders=(",
        *(f"  {shlex.quote(folder)}" for folder in array.folders),
        ")",
        "folder=${folders[$SLURM_ARRAY_TASK_ID]}",
        'mkdir -p "$folder/slurm" || exit',
        'log="$folder/slurm/job-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.log"',
        'echo "all further output: $log"',
        'exec >>"$log" 2>&1',
        "",
        *job.setup,
        f'{shlex.join(["srun", *job.srun_args, *command])} "$folder"',
        "",
    ]
    return "\n".join(lines)


def _queue(array: Array, script: str) -> str:
    answer = queue.ask("sbatch", "--parsable", text=script, options=array.job.options)
    if answer.code:
        raise queue.refusal(answer.error + answer.out, array.job)
    job_id = answer.out.strip().partition(";")[0]
    for i, cell in enumerate(array.cells):
        element = f"{job_id}_{i}"
        submit.record_job(cell.run.folder, element, [cell.run.folder / "slurm" / f"job-{element}.log"])
    return job_id


# ---- following


def follow(cells: Sequence[Cell], say: Callable[[str], None], *, poll_seconds: float = POLL_SECONDS) -> int:
    """Until every cell's job has left the queue -> 0, or 1 where a run did not finish; each end is told.

    Ctrl-C ends the following alone (130).
    """
    jobs = {cell.name: job for cell in cells if (job := submit.last(cell.run.folder)) is not None}
    try:
        _until_gone(jobs, say, poll_seconds)
    except KeyboardInterrupt:
        arrays = " ".join(_arrays(jobs))
        say(f"no longer following; the runs go on. To end them: scancel {arrays}")
        return INTERRUPTED
    failed = [cell for cell in cells if not newest_checkpoint(cell.run.folder, cell.run.train)[1]]
    for cell in failed:
        ended = outcome(jobs[cell.name]) if cell.name in jobs else None
        why = f"code {ended[0]}: {ended[1]}" if ended else "no word of its own"
        say(f"{cell.name} is not finished ({why}); hpcgrpo doctor {cell.run.folder}")
    return 1 if failed else 0


def _arrays(jobs: Mapping[str, Submitted]) -> list[str]:
    return sorted({job.job_id.partition("_")[0] for job in jobs.values()})


def _until_gone(jobs: Mapping[str, Submitted], say: Callable[[str], None], poll_seconds: float) -> None:
    told, gone_since = "", None
    while True:
        try:
            states = {name: job for array in _arrays(jobs) for name, job in in_queue(array).items()}
        except queue.Unreachable as error:
            states, now = None, str(error)
        if states is not None:
            mine = [states[job.job_id] for job in jobs.values() if job.job_id in states]
            counts = {state: mine.count(state) for state in dict.fromkeys(sorted(mine))}
            now = ", ".join(f"{n} {state}" for state, n in counts.items()) or "none in the queue"
            gone_since = None if mine else gone_since or time.monotonic()
        if now != told:
            told = now
            say(now)
        if gone_since is not None and time.monotonic() - gone_since >= GONE_SECONDS:
            return
        time.sleep(poll_seconds)


def in_queue(array: str) -> dict[str, str]:
    """The elements of an array that are queued or running -> their states. Raises Unreachable."""
    answer = queue.ask("squeue", "--noheader", "--array", "--jobs", array, "--states=all", "--format=%i %T")
    if answer.code and not queue.GONE.search(answer.error):
        raise queue.Unreachable(f"squeue: {' '.join(answer.error.split())}")
    lines = [line.split() for line in answer.out.splitlines() if line.strip()]
    return {element: state for element, state in lines if state not in queue.OVER}
