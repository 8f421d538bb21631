"""A function's keyword arguments as a schema: what a builder takes, checked against its annotations."""

from __future__ import annotations

import difflib
import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Builder = Callable[..., Any]


def parameters(builder: Builder) -> dict[str, inspect.Parameter]:
    """The keywords of `builder` in the order of its signature."""
    return dict(inspect.signature(builder).parameters)


def option_types(builder: Builder) -> dict[str, Any]:
    """The resolved type of each keyword of `builder`."""
    hints = get_type_hints(builder)
    return {name: hints[name] for name in parameters(builder)}


def check_types(builder: Builder, values: Mapping[str, Any]) -> None:
    """Raise ValueError where a value is not of the type that the signature of `builder` gives it.

    Strict: a bool is no number, a number must be finite, and a Literal's value has the type of its choice.
    """
    for name, annotation in option_types(builder).items():
        if name in values and not _matches(values[name], annotation):
            raise ValueError(_type_error(name, values[name], annotation))


def require(holds: bool, name: str, value: Any, rule: str) -> None:
    """Raise ValueError that names the option, its value and the rule, unless the rule holds."""
    if not holds:
        raise ValueError(f"{name}={value!r} is not allowed: {rule}")


def layers(options: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The resolved options of an algorithm and of each base inside it, the outermost first."""
    layer: Mapping[str, Any] | None = options
    while layer:
        yield layer
        layer = layer.get("base")


def refuse(name: str, options: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise ValueError where a base has a layer, at any depth, that `reasons` has a reason against.

    `name`, `options`: the base's. A reason's key is an algorithm, or `algorithm.flag` for an option that is on.
    """
    for layer in layers(options):
        on = [f"{layer['name']}.{key}" for key, value in layer.items() if value is True]
        for kind in (layer["name"], *on):
            require(kind not in reasons, "base", name, reasons.get(kind, ""))


def nearest(word: str, words: Iterable[str]) -> str:
    """' (did you mean ...?)' with the closest of `words`, or nothing."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def type_text(annotation: Any) -> str:
    """How a type reads in a table or message: 'group | batch | none', 'float | null'."""
    if get_origin(annotation) is Literal:
        return " | ".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(type_text(part) for part in get_args(annotation))
    if annotation is type(None):
        return "null"
    return {int: "int", float: "float", bool: "bool", str: "str"}.get(annotation, annotation.__name__.lower())


def _matches(value: Any, annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_matches(value, part) for part in get_args(annotation))
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _type_error(name: str, value: Any, annotation: Any) -> str:
    found = f"{name}={value!r} ({type(value).__name__})"
    if get_origin(annotation) is Literal:
        hint = nearest(str(value), map(str, get_args(annotation)))
        return f"{found} is not one of {type_text(annotation)}{hint}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{found} is not a finite number"
    hint = "; write the number without quotes, in YAML as 1.0e-6" if _is_number(value) else ""
    return f"{found} has the wrong type: expected {type_text(annotation)}{hint}"


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False
