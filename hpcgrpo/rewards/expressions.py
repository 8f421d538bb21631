r"""Formulas read and evaluated without sympy: the common ones, a hundred times faster and in bounded time.

Reads numbers, letters with subscripts, `+ - \cdot /`, powers, roots, fractions, factorials, binomials, brackets and
the elementary functions. What is ambiguous (`1/2x`, `f(x)`, `\sin x/2`) or of another kind is left to `formulas`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from mpmath import MPContext

from hpcgrpo.rewards.numbers import decimal_value, rounds_to
from hpcgrpo.rewards.reading import Node, Unreadable, names, read

MAX_LOG10 = 1e5  # larger numbers are not computed
MAX_FACTORIAL = 20_000
DIGITS = 50
POINTS = 6

Value = Any  # Fraction where exact, else a number of MP

REAL = ""  # a key of points at which only what is real throughout is compared

MP = MPContext()
MP.dps = DIGITS


class TooBig(Exception):
    """A number of more than MAX_LOG10 digits would have to be computed."""


# ---------------------------------------------------------------------------------------------- evaluation


def _number(value: Value) -> Any:
    return MP.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _power(base: Value, exponent: Value) -> Value:
    exact = isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1
    if isinstance(exponent, Fraction) and not exact and abs(exponent) > 10**9:
        raise TooBig
    if not exact:
        return _float_power(_number(base), exponent)
    if base in (0, 1, -1):
        if base == 0 and exponent <= 0:
            raise ZeroDivisionError
        return base ** (abs(exponent.numerator) % 2 or 2) if base else base
    if abs(exponent) > MAX_LOG10 * 4 or abs(exponent) * _log10(base) > MAX_LOG10:
        raise TooBig
    return base**exponent.numerator


def _log10(value: Fraction) -> float:
    return max(abs(value.numerator), value.denominator).bit_length() * math.log10(2)


def _float_power(base: Any, exponent: Value) -> Any:
    if base == 0:
        if MP.re(_number(exponent)) <= 0:
            raise ZeroDivisionError
        return MP.mpf(0)
    size = abs(MP.log(abs(base)) * abs(_number(exponent)))
    if size > MAX_LOG10:
        raise TooBig
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        return base**exponent.numerator
    if isinstance(exponent, Fraction) and exponent.denominator % 2 and MP.im(base) == 0 and MP.re(base) < 0:
        sign = -1 if exponent.numerator % 2 else 1  # the real root, as \sqrt[3]{-8}
        return sign * MP.power(-MP.re(base), _number(exponent))
    return MP.power(base, _number(exponent))


def _root(value: Value, degree: Value) -> Value:
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 2 <= degree <= 1000:
        raise Unreadable
    number = _number(value)
    if degree % 2 and MP.im(number) == 0 and number < 0:
        return -MP.power(-number, MP.mpf(1) / degree.numerator)
    return MP.sqrt(number) if degree == 2 else MP.power(number, MP.mpf(1) / degree.numerator)


def _factorial(value: Value) -> Value:
    if isinstance(value, Fraction):
        if value.denominator != 1 or value < 0:
            raise ZeroDivisionError
        if value > MAX_FACTORIAL:
            raise TooBig
        return Fraction(math.factorial(value.numerator))
    if abs(value) > MAX_FACTORIAL:
        raise TooBig
    return MP.gamma(value + 1)


def _binomial(above: Value, below: Value) -> Value:
    exact = all(isinstance(v, Fraction) and v.denominator == 1 for v in (above, below))
    if exact and above >= 0:
        if above > MAX_FACTORIAL:
            raise TooBig
        return Fraction(math.comb(above.numerator, below.numerator)) if below >= 0 else Fraction(0)
    if max(abs(_number(above)), abs(_number(below))) > MAX_FACTORIAL:
        raise TooBig
    return MP.binomial(_number(above), _number(below))


def _rounding(function: Callable[[Any], Any], exact: Callable[[Fraction], int]) -> Callable[[Value], Value]:
    def rounded(value: Value) -> Value:
        if isinstance(value, Fraction):
            return Fraction(exact(value))
        if MP.im(value) != 0 or abs(value) > 1e30:
            raise TooBig
        return Fraction(int(function(MP.re(value))))

    return rounded


def _function(name: str, value: Value) -> Value:
    number = _number(value)
    if name == "exp":
        return _float_power(MP.e, number)
    if name in ("sinh", "cosh", "tanh", "sin", "cos") and abs(number) > MAX_LOG10:
        raise TooBig
    if name in ("ln", "log", "lg"):
        if number == 0:
            raise ZeroDivisionError
        return MP.log(number) / (MP.log(10) if name == "lg" else 1)
    short = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}
    return getattr(MP, short.get(name, name))(number)


def _log(value: Value, base: Value) -> Value:
    below = MP.log(_number(base))
    if below == 0 or value == 0:
        raise ZeroDivisionError
    return MP.log(_number(value)) / below


def _fold(operate: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    def folded(first: Value, *others: Value) -> Value:
        for other in others:
            exact = isinstance(first, Fraction) and isinstance(other, Fraction)
            first = operate(first, other) if exact else operate(_number(first), _number(other))
        return first

    return folded


_CONSTANTS = {"pi": lambda: +MP.pi, "e": lambda: +MP.e, "i": lambda: MP.mpc(0, 1)}
_RULES: dict[str, Callable[..., Value]] = {
    "add": _fold(lambda a, b: a + b),
    "mul": _fold(lambda a, b: a * b),
    "div": _fold(lambda a, b: a / b),
    "pow": _power,
    "root": _root,
    "factorial": _factorial,
    "binom": _binomial,
    "abs": abs,
    "lfloor": _rounding(MP.floor, math.floor),
    "lceil": _rounding(MP.ceil, math.ceil),
    "log": _log,
}


def evaluate(node: Node, point: dict[str, Any]) -> Value:
    """A formula's value: a Fraction where the arithmetic is exact. Raises TooBig, ZeroDivisionError."""
    kind = node[0]
    if kind == "number":
        return node[1]
    if kind == "name":
        return point[node[1]]
    if kind == "constant":
        return _CONSTANTS[node[1]]()
    if kind == "function":
        return _function(node[1], evaluate(node[2], point))
    value = _RULES[kind](*(evaluate(part, point) for part in node[1:]))
    if isinstance(value, Fraction) and _log10(value) > MAX_LOG10:
        raise TooBig
    if REAL in point and MP.im(_number(value)) != 0:
        raise ZeroDivisionError
    return value


