"""The evaluation's side of the command line with Slurm: what is queued behind what, what is followed, what is shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from evaluation import following, jobs, rolling
from evaluation import source as sources
from evaluation.command import (
    WATCH_FILE,
    Options,
    check,
    folder_of,
    is_run,
    set_aside,
    settings,
    tasks_of,
    to_watch,
    watch_file,
    watched,
)
from evaluation.config import EvaluationConfig
from evaluation.reasons import exit_code
from evaluation.scripts import MERGE
from evaluation.source import Source
from evaluation.task import Task
from hpcgrpo import evidence
from hpcgrpo.launch import submit as launched
from hpcgrpo.launch.follow import INTERRUPTED, follow, say
from hpcgrpo.sections import RunConfig


@contextmanager
def _told(options: Options) -> Iterator[dict[str, Any]]:
    """With `--json` what is printed goes to standard error, and what is filled in here is printed as one object."""
    said: dict[str, Any] = {}
    if not options.as_json:
        yield said
        return
    with redirect_stdout(sys.stderr):
        yield said
    print(json.dumps(said), flush=True)


# ---- one evaluation


def evaluate(text: str, options: Options) -> int:
    """Queue an evaluation: behind the run's training where that is live, else of what is there -> exit code.

    With `--wait` it is followed to its end; so is one of the same settings that is live already.
    """
    source = sources.find(text, checkpoint=options.checkpoint)
    found = settings(options, source)
    folder = folder_of(source, options).absolute()
    joined = not options.dry_run and jobs.join(
        tasks_of(source.text, found, folder), folder, wait=options.wait and not options.fresh
    )
    with _told(options) as said:
        if not joined:
            _evaluate_anew(source, found, options, said)
        if not options.dry_run:
            said |= _jobs(folder)
        if options.wait and not options.dry_run:
            code = following.follow(folder)
            said |= _summary(folder)
            return code
    return 0


def _evaluate_anew(source: Source, found: EvaluationConfig, options: Options, said: dict[str, Any]) -> None:
    after = options.after
    if after is None and source.run is not None and options.checkpoint is None and is_run(source):
        after = jobs.training_job(source.run.folder)
    check(source, found)
    if options.published is not None:
        say("--published is not shown by the job; afterwards: hpcgrpo eval --compare FOLDER TABLE:ROW")
    if options.pass_at_n is not None:
        say("--pass-n is not drawn by the job; afterwards the same command without --executor slurm draws it")
    if options.fresh and not options.dry_run:
        set_aside(folder_of(source, options), found)
    _queue(source, found, options, said, after=after)


def _queue(
    source: Source, found: EvaluationConfig, options: Options, said: dict[str, Any], *, after: str | None
) -> None:
    """The array and the merge, or with `--dry-run` their scripts alone."""
    tasks, folder, name = _tasks(source, found, options, after), folder_of(source, options), _name(source)
    if options.dry_run:
        said |= jobs.dry_run(tasks, cluster=found.cluster, after=after, name=name, folder=folder)
        for script, words in said.items():
            print(f"{script}: {words}")
        return
    done = jobs.submit(tasks, cluster=found.cluster, after=after, name=name, folder=folder)
    waits = f", when job {done.after} has ended well" if done.after else ""
    print(
        f"job {' '.join(done.arrays)}: {len(done.elements)} evaluation tasks{waits}; then {done.merge}: the table"
    )
    print(f"  folder     {done.folder}\n  to end it  scancel {' '.join(done.ids)}", flush=True)


def _tasks(source: Source, found: EvaluationConfig, options: Options, after: str | None) -> list[Task]:
    """Of a training that is waited for, whatever checkpoint it ends with."""
    whole = is_run(source)
    pinned = str(source.step) if whole and after is None and source.step is not None else None
    where = str(source.run.folder) if whole and source.run is not None else source.text
    return tasks_of(where, found, folder_of(source, options), checkpoint=pinned, waits_for=after)


def _name(source: Source) -> str:
    return f"{source.name}-eval"


def _jobs(folder: Path) -> dict[str, Any]:
    done = jobs.submitted(folder)
    return {"jobs": done.ids, "after": done.after, "folder": str(folder)} if done is not None else {}


def _summary(folder: Path) -> dict[str, Any]:
    """What the merge wrote, if it came to its end."""
    ended = exit_code(folder / "jobs", MERGE) is not None
    return {"summary": evidence.read_json(folder / "summary.json")} if ended else {}


# ---- a training and its evaluation


def submit_both(trained: RunConfig, options: Options, *, rolling_too: bool) -> int:
    """Queue a training and its evaluation, both checked before either is -> exit code.

    With `--wait` both are followed, also those that are live already with the same settings: the training's code
    unless that is 0, else the evaluation's.
    """
    source = sources.of_run(trained)
    found = settings(options, source)
    check(source, found)
    with _told(options) as said:
        if options.dry_run:
            return _try_both(trained, source, found, options, said)
        place, tasks = trained.folder.absolute() / "eval", _tasks(source, found, options, None)
        if rolling_too:
            joined = _joins_watch(source, found, options)
        else:
            joined = jobs.join(tasks, place, wait=options.wait and not options.fresh)
        if not joined:
            jobs.test_only(tasks, cluster=found.cluster, name=_name(source), folder=place)
        after, code = _train(trained, options)
        if code:
            return code
        if not joined and rolling_too:
            _queue_watch(source, found, options, after)
        elif not joined:
            _queue(source, found, options, {}, after=after)
        training = launched.last(trained.folder) if after is not None else None
        none = {"job_id": None, "folder": str(trained.folder.absolute()), "log": None}
        said |= launched.in_words(training) if training is not None else none
        said["eval"] = _watch(place) if rolling_too else _jobs(place)
        if not options.wait:
            return 0
        code = follow(training, out=sys.stdout) if training is not None else 0
        if code == INTERRUPTED:
            return code
        ended = _follow_watch(place, said["eval"]) if rolling_too else following.follow(place)
        said["eval"] |= {} if rolling_too else _summary(place)
        return code or ended


def _try_both(
    trained: RunConfig, source: Source, found: EvaluationConfig, options: Options, said: dict[str, Any]
) -> int:
    if options.as_json:
        said |= launched.tried(trained)
    else:
        launched.dry_run(trained, as_json=False)
    said["eval"] = {}
    _queue(source, found, options, said["eval"], after=None)
    return 0


def _train(trained: RunConfig, options: Options) -> tuple[str | None, int]:
    """Queue the training, unless it is live and to be followed -> its job, None where it is finished; exit code."""
    live = launched.find_live(trained.folder)
    if live is not None and options.wait and not options.fresh and launched.is_same(trained):
        say(f"{trained.name} is live as job {live.job_id}; following it")
        return live.job_id, 0
    code = launched.submit(trained, executor="slurm", wait=False, fresh=options.fresh, as_json=False)
    return (None if code else jobs.training_job(trained.folder)), code


# ---- every checkpoint as it appears


def evaluate_rolling(text: str, options: Options) -> int:
    """Have a small job queue an evaluation of every checkpoint of a run as it appears -> exit code."""
    source, found = watched(text, options)
    assert source.run is not None
    folder = source.run.folder.absolute()
    with _told(options) as said:
        if not _joins_watch(source, found, options):
            _queue_watch(source, found, options, jobs.training_job(folder))
        said |= _watch(folder / "eval")
        return _follow_watch(folder / "eval", said) if options.wait else 0


def _joins_watch(source: Source, found: EvaluationConfig, options: Options) -> bool:
    assert source.run is not None
    folder = source.run.folder.absolute()
    known = evidence.read_json(folder / "eval" / WATCH_FILE)
    same = known == to_watch(folder, found, options, on_slurm=True)
    return jobs.join_watch(folder / "eval", wait=options.wait and not options.fresh and same)


def _queue_watch(source: Source, found: EvaluationConfig, options: Options, after: str | None) -> None:
    assert source.run is not None
    folder = source.run.folder.absolute()
    file = watch_file(folder, found, options, on_slurm=True)
    job = jobs.submit_watch(
        file, cluster=found.cluster, after=after, name=_name(source), folder=folder / "eval"
    )
    print(
        f"job {job}: evaluates each checkpoint of {folder} as it appears; its log is {folder}/eval/watch.log"
    )


def _watch(place: Path) -> dict[str, Any]:
    return {"jobs": [jobs.watching(place)], "folder": str(place)}


def _follow_watch(place: Path, said: dict[str, Any]) -> int:
    """Until every checkpoint is evaluated; then the table -> exit code, 1 where one is not."""
    code = following.follow_watch(place)
    for folder in rolling.submitted(place.parent) if code != INTERRUPTED else ():
        code = following.follow(folder, out=sys.stderr) or code
        if code == INTERRUPTED:
            break
    said["curve"] = rolling.curve(place.parent)
    print(rolling.table(place.parent))
    return code
