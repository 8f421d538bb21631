"""The evaluation's side of the command line: which model, which benchmarks, where it runs, what is shown."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from evaluation import benchmarks, compare, config, jobs, pass_at_n, presets, published, rolling, run
from evaluation import source as sources
from evaluation.claims import sole
from evaluation.config import EvaluationConfig
from evaluation.prepare import load_model, prepare, recipe
from evaluation.published import Side
from evaluation.source import Source
from evaluation.task import Task
from hpcgrpo.config_file import ConfigError
from hpcgrpo.journal import write_atomically
from hpcgrpo.types import Stopped

INTERRUPTED = 130
WATCH_FILE = "watch.json"  # in the run's eval folder: what the watching job is to do
LOOK_SECONDS = 30.0  # between looks for a new checkpoint


@dataclass(frozen=True)
class Options:
    """How an evaluation is run, beyond what it measures."""

    config: str | None = None  # a YAML file
    overrides: Sequence[str] = ()
    checkpoint: str | None = None
    output_dir: str | None = None
    fresh: bool = False
    after: str | None = None  # a job of Slurm's
    wait: bool = False
    dry_run: bool = False
    every: int = 1  # of rolling: each so many-th checkpoint
    published: str | None = None  # TABLE:ROW beside the results
    pass_at_n: int | None = None
    as_json: bool = False


def settings(options: Options, source: Source) -> EvaluationConfig:
    """The evaluation's configuration, every benchmark and the preset of which is known."""
    said = [item for item in options.overrides if item.startswith("num_samples=")]
    if options.pass_at_n is not None and said not in ([], [f"num_samples={options.pass_at_n}"]):
        raise ConfigError(f"--pass-n {options.pass_at_n} is the number of samples; leave {said[-1]} out")
    found = config.load(options.config, options.overrides, num_samples=options.pass_at_n)
    for benchmark in benchmarks.resolve(found.benchmarks):
        recipe(benchmark, found, source.run)
    shards(found)
    return found


def shards(found: EvaluationConfig) -> dict[str, int]:
    """Benchmark -> elements that share its problems, of those that are shared. Raises ConfigError."""
    names, counts = [benchmark.name for benchmark in benchmarks.resolve(found.benchmarks)], {}
    for text, count in found.shards.items():
        name = text
        with suppress(ValueError):
            name = benchmarks.resolve([text])[0].name
        if name not in names or count < 1:
            asked = ", ".join(found.benchmarks)
            raise ConfigError(
                f"shards: {text}: {count}: a benchmark of this evaluation ({asked}), and 1 or more"
            )
        counts[name] = count
    return counts


def folder_of(source: Source, options: Options) -> Path:
    """Where the results go: a checkpoint that was named has a folder of its own."""
    if options.output_dir is not None:
        return Path(options.output_dir)
    named = options.checkpoint is not None or Path(source.text).name == f"checkpoint-{source.step}"
    return source.folder / f"checkpoint-{source.step}" if named else source.folder


# ---- on this machine


def here(text: str, options: Options) -> int:
    """Evaluate on this machine -> exit code; the same command goes on where it stopped."""
    source = sources.find(text, checkpoint=options.checkpoint)
    found = settings(options, source)
    beside = _published(options, found)
    folder = folder_of(source, options)
    moved = {}
    if options.fresh:
        check(source, found)  # before anything is moved
        moved = set_aside(folder, found)
    with run.Stop() as stop:
        try:
            results = run.evaluate(source, found, folder=folder, stopping=stop, say=run.say)
        except Stopped:
            run.say("stopped; what was graded is kept, and the same command goes on")
            return INTERRUPTED if stop.signal == signal.SIGINT else run.STOPPED
    run.write_summary(folder, results, {}, beside)
    said: dict[str, Any] = {"folder": str(folder), "moved": moved, "results": results}
    if beside is not None:
        said["published"] = compare.beside_published(results, beside)
    if options.pass_at_n is not None:
        said["pass_at_n"] = pass_at_n.study(results, folder, beside=pass_at_n.figure_s1())
    if options.as_json:
        print(json.dumps(said, indent=1))
    else:
        run.show(results, {}, beside)
        run.say(f"results in {folder}" + (f"; earlier ones in {', '.join(moved.values())}" if moved else ""))
    return 0


def _published(options: Options, found: EvaluationConfig) -> Side | None:
    """The published row that was asked for. Raises ValueError where there is none or it lacks all of these."""
    if options.published is None:
        return None
    names = [b.name for b in benchmarks.resolve(found.benchmarks)]
    table, _, row = options.published.partition(":")
    side = published.find(table, row, beside=names)
    if not set(names) & set(side.scores):
        raise ConfigError(
            f"--published {side.name}: has no score of {', '.join(names)}, but of {', '.join(side.scores)};"
            " --list-published lists all rows"
        )
    paper = table.partition("_")[0]
    if paper in presets.PRESETS and found.preset != paper:
        run.say(f"--published: the row was measured by its paper's protocol; here that is preset={paper}")
    return side


def set_aside(folder: Path, found: EvaluationConfig) -> dict[str, str]:
    """Move what is known of these benchmarks out of the way, and say so -> where from and where to.

    Raises FolderInUse where another process evaluates there.
    """
    moved: dict[str, str] = {}
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for benchmark in benchmarks.resolve(found.benchmarks):
        with ExitStack() as held:
            for lock in sorted((folder / benchmark.name).glob(".*/.lock")):
                held.enter_context(sole(lock.parent, say=run.say))
            for path in (folder / benchmark.name, folder / f"{benchmark.name}.json"):
                if path.exists():
                    kept = path.with_name(f"{path.name}.until-{stamp}")
                    path.rename(kept)
                    moved[str(path)] = str(kept)
                    run.say(f"moved {path} to {kept}")
    return moved


