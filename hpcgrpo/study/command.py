"""`hpcgrpo study`: everything checked, what runs need prepared, the runs, and at the end the tables."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpcgrpo import checks, config
from hpcgrpo.config import ConfigError
from hpcgrpo.journal import claim
from hpcgrpo.launch import local as launch_local
from hpcgrpo.study import design, local, plots, prepare, results, tables
from hpcgrpo.study.cells import Cell, near
from hpcgrpo.study.design import Study
from hpcgrpo.study.prepare import Command

FAILED = 1


@dataclass(frozen=True)
class Options:
    """How a study is run and shown."""

    executor: str = "local"
    jobs: int = 1  # runs at once, on this machine
    array_parallelism: int | None = None  # elements at once, on Slurm
    only: tuple[str, ...] = ()  # axis=label
    table_only: bool = False
    dry_run: bool = False
    wait: bool = False
    as_json: bool = False


def run(study: Study, options: Options) -> int:
    """Check, prepare, run, compare -> 0, or 1 where a run failed. Raises ConfigError before anything starts."""
    if options.jobs < 1 or (options.array_parallelism or 1) < 1:
        raise ConfigError("--jobs and --array-parallelism: 1 or more")
    chosen = select(study, options.only)
    commands = prepare.commands(study)
    if options.dry_run:
        return _dry_run(study, chosen, commands, options)
    if options.table_only:
        if not any(cell.run.folder.exists() for cell in study.cells):
            raise ConfigError(
                f"{study.folder}: none of the study's runs has been started yet; leave --table out"
            )
        return _compare(study, options)
    with claim(study.folder):
        check(chosen, [c for c in commands if c.outstanding])
        _prepare(study, commands)
        check(chosen, [])
        if options.executor == "slurm":
            return _on_slurm(study, chosen, options)
        return _here(study, chosen, options)


def say(line: str) -> None:
    """Progress goes to stderr, so that stdout holds the result alone."""
    print(line, file=sys.stderr, flush=True)


def select(study: Study, only: Sequence[str]) -> list[Cell]:
    """The cells that `axis=label` leaves; several labels of one axis all count. Raises ConfigError for unknown ones."""
    wanted: dict[str, set[str]] = {}
    known = {axis.name: list(axis.sets) for axis in study.axes}
    for item in only:
        axis, _, label = item.partition("=")
        if axis not in known:
            raise ConfigError(
                f"--only {item}: {axis!r} is no axis{near(axis, list(known))}; write axis=label"
            )
        if label not in known[axis]:
            raise ConfigError(
                f"--only {item}: {axis} has no label {label!r}{near(label, known[axis])}; it has"
                f" {', '.join(known[axis])}"
            )
        wanted.setdefault(axis, set()).add(label)
    found = [c for c in study.cells if all(c.labels[a] in labels for a, labels in wanted.items())]
    if not found:
        raise ConfigError(f"--only {' '.join(only)}: no run is left; the study skips them")
    return found


def checkable(cells: Sequence[Cell], outstanding: Sequence[Command]) -> list[Cell]:
    """One cell of those that differ in their seeds alone, without those whose models are yet to be prepared."""
    later = set(prepare.awaited(list(outstanding)))
    found: dict[str, Cell] = {}
    for cell in cells:
        models = [cell.run.model_name_or_path, cell.run.peer.model_name_or_path if cell.run.peer else ""]
        if not {model.rstrip("/") for model in models} & later:
            alike = cell.run.model_copy(update={"name": "x", "seed": 0}).model_dump_json()
            found.setdefault(alike, cell)
    return list(found.values())


def check(cells: Sequence[Cell], outstanding: Sequence[Command]) -> None:
    """Every run's inputs, but for models that are yet to be prepared. Raises ConfigError naming the run."""
    for cell in checkable(cells, outstanding):
        with named(cell):
            checks.inputs(cell.run)


