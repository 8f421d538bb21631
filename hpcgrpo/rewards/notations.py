"""Answers taken apart: lists, sets, matrices, relations; bases, times, choices and ratios compared."""

from __future__ import annotations

import re
from fractions import Fraction

from hpcgrpo.rewards import expressions
from hpcgrpo.rewards.answers import settle
from hpcgrpo.rewards.units import embraced

_OPENING, _CLOSING = "([{", ")]}"
_RELATION = re.compile(r"(\\leq|\\geq|\\neq?(?![a-z])|\\equiv|\\approx|<|>|=)")
_BASE = re.compile(r"(-?)\(?([0-9A-Za-z.]+)\)?_\s*\{?\s*\(?(\w+)\)?\s*\}?")
_BASE_WORDS = {
    **{"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9},
    **{"ten": 10, "eleven": 11, "twelve": 12, "sixteen": 16},
}
_ACCENTED = r"\\(?:hat|vec|bar|overline|tilde|overrightarrow|mathcal)\s*\{[^{}]*\}"
_LETTERS = rf"\\Delta\s*\\?[A-Za-z]+|\\?[A-Za-z]+(?:\s*[A-Z]+)?|{_ACCENTED}"
NAME = re.compile(
    rf"(?:m?\\(?:angle|triangle)\s*)?(?:{_LETTERS})(?:_(?:\w|\{{[^{{}}]*\}}))?'*(?:\^\{{?-1\}}?)?(?:\s*\([^()]*\))?"
    r"|\([^()]*\)|\\frac\{d\s*\w+\}\{d\s*\w+\}|\|[A-Za-z ]+\||\[[A-Z]+\]"
)
_VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'*")
_MATRIX = re.compile(
    r"[\[(]?\s*\\begin\{([pbvBV]?)(?:small)?(?:matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{[a-zA-Z]*(?:matrix|array)\}\s*[\])]?"
)
_CLOCK = re.compile(r"0?(\d{1,2}):([0-5]\d)(?:\s*([AP])M)?")
_RATIO = re.compile(r"[\d.]+(?:\s*:\s*[\d.]+)+")
_CHOICE = re.compile(r"\(?([A-J])(?:\)|[.:。])\s*(?=\S).*", re.S)


def bases(gold: str, prediction: str) -> bool | None:
    """`52_8`: the digits and the base are the answer."""
    left, right = _in_base(gold), _in_base(prediction)
    if left is None and right is None:
        return None
    if left and right:
        return left == right
    for base, other in ((left, prediction), (right, gold)):
        if base and base[2] == 10:
            return settle(base[0] + base[1], other)
    return False


def _in_base(text: str) -> tuple[str, str, int] | None:
    match = _BASE.fullmatch(text)
    if match is None:
        return None
    sign, digits, base = match.groups()
    number = _BASE_WORDS.get(base.lower(), int(base) if base.isdecimal() and len(base) < 3 else 0)
    plain = digits.lower().replace(".", "", 1)
    if not 2 <= number <= 36 or not (re.search(r"\d", digits) or (len(digits) > 1 and digits.isupper())):
        return None
    return (
        (sign, digits.lower(), number)
        if all(int(c, 36) < number for c in plain if c.isalnum())
        else (text, "", 0)
    )


def clocks(gold: str, prediction: str) -> bool | None:
    """Times of day: the half of it may be left out, or told by counting to 24."""
    left, right = _CLOCK.fullmatch(gold), _CLOCK.fullmatch(prediction)
    if not left or not right:
        return None
    (hours, minutes, half), (hours2, minutes2, half2) = left.groups(), right.groups()
    first, second = _hour(hours, half), _hour(hours2, half2)
    told = [int(h) > 12 or half is not None for h, half in ((hours, half), (hours2, half2))]
    same_hour = first == second if all(told) or not any(told) else first % 12 == second % 12
    return same_hour and minutes == minutes2


def _hour(hours: str, half: str | None) -> int:
    return int(hours) if half is None else int(hours) % 12 + (12 if half == "P" else 0)


def choices(gold: str, prediction: str) -> bool | None:
    """`B` is answered by `(B) 12` and `B: twelve`."""
    left, right = _CHOICE.fullmatch(gold), _CHOICE.fullmatch(prediction)
    letters = [m.group(1) if m else t for m, t in ((left, gold), (right, prediction))]
    if not (left or right) or not all(re.fullmatch("[A-J]", letter) for letter in letters):
        return None
    return letters[0] == letters[1]


def ratios(gold: str, prediction: str) -> bool | None:
    """`3:4` is `6:8` and, where a fraction is written, 3/4; never a plain number."""
    ratios = [
        [Fraction(n) for n in t.split(":")] if _RATIO.fullmatch(t) else None for t in (gold, prediction)
    ]
    left, right = ratios
    if left is None and right is None:
        return None
    if left and right:
        return len(left) == len(right) and all(
            a * right[-1] == b * left[-1] for a, b in zip(left, right, strict=True)
        )
    ratio, other = (left, prediction) if left else (right, gold)
    assert ratio is not None
    if len(ratio) != 2 or not ratio[1] or not re.search(r"/|\\frac", other):
        return False
    return expressions.value_of(other) == ratio[0] / ratio[1]


def rows_of(text: str) -> list[list[str]] | None:
    """The cells of a matrix, row by row; None for what is none, and for a determinant."""
    text = text.split("=", 1)[-1] if NAME.fullmatch(text.split("=", 1)[0].strip()) else text
    match = _MATRIX.fullmatch(text.strip())
    if match is None or r"\begin" in match.group(2) or match.group(1) in ("v", "V"):
        return None
    rows = [
        row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match.group(2).replace(r"\hline", "")) if row.strip()
    ]
    return [[cell.strip() for cell in row.split("&")] for row in rows]


