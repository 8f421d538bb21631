"""A configuration's files: `extends`, the merge of what they say, and overrides; no value is checked here."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from hpcgrpo.sections import RunConfig

EXTENDS = "extends"


class ConfigError(ValueError):
    """A configuration a user can mend: names the key, the value, the rule and the way out."""


@dataclass(frozen=True)
class Layer:
    """What one file says, or the command line: later layers win."""

    source: str  # as errors name it
    values: dict[str, Any]


@dataclass(frozen=True)
class Tree:
    """A configuration as its files have it: merged values, environment variables not yet expanded."""

    values: dict[str, Any]
    layers: tuple[Layer, ...]  # what is extended first, the file itself last

    def source(self, keys: Sequence[str]) -> str:
        """The last file that says this key, or else the one that was asked for."""
        saying = (layer.source for layer in reversed(self.layers) if _holds(layer.values, keys))
        return next(saying, self.layers[-1].source)


def read_tree(path: str | Path) -> dict[str, Any]:
    """A file's values with what it `extends` under them, neither checked nor expanded.

    A section is merged key by key; any other value replaces the one below as a whole, `algorithm` and `rewards` too,
    since a mix of two algorithms' options is none. `key: null` is the default again. Names in `extends` are relative
    to the file that has them; of a list, the later ones win. Raises ConfigError for what is missing, broken or
    extends itself.
    """
    return read(path).values


def read(path: str | Path | None, text: str | None = None) -> Tree:
    """As `read_tree`, with which file says what. `text` is read in the file's place."""
    source = str(path) if path is not None else "configuration"
    layers = tuple(_layers(Path(source), source, text, ()))
    values: dict[str, Any] = {}
    for layer in layers:
        values = merge(values, layer.values)
    return Tree(values, layers)


def merge(base: Mapping[str, Any], over: Mapping[str, Any], section: Any = RunConfig) -> dict[str, Any]:
    """`over` on top of `base`: sections key by key, everything else as a whole."""
    merged = dict(base)
    for key, value in over.items():
        inner, below = section_of(section, key), merged.get(key)
        if inner and isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[key] = merge(below, value, inner)
        else:
            merged[key] = value
    return merged


def override(tree: Tree, overrides: Sequence[str]) -> Tree:
    """`key.sub=value` items on top, as from the command line; interpolations are resolved.

    A mapping replaces, it never mixes. Raises ConfigError for an item of another form.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    source = tree.layers[-1].source
    try:
        merged, said = OmegaConf.create(tree.values), OmegaConf.create({})
        for item in _checked(overrides):
            key = item.partition("=")[0]
            value = OmegaConf.select(OmegaConf.from_dotlist([item]), key)
            for place in (merged, said):
                OmegaConf.update(place, key, value, merge=False, force_add=True)
        values: Any = OmegaConf.to_container(merged, resolve=True)
        given: Any = OmegaConf.to_container(said)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())}") from None
    return Tree(values, (*tree.layers, Layer(source, given)))


def without_resets(values: Any, section: Any = RunConfig) -> Any:
    """The values without those that are null where null is no value of the key, so that its default holds."""
    if not isinstance(values, Mapping):
        return values
    kept = {}
    for key, value in values.items():
        found = section.model_fields.get(key)
        if value is None and found and type(None) not in get_args(found.annotation):
            continue
        inner = section_of(section, key)
        kept[key] = without_resets(value, inner) if inner else value
    return kept


def expand(value: Any) -> Any:
    """$NAME and ${NAME} in strings, from the environment; an unset one is an error."""
    if isinstance(value, Mapping):
        return {k: expand(v) for k, v in value.items()}
    if isinstance(value, list):
        return [expand(v) for v in value]
    if isinstance(value, str) and "$" in value:
        expanded = os.path.expandvars(value)
        unset = re.search(r"\$\{?([A-Z][A-Z0-9_]*)\}?", expanded)
        if unset and unset[1] not in os.environ:
            raise ConfigError(f"{value!r}: the environment variable {unset[1]} is not set")
        return expanded
    return value


def section_of(parent: Any, name: str) -> Any:
    """The class of a section by its key, or None for any other key."""
    found = parent.model_fields.get(name) if parent else None
    kinds = [found.annotation, *get_args(found.annotation)] if found else []
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


# ---- reading


def _layers(path: Path, source: str, text: str | None, above: tuple[Path, ...]) -> Iterator[Layer]:
    """What the file extends, then the file; `above` are the files that lead here."""
    here = path.resolve()
    if here in above:
        chain = " -> ".join(p.name for p in (*above[above.index(here) :], here))
        raise ConfigError(
            f"{above[-1]}: {EXTENDS}: {chain}: a file cannot extend itself; move what they share to one of their own"
        )
    values = _mapping(_read(path) if text is None else text, source)
    for name in _extended(values.pop(EXTENDS, None), source):
        base = path.parent / Path(str(expand(name))).expanduser()
        if not base.is_file():
            raise ConfigError(f"{source}: {EXTENDS} {name}: {_missing(base)}")
        yield from _layers(base, str(base), None, (*above, here))
    yield Layer(source, values)


def _extended(value: Any, source: str) -> list[str]:
    names = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"{source}: {EXTENDS}: must be a file's name or a list of them, relative to this file (given: {value!r})"
        )
    return names


def _mapping(text: str, source: str) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        found: Any = OmegaConf.to_container(OmegaConf.create(text))
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{source}: holds no mapping of keys to values; start from configs/quickstart.yaml")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(_missing(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _missing(path: Path) -> str:
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
    hint = f"; did you mean {path.parent / near[0]}?" if near else ""
    return f"{path}: no such configuration file{hint}"


def _checked(overrides: Sequence[str]) -> list[str]:
    for item in overrides:
        if not re.match(r"^[A-Za-z_][\w.\-:]*=", item):
            raise ConfigError(f"override {item!r}: write it as key.sub=value, for example train.max_steps=10")
    return list(overrides)


def _holds(values: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(values, Mapping) or key not in values:
            return False
        values = values[key]
    return True
