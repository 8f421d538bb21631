"""Whether two final answers mean the same: structure by text, formulas by `expressions` and `formulas`.

Runs in a process of `grading.Grader` alone: nothing here bounds its own time or memory.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import sympy

from hpcgrpo.rewards import expressions
from hpcgrpo.rewards.answers import modulus_split, settle, tidy
from hpcgrpo.rewards.formulas import by_math_verify, formulas_equal, tree_of
from hpcgrpo.rewards.notations import (
    NAME,
    bases,
    bracketed,
    choices,
    clocks,
    members_of,
    named_values,
    ratios,
    rows_of,
    split,
    tokens_of,
)
from hpcgrpo.rewards.relations import chained, differences, interval, pairs_equal, proportional
from hpcgrpo.rewards.units import without_unit

_TRIG = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_WORDS = re.compile(r"[^\W\d_]{4,}|[^\W\d_]{2,}(?:[ '-]+[^\W\d_]+)+")
_LETTERS_ALONE = re.compile(r"[A-Za-z]{3,}")
_MEMBER = re.compile(r"^\s*(?:\\?[A-Za-z](?:_\w|_\{\w+\})?|\([a-z](?:,[a-z])+\))\s*\\in(?![a-z])\s*")
_FUNCTIONS = re.compile(
    r"(?<![\\a-zA-Z])(sin|cos|tan|cot|sec|csc|ln|log|exp|arcsin|arccos|arctan|sqrt|pi|theta|alpha|beta|lambda|sigma"
    r"|omega)(?![a-zA-Z])"
)
_SET = re.compile(r"\\(?:cup|cap|setminus|backslash|emptyset|mathbb)(?![a-z])|\\\{")
_SETS = re.compile(r"\\(?:cup|cap|setminus|backslash|mathbb)(?![a-z])|\\in(?![a-z])|\\mid|\|\s*\\?[a-z]")
_BUILDER = re.compile(
    r"\\\{\s*(\\?[A-Za-z])\s*(?:\\in\s*(?:\\mathbb\{?R\}?|R))?\s*(?:\\mid(?![a-z])|\||:|\\colon)\s*(.+)\\\}"
)
_MINUTES = re.compile(r"(\d+)\s*\^\\circ\s*(\d+)\s*(?:'|\^\{?\\prime\s*\}?)(?!')")
_INDEX = re.compile(r"_\{?\d\}?$|\([a-z]\)$")
_ARTICLE = re.compile(r"(?:an?|the) (?=\w{3})")


def equal(gold: str, prediction: str, tolerance: float | None = None) -> bool:
    """Whether the prediction equals the reference, or lies within `tolerance` (absolute) of it. Not symmetric where
    the reference is an equation: `x = 5` may be answered by `5`, `2x + z = 1` not by `1`."""
    random.seed(0)
    sympy.core.random.seed(0)
    (gold, modulus), (prediction, other) = (modulus_split(tidy(text)) for text in (gold, prediction))
    if modulus != other and modulus and (other or r"\equiv" in gold):
        return False
    gold, prediction = _simple(gold), _simple(prediction)
    if tolerance is not None and _within(gold, prediction, tolerance):
        return True
    return _same(gold, prediction)


# --------------------------------------------------------------------------------------------- structure


def _simple(text: str) -> str:
    """Spellings that only matter to formulas: scientific notation, degrees, words for operators."""
    text = re.sub(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?!\w)", r"\1 \\times 10^{\2}", text)
    text = _FUNCTIONS.sub(r"\\\1", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text).replace(r"\pi", r"\pi ")
    text = _MINUTES.sub(r"(\1+\2/60)", text)
    text = _alternatives(text)
    text = re.sub(r"(?<![a-zA-Z\\])(?:,?\s*\b(?:and|or)\b)(?![a-zA-Z])", " , ", text)
    text = re.sub(r"\\mathbb\s*\{?R\}?$", r"(-\\infty,\\infty)", text)
    text = _BUILDER.sub(r"\2", text) if _BUILDER.fullmatch(text) else _MEMBER.sub("", text)
    text = text.replace(r"\equiv", "=").replace("*", r" \cdot ")
    if _TRIG.search(text):
        return re.sub(r"(\d+(?:\.\d+)?)\s*\^\\circ", r"(\1 \\cdot \\pi /180)", text)
    text = without_unit(text.replace(r"^\circ", "").strip())
    name, is_set, members = text.partition(r"=\{")
    return r"\{" + members if is_set and NAME.fullmatch(name.strip()) else text


def _alternatives(text: str) -> str:
    r"""`x < 1 or x > 2` -> `(-\infty,1) \cup (2,\infty)`; `x > 1 and x < 3` -> `1<x<3`."""
    halves = re.split(r"\s*,?\s*\band\b\s*", text)
    if len(halves) == 2 and (chain := chained(*halves)):
        return chain
    parts = re.split(r"\s*,?\s*\bor\b\s*", text)
    intervals = [interval(part) for part in parts]
    if any(intervals):
        intervals = [known or _point(part) for known, part in zip(intervals, parts, strict=True)]
    return r"\cup ".join(map(str, intervals)) if len(parts) > 1 and None not in intervals else text


def _point(text: str) -> str | None:
    r"""`x = 5` -> `\{5\}`."""
    tokens = tokens_of(text)
    is_value = len(tokens) == 3 and tokens[1] == "=" and re.fullmatch(r"\\?[A-Za-z]+", tokens[0])
    return rf"\{{{tokens[2]}\}}" if is_value else None


def _same(gold: str, prediction: str) -> bool:
    verdict = settle(gold, prediction)
    if verdict is not None:
        return verdict
    for rule in (bases, clocks, choices, ratios, _ellipses, _percentages, _matrices, _values_of_names):
        if (decided := rule(gold, prediction)) is not None:
            return decided
    if r"\bmod" in prediction and r"\bmod" not in gold:
        return False
    golds, predictions = members_of(gold), members_of(prediction)
    if len(golds) > 1 or len(predictions) > 1:
        tuples = [
            bool(b and b[0] == "(" and len(b[2]) > 1) for b in (bracketed(prediction), bracketed(golds[0]))
        ]
        if gold.startswith(r"\{") and tuples == [True, False]:
            return False  # a set is no tuple; a list without brackets may be answered by one
        if (tuples[1] or prediction.startswith(r"\{")) and len(set(golds)) == len(golds):
            predictions = list(dict.fromkeys(predictions))  # a member of a set may be told twice
        return _paired(golds, predictions, _single)
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


def _values_of_names(gold: str, prediction: str) -> bool | None:
    """`x=1, y=2` and `(x,y)=(1,2)`: name by name; against a tuple as (x,y) says, or in the
    order of the alphabet, and against a list as told."""
    left, right = named_values(gold), named_values(prediction)
    if left and right:
        return all(_same(left[name], right[name]) for name in left) if left.keys() == right.keys() else None
    values, other = (left, prediction) if left else (right, gold)
    if not values:
        return None
    parts, bracket = split(other, ",;"), bracketed(other)
    if bracket and bracket[:2] == ("(", ")"):
        parts = bracket[2]
        if not (gold if left else prediction).startswith("("):
            values = dict(sorted(values.items(), key=lambda item: item[0].lstrip("\\")))
    elif not left or "=" in other:
        return None
    if len(parts) != len(values):
        return None
    pairs = zip(values.values(), parts, strict=True)
    return all(_same(v, p) if left else _same(p, v) for v, p in pairs)


def _matrices(gold: str, prediction: str) -> bool | None:
    """Matrices of one shape, cell by cell; None unless both are nothing but a matrix."""
    left, right = rows_of(gold), rows_of(prediction)
    if left is None or right is None:
        return None
    shapes = [[len(row) for row in matrix] for matrix in (left, right)]
    return shapes[0] == shapes[1] and all(
        _same(a, b) for rows in zip(left, right, strict=True) for a, b in zip(*rows, strict=True)
    )


def _paired(golds: Sequence[str], predictions: Sequence[str], same: Callable[[str, str], bool]) -> bool:
    """The same members, as often, in any order."""
    if len(predictions) == 1 and (bracket := bracketed(predictions[0])) and bracket[0] + bracket[1] == "()":
        return len(golds) == len(bracket[2]) and all(map(_same, golds, bracket[2]))
    left = list(predictions)
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
            interval(t) or t if r else t for t, r in zip((gold, prediction), relations, strict=True)
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
    if gold[0] == r"\{":
        return _paired(gold[2], prediction[2], _same)
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
        if expressions.names(expressions.read(first) or ("number",)) or (
            named[1] and expressions.value_of(first) is None
        ):
            claims = False  # \theta = 7 and \min = 7 are
        return gold, prediction if claims and not formulas_equal(first, last) else last
    if named[0] and len(sides[1]) == 1:
        return sides[0][-1], prediction
    if all(named) and _one_name(sides[0][0], sides[1][0]):
        return sides[0][-1], sides[1][-1]
    return gold, prediction


def _one_name(gold: str, prediction: str) -> bool:
    """Whether two names are one: `x` may be called `x_1`, and `y` `y(t)`."""
    names = [name.replace(" ", "") for name in (gold, prediction)]
    plain = [_INDEX.sub("", name) for name in names]
    return names[0] == names[1] or (plain[0] == plain[1] and any(map(str.__eq__, names, plain)))


def _exact_side(text: str) -> str:
    r"""What stands before an approximation sign, unless it is only a name."""
    sides = [side.strip() for side in re.split(r"\\approx|\\simeq", text)]
    return sides[1] if len(sides) == 2 and re.fullmatch(r"\\?[A-Za-z]", sides[0]) else sides[0] or text


def _relations_equal(gold: str, prediction: str) -> bool:
    """Equal up to a constant factor, which must be positive for an inequality."""
    left, right = interval(gold), interval(prediction)
    if left and right:
        return _same(left, right)
    if (verdict := pairs_equal(gold, prediction)) is not None:
        return verdict
    try:
        golds, predictions = differences(gold), differences(prediction)
    except (ValueError, TypeError):
        return by_math_verify(gold, prediction)
    if len(golds) != len(predictions):
        return False
    return all(
        any(sign == other and proportional(tree, tree2, sign == "=") for other, tree2 in predictions)
        for sign, tree in golds
    )


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
