"""Evaluations as Slurm jobs: an array with an element for each task, behind a training where it is asked for, and a
job that merges what the elements found.

In `<folder>/jobs`: each task's `<name>.json`, its log and, where it did not end well, its `.reason`; `merge.log`.
In `<folder>/jobs/slurm`: the scripts, the code that they run, exit codes, and which jobs they are (submitted.json).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from evaluation.reasons import Submitted as Submitted
from evaluation.reasons import exit_code, write_record
from evaluation.reasons import explain as explain
from evaluation.reasons import submitted as submitted
from evaluation.reasons import why as why
from evaluation.scripts import COMMANDS, MERGE, Commands, Script, arranged, check_after, render, single, small
from evaluation.task import Task
from hpcgrpo import evidence
from hpcgrpo.checkpoint_folder import complete
from hpcgrpo.config_file import ConfigError
from hpcgrpo.journal import claim, write_atomically
from hpcgrpo.launch import queue, snapshot
from hpcgrpo.launch import submit as launched
from hpcgrpo.launch.follow import GONE_SECONDS, INTERRUPTED, LEAVING_SECONDS, say
from hpcgrpo.launch.job import imports
from hpcgrpo.sections import ClusterConfig

POLL_SECONDS = 5.0


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
    _refuse_live(folder)
    for script in (*arrays, merge):
        _check(script)
    try:
        with claim(place):  # two submissions at once: the second one is refused
            _refuse_live(folder)
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
    script = single(cluster, name=f"{name}-watch", logs=folder, log="watch", requeues=cluster.max_requeues,
                     command=(*commands.watch, str(file.absolute())))  # fmt: skip
    if after is not None:
        script = replace(
            script, job=replace(script.job, options={**script.job.options, "dependency": f"after:{after}"})
        )
    _check(script)
    place = folder / "slurm"
    with claim(place):
        job = str(evidence.read_json(place / "watch.json").get("job") or "")
        if job and queue.state(job) is not None:
            raise ConfigError(f"{folder}: is watched by job {job} already; end it with `scancel {job}`")
        code = snapshot.take({}, place, beside=("evaluation",))
        (place / "watch.code").unlink(missing_ok=True)
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
    return _states(found) if found is not None else {}


def _states(jobs: Submitted) -> dict[str, str]:
    found: dict[str, str] = {}
    for job in jobs.ids:
        answer = queue.ask("squeue", "--noheader", "--array", "--jobs", job, "--states=all", "--format=%i %T")
        if answer.code and not queue.GONE.search(answer.error):
            raise queue.Unreachable(f"squeue: {' '.join(answer.error.split())}")
        pairs = [line.split() for line in answer.out.splitlines() if line.strip()]
        found.update({element: state for element, state in pairs if state not in queue.OVER})
    return found


def _refuse_live(folder: Path) -> None:
    found = live(folder)
    if found:
        ids = " ".join(sorted({job.partition("_")[0] for job in found}))
        raise ConfigError(
            f"{folder}: this evaluation is live as job {ids.replace(' ', ', ')}; follow it with --wait, or end it with"
            f" `scancel {ids}`"
        )


# ---- following


def follow(
    folder: Path,
    *,
    out: TextIO = sys.stdout,
    tell: Callable[[str], None] = say,
    poll_seconds: float = POLL_SECONDS,
) -> int:
    """Until the merge has ended: what the jobs do to `tell`, then the merge's words to `out` -> its exit code.

    1 where it never ran. Each task that is missing is told with its reason. Ctrl-C ends the following alone (130).
    """
    jobs = submitted(folder)
    if jobs is None:
        raise ConfigError(f"{folder}: no evaluation was queued here")
    try:
        _until_over(jobs, tell, poll_seconds)
    except KeyboardInterrupt:
        tell(f"no longer following; the evaluation goes on. To end it: scancel {' '.join(jobs.ids)}")
        return INTERRUPTED
    code = exit_code(folder / "jobs", MERGE)
    printed = _printed(folder / "jobs" / f"{MERGE}.log", whole=code is None)
    out.write(printed)
    for name, reason in explain(folder).items():
        if reason not in printed:
            tell(f"{name}: {reason}")
    if code is None:
        tell(
            f"the job that merges the results ({jobs.merge}) left the queue without its end; Slurm says"
            f" {queue.final_state(jobs.merge or '0')}. `hpcgrpo eval-merge {folder}` makes the table"
        )
    return 1 if code is None else code


def _printed(log: Path, *, whole: bool) -> str:
    """What the merge printed; without srun's own lines where it ended by itself."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except OSError:
        return ""
    return "".join(line for line in lines if whole or not line.startswith("srun: "))


def _until_over(jobs: Submitted, tell: Callable[[str], None], poll_seconds: float) -> None:
    """Out of the queue for a while, or the merge has written how it ended and had time to leave."""
    told, gone_since, merged_since = "", None, None
    while True:
        now = time.monotonic()
        if exit_code(jobs.folder / "jobs", MERGE) is not None:
            merged_since = merged_since or now
        try:
            states = _states(jobs)
            shown = "; ".join(_shown(jobs, states)) or "none in the queue"
            gone_since = None if states else gone_since or now
        except queue.Unreachable as error:
            shown = str(error)
        if shown != told:
            told = shown
            tell(shown)
        if merged_since is not None and (gone_since is not None or now - merged_since > LEAVING_SECONDS):
            return
        if gone_since is not None and now - gone_since >= GONE_SECONDS:
            return
        time.sleep(poll_seconds)


def _shown(jobs: Submitted, states: Mapping[str, str]) -> Iterator[str]:
    mine = [states[e] for e in jobs.elements.values() if e in states]
    if mine:
        counts = ", ".join(f"{mine.count(state)} {state}" for state in sorted(set(mine)))
        waiting = f", waiting for job {jobs.after}" if jobs.after and set(mine) == {"PENDING"} else ""
        yield f"job {' '.join(jobs.arrays)}: {counts} of {len(jobs.elements)}{waiting}"
    elif jobs.merge and jobs.merge in states:
        yield f"job {jobs.merge} (merge): {states[jobs.merge]}"
