"""Whether two final answers mean the same: structure by text, formulas by `expressions` and `formulas`.

Runs in a process of `grading.Grader` alone: nothing here bounds its own time or memory.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import sympy

from hpcgrpo.rewards import expressions
from hpcgrpo.rewards.answers import pmod_free, settle, tidy
from hpcgrpo.rewards.formulas import by_math_verify, formulas_equal, sample_points, tree_of, value_at
from hpcgrpo.rewards.notations import (
    NAME,
    bases,
    bracketed,
    choices,
    clocks,
    members_of,
    ratios,
    rows_of,
    split,
    tokens_of,
)
from hpcgrpo.rewards.units import without_unit

_TRIG = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_ORDERS = ("<", ">", r"\leq", r"\geq")
_WORDS = re.compile(r"[^\W\d_]{4,}|[^\W\d_]{2,}(?:[ '-]+[^\W\d_]+)+")
_LETTERS_ALONE = re.compile(r"[A-Za-z]{3,}")
_MEMBER = re.compile(r"^\s*\\?[A-Za-z](?:_\w|_\{\w+\})?\s*\\in(?![a-z])\s*")
_FUNCTIONS = re.compile(
    r"(?<![\\a-zA-Z])(sin|cos|tan|cot|sec|csc|ln|log|exp|arcsin|arccos|arctan|sqrt|pi|theta|alpha|beta|lambda|sigma"
    r"|omega)(?![a-zA-Z])"
)
_SET = re.compile(r"\\(?:cup|cap|setminus|backslash|emptyset|mathbb)(?![a-z])|\\\{")
_SETS = re.compile(r"\\(?:cup|cap|setminus|backslash|mathbb)(?![a-z])|\\in(?![a-z])|\\mid|\|\s*\\?[a-z]")
_BUILDER = re.compile(
    r"\\\{\s*(\\?[A-Za-z])\s*(?:\\in\s*(?:\\mathbb\{?R\}?|R))?\s*(?:\\mid(?![a-z])|\||:|\\colon)\s*(.+)\\\}"
)
_ARTICLE = re.compile(r"(?:an?|the) (?=\w{3})")


def equal(gold: str, prediction: str, tolerance: float | None = None) -> bool:
    """Whether the prediction equals the reference, or lies within `tolerance` (absolute) of it. Not symmetric where
    the reference is an equation: `x = 5` may be answered by `5`, `2x + z = 1` not by `1`."""
    random.seed(0)
    sympy.core.random.seed(0)
    gold, prediction = _simple(tidy(gold)), _simple(tidy(prediction))
    if tolerance is not None and _within(gold, prediction, tolerance):
        return True
    return _same(gold, prediction)


# --------------------------------------------------------------------------------------------- structure


def _simple(text: str) -> str:
    """Spellings that only matter to formulas: scientific notation, degrees, words for operators."""
    text = re.sub(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?!\w)", r"\1 \\times 10^{\2}", text)
    text = _FUNCTIONS.sub(r"\\\1", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text).replace(r"\pi", r"\pi ")
    text = _alternatives(text)
    text = re.sub(r"(?<![a-zA-Z\\])(?:,?\s*\b(?:and|or)\b)(?![a-zA-Z])", " , ", text)
    text = re.sub(r"\\mathbb\s*\{?R\}?$", r"(-\\infty,\\infty)", text)
    text = _BUILDER.sub(r"\2", text) if _BUILDER.fullmatch(text) else _MEMBER.sub("", text)
    text = pmod_free(text).replace(r"\equiv", "=").replace("*", r" \cdot ")
    if _TRIG.search(text):
        return re.sub(r"(\d+(?:\.\d+)?)\s*\^\\circ", r"(\1 \\cdot \\pi /180)", text)
    text = without_unit(text.replace(r"^\circ", "").strip())
    name, is_set, members = text.partition(r"=\{")
    return r"\{" + members if is_set and NAME.fullmatch(name.strip()) else text


def _alternatives(text: str) -> str:
    r"""`x < 1 or x > 2` -> `(-\infty,1) \cup (2,\infty)`."""
    parts = re.split(r"\s*,?\s*\bor\b\s*", text)
    intervals = [_interval(part) for part in parts]
    return r"\cup ".join(map(str, intervals)) if len(parts) > 1 and None not in intervals else text


def _same(gold: str, prediction: str) -> bool:
    verdict = settle(gold, prediction)
    if verdict is not None:
        return verdict
    for rule in (bases, clocks, choices, ratios, _ellipses, _percentages, _matrices):
        if (decided := rule(gold, prediction)) is not None:
            return decided
    if r"\bmod" in prediction and r"\bmod" not in gold:
        return False
    golds, predictions = members_of(gold), members_of(prediction)
    if len(golds) > 1 or len(predictions) > 1:
        if gold.startswith(r"\{") and prediction.startswith("("):
            return False  # a set is no tuple; a list without brackets may be answered by one
        return _match(golds, predictions)
    return _single(golds[0], predictions[0]) if golds and predictions else False


def _ellipses(gold: str, prediction: str) -> bool | None:
    """What goes on: the terms that are shown, one by one."""
    if r"\ldots" not in gold + prediction:
        return None
    left, right = (split(t, ",") for t in (gold, prediction))
    if len(left) > 1 or len(right) > 1:
        return len(left) == len(right) and all(
            (a == b) if r"\ldots" in a + b else _single(a, b) for a, b in zip(left, right, strict=True)
        )
    if gold.count(r"\ldots") != prediction.count(r"\ldots"):
        return False
    return expressions.same_value(*(t.replace(r"\ldots", r"\Xi ") for t in (gold, prediction))) is True


def _percentages(gold: str, prediction: str) -> bool | None:
    r"""`33\frac{1}{3}%` is 1/3 as well as `33\frac{1}{3}`."""
    if gold.endswith("%") == prediction.endswith("%"):
        return None
    bare = gold.rstrip("% "), prediction.rstrip("% ")
    if _single(*bare):
        return True
    return _single(
        *(
            rf"\frac{{{b}}}{{100}}" if t.endswith("%") else b
            for b, t in zip(bare, (gold, prediction), strict=True)
        )
    )


def _matrices(gold: str, prediction: str) -> bool | None:
    """Matrices of one shape, cell by cell; None unless both are nothing but a matrix."""
    left, right = rows_of(gold), rows_of(prediction)
    if left is None or right is None:
        return None
    shapes = [[len(row) for row in matrix] for matrix in (left, right)]
    return shapes[0] == shapes[1] and all(
        _same(a, b) for rows in zip(left, right, strict=True) for a, b in zip(*rows, strict=True)
    )


def _match(golds: Sequence[str], predictions: Sequence[str]) -> bool:
    """The same members, as often, in any order."""
    return _paired(golds, predictions, _single)


def _paired(golds: Sequence[str], predictions: Sequence[str], same: Callable[[str, str], bool]) -> bool:
    if len(predictions) == 1 and (bracket := bracketed(predictions[0])) and bracket[0] + bracket[1] == "()":
        return len(golds) == len(bracket[2]) and all(map(_same, golds, bracket[2]))
    left = list(predictions)
    if len(set(golds)) == len(golds):
        left = list(dict.fromkeys(predictions))
    if len(golds) != len(left):
        return False
    for gold in golds:
        hit = next((i for i, candidate in enumerate(left) if same(gold, candidate)), None)
        if hit is None:
            return False
        del left[hit]
    return True


def _single(gold: str, prediction: str) -> bool:
    verdict = settle(gold, prediction)
    if verdict is not None:
        return verdict
    gold, prediction = _answer_side(gold, prediction)
    if (verdict := settle(gold, prediction)) is not None:
        return verdict
    relations = [len(tokens_of(t)) > 1 for t in (gold, prediction)]
    if all(relations):
        return _relations_equal(gold, prediction)
    if any(relations):
        gold, prediction = (
            _interval(t) or t if r else t for t, r in zip((gold, prediction), relations, strict=True)
        )
        if len(tokens_of(gold)) > 1 or len(tokens_of(prediction)) > 1:
            sets = all(r or _SETS.search(t) for r, t in zip(relations, (gold, prediction), strict=True))
            return sets and not _equation(gold + prediction) and by_math_verify(gold, prediction)
    brackets = bracketed(gold), bracketed(prediction)
    if any(b and len(b[2]) > 1 for b in brackets):
        if all(brackets):
            return _brackets_equal(*brackets)  # type: ignore[arg-type]
        set_like = [bool(b or _SETS.search(t)) for b, t in zip(brackets, (gold, prediction), strict=True)]
        return all(set_like) and bool(_SETS.search(gold + prediction)) and by_math_verify(gold, prediction)
    if r"\cup" in gold and r"\cup" in prediction and (verdict := _unions(gold, prediction)) is not None:
        return verdict
    if _words(gold) or _words(prediction):
        return _ARTICLE.sub("", gold.casefold()) == _ARTICLE.sub("", prediction.casefold())
    return _kind(gold) == _kind(prediction) and formulas_equal(gold, prediction)


def _kind(text: str) -> str:
    return "matrix" if r"\begin" in text else "set" if _SET.search(text) else "formula"


def _words(text: str) -> bool:
    """Whether letters are a word and no product: four of them, or three with a vowel."""
    return bool(
        _WORDS.fullmatch(text) or (_LETTERS_ALONE.fullmatch(text) and re.search("[aeiouAEIOU]", text))
    )


def _unions(gold: str, prediction: str) -> bool | None:
    """The same parts in any order: True; whether other parts can make up the same set is not seen here: None."""
    left, right = ([p.strip() for p in re.split(r"\\cup(?![a-z])", t)] for t in (gold, prediction))
    return True if len(left) == len(right) and _paired(left, right, _same) else None


def _within(gold: str, prediction: str, tolerance: float) -> bool:
    """Whether all numbers of the prediction lie within `tolerance` of the reference's, in order within brackets."""
    near = partial(_near, tolerance=tolerance)
    golds, predictions = members_of(gold), members_of(prediction)
    if len(golds) != 1 or len(predictions) != 1:
        return _paired(golds, predictions, near) if golds and predictions else False
    return near(golds[0], predictions[0])