@contextlib.contextmanager
def named(cell: Cell) -> Iterator[None]:
    """What a user can mend is told with the cell's name."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(
            "\n".join(f"cell {cell.name}: {line}" for line in str(error).splitlines())
        ) from None


def _prepare(study: Study, commands: Sequence[Command]) -> None:
    for command in commands:
        if command.outstanding:
            say(f"{study.name}: preparing: {command}")
            prepare.run(command)


def unfinished(cells: Sequence[Cell]) -> list[Cell]:
    """The cells that have steps left; their folders are claimed for a moment and get their configuration.

    Raises ConfigError for a folder that holds another run, before any cell is started.
    """
    left = []
    for cell in cells:
        notes = io.StringIO()  # what is finished is counted, not told one by one
        with named(cell), contextlib.redirect_stderr(notes):
            again = launch_local.prepare(cell.run, fresh=False)
        if again:
            left.append(cell)
            sys.stderr.write(notes.getvalue())
    return left


def _here(study: Study, chosen: Sequence[Cell], options: Options) -> int:
    left = unfinished(chosen)
    done = len(chosen) - len(left)
    say(f"{study.name}: {len(chosen)} runs, {done} finished, {options.jobs} at once; in {study.folder}")
    ended = local.run(
        left, jobs=options.jobs, total=len(chosen), done=done, say=lambda line: say(f"{study.name}: {line}")
    )
    if ended.stopping is not None:
        say(f"{study.name}: stopped; the same command goes on from here")
        return 128 + ended.stopping
    code = _compare(study, options)
    for name, failure in ended.failed.items():
        folder = study.folder / name
        say(f"{study.name}: {name} ended with code {failure}; {folder / local.LOG} ends with")
        for line in local.last_words(folder):
            say(f"    {line}")
    return FAILED if ended.failed else code


def _on_slurm(study: Study, chosen: Sequence[Cell], options: Options) -> int:
    from hpcgrpo.study import array

    live = array.live(chosen)
    left = unfinished([cell for cell in chosen if cell.name not in live])
    done = len(chosen) - len(live) - len(left)
    say(f"{study.name}: {len(chosen)} runs, {done} finished, {len(live)} in the queue; in {study.folder}")
    queued = {}
    for job_id, count in array.submit_arrays(study, left, parallelism=options.array_parallelism):
        say(f"{study.name}: job {job_id}: {count} runs; to end them: scancel {job_id}")
        queued[job_id] = count
    if not options.wait:
        if options.as_json:
            print(json.dumps({"study": study.name, "folder": str(study.folder), "jobs": queued}))
        return 0
    code = array.follow(chosen, lambda line: say(f"{study.name}: {line}"))
    return code if code == array.INTERRUPTED else max(code, _compare(study, options))


def _compare(study: Study, options: Options) -> int:
    outcomes = results.collect(study)
    table = tables.build(study, outcomes)
    tables.write(study, outcomes, table)
    if any(o.finished for o in outcomes):
        plots.draw(study, outcomes, table)
    if options.as_json:
        print(json.dumps(table, indent=1))
    else:
        tables.show(table)
        print(f"tables and pictures: {study.folder}/table.md")
    return 0


def _dry_run(study: Study, chosen: Sequence[Cell], commands: Sequence[Command], options: Options) -> int:
    """Nothing is started and nothing downloaded: what could not be looked at for that is said."""
    outstanding = [c for c in commands if c.outstanding]
    notes: dict[str, None] = {}
    for cell in checkable(chosen, outstanding):
        with named(cell):
            report = checks.check(cell.run)
        notes |= {f"warning  {note}": None for note in report["warnings"]}
        notes |= {f"not checked  {note}": None for note in report["not_checked"]}
    if options.as_json:
        runs = [{"cell": c.name, "labels": dict(c.labels), "folder": str(c.run.folder)} for c in chosen]
        said = {
            "study": study.name,
            "prepare": [str(c) for c in outstanding],
            "runs": runs,
            "notes": list(notes),
        }
        print(json.dumps(said, indent=1))
        return 0
    for command in outstanding:
        print(f"prepare  {command}")
    for cell in chosen:
        print(f"run      {cell.run.folder}  ({', '.join(f'{a}: {v}' for a, v in cell.labels.items())})")
    for note in notes:
        print(note)
    print(f"{len(chosen)} runs; compared: {', '.join(study.labels)}")
    return 0


def sweep(path: str, overrides: Sequence[str], sweeps: Sequence[str]) -> Study:
    """A study of one run's YAML: each `key=a,b,c` an axis, all but the seed compared. Raises ConfigError."""
    base = config.load(path, overrides)
    axes: dict[str, list[Any]] = {}
    for item in sweeps:
        key, found = _swept(item)
        axes[key] = [*axes.get(key, []), *found]
    values = {"name": f"{base.name}-sweep", "axes": axes}
    file = design.parse(values, source=path)
    return design.build(file, base, source=path, output_dir=base.output_dir)


def _swept(item: str) -> tuple[str, list[Any]]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    key, equals, values = item.partition("=")
    try:
        read = OmegaConf.to_container(OmegaConf.create(f"values: [{values}]"))
        found = read["values"] if isinstance(read, dict) else []
    except (YAMLError, OmegaConfBaseException):
        found = []
    if not equals or not key or not found:
        raise ConfigError(f"--sweep {item}: write it as key.sub=value,value, for example --sweep seed=0,1,2")
    return key, list(found)
