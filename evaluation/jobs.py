"""Evaluations as Slurm jobs: an array with an element for each task, behind a training where it is asked for, and a
job that merges what the elements found.

In `<folder>/jobs`: each task's `<name>.json`, its log and, where it did not end well, its `.reason`; `merge.log`.
In `<folder>/jobs/slurm`: the scripts, the code that they run, exit codes, and which jobs they are (submitted.json).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from evaluation import task as tasks_files
from evaluation.config import EvaluationConfig
from evaluation.reasons import Submitted as Submitted
from evaluation.reasons import explain as explain
from evaluation.reasons import submitted as submitted
from evaluation.reasons import why as why
from evaluation.reasons import write_record
from evaluation.scripts import COMMANDS, MERGE, Commands, Script, arranged, check_after, render, single, small
from evaluation.task import Task
from hpcgrpo import evidence
from hpcgrpo.checkpoint_folder import complete
from hpcgrpo.config_file import ConfigError
from hpcgrpo.journal import claim, write_atomically
from hpcgrpo.launch import queue, snapshot
from hpcgrpo.launch import submit as launched
from hpcgrpo.launch.follow import say
from hpcgrpo.launch.job import imports
from hpcgrpo.sections import ClusterConfig

WATCH = "watch"


# ---- queueing


def submit(
    tasks: Sequence[Task],
    *,
    cluster: ClusterConfig,
    after: str | None,
    name: str,
    folder: Path,
    merge_cluster: ClusterConfig | None = None,
    commands: Commands = COMMANDS,
    code_root: Path | None = None,
) -> Submitted:
    """Queue an array that runs `tasks`, and a job that merges what they write to `folder`.

    `after`: a training's job that is queued or running; the array starts once it has ended well and is cancelled
    where it does not, and `tasks` name its run's folder as their source. `code_root`: where the copy of the code goes,
    if several evaluations share it. Raises ConfigError for what the user can mend, and then nothing is queued.
    """
    queue.require()
    folder = folder.absolute()
    arrays, merge = arranged(tasks, cluster=cluster, after=after, name=name, folder=folder, commands=commands,
                             merge_cluster=merge_cluster)  # fmt: skip
    place = folder / "jobs" / "slurm"
    join(tasks, folder, wait=False)
    for script in (*arrays, merge):
        _check(script)
    try:
        with claim(place):  # two submissions at once: the second one is refused
            join(tasks, folder, wait=False)
            code = snapshot.take({}, code_root or place, beside=("evaluation",))
            if code_root is None:
                snapshot.prune(place, keep=code)
            _write_tasks(tasks, folder / "jobs")
            lines = imports(code, Path.cwd())
            return _queue([_with_setup(a, lines) for a in arrays], _with_setup(merge, lines), tasks, after)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error}); name another folder (--output-dir)"
        ) from None


def test_only(tasks: Sequence[Task], *, cluster: ClusterConfig, name: str, folder: Path) -> None:
    """Whether Slurm would take these tasks; nothing is queued or written. Raises ConfigError."""
    queue.require()
    arrays, merge = arranged(tasks, cluster=cluster, after=None, name=name, folder=folder.absolute())
    for script in (*arrays, merge):
        _check(script)


def _check(script: Script) -> str:
    """What sbatch says of a script, but for what it waits for, which may be yet to come. Raises ConfigError."""
    free = {k: v for k, v in script.job.options.items() if k != "dependency"}
    job = replace(script.job, options=free)
    try:
        queue.check(job)
        return queue.test_only(job, render(replace(script, job=job)))
    except queue.Unreachable:
        raise
    except ConfigError as error:
        raise ConfigError(
            f"{'the job that merges the results: ' if script.log == MERGE else ''}{error}"
        ) from None


def _write_tasks(tasks: Sequence[Task], folder: Path) -> None:
    """The tasks' files; what earlier ones of the same names and benchmarks left is removed."""
    names = {task.name for task in tasks}
    for path in folder.glob("*.json"):
        if path.stem not in names and _benchmark(path) in {task.benchmark for task in tasks}:
            path.unlink()  # shared out otherwise
            names.add(path.stem)
    for name in [*names, MERGE]:
        for path in (folder / f"{name}.reason", folder / "slurm" / f"{name}.code"):
            path.unlink(missing_ok=True)
        log = folder / f"{name}.log"
        if log.exists():  # a log says that this submission's job has started
            log.replace(folder / f"{name}.log.before")
    folder.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        task.write(folder / f"{task.name}.json")