def _near(gold: str, prediction: str, tolerance: float) -> bool:
    brackets = bracketed(gold), bracketed(prediction)
    if all(b and len(b[2]) > 1 for b in brackets):
        (opening, closing, left), (opening2, closing2, right) = brackets  # type: ignore[misc]
        same_brackets = (opening, closing, len(left)) == (opening2, closing2, len(right))
        return same_brackets and all(_near(a, b, tolerance) for a, b in zip(left, right, strict=True))
    values = [expressions.value_of(without_unit(t)) for t in _answer_side(gold, prediction)]
    if values[0] is None or values[1] is None:
        return False
    return abs(values[0] - values[1]) <= Fraction(repr(tolerance))


def _equation(text: str) -> bool:
    return "=" in text and "<" not in text


def _brackets_equal(gold: tuple[str, str, list[str]], prediction: tuple[str, str, list[str]]) -> bool:
    if gold[:2] != prediction[:2] or len(gold[2]) != len(prediction[2]):
        return False
    return all(map(_same, gold[2], prediction[2]))


# --------------------------------------------------------------------------------------------- relations


def _answer_side(gold: str, prediction: str) -> tuple[str, str]:
    """Drops `name =` where only one side has it, and what follows an approximation sign."""
    gold, prediction = (_exact_side(t) for t in (gold, prediction))
    tokens = tokens_of(gold), tokens_of(prediction)
    sides = [
        t[::2] if set(t[1::2]) == {"="} else [text]
        for t, text in zip(tokens, (gold, prediction), strict=True)
    ]
    named = [len(s) > 1 and bool(NAME.fullmatch(s[0])) for s in sides]
    if len(sides[1]) > 1 and len(sides[0]) == 1:
        if len(sides[1]) == 2 and NAME.fullmatch(sides[1][1]) and not named[1]:
            return gold, sides[1][0]  # 7 = x
        first, last = sides[1][0], sides[1][-1]
        claims = not re.search(r"[A-Za-z]", re.sub(r"\\[a-z]+", "", first))  # 8 = 7 is no way to say 7
        return gold, prediction if claims and not formulas_equal(first, last) else last
    if named[0] and len(sides[1]) == 1:
        return sides[0][-1], prediction
    if all(named) and sides[0][0].replace(" ", "") == sides[1][0].replace(" ", ""):
        return sides[0][-1], sides[1][-1]
    return gold, prediction


