"""JSONL as users write it: which lines count, and what is said of one that is no JSON."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import Any

JSON_KINDS = {
    list: "a list",
    dict: "an object",
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of every line that is not blank; blank ones are left out but counted.

    Lines end with a newline alone, since JSON text may hold U+2028. A byte order mark at the start is left out.
    """
    for number, line in enumerate(file, 1):
        text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if text.strip():
            yield number, text


def value(line: bytes) -> Any:
    """The JSON value of a line. Raises ValueError that says what is wrong with it, but not where it stands."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte {error.start + 1} is not UTF-8; convert the file, e.g. with iconv -t utf-8"
        ) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        array = line.strip() in (b"[", b"{")
        hint = " (a JSON array? expected one object a line)" if array else "; each line holds one object"
        raise ValueError(f"malformed JSON: {error.msg} at column {error.colno}{hint}") from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise ValueError(f"malformed JSON: {error}") from None


def kind(value: Any) -> str:
    """What JSON calls a value: 'a list', 'null', ..."""
    return JSON_KINDS.get(type(value), type(value).__name__)
