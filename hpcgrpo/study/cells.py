"""The runs of a study: the product of its axes, each with a name, a folder and a checked configuration."""

from __future__ import annotations

import difflib
import itertools
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgrpo import config
from hpcgrpo.config import ConfigError
from hpcgrpo.sections import RunConfig

WHOLE = ("algorithm", "rewards")  # replaced as a whole by a mapping, since their options belong together
LONGEST_NAME = 200  # bytes of a folder's name that every file system takes, with room for a suffix
OWN = ("name", "output_dir")  # what the study itself sets


@dataclass(frozen=True)
class Axis:
    """One thing that is varied: labels, what each sets, and its part of a run's name."""

    name: str
    sets: Mapping[str, Mapping[str, Any]]  # label -> overrides, dotted or nested
    slugs: Mapping[str, str]  # label -> part of a folder's name


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    labels: Mapping[str, str]  # axis -> label
    run: RunConfig

    @property
    def name(self) -> str:
        return self.run.name


def build_axes(given: Mapping[str, Mapping[str, Any] | Sequence[Any]], *, source: str) -> tuple[Axis, ...]:
    """Axes from a file's: a mapping gives labels, a list the values of the key that the axis is named after."""
    return tuple(_axis(name, values, source) for name, values in given.items())


def _axis(name: str, values: Mapping[str, Any] | Sequence[Any], source: str) -> Axis:
    if not values:
        raise ConfigError(f"{source}: axes: {name} is empty; give it labels or values, or leave it out")
    if isinstance(values, Mapping):
        sets = {str(label): dict(overrides) for label, overrides in values.items()}
        return Axis(name, sets, _distinct({label: slug(label) for label in sets}))
    if bad := [v for v in values if isinstance(v, dict | list)]:
        raise ConfigError(
            f"{source}: axes: {name}: {bad[0]!r}: give what is no plain value a label (a mapping)"
        )
    sets = {text(value): {name: value} for value in values}
    if len(sets) < len(values):
        raise ConfigError(f"{source}: axes: {name}: {list(values)} holds a value twice")
    last = name.rpartition(".")[2]
    return Axis(name, sets, _distinct({label: slug(f"{last}{label}") for label in sets}))


def near(name: str, names: Sequence[str]) -> str:
    """A hint at the known name that was most likely meant, or nothing."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def text(value: Any) -> str:
    """A value as a label: a string as it is, anything else as JSON writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def slug(label: str) -> str:
    """A label as part of a folder's name: ASCII letters, digits, dots and single hyphens."""
    ascii_text = unicodedata.normalize("NFKD", label).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9.]+", "-", ascii_text).strip("-.") or "x"


def _distinct(slugs: Mapping[str, str]) -> dict[str, str]:
    """The same with a number where two are alike but for their case, which some file systems do not tell apart."""
    taken: set[str] = set()
    found = {}
    for label, wanted in slugs.items():
        tries = itertools.chain([wanted], (f"{wanted}-{n}" for n in itertools.count(2)))
        found[label] = next(t for t in tries if t.casefold() not in taken)
        taken.add(found[label].casefold())
    return found


def build_cells(
    axes: Sequence[Axis],
    base: RunConfig,
    *,
    sets: Mapping[str, Any],
    skip: Sequence[Mapping[str, Any]],
    folder: Path,
    source: str,
) -> tuple[Cell, ...]:
    """Every run of the product but those of `skip`. Raises ConfigError with what is wrong in which of them."""
    _check_keys(axes, sets, source)
    _check_skip(axes, skip, source)
    values, cells = base.model_dump(mode="json"), []
    wrong: dict[str, list[dict[str, str]]] = {}
    for labels in _product(axes):
        if any(all(labels[a] in _several(v) for a, v in rule.items()) for rule in skip):
            continue
        try:
            cells.append(_cell(axes, labels, values, sets, folder))
        except ConfigError as error:
            wrong.setdefault(str(error), []).append(labels)
    if wrong:
        raise ConfigError("\n".join(_told(source, said, where) for said, where in wrong.items()))
    if not cells:
        raise ConfigError(f"{source}: skip leaves no run")
    return tuple(cells)


