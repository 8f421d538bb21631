"""A study as its YAML file describes it: a base run, axes, and what is compared. Needs neither torch nor a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from hpcgrpo import config
from hpcgrpo.config import ConfigError
from hpcgrpo.config_file import Layer, Tree, override, read
from hpcgrpo.sections import RunConfig, Section
from hpcgrpo.study.cells import Axis, Cell, build_axes, build_cells, near, refuse_hidden

REDUCERS = ("first", "last", "mean", "median", "min", "max", "sum")
WAYS = f"write one of {', '.join(REDUCERS)}, or {{last: n}} or {{first: n}} for a mean over n lines"


class Prepare(Section):
    """A command that makes what runs need; `{axis}` stands for the axis's label."""

    run: str
    creates: str | None = None  # a path; where it exists, the command is not run again


class Published(Section):
    """A table of a paper, shown beside the study's own."""

    table: str
    rows: dict[str, dict[str, float | str | None]]


class StudyFile(Section):
    """The keys of a study's file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    base: str | None = None  # a run's YAML, relative to this file
    set: dict[str, Any] = Field({})  # overrides for every run
    axes: dict[str, dict[str, dict[str, Any]] | list[Any]] = Field(min_length=1)
    skip: tuple[dict[str, Any], ...] = ()
    prepare: tuple[Prepare, ...] = ()
    compare: str | tuple[str, ...] | None = None  # None: the axes that are not seeds
    baseline: str | None = None  # a label; None: the first one
    pair: tuple[str, ...] | None = None  # None: all other axes
    group: tuple[str, ...] = ()  # of the pair axes: averaged over the others first
    metrics: dict[str, str | dict[Literal["first", "last"], int]] | None = None
    curves: tuple[str, ...] | None = None
    published: tuple[Published, ...] = ()

    @field_validator("axes", mode="before")
    @classmethod
    def _of_labels_or_values(cls, axes: Any) -> Any:
        for name, given in axes.items() if isinstance(axes, dict) else ():
            if not isinstance(given, dict | list):
                raise ValueError(
                    f"{name}: {given!r}: write a list of values ([0, 1, 2]), or labels with what each sets"
                )
            if wrong := [label for label in given if isinstance(given, dict) and not isinstance(label, str)]:
                raise ValueError(f"{name}: {wrong[0]!r}: a label is a text; write it in quotes")
        return axes

    @model_validator(mode="after")
    def _reducers(self) -> StudyFile:
        for name, how in (self.metrics or {}).items():
            if isinstance(how, str) and how not in REDUCERS:
                raise ValueError(f"metrics: {name}: {how!r}: {WAYS}")
            if not isinstance(how, str) and (len(how) != 1 or min(how.values()) < 1):
                raise ValueError(f"metrics: {name}: {dict(how)!r}: {WAYS}")
        return self


@dataclass(frozen=True)
class Study:
    """A study whose runs are all known and checked."""

    name: str
    folder: Path  # output_dir/name; a run's folder is below it
    axes: tuple[Axis, ...]
    cells: tuple[Cell, ...]
    prepare: tuple[Prepare, ...]
    compare: tuple[str, ...]
    pair: tuple[str, ...]
    group: tuple[str, ...]
    baseline: str
    metrics: Mapping[str, Any]  # name -> how one number is made of a run's lines, see results.measure
    curves: tuple[str, ...]
    published: tuple[Published, ...]

    def label(self, cell: Cell) -> str:
        """What the cell is compared as."""
        return join(cell.labels[axis] for axis in self.compare) or self.name

    @property
    def labels(self) -> list[str]:
        """Everything that is compared, in the file's order, the baseline first."""
        found = list(dict.fromkeys(self.label(cell) for cell in self.cells))
        return sorted(found, key=lambda label: label != self.baseline)


def join(labels: Any) -> str:
    """One label of several axes'."""
    return " / ".join(labels)


def load(path: str | Path, overrides: Sequence[str] = (), *, output_dir: str = "logs") -> Study:
    """Read a study's file; overrides go to its own keys, or to every run. Raises ConfigError naming cell and axis."""
    path = Path(path)
    values, sets = _read(path, overrides)
    file = parse(values, source=str(path))
    if file.base is None:
        raise ConfigError(f"{path}: base: required, but missing: a run's YAML, relative to this file")
    base = config.load(path.parent / file.base)
    refuse_hidden(build_axes(file.axes, source=str(path)), sets)
    return build(file, base, source=str(path), output_dir=output_dir, sets={**file.set, **sets})