def _benchmark(path: Path) -> str | None:
    return evidence.read_json(path).get("benchmark")


def _with_setup(script: Script, lines: Sequence[str]) -> Script:
    return replace(script, job=replace(script.job, setup=(*script.job.setup, *lines)))


def _queue(arrays: Sequence[Script], merge: Script, tasks: Sequence[Task], after: str | None) -> Submitted:
    """All or nothing: what is queued already is cancelled where a later one is refused."""
    source = tasks[0].source if after else None
    done = Submitted(merge.folder.parent, {}, None, after, source)
    try:
        for number, array in enumerate(arrays):
            array_id = _sbatch(array, merge.folder / "slurm" / f"array-{number}.sbatch")
            elements = {name: f"{array_id}_{i}" for i, name in enumerate(array.names)}
            done = replace(done, elements={**done.elements, **elements})
            write_record(done)
        waits = f"afterany:{':'.join(done.arrays)}"
        job = replace(merge.job, options={**merge.job.options, "dependency": waits})
        done = replace(done, merge=_sbatch(replace(merge, job=job), merge.folder / "slurm" / "merge.sbatch"))
        write_record(done)
    except BaseException:
        if done.ids:
            with suppress(queue.Unreachable):
                queue.ask("scancel", *done.ids)
        raise
    return done


def _sbatch(script: Script, path: Path) -> str:
    text = render(script)
    write_atomically(path, text)
    answer = queue.ask("sbatch", "--parsable", text=text, options=script.job.options)
    if answer.code:
        raise queue.refusal(answer.error + answer.out, script.job)
    return answer.out.strip().partition(";")[0]


def dry_run(
    tasks: Sequence[Task],
    *,
    cluster: ClusterConfig,
    after: str | None,
    name: str,
    folder: Path,
    merge_cluster: ClusterConfig | None = None,
    commands: Commands = COMMANDS,
) -> dict[str, str]:
    """Write the scripts and tasks to `<folder>/jobs/dry-run` and let sbatch check them -> what it says of each script.

    An evaluation that is there is left as it is. Raises ConfigError where Slurm would refuse.
    """
    folder = folder.absolute()
    arrays, merge = arranged(tasks, cluster=cluster, after=after, name=name, folder=folder, commands=commands,
                             merge_cluster=merge_cluster)  # fmt: skip
    place = folder / "jobs" / "dry-run"
    for task in tasks:
        task.write(place / f"{task.name}.json")
    named = {f"array-{i}.sbatch": array for i, array in enumerate(arrays)} | {"merge.sbatch": merge}
    for file, script in named.items():
        write_atomically(place / file, render(script))
    return {str(place / file): _asked(script) for file, script in named.items()}


def _asked(script: Script) -> str:
    try:
        queue.require()
    except ConfigError as error:
        return f"not asked: {error}"
    try:
        return _check(script)
    except queue.Unreachable as error:  # the script stands all the same
        return f"not asked: {error}"