def _exact_side(text: str) -> str:
    r"""What stands before an approximation sign, unless it is only a name."""
    sides = [side.strip() for side in re.split(r"\\approx|\\simeq", text)]
    return sides[1] if len(sides) == 2 and re.fullmatch(r"\\?[A-Za-z]", sides[0]) else sides[0] or text


def _differences(text: str) -> list[tuple[str, Any]]:
    """A chain of relations as (sign, tree) pairs: `tree = 0`, `tree < 0` or `tree <= 0`."""
    tokens = tokens_of(text)
    trees = [tree_of(t) for t in tokens[::2]]
    pairs = []
    for i, sign in enumerate(tokens[1::2]):
        left, right = trees[i], trees[i + 1]
        if left is None or right is None:
            raise ValueError(text)
        if sign in (">", r"\geq"):
            left, right, sign = right, left, {">": "<", r"\geq": r"\leq"}[sign]
        pairs.append((sign, sympy.Add(left, sympy.Mul(-1, right, evaluate=False), evaluate=False)))
    return pairs


def _relations_equal(gold: str, prediction: str) -> bool:
    """Equal up to a constant factor, which must be positive for an inequality."""
    left, right = _interval(gold), _interval(prediction)
    if left and right:
        return _same(left, right)
    if (verdict := _pairs_equal(gold, prediction)) is not None:
        return verdict
    try:
        golds, predictions = _differences(gold), _differences(prediction)
    except (ValueError, TypeError):
        return by_math_verify(gold, prediction)
    if len(golds) != len(predictions):
        return False
    return all(
        any(sign == other and _proportional(tree, tree2, sign == "=") for other, tree2 in predictions)
        for sign, tree in golds
    )