def sample_points(found: set[str]) -> list[dict[str, Any]]:
    """Where to compare: the same for the same names, positive first, then of both signs."""
    if not found:
        return [{}]
    ordered = sorted(found)
    draw = random.Random("/".join(ordered))
    points = []
    for i in range(POINTS):
        signs = [1 if i < POINTS - 2 else -1 if i == POINTS - 1 else (-1) ** n for n in range(len(ordered))]
        point = {n: MP.mpf(s * draw.uniform(0.2, 2.3)) for n, s in zip(ordered, signs, strict=True)}
        if min(signs) < 0:
            point[REAL] = MP.mpf(1)  # \sqrt{1/n} and 1/\sqrt{n} part where neither is real
        points.append(point)
    return points


# ---------------------------------------------------------------------------------------------- comparison


def same_value(gold: str, prediction: str) -> bool | None:
    """Whether two formulas are equal; None where one can't be read here or has no value."""
    a, b = read(gold), read(prediction)
    if a is None or b is None:
        return None
    if a == b:
        return _has_value(a)
    agreed = False
    try:
        for point in sample_points(names(a) | names(b)):
            verdict = _agree(a, b, point)
            if verdict is False:
                return not point and _stands_for(gold, prediction, a, b)
            agreed = agreed or bool(verdict)
    except TooBig:
        return False
    except (Unreadable, ValueError, OverflowError, TypeError):
        return None
    return True if agreed else None


def _has_value(node: Node) -> bool | None:
    """Whether a formula that equals itself has a value anywhere (`1/0` has none); None: it isn't computed."""
    for point in sample_points(names(node)):
        try:
            evaluate(node, point)
            return True
        except (ZeroDivisionError, ValueError):
            continue
        except (TooBig, Unreadable, OverflowError, TypeError):
            return True
    return False


def _agree(a: Node, b: Node, point: dict[str, Any]) -> bool | None:
    """None: nothing to be seen at this point."""
    try:
        x, y = evaluate(a, point), evaluate(b, point)
    except ZeroDivisionError:
        return None if point else False
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    x, y = _number(x), _number(y)
    if not (MP.isfinite(x) and MP.isfinite(y)):
        return None
    if abs(x - y) <= MP.mpf(10) ** -30 * max(abs(x), abs(y)):
        return True
    return abs(x - y) < 1e-20 and _vanishes(a, b, point)


def _vanishes(a: Node, b: Node, point: dict[str, Any]) -> bool:
    r"""A difference that shrinks with the precision is zero (`\sqrt{2}^2 - 2` against 0)."""
    sizes = []
    for digits in (DIGITS, 2 * DIGITS):
        with MP.workdps(digits):
            sizes.append(abs(_number(evaluate(a, point)) - _number(evaluate(b, point))))
    return bool(sizes[1] <= sizes[0] * MP.mpf(10) ** -(DIGITS // 2))


def _stands_for(gold: str, prediction: str, a: Node, b: Node) -> bool:
    """Whether one side is a decimal that is the other rounded to six digits or more."""
    for text, other in ((gold, b), (prediction, a)):
        decimal = decimal_value(text)
        if decimal is None:
            continue
        exact = evaluate(other, {})
        if not isinstance(exact, Fraction):
            if MP.im(exact) != 0:
                return False
            exact = Fraction(str(MP.nstr(MP.re(exact), DIGITS - 5)))
        if rounds_to(exact, decimal):
            return True
    return False


def value_of(text: str) -> Fraction | None:
    """The real number that a formula without variables stands for, to about 40 digits; None if there is none."""
    node = read(text)
    if node is None or names(node):
        return None
    try:
        value = evaluate(node, {})
        if isinstance(value, Fraction):
            return value
        real = MP.im(value) == 0 and MP.isfinite(value)
        return Fraction(str(MP.nstr(MP.re(value), DIGITS - 5))) if real else None
    except (TooBig, Unreadable, ZeroDivisionError, ValueError, OverflowError, TypeError):
        return None


def proportional(a: Sequence[Node], b: Sequence[Node], *, any_sign: bool) -> bool | None:
    """Whether (left - right) of one relation is a constant times that of another, a positive one unless
    `any_sign`; None where a value is missing."""
    found = set().union(*(names(n) for n in (*a, *b)))
    ratios = []
    try:
        for point in sample_points(found):
            try:
                x, y = (_number(evaluate(n[0], point)) - _number(evaluate(n[1], point)) for n in (a, b))
            except ZeroDivisionError:
                continue
            if abs(y) < 1e-30 or abs(x) < 1e-30:
                return False
            ratios.append(x / y)
    except TooBig:
        return False
    except (Unreadable, ZeroDivisionError, ValueError, OverflowError, TypeError):
        return None
    if len(ratios) < 2 and found:
        return None
    first = ratios[0]
    return all(abs(r - first) <= 1e-20 * abs(first) for r in ratios) and (any_sign or MP.re(first) > 0)
