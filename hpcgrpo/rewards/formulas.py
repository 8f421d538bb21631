"""Whether two formulas mean the same: math-verify's parser, then exact or many-digit evaluation.

The one module that imports math_verify and sympy; it runs where `equivalence` runs, in a process of its own.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import LatexExtractionConfig, parse, verify
from math_verify.grader import should_treat_as_complex
from sympy import Product, Sum
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.function import AppliedUndef

from hpcgrpo.rewards import expressions
from hpcgrpo.rewards.numbers import decimal_value, rounds_to

MAX_LOG10 = 1e5  # larger numbers are not computed, only compared as text
MAX_DEPTH = 25  # of brackets; the parser's time grows steeply with it
DIGITS = 50
POINTS = 6

_OPENING, _CLOSING = "([{", ")]}"
_SPELLING = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last", equations=False
)
_BOX = LatexExtractionConfig(boxed_match_priority=0, normalization_config=_SPELLING)


def formulas_equal(gold: str, prediction: str) -> bool:
    """Whether two formulas are equal as expressions or matrices; False for what cannot be read."""
    verdict = expressions.same_value(gold, prediction)
    if verdict is not None:
        return verdict
    a, b = tree_of(gold), tree_of(prediction)
    if a is None or b is None:
        return False
    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        return a.shape == b.shape and all(
            _trees_equal(x, y, "", "") for x, y in zip(a.flat(), b.flat(), strict=True)
        )
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return by_math_verify(gold, prediction)
    return _trees_equal(a, b, gold, prediction)


def _trees_equal(a: Any, b: Any, gold: str, prediction: str) -> bool:
    if a == b:
        return not a.has(sympy.nan, sympy.zoo)
    if any(_too_big(x) for x in (a, b)):
        return False
    if gold and any(x.free_symbols and x.has(ExprWithLimits) for x in (a, b)):
        verdict = _sums_equal(a, b)
        return by_math_verify(gold, prediction) if verdict is None else verdict
    found = [_agree(a, b, point, gold, prediction) for point in sample_points((a, b))]
    if None in found and not any(f is False for f in found):
        return bool(gold) and by_math_verify(gold, prediction)
    return all(found)


def _sums_equal(a: Any, b: Any) -> bool | None:
    """Sums and products of a varying number of terms, for three numbers of them; None: no such formulas."""
    if not all(isinstance(x, Sum | Product) for t in (a, b) for x in t.atoms(ExprWithLimits)):
        return None
    found = sorted(a.free_symbols | b.free_symbols, key=str)
    for first in (3, 4, 6):
        point = {name: first + i for i, name in enumerate(found)}
        x, y = (sympy.N(t.subs(point).doit(), DIGITS) for t in (a, b))
        if not (x.is_number and y.is_number and x.is_finite and y.is_finite):
            return None
        if abs(x - y) > sympy.Float(10) ** -30 * max(abs(x), abs(y)):
            return False
    return True


def _agree(a: Any, b: Any, point: dict[Any, Any], gold: str, prediction: str) -> bool | None:
    if not point:
        a, b = a.doit(), b.doit()
        if a.is_Rational and b.is_Rational:  # exactly: 2^{2007} - 1 is not 2^{2007}
            return bool(a == b) or _rounded(gold, b) or _rounded(prediction, a)
    x, y = value_at(a, point), value_at(b, point)
    if x is None or y is None:
        return None
    if any(v < 0 for v in point.values()) and (abs(sympy.im(x)) + abs(sympy.im(y))) > 0:
        return True  # \sqrt{1/n} and 1/\sqrt{n} part where neither is real
    if abs(x - y) <= sympy.Float(10) ** -30 * max(abs(x), abs(y)):
        return True
    if point:
        return False
    return _vanishes(a, b) or _rounded(gold, y) or _rounded(prediction, x)


def _vanishes(a: Any, b: Any) -> bool:
    """A difference that shrinks with the precision is zero (`\\sqrt{2}^2 - 2` against 0)."""
    small = [abs(sympy.N(a - b, n)) for n in (DIGITS, 2 * DIGITS)]
    return bool(small[1] <= small[0] * sympy.Float(10) ** -(DIGITS // 2)) and bool(small[0] < 1e-20)


def _rounded(text: str, exact: Any) -> bool:
    decimal = decimal_value(text)
    if decimal is None or sympy.im(exact) != 0:
        return False
    return rounds_to(Fraction(str(sympy.Rational(sympy.re(exact)))), decimal)


def sample_points(trees: Sequence[Any]) -> list[dict[Any, Any]]:
    """Where to compare: the same for the same names, positive first, then of both signs."""
    names = sorted({s for t in trees for s in t.free_symbols}, key=str)
    if not names:
        return [{}]
    draw = random.Random("/".join(map(str, names)))
    points = []
    for i in range(POINTS):
        signs = [1 if i < POINTS - 2 else -1 if i == POINTS - 1 else (-1) ** n for n in range(len(names))]
        points.append(
            {n: sympy.Float(s * draw.uniform(0.2, 2.3), DIGITS) for n, s in zip(names, signs, strict=True)}
        )
    return points


def value_at(tree: Any, point: dict[Any, Any]) -> Any:
    """A formula's value at a point, to many digits."""
    value = sympy.N(tree.subs(point) if point else tree, DIGITS)
    return value if value.is_number and value.is_finite and not value.free_symbols else None