def _told(source: str, said: str, where: Sequence[Mapping[str, str]]) -> str:
    axes = ", ".join(f"{axis}={label}" for axis, label in where[0].items())
    more = f" (and in {len(where) - 1} more)" if len(where) > 1 else ""
    return "\n".join(f"{source}: cell {axes}{more}: {line}" for line in said.splitlines())


def _product(axes: Sequence[Axis]) -> Iterator[dict[str, str]]:
    for labels in itertools.product(*(axis.sets for axis in axes)):
        yield dict(zip((axis.name for axis in axes), labels, strict=True))


def _cell(
    axes: Sequence[Axis], labels: dict[str, str], base: Any, sets: Mapping[str, Any], folder: Path
) -> Cell:
    values = deepcopy(base)
    apply(values, sets)
    for axis in axes:
        apply(values, axis.sets[labels[axis.name]])
    name = "_".join(axis.slugs[labels[axis.name]] for axis in axes)
    if len(name) > LONGEST_NAME:
        raise ConfigError(f"its name {name} is longer than {LONGEST_NAME} characters; shorten the labels")
    values |= {"name": name, "output_dir": str(folder)}
    return Cell(labels, config.parse(values, source="run"))


def apply(values: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Set overrides in a run's values, in place: `a.b: 1` and `a: {b: 1}` are the same, but for what is WHOLE."""
    for key, value in overrides.items():
        *path, last = str(key).split(".")
        inner = values
        for part in path:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        mixes = isinstance(value, Mapping) and isinstance(inner.get(last), dict)
        if mixes and (path or last not in WHOLE):
            apply(inner[last], value)
        else:
            inner[last] = deepcopy(value)


def _flat(overrides: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in overrides.items():
        whole = prefix + str(key)
        if isinstance(value, Mapping) and value and whole not in WHOLE:
            yield from _flat(value, whole + ".")
        else:
            yield whole


def _check_keys(axes: Sequence[Axis], sets: Mapping[str, Any], source: str) -> None:
    """No key is set where it never has an effect (a later axis goes before an earlier one); none is the study's own."""
    found = {"set": set(_flat(sets))}
    found |= {axis.name: {key for s in axis.sets.values() for key in _flat(s)} for axis in axes}
    for place, keys in found.items():
        if own := sorted(keys & set(OWN)):
            raise ConfigError(f"{source}: {place}: {own[0]} is set by the study itself; leave it out")
    always = {axis.name: set.intersection(*(set(_flat(s)) for s in axis.sets.values())) for axis in axes}
    for axis, later in itertools.combinations(axes, 2):
        if both := sorted(found[axis.name] & always[later.name]):
            raise ConfigError(
                f"{source}: {both[0]} is set by the axes {axis.name} and {later.name}, and by each label of the latter;"
                " the first would have no effect"
            )


def refuse_hidden(axes: Sequence[Axis], sets: Mapping[str, Any]) -> None:
    """Raises ConfigError for an override from outside that an axis would undo."""
    for axis in axes:
        hidden = {key for s in axis.sets.values() for key in _flat(s)} & set(_flat(sets))
        if hidden:
            key = sorted(hidden)[0]
            raise ConfigError(
                f"override {key}: the axis {axis.name} sets {key} itself; override axes.{axis.name}"
            )


def _several(value: Any) -> list[str]:
    return [text(v) for v in value] if isinstance(value, list | tuple) else [text(value)]


def _check_skip(axes: Sequence[Axis], skip: Sequence[Mapping[str, Any]], source: str) -> None:
    known = {axis.name: axis.sets for axis in axes}
    for axis, label in ((a, label) for rule in skip for a, v in rule.items() for label in _several(v)):
        if axis not in known:
            raise ConfigError(f"{source}: skip: {axis!r} is no axis{near(axis, list(known))}")
        if label not in known[axis]:
            hint = near(label, list(known[axis]))
            raise ConfigError(f"{source}: skip: {axis} has no label {label!r}{hint}")
