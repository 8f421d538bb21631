"""Plain numbers as answers write them: decimals, ratios, mixed numbers, repeating decimals. Rational arithmetic."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 400  # of a plain number, its exponent included
MIN_ROUNDED_DIGITS = 6  # a decimal of fewer significant digits does not stand for 1/3 or \sqrt{2}

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<whole>{_INTEGER})?(?:\.(?P<part>\d*))?(?P<exp>[eE][-+]?\d{{1,3}})?"
)
_TIMES_TEN = re.compile(r"\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*([-+]?\d{1,3})\s*\}?$")
_RATIO = re.compile(
    r"(?P<sign>[-+]?)\s*(?:\\frac\s*\{?\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}|(\d+)\s*/\s*(\d+))"
)
_MIXED = re.compile(r"(?P<sign>[-+]?)\s*(\d+)\s*(?:\\frac\s*\{(\d+)\}\s*\{(\d+)\}|(?<=\d) (\d+)\s*/\s*(\d+))")
_REPEATING = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>\d*)\.(?:(?P<fixed>\d*)\\(?:overline|bar|dot)\s*\{?(?P<period>\d+)\}?"
    r"|(?P<start>\d*?)(?P<seen>\d{1,6}?)(?P=seen){2,}\s*\\ldots)"
)


def decimal_value(text: str) -> tuple[Fraction, int, Fraction] | None:
    """(value, significant digits, half a unit of the last one) of an integer, decimal or `a \\times 10^b`."""
    power = 0
    if ten := _TIMES_TEN.search(text):
        power, text = int(ten.group(1)), text[: ten.start()]
    match = _DECIMAL.fullmatch(text.strip())
    if not match or not (match["whole"] or match["part"]) or len(text) > MAX_DIGITS:
        return None
    whole, part = (match["whole"] or "").replace(",", ""), match["part"] or ""
    power += int(match["exp"][1:]) if match["exp"] else 0
    unit = Fraction(10) ** (power - len(part))
    value = int(whole + part) * unit * (-1 if match["sign"] == "-" else 1)
    return value, len((whole + part).lstrip("0")), unit / 2


def ratio_value(text: str) -> Fraction | None:
    """Value of `a/b`, `\\frac{a}{b}`, a proper mixed number (`2 2/3`) or a repeating decimal (`0.\\overline{3}`)."""
    if len(text) > MAX_DIGITS:
        return None
    if match := _REPEATING.fullmatch(text):
        return _repeating_value(**match.groupdict())
    if match := _RATIO.fullmatch(text):
        whole, parts = 0, [int(g) for g in match.groups()[1:] if g is not None]
    elif match := _MIXED.fullmatch(text):
        whole, *parts = (int(g) for g in match.groups()[1:] if g is not None)
        if not 0 < parts[0] < parts[1]:
            return None
    else:
        return None
    if parts[1] == 0:
        return None
    return (whole + Fraction(parts[0], parts[1])) * (-1 if match["sign"] == "-" else 1)


def _repeating_value(
    sign: str, whole: str, fixed: str | None, period: str | None, start: str | None, seen: str | None
) -> Fraction:
    before, again = fixed or start or "", period or seen or ""
    nines = 10 ** len(before) * (10 ** len(again) - 1)
    value = Fraction(int(whole + before or "0"), 10 ** len(before)) + Fraction(int(again), nines)
    return -value if sign == "-" else value


def numbers_equal(gold: str, prediction: str) -> bool | None:
    """Whether two texts are one number, or one the other rounded; None: not both are plain numbers."""
    ratios = ratio_value(gold), ratio_value(prediction)
    decimals = decimal_value(gold), decimal_value(prediction)
    values = [r if r is not None else d[0] if d else None for r, d in zip(ratios, decimals, strict=True)]
    if values[0] is None or values[1] is None:
        return None
    if values[0] == values[1]:
        return True
    for ratio, decimal in zip(ratios, reversed(decimals), strict=True):
        if ratio is not None and decimal is not None:
            return rounds_to(ratio, decimal)
    return False


def rounds_to(exact: Fraction, decimal: tuple[Fraction, int, Fraction]) -> bool:
    """A decimal stands for a number if it is that number rounded to at least six significant digits; an integer stands
    for itself."""
    value, digits, half = decimal
    return digits >= MIN_ROUNDED_DIGITS and half != Fraction(1, 2) and abs(value - exact) <= half
