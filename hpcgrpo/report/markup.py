"""HTML that is safe by construction: whatever isn't `Html` already is escaped, and shows what it hides."""

from __future__ import annotations

import html
import math
import re
import time
from typing import Any, TypeGuard

VOID = ("br", "col", "hr", "meta", "line", "rect", "circle", "path")  # without children here
# Control characters, and those that turn the direction of what follows.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


class Html(str):
    """Text that is markup; `tag` and `join` make it."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: Any) -> Html:
    """An element. Children that aren't Html are escaped; an attribute of None or False is left out, `_` becomes `-`.

    `class_` and `for_` stand for the words that Python keeps for itself.
    """
    said = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID and not children:
        return Html(f"<{name}{said}>" if name in ("br", "col", "hr", "meta") else f"<{name}{said}/>")
    return Html(f"<{name}{said}>{join(*children)}</{name}>")


def join(*parts: object) -> Html:
    """Parts one after another; None is nothing."""
    return Html("".join(p if isinstance(p, Html) else text(p) for p in parts if p is not None))


def text(value: object) -> Html:
    """Escaped text."""
    return Html(html.escape(visible(str(value)), quote=True))


def visible(value: str) -> str:
    """Text with its control, direction and surrogate characters written out, so that it cannot act on the page."""
    return _HIDDEN.sub(_written, value.replace("\r\n", "\n"))


def number(value: float | None, key: str, *, percent: bool = False, unit: str = "") -> Html:
    """A measured number: rounded for the eye, exact in the element's value; `key` says what it is."""
    if not finite(value):
        return Html("–")
    said = f"{100 * value:.2f} %" if percent else shown(value)
    exact = tag("data", said, value=repr(float(value)), data_key=key)
    return join(exact, f" {unit}") if unit else exact


def finite(value: object) -> TypeGuard[float]:
    """Whether it is a number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def shown(value: float) -> str:
    """Four digits; whole numbers in full."""
    if not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1e15 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Seconds as a person says them."""
    if not finite(seconds):
        return "–"
    assert seconds is not None
    if seconds < 120:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 4 * 86400 else f"{seconds / 86400:.1f} days"


def moment(seconds: float | None) -> Html:
    """A time of day, in this machine's zone."""
    if not finite(seconds):
        return Html("")
    local = time.localtime(seconds)
    return tag(
        "time",
        time.strftime("%Y-%m-%d %H:%M %Z", local),
        datetime=time.strftime("%Y-%m-%dT%H:%M:%S%z", local),
    )


def _attribute(key: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    name = {"viewbox": "viewBox"}.get(name, name)
    return f" {name}" if value is True else f' {name}="{text(value)}"'


def _written(match: re.Match[str]) -> str:
    return f"[U+{ord(match[0]):04X}]"
