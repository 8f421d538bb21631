"""Evaluates a model: sample, grade while sampling, keep every record, and go on from the records after a kill."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from evaluation import files, jobs, metrics, rolling, samples, serving, tables
from evaluation import source as sources
from evaluation import task as tasks
from evaluation.benchmarks import resolve
from evaluation.claims import sole
from evaluation.config import EvaluationConfig
from evaluation.prepare import Prepared, Say, load_model, prepare, requests
from evaluation.progress import Progress
from evaluation.published import Side
from evaluation.records import (
    Recorder,
    check_settings,
    file_of,
    keep_settings,
    missing,
    read_result,
    records,
    regrade,
)
from evaluation.scripts import STOPPED
from evaluation.source import Source
from evaluation.task import Task
from hpcgrpo.config_file import ConfigError
from hpcgrpo.rewards.grading import Grader
from hpcgrpo.types import Sampling, Stopped

MOST_GRADERS = 8
WHOLE = (0, 1)  # the shard that is all of a benchmark


def evaluate(
    source: Source,
    config: EvaluationConfig,
    *,
    folder: Path,
    shard: tuple[int, int] = WHOLE,
    stopping: Callable[[], bool],
    say: Say,
) -> list[dict[str, Any]]:
    """Evaluate every benchmark of the configuration -> the results of those that are whole now.

    Raises Stopped where it was told to stop, ConfigError for what the user can mend, FolderInUse where another process
    evaluates into the folder, EngineError where no engine comes up; what was graded until then is kept.
    """
    labels = {_label(WHOLE): True, _label(shard): False}  # shards share the whole, which none has beside them
    places = {
        folder / b.name / f".{x}": shared for b in resolve(config.benchmarks) for x, shared in labels.items()
    }
    known = {p: shared for p, shared in places.items() if p.exists()}  # one may be at work there: told first
    with ExitStack() as held:
        _claim(held, known, folder, stopping, say)
        model = load_model(source)
        prepared = [prepare(model, config, name, say=say) for name in config.benchmarks]
        _claim(held, {p: shared for p, shared in places.items() if p not in known}, folder, stopping, say)
        grader = held.enter_context(_grader(config))
        for one in prepared:
            keep_settings(folder, one)
            _regrade(folder, one, shard, grader, say)
        todo = [(one, missing(folder, one, shard, again=True)) for one in prepared]
        todo = [(one, left) for one, left in todo if left]
        if todo and stopping():
            raise Stopped
        if todo:
            length = max(one.longest_prompt + one.protocol.max_completion_length for one, _ in todo)
            served = serving.Served(str(source.model), length, model.end_ids, model.decode)
            alone = f"{prepared[0].benchmark.name}-" if len(prepared) == 1 else ""
            logs = folder / "logs" / f"{alone}{_label(shard)}"  # another task's may run on another node
            with serving.sampler(config, served, folder=logs, stopping=stopping, say=say) as sampler:
                for one, left in todo:
                    with _recorder(one, left, config, grader, folder, shard, stopping) as recorder:
                        protocol = one.protocol
                        sampling = Sampling(
                            protocol.temperature,
                            protocol.max_completion_length,
                            protocol.top_p,
                            protocol.top_k,
                        )
                        sampler.stream(recorder.asked, sampling, recorder.arrived)
        whole = [one for one in prepared if not missing(folder, one, WHOLE, again=False)]
        return [finish(folder, one, grader, say=say) for one in whole]


def _regrade(folder: Path, prepared: Prepared, shard: tuple[int, int], grader: Grader, say: Say) -> None:
    name = prepared.benchmark.name
    if number := regrade(folder, prepared, shard, grader):
        say(f"{name}: {number} completions that another version of the grader had graded were graded again")


@contextmanager
def _recorder(
    prepared: Prepared,
    todo: Sequence[tuple[str, int]],
    config: EvaluationConfig,
    grader: Grader,
    folder: Path,
    shard: tuple[int, int],
    stopping: Callable[[], bool],
) -> Iterator[Recorder]:
    name, open_ones = prepared.benchmark.name, set(todo)
    mine = {p.id for p in prepared.share(shard)}
    done = [s for key, s in records(folder, prepared).items() if key[0] in mine and key not in open_ones]
    asked = requests(prepared, todo, config.seed)
    progress = Progress(name, len(todo) + len(done), len(done), sum(s.right for s in done))
    file = file_of(folder, prepared, shard)
    with progress, Recorder(prepared, todo, asked, file, grader, progress, stopping) as recorder:
        yield recorder


def finish(folder: Path, prepared: Prepared, grader: Grader, *, say: Say) -> dict[str, Any]:
    """A benchmark's result from its records, written to `<benchmark>.json`; `say` tells where more problems' goes."""
    found = samples.by_problem(records(folder, prepared).values())
    summary = metrics.summarize(
        found,
        num_samples=prepared.protocol.num_samples,
        same=None if prepared.benchmark.kind == "choice" else partial(_same, grader),
    )
    result = {
        "benchmark": prepared.benchmark.name,
        "title": prepared.benchmark.title,
        "model": prepared.settings["model"],
        "settings": prepared.settings,
        "summary": summary,
        "problems": {name: {"right": [int(s.right) for s in one]} for name, one in found.items()},
    }
    path = folder / f"{prepared.benchmark.name}.json"
    before = read_result(path)
    if before is not None and len(before["problems"]) > len(found):
        say(
            f"{path}: the result of {len(before['problems'])} problems is replaced by that of {len(found)}; all samples"
            " are kept, and the same command with the earlier max_problems shows it again"
        )
    files.write(path, json.dumps(result, indent=1) + "\n")
    return result


def _same(grader: Grader, pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Whether two answers are one, for the vote."""
    return [outcome == "right" for outcome in grader.grade(pairs)]