@lru_cache(maxsize=256)  # a group's answers share the reference
def tree_of(text: str) -> Any:
    """The unevaluated expression, decimals as rationals, `i` as the imaginary unit; None if unreadable."""
    if _too_hard_to_read(text):
        return None
    text = re.sub(r"(?<![a-zA-Z\\])i\s*\(", r"i \\cdot (", text).replace(r"\log_e", r"\ln")
    text = re.sub(r"(?<![\d.}\\])(\d+) (\d+)\s*/\s*(\d+)", r"\1\\frac{\2}{\3}", text)
    text = normalize_latex(text, _SPELLING)
    try:
        tree = latex2sympy(
            text,
            is_real=not should_treat_as_complex(text),
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except (MemoryError, RecursionError):
        raise
    except Exception:  # the parser raises whatever it meets
        return None
    return _exact(tree)


def _exact(tree: Any) -> Any:
    if isinstance(tree, sympy.MatrixBase):
        return tree.applyfunc(_exact)
    if not isinstance(tree, sympy.Expr):
        return tree
    imaginary = {s: sympy.I if s.name == "i" else sympy.Symbol(s.name) for s in tree.free_symbols}
    names = {f: sympy.Symbol(str(f)) for f in tree.atoms(AppliedUndef)}
    floats = {f: sympy.Rational(str(f)) for f in tree.atoms(sympy.Float)}
    replacements = {**names, **imaginary, **floats}
    return tree.xreplace(replacements) if replacements else tree


_HARD = re.compile(
    r"\\(?:ii+nt|oint)|\\(?:int|sum|prod|lim)(?![a-z]).*\\(?:int|sum|prod|lim)(?![a-z])"  # of several variables
    r"|\^\s*\{[^{}]*(?:\^|!)|\^\s*\w\s*\^|!\s*\)*\s*!|\d{5,}\s*!|\^\s*\{?\s*-?\d{5}"  # numbers beyond computing
    r"|binom.*(?:\d{5}|[\^!])|\\end\s*\{\w+\}\s*\)?\s*\^\s*\{?\s*\d\d"
    r"|\\(?:sum|prod)(?![a-z]).{0,40}?\^\s*\{?\s*(?:\d{4}|\d+\s*\^)"  # thousands of terms
    r"|\\lim(?![a-z]).*!",
    re.DOTALL,
)
_INTEGRAND = re.compile(
    r"(?:[\w\s+\-^=.,{}()/]|\\(?:int|frac|cdot|pi|infty|[,;!])(?![a-z])"
    r"|\\(?:sin|cos|sqrt|ln)(?![a-z])\s*\{?\(?[\w ]{1,3}\)?\}?)*"
)
_LETTER_POWER = re.compile(r"(?<!e)\^\s*(?:[a-zA-Z]|\{[^{}]*[a-zA-Z])")
_NO_FORMULA = re.compile(r"__|[\"#@;?`\x1b]|%s")


def _too_hard_to_read(text: str) -> bool:
    """Whether reading or computing it would take long, or it is no formula at all: then only equal text is equal."""
    depth = deepest = 0
    for char in text:
        depth += (char in _OPENING) - (char in _CLOSING)
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH or _HARD.search(text) or _NO_FORMULA.search(text):
        return True
    return r"\int" in text and (not _INTEGRAND.fullmatch(text) or bool(_LETTER_POWER.search(text)))


def _too_big(tree: Any) -> bool:
    """A power, factorial or product anywhere whose size forbids computing it."""
    for node in sympy.preorder_traversal(tree):
        if isinstance(node, sympy.Pow | sympy.factorial | sympy.exp) and not node.free_symbols:
            size = _log10(node)
            if size is None or abs(size) > MAX_LOG10:
                return True
    return False


def _log10(tree: Any) -> float | None:
    """Roughly log10 of the size of a number written with powers and factorials; None if beyond a float."""
    try:
        size = _log10_of(tree)
    except (OverflowError, RecursionError):
        return None
    return size if math.isfinite(size) else None


def _log10_of(tree: Any) -> float:
    if tree.is_Rational:
        return (math.log10(abs(tree.p)) if tree.p else 0.0) - math.log10(tree.q)
    if isinstance(tree, sympy.Pow | sympy.exp):
        base, exponent = tree.as_base_exp() if isinstance(tree, sympy.Pow) else (sympy.E, tree.args[0])
        return _log10_of(base) * 10 ** min(_log10_of(exponent), 300)
    if isinstance(tree, sympy.factorial):
        size = 10 ** min(_log10_of(tree.args[0]), 300)
        return size * math.log10(max(size, 1))
    if tree.is_Mul:
        return sum(_log10_of(a) for a in tree.args)
    return max((_log10_of(a) for a in tree.args), default=0.5)


def by_math_verify(gold: str, prediction: str) -> bool:
    """math-verify's own comparison, for sets, unions and relations."""
    if _too_hard_to_read(gold) or _too_hard_to_read(prediction):
        return False
    sides = [
        parse(rf"\boxed{{{t}}}", [_BOX], fallback_mode="no_fallback", parsing_timeout=None)
        for t in (gold, prediction)
    ]
    if not all(sides):
        return False
    return bool(verify(*sides, timeout_seconds=None, allow_set_relation_comp=True))


def plain_math_verify(gold: str, prediction: str, tolerance: float | None = None) -> bool:
    """math-verify as it comes, each side in a box of its own; without its alarms, since the process has its limits."""
    sides = [
        parse(t if r"\boxed" in t else rf"\boxed{{{t}}}", parsing_timeout=None) for t in (gold, prediction)
    ]
    return bool(verify(*sides, timeout_seconds=None))