# ---- what is asked


def is_run(source: Source) -> bool:
    """Whether a run was named, not one of its checkpoints."""
    return source.run is not None and not (Path(source.text) / "config.json").exists()


def check(source: Source, found: EvaluationConfig) -> None:
    """Whether every benchmark's data is there and its prompts fit; with the run's first model where none is trained.

    Raises ConfigError before anything is queued.
    """
    if source.model is None and source.run is not None:
        source = replace(source, model=source.run.model_name_or_path)
    model = load_model(source)
    for name in found.benchmarks:
        prepare(model, found, name, say=run.say)


def tasks_of(
    source: str,
    found: EvaluationConfig,
    folder: Path,
    *,
    checkpoint: str | None = None,
    waits_for: str | None = None,
) -> list[Task]:
    """A task a benchmark, or one for each of its shards."""
    counts = shards(found)
    return [
        Task(source, found, name, str(folder.absolute()), checkpoint, (i, counts.get(name, 1)), waits_for)
        for name in (benchmark.name for benchmark in benchmarks.resolve(found.benchmarks))
        for i in range(counts.get(name, 1))
    ]


# ---- every checkpoint as it appears


def follow_training(text: str, options: Options) -> int:
    """Evaluate every checkpoint of a run on this machine as it appears -> exit code."""
    source, found = watched(text, options)
    assert source.run is not None
    folder = source.run.folder.absolute()
    code = watch(watch_file(folder, found, options, on_slurm=False))
    print(rolling.table(folder))
    return code


def watched(text: str, options: Options) -> tuple[Source, EvaluationConfig]:
    """A run, every checkpoint of which is to be evaluated, and how. Raises ConfigError."""
    source = sources.find(text)
    if source.run is None or not is_run(source):
        raise ConfigError(f"--rolling: {text} is no run; name a run's folder or its YAML file")
    if options.fresh:
        raise ConfigError(
            f"--fresh goes with one evaluation, not with --rolling; to begin anew, move {source.run.folder}/eval away"
        )
    if options.every < 1:
        raise ConfigError(f"--every {options.every}: each N-th checkpoint is evaluated, and N is 1 or more")
    found = settings(options, source)
    check(source, found)
    return source, found


def to_watch(folder: Path, found: EvaluationConfig, options: Options, *, on_slurm: bool) -> dict[str, Any]:
    """What who watches a run is to do, as `watch_file` writes it."""
    return {
        "run": str(folder),
        "config": found.model_dump(mode="json"),
        "every": options.every,
        "slurm": on_slurm,
    }


def watch_file(folder: Path, found: EvaluationConfig, options: Options, *, on_slurm: bool) -> Path:
    """Write what who watches a run is to do, for `watch` to read -> the file."""
    said = to_watch(folder, found, options, on_slurm=on_slurm)
    write_atomically(folder / "eval" / WATCH_FILE, json.dumps(said, indent=1) + "\n")
    return folder / "eval" / WATCH_FILE


def watch(file: Path) -> int:
    """What the watching job does, by the file that `follow_training` wrote."""
    said = json.loads(file.read_text(encoding="utf-8"))
    folder, found = Path(said["run"]), config.parse(said["config"], source=str(file))

    def tasks_for(model: Path, step: int) -> list[Task]:
        return tasks_of(str(model), found, rolling.folder_of(folder, step))

    return rolling.watch(
        folder,
        tasks_for=tasks_for,
        submit=partial(_queue_kept, folder.name) if said["slurm"] else _evaluate_kept,
        alive=lambda: rolling.training_lives(folder),
        poll_seconds=LOOK_SECONDS if said["slurm"] else LOOK_SECONDS / 6,
        every=said["every"],
    )


def _queue_kept(name: str, tasks: Sequence[Task]) -> list[str]:
    place = Path(tasks[0].folder)
    done = jobs.submit(
        tasks, cluster=tasks[0].config.cluster, after=None, name=f"{name}-{place.name}", folder=place,
        code_root=place.parent / "slurm",
    )  # fmt: skip
    return done.ids


def _evaluate_kept(tasks: Sequence[Task]) -> int:
    """All benchmarks of a checkpoint in this process."""
    first = tasks[0]
    folder = Path(first.folder)
    with run.Stop() as stop:
        try:
            results = run.evaluate(
                sources.find(first.source), first.config, folder=folder, stopping=stop, say=run.say
            )
        except Stopped:
            return run.STOPPED
    run.write_summary(folder, results, {})
    rolling.note(folder, {r["benchmark"]: r["summary"]["avg@k"]["mean"] for r in results}, {})
    return 0


# ---- lists


def list_benchmarks(*, as_json: bool) -> int:
    """Every benchmark and preset."""
    rows: list[dict[str, Any]] = [
        {
            "name": b.name, "title": b.title, "problems": b.size, "grading": b.kind,
            "files": list(b.files), "source": b.source,
            "presets": [name for name, p in presets.PRESETS.items() if p.rule or b.name in p.settings],
        }
        for b in benchmarks.BENCHMARKS.values()
    ]  # fmt: skip
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    heads = ("name", "problems", "grading", "presets", "file in data_dir")
    lines = [heads] + [
        (
            row["name"],
            str(row["problems"] or ""),
            row["grading"],
            " ".join(row["presets"]),
            row["files"][0] if row["files"] else "generated",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:  # names stay whole, however narrow the terminal is
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print("Your own: NAME=FILE.jsonl with the columns problem and answer.")
    return 0