def in_words(result: Mapping[str, Any]) -> str:
    """A result in one line."""
    score = result["summary"]["avg@k"]
    return (
        f"{score['mean']:.4f} (95 %: {score['low']:.4f} to {score['high']:.4f}), avg@{score['k']} of"
        f" {result['summary']['num_problems']} problems"
    )


def _claim(
    held: ExitStack, places: Mapping[Path, bool], folder: Path, stopping: Callable[[], bool], say: Say
) -> None:
    """Hold these places, those that are True beside others of the same. Raises FolderInUse."""
    try:
        for place, shared in places.items():
            held.enter_context(sole(place, say=say, stopping=stopping, shared=shared))
    except OSError as error:
        room = "make room, or " if error.errno in files.FULL else ""
        raise ConfigError(
            f"{folder}: results cannot be written there ({error.strerror}); {room}name another folder (--output-dir)"
        ) from None


def _label(shard: tuple[int, int]) -> str:
    return "whole" if shard == WHOLE else f"{shard[0]}-of-{shard[1]}"


@contextmanager
def _grader(config: EvaluationConfig) -> Iterator[Grader]:
    cores = len(os.sched_getaffinity(0))
    with Grader(num_processes=config.grader_processes or min(cores, MOST_GRADERS)) as grader:
        yield grader


# ---- as a process


class Stop:
    """Whether it is time to stop: SIGTERM, SIGINT or Slurm's warning came. A second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> Stop:
        self.before = {
            n: signal.signal(n, self._heed) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _heed(self, number: int, _: object) -> None:
        if self.signal is not None and number != signal.SIGUSR2:
            os._exit(128 + number)
        self.signal = number
        if number == signal.SIGINT:
            print("hpcgrpo: stopping; once more ends it at once", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Tell the user, off the results' way."""
    print(text, file=sys.stderr, flush=True)


def task(path: Path) -> int:
    """Do what a task's file says -> exit code: 0 done, 75 stopped and to be started again."""
    found = tasks.read(path)
    source = sources.find(found.source, checkpoint=found.checkpoint)
    config = found.config.model_copy(update={"benchmarks": (_asked_as(found),)})
    with Stop() as stop:
        try:
            results = evaluate(
                source, config, folder=Path(found.folder), shard=found.shard, stopping=stop, say=say
            )
        except Stopped:
            say(f"{found.name}: stopped by signal {stop.signal}; what was graded is kept")
            return STOPPED
    for result in results:
        say(f"{found.name}: {in_words(result)}")
    return 0