def submit_watch(
    file: Path,
    *,
    cluster: ClusterConfig,
    after: str | None,
    name: str,
    folder: Path,
    commands: Commands = COMMANDS,
) -> str:
    """Queue the job that evaluates checkpoints as they appear, to start when the training does -> its id.

    `file` is what its command reads; its log is `<folder>/watch.log`. Raises ConfigError where one is live already.
    """
    queue.require()
    check_after(after)
    folder = folder.absolute()
    cluster = small(cluster).model_copy(update={"timeout_min": cluster.timeout_min})
    script = single(cluster, name=f"{name}-watch", logs=folder, log=WATCH, requeues=cluster.max_requeues,
                     command=(*commands.watch, str(file.absolute())))  # fmt: skip
    if after is not None:
        script = replace(
            script, job=replace(script.job, options={**script.job.options, "dependency": f"after:{after}"})
        )
    _check(script)
    place = folder / "slurm"
    with claim(place):
        join_watch(folder, wait=False)
        code = snapshot.take({}, place, beside=("evaluation",))
        (place / f"{WATCH}.code").unlink(missing_ok=True)
        job = _sbatch(_with_setup(script, imports(code, Path.cwd())), place / "watch.sbatch")
        write_atomically(place / "watch.json", json.dumps({"job": job}) + "\n")
    return job


# ---- the jobs of an evaluation


def training_job(run_folder: Path) -> str | None:
    """The live training job that an evaluation of this run waits for; None where a checkpoint is there to take.

    Raises ConfigError where there is neither, with the reason why the last job left none.
    """
    last = launched.find_live(run_folder)
    if last is not None:
        return last.job_id
    if complete(run_folder / "checkpoints"):
        return None
    before = launched.last(run_folder)
    ended = why(before.job_id, run_folder) if before is not None else None
    reason = f"{ended}, and " if ended else ""
    raise ConfigError(
        f"{run_folder}: {reason}no complete checkpoint is there and no training job is live; train it first"
        " (hpcgrpo submit), or name a model's folder"
        + (f"; hpcgrpo doctor {run_folder} looks for the cause" if before else "")
    )


def live(folder: Path) -> dict[str, str]:
    """Which jobs of an evaluation are queued or running -> their states. Raises Unreachable where nobody can tell."""
    found = submitted(folder)
    return states(found) if found is not None else {}


def states(jobs: Submitted) -> dict[str, str]:
    """Those of an evaluation's jobs that are queued or running -> their states. Raises Unreachable."""
    found: dict[str, str] = {}
    for job in jobs.ids:
        answer = queue.ask("squeue", "--noheader", "--array", "--jobs", job, "--states=all", "--format=%i %T")
        if answer.code and not queue.GONE.search(answer.error):
            raise queue.Unreachable(f"squeue: {' '.join(answer.error.split())}")
        pairs = [line.split() for line in answer.out.splitlines() if line.strip()]
        found.update({element: state for element, state in pairs if state not in queue.OVER})
    return found


def join(tasks: Sequence[Task], folder: Path, *, wait: bool) -> bool:
    """Whether an evaluation of these tasks and settings is live in `folder`, and followed since `wait` asks for it.

    Raises ConfigError for one that is live otherwise, Unreachable where nobody can tell.
    """
    found = live(folder)
    if not found:
        return False
    ids = " ".join(sorted({job.partition("_")[0] for job in found}))
    said = f"{folder}: this evaluation is live as job {ids.replace(' ', ', ')}"
    if wait and _settings(folder) == {task.name: task.config for task in tasks}:
        say(f"{said}; following it")
        return True
    raise ConfigError(f"{said}; follow it with --wait and the same settings, or end it with `scancel {ids}`")


def _settings(folder: Path) -> dict[str, EvaluationConfig]:
    """Of each task that was queued last."""
    found = submitted(folder)
    names = found.elements if found is not None else ()
    return {name: tasks_files.read(folder / "jobs" / f"{name}.json").config for name in names}


def watching(folder: Path) -> str | None:
    """The job that was queued last to watch for checkpoints, live or not; `folder` is the run's eval folder."""
    return str(evidence.read_json(folder / "slurm" / "watch.json").get("job") or "") or None


def join_watch(folder: Path, *, wait: bool) -> bool:
    """Whether a job that watches is live, and followed since `wait` asks for it; else ConfigError for a live one."""
    job = watching(folder)
    if job is None or queue.state(job) is None:
        return False
    if wait:
        say(f"{folder}: is watched by job {job}; following it")
        return True
    raise ConfigError(
        f"{folder}: is watched by job {job} already; follow it with --wait and the same settings, or end it"
        f" with `scancel {job}`"
    )