def parse(values: Any, *, source: str) -> StudyFile:
    """A StudyFile from plain values. Raises ConfigError for a wrong or unknown key."""
    if isinstance(values, dict) and "axes" not in values and "model_name_or_path" in values:
        raise ConfigError(
            f"{source}: describes a run, not a study (it has no axes): use hpcgrpo train or submit"
        )
    try:
        return StudyFile.model_validate(values)
    except ValidationError as error:
        said = [_explain(source, e) for e in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(said))) from None


def _explain(source: str, error: Any) -> str:
    key = ".".join(str(p) for p in error["loc"] if str(p) not in ("str", "list[any]"))
    if error["type"] == "extra_forbidden":
        return f"{source}: {key}: unknown key of a study{near(key, list(StudyFile.model_fields))}"
    return f"{source}: {key}: {error['msg'].removeprefix('Value error, ')}".replace(": : ", ": ")


def build(
    file: StudyFile,
    base: RunConfig,
    *,
    source: str,
    output_dir: str,
    sets: Mapping[str, Any] | None = None,
) -> Study:
    """All runs of a study over a base run, each checked. Raises ConfigError naming the cell and its axes."""
    axes = build_axes(file.axes, source=source)
    names = [axis.name for axis in axes]
    compare = _compare(file, names, source)
    pair = tuple(n for n in names if n not in compare) if file.pair is None else file.pair
    for key, given in (("pair", pair), ("group", file.group), ("compare", compare)):
        _known(key, given, names, source)
    if not set(file.group) <= set(pair):
        raise ConfigError(f"{source}: group: {', '.join(file.group)}: must be among pair ({', '.join(pair)})")
    if both := set(pair) & set(compare):
        raise ConfigError(f"{source}: pair: {', '.join(both)} is compared; it cannot make pairs too")
    folder = Path(output_dir) / file.name
    cells = build_cells(
        axes, base, sets=file.set if sets is None else sets, skip=file.skip, folder=folder, source=source
    )
    metrics: Mapping[str, Any] = file.metrics or _usual_metrics(cells[0].run)
    study = Study(
        file.name, folder, axes, cells, file.prepare, compare, pair, file.group, file.baseline or "",
        metrics, file.curves or _usual_curves(cells[0].run), file.published,
    )  # fmt: skip
    return _with_baseline(study, file.baseline, source)


def _compare(file: StudyFile, names: Sequence[str], source: str) -> tuple[str, ...]:
    if file.compare is None:
        return tuple(n for n in names if n != "seed")
    return (file.compare,) if isinstance(file.compare, str) else file.compare


def _known(key: str, given: Sequence[str], names: Sequence[str], source: str) -> None:
    for name in given:
        if name not in names:
            hint = near(name, names)
            raise ConfigError(f"{source}: {key}: {name!r} is no axis{hint}; the axes are {', '.join(names)}")


def _with_baseline(study: Study, wanted: str | None, source: str) -> Study:
    labels = study.labels
    if wanted is not None and wanted not in labels:
        raise ConfigError(
            f"{source}: baseline: {wanted!r} is no label that is compared{near(wanted, labels)}; these are"
            f" {', '.join(labels)}"
        )
    return replace(study, baseline=wanted or labels[0])


def _usual_metrics(run: RunConfig) -> dict[str, Any]:
    """What is looked at where the file does not say."""
    held_out = ["eval/accuracy"] if run.eval else []
    held_out += ["eval/two_pass/accuracy"] if run.eval and run.eval.two_pass else []
    return {**dict.fromkeys(held_out, "last"), "reward": {"last": 10}, "step_time": "median"}


def _usual_curves(run: RunConfig) -> tuple[str, ...]:
    held_out = tuple(name for name in _usual_metrics(run) if name.startswith("eval/"))
    return ("reward", *held_out, "entropy", "completions/mean_length")


def _read(path: Path, overrides: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The file's values with overrides of its own keys, and the overrides that are meant for the runs."""
    own = [item for item in overrides if re.split("[.=]", item, maxsplit=1)[0] in StudyFile.model_fields]
    sets: dict[str, Any] = {}
    nothing = Tree({}, (Layer(str(path), {}),))
    for item in overrides:
        if item not in own:
            key, value = item.partition("=")[0], override(nothing, [item]).values
            sets[key] = reduce(lambda inner, part: inner[part], key.split("."), value)
    return override(read(path), own).values, sets