def _asked_as(task: Task) -> str:
    """The benchmark as the configuration has it, e.g. NAME=FILE.jsonl."""
    return next(text for text in task.config.benchmarks if resolve([text])[0].name == task.benchmark)


def merge(folder: Path) -> int:
    """Bring the tasks of `folder/jobs` together and print their table -> 0, or 1 where a benchmark is not whole.

    Each of those is told with the reason.
    """
    asked = [tasks.read(path) for path in sorted((folder / "jobs").glob("*.json"))]
    if not asked:
        raise ConfigError(f"{folder}: no evaluation was queued here (jobs/*.json)")
    why = jobs.explain(folder)
    results: list[dict[str, Any]] = []
    lacking: dict[str, str] = {}
    order = [b.name for b in resolve(asked[0].config.benchmarks)]  # the table's
    asked.sort(key=lambda t: order.index(t.benchmark) if t.benchmark in order else len(order))
    for name in dict.fromkeys(t.benchmark for t in asked):
        shards = [t for t in asked if t.benchmark == name]
        try:
            results.append(_merged(folder, shards[0]))
        except ValueError as error:
            reasons = dict.fromkeys(why[t.name] for t in shards if t.name in why)
            lacking[name] = "; ".join(reasons) or str(error)
    write_summary(folder, results, lacking)
    show(results, lacking)
    scores = {r["benchmark"]: r["summary"]["avg@k"]["mean"] for r in results}
    rolling.note(folder, scores, lacking)
    return 1 if lacking else 0


def show(
    results: Sequence[Mapping[str, Any]], lacking: Mapping[str, str], published: Side | None = None
) -> None:
    """The table on stdout; what is missing below."""
    from rich.console import Console

    if results:
        wide = Console(width=None if sys.stdout.isatty() else 160)
        wide.print(tables.result_table(results, published=published))
    for benchmark, why in lacking.items():
        say(f"{benchmark}: not evaluated: {why}")


def _merged(folder: Path, first: Task) -> dict[str, Any]:
    """A benchmark's result. Raises ConfigError where samples are missing."""
    model = load_model(sources.find(first.source, checkpoint=first.checkpoint))
    prepared = prepare(model, first.config, _asked_as(first), say=lambda _: None)
    check_settings(folder, prepared)
    left = missing(folder, prepared, WHOLE, again=False)
    if left:  # where none was begun, no settings are left for later ones to keep to
        total = len(prepared.problems) * prepared.protocol.num_samples
        raise ConfigError(f"{len(left)} of {total} samples are missing; the same command goes on")
    keep_settings(folder, prepared)
    with _grader(first.config) as grader:
        _regrade(folder, prepared, WHOLE, grader, say)
        return finish(folder, prepared, grader, say=say)


def _earlier(folder: Path, others: Collection[str]) -> list[dict[str, Any]]:
    """The results in the folder of benchmarks that are none of `others`, by name."""
    found = [read_result(path) for path in sorted(folder.glob("*.json"))]
    return [result for result in found if result is not None and result["benchmark"] not in others]


def write_summary(
    folder: Path,
    results: Sequence[Mapping[str, Any]],
    lacking: Mapping[str, str],
    published: Side | None = None,
) -> None:
    """summary.json and summary.md of a folder: these results, then the others that lie there already."""
    results = [*results, *_earlier(folder, {*lacking, *(r["benchmark"] for r in results)})]
    said = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "results": {r["benchmark"]: {"model": r["model"], **r["summary"]} for r in results},
        "missing": dict(lacking),
    }
    files.write(folder / "summary.json", json.dumps(said, indent=1) + "\n")
    text = tables.to_markdown(results, published=published) if results else ""
    text += tables.models_in_words(results)
    for name, why in lacking.items():
        text += f"\n{name}: not evaluated: {why}\n"
    files.write(folder / "summary.md", text)