def _pairs_equal(gold: str, prediction: str) -> bool | None:
    """As `_relations_equal` for sides that `expressions` reads; None where it does not."""
    chains: list[list[tuple[str, Any]]] = []
    for text in (gold, prediction):
        tokens = tokens_of(text)
        sides = [expressions.read(t) for t in tokens[::2]]
        if None in sides:
            return None
        chain = []
        for i, sign in enumerate(tokens[1::2]):
            pair = (sides[i], sides[i + 1])
            turned = {">": "<", r"\geq": r"\leq"}.get(sign)
            chain.append((turned or sign, pair[::-1] if turned else pair))
        chains.append(chain)
    if len(chains[0]) != len(chains[1]):
        return False
    found = [[sign == other and _ratio_of(a, b, sign) for other, b in chains[1]] for sign, a in chains[0]]
    if any(True not in row and None in row for row in found):
        return None
    return all(True in row for row in found)


def _ratio_of(a: Any, b: Any, sign: str) -> bool | None:
    return expressions.proportional(a, b, any_sign=sign in ("=", r"\neq"))


def _proportional(a: Any, b: Any, any_sign: bool) -> bool:
    ratios = []
    for point in sample_points((a, b)):
        x, y = value_at(a, point), value_at(b, point)
        if x is None or y is None or abs(y) < 1e-30 or abs(x) < 1e-30:
            return False
        ratios.append(x / y)
    first = ratios[0]
    return all(abs(r - first) <= 1e-20 * abs(first) for r in ratios) and (any_sign or sympy.re(first) > 0)


def _interval(text: str) -> str | None:
    """The interval that a relation about one name describes: `0 < x \\leq 3` -> `(0,3]`."""
    tokens = tokens_of(text)
    signs = tokens[1::2]
    if signs == [r"\neq"] and re.fullmatch(r"\\?[A-Za-z]", tokens[0]):
        return rf"(-\infty,{tokens[2]})\cup ({tokens[2]},\infty)"
    if not signs or any(s not in _ORDERS for s in signs):
        return None
    if signs[0] in (">", r"\geq"):
        turned = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}
        tokens = [turned.get(t, t) for t in reversed(tokens)]
    low = high = None
    if len(tokens) == 5 and re.fullmatch(r"\\?[A-Za-z]+", tokens[2]):
        low, high = (tokens[0], tokens[1]), (tokens[4], tokens[3])
    elif len(tokens) == 3 and re.fullmatch(r"[A-Za-z]|\\[a-z]+", tokens[0]) and tokens[0] != r"\infty":
        low, high = (r"-\infty", "<"), (tokens[2], tokens[1])
    elif len(tokens) == 3 and re.fullmatch(r"[A-Za-z]|\\[a-z]+", tokens[2]) and tokens[2] != r"\infty":
        low, high = (tokens[0], tokens[1]), (r"\infty", "<")
    if low is None or high is None:
        return None
    return f"{'[' if low[1] != '<' else '('}{low[0]},{high[0]}{']' if high[1] != '<' else ')'}"


def warm_up() -> None:
    """Fills the parsers' caches, which processes forked from this one then share."""
    equal(r"\frac{1}{2}x+3", r"x(3+0.5)^{2}")
    for text in (
        r"\frac{1}{2}x+3",
        r"2\sqrt{8}-\pi",
        r"\sin y",
        "2-y=1",
        r"\sum_{k=1}^{n} k",
        r"\int_{0}^{1} x dx",
    ):
        tree_of(text)
    by_math_verify(r"(0,1)\cup (2,3)", r"(0,1)\cup (2,4)")
    for cache in (tree_of, expressions.read):
        cache.cache_clear()