def split(text: str, separators: str) -> list[str]:
    """Parts at separators outside any bracket; the whole text if brackets don't balance."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth -= 1
        elif char in separators and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        return [text]
    return [p.strip() for p in (*parts, text[start:]) if p.strip()]


def bracketed(text: str) -> tuple[str, str, list[str]] | None:
    """(opening, closing, parts) where one pair of brackets embraces everything."""
    text = text.strip()
    opening = r"\{" if text.startswith(r"\{") else text[:1]
    closing = r"\}" if text.endswith(r"\}") else text[-1:]
    if opening not in ("(", "[", r"\{", "{") or closing not in (")", "]", r"\}", "}") or len(text) < 3:
        return None
    inner = text[len(opening) : -len(closing)]
    return (opening, closing, split(inner, ",;")) if embraced(inner) else None


def members_of(text: str) -> list[str]:
    r"""What a list or set lists; `a \pm b` counts as two."""
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text):
        return [text]
    members = []
    for part in split(text, ",;"):
        bracket = bracketed(part)
        if bracket and bracket[0] in (r"\{", "{") and (":" not in part and r"\mid" not in part):
            nested = any(inner.startswith((r"\{", r"\emptyset")) for inner in bracket[2])
            members += [part] if nested else [m for inner in bracket[2] for m in members_of(inner)]
        elif r"\pm" in part:
            members += [
                part.replace(r"\pm", "+").replace(r"\mp", "-").lstrip("+ "),
                part.replace(r"\pm", "-").replace(r"\mp", "+"),
            ]
        else:
            members.append(part)
    return [m for m in members if m]


def named_values(text: str) -> dict[str, str] | None:
    """Name -> value of `x=1, y=2` or `(x,y)=(1,2)`; None unless these are two names or more, each told once, that
    don't count one thing's values (`x_1`, `x_2`)."""
    pairs = [tokens_of(part) for part in split(text, ",;")]
    if len(pairs) == 1 and len(pairs[0]) == 3:
        left, right = bracketed(pairs[0][0]), bracketed(pairs[0][2])
        if left and right and left[:2] == right[:2] == ("(", ")") and len(left[2]) == len(right[2]):
            pairs = [[name, pairs[0][1], value] for name, value in zip(left[2], right[2], strict=True)]
    if len(pairs) < 2 or any(len(p) != 3 or p[1] != "=" or not _VARIABLE.fullmatch(p[0]) for p in pairs):
        return None
    apart = {name.partition("_")[0] for name, _, _ in pairs}
    return {name: value for name, _, value in pairs} if len(apart) == len(pairs) else None


def tokens_of(text: str) -> list[str]:
    """Sides and signs, in turn, of the relations that stand outside any bracket."""
    depth, shown = 0, []
    for char in text:
        depth -= char in _CLOSING
        shown.append(char if depth <= 0 else " ")
        depth += char in _OPENING
    tokens, start = [], 0
    for match in _RELATION.finditer("".join(shown)):
        tokens += [text[start : match.start()].strip(), match.group()]
        start = match.end()
    return [*tokens, text[start:].strip()]
