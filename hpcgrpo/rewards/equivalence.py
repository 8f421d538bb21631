"""Whether two final answers mean the same: structure by text, formulas by `formulas`.

Runs in a process of `grading.Grader` alone: nothing here bounds its own time or memory.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import sympy

from hpcgrpo.rewards.answers import embraced, pmod_free, settle, tidy, without_unit
from hpcgrpo.rewards.formulas import by_math_verify, formulas_equal, sample_points, tree_of, value_at

_OPENING, _CLOSING = "([{", ")]}"
_TRIG = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_RELATION = re.compile(r"(\\leq|\\geq|\\neq?(?![a-z])|\\equiv|\\approx|<|>|=)")
_BASE = re.compile(r"\(?(\d+)\)?_\s*\{?\s*(\d+)\s*\}?")
_NAME = re.compile(
    r"\\?[A-Za-z]+(?:_(?:\w|\{[^{}]*\}))?'*(?:\s*\([^()]*\))?|\([^()]*\)|\\frac\{d\s*\w+\}\{d\s*\w+\}"
)
_WORDS = re.compile(r"[^\W\d_]{4,}|[^\W\d_]{2,}(?:[ '-]+[^\W\d_]+)+")
_MEMBER = re.compile(r"^\s*\\?[A-Za-z](?:_\w|_\{\w+\})?\s*\\in(?![a-z])\s*")
_FUNCTIONS = re.compile(
    r"(?<![\\a-zA-Z])(sin|cos|tan|cot|sec|csc|ln|log|exp|arcsin|arccos|arctan|sqrt|pi)(?![a-zA-Z])"
)
_SETS = re.compile(r"\\(?:cup|cap|setminus|backslash|mathbb)(?![a-z])|\\in(?![a-z])|\\mid|\|\s*\\?[a-z]")


def equal(gold: str, prediction: str) -> bool:
    """Whether the prediction equals the reference. Not symmetric where the reference is an equation:
    `x = 5` may be answered by `5`, `2x + z = 1` not by `1`."""
    random.seed(0)
    sympy.core.random.seed(0)
    return _same(_simple(tidy(gold)), _simple(tidy(prediction)))


# --------------------------------------------------------------------------------------------- structure


def _simple(text: str) -> str:
    """Spellings that only matter to formulas: scientific notation, degrees, words for operators."""
    text = re.sub(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?!\w)", r"\1 \\times 10^{\2}", text)
    text = _FUNCTIONS.sub(r"\\\1", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text).replace(r"\pi", r"\pi ")
    text = re.sub(r"(?<![a-zA-Z\\])(?:,?\s*\b(?:and|or)\b)(?![a-zA-Z])", " , ", text)
    text = re.sub(r"\\mathbb\s*\{?R\}?$", r"(-\\infty,\\infty)", text)
    text = _MEMBER.sub("", text)
    text = pmod_free(text).replace(r"\equiv", "=").replace("*", r" \cdot ")
    if _TRIG.search(text):
        return re.sub(r"(\d+(?:\.\d+)?)\s*\^\\circ", r"(\1 \\cdot \\pi /180)", text)
    return without_unit(text.replace(r"^\circ", "").strip())


def _same(gold: str, prediction: str) -> bool:
    verdict = settle(gold, prediction)
    if verdict is not None:
        return verdict
    if (bases := _bases(gold, prediction)) is not None:
        return bases
    if r"\bmod" in prediction and r"\bmod" not in gold:
        return False
    golds, predictions = _members(gold), _members(prediction)
    if len(golds) > 1 or len(predictions) > 1:
        return _match(golds, predictions)
    return _single(golds[0], predictions[0]) if golds and predictions else False


def _bases(gold: str, prediction: str) -> bool | None:
    """`52_8`: the digits and the base are the answer."""
    left, right = _BASE.fullmatch(gold), _BASE.fullmatch(prediction)
    if not left and not right:
        return None
    return bool(left and right and left.groups() == right.groups())


def _split(text: str, separators: str) -> list[str]:
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


def _bracketed(text: str) -> tuple[str, str, list[str]] | None:
    """(opening, closing, parts) where one pair of brackets embraces everything."""
    text = text.strip()
    opening = r"\{" if text.startswith(r"\{") else text[:1]
    closing = r"\}" if text.endswith(r"\}") else text[-1:]
    if opening not in ("(", "[", r"\{", "{") or closing not in (")", "]", r"\}", "}") or len(text) < 3:
        return None
    inner = text[len(opening) : -len(closing)]
    return (opening, closing, _split(inner, ",;")) if embraced(inner) else None


def _members(text: str) -> list[str]:
    r"""What a list or set lists; `a \pm b` counts as two."""
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text):
        return [text]
    members = []
    for part in _split(text, ",;"):
        bracket = _bracketed(part)
        if bracket and bracket[0] in (r"\{", "{") and (":" not in part and r"\mid" not in part):
            members += bracket[2]
        elif r"\pm" in part:
            members += [part.replace(r"\pm", "+").lstrip("+ "), part.replace(r"\pm", "-")]
        else:
            members.append(part)
    return [m for m in members if m]


def _match(golds: Sequence[str], predictions: Sequence[str]) -> bool:
    """The same members, as often, in any order."""
    if len(predictions) == 1 and (bracket := _bracketed(predictions[0])) and bracket[0] + bracket[1] == "()":
        return len(golds) == len(bracket[2]) and all(map(_same, golds, bracket[2]))
    left = list(predictions)
    if len(set(golds)) == len(golds):
        left = list(dict.fromkeys(predictions))
    if len(golds) != len(left):
        return False
    for gold in golds:
        hit = next((i for i, candidate in enumerate(left) if _single(gold, candidate)), None)
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
    relations = [len(_tokens(t)) > 1 for t in (gold, prediction)]
    if all(relations):
        return _relations_equal(gold, prediction)
    if any(relations):
        gold, prediction = (
            _interval(t) or t if r else t for t, r in zip((gold, prediction), relations, strict=True)
        )
        if len(_tokens(gold)) > 1 or len(_tokens(prediction)) > 1:
            return not _equation(gold + prediction) and by_math_verify(gold, prediction)
    brackets = _bracketed(gold), _bracketed(prediction)
    if any(b and len(b[2]) > 1 for b in brackets):
        if all(brackets):
            return _brackets_equal(*brackets)  # type: ignore[arg-type]
        return bool(_SETS.search(gold + prediction)) and by_math_verify(gold, prediction)
    if re.fullmatch(r"[A-Za-z]{3,}", gold) and gold.casefold() == prediction.casefold():
        return True
    if _WORDS.fullmatch(gold) or _WORDS.fullmatch(prediction):
        return gold.casefold() == prediction.casefold()
    return formulas_equal(gold, prediction)


def _equation(text: str) -> bool:
    return "=" in text and "<" not in text


def _brackets_equal(gold: tuple[str, str, list[str]], prediction: tuple[str, str, list[str]]) -> bool:
    if gold[:2] != prediction[:2] or len(gold[2]) != len(prediction[2]):
        return False
    return all(map(_same, gold[2], prediction[2]))


# --------------------------------------------------------------------------------------------- relations


def _answer_side(gold: str, prediction: str) -> tuple[str, str]:
    """Drops `name =` where only one side has it, and what follows an approximation sign."""
    gold, prediction = (re.split(r"\\approx|\\simeq", t)[0].strip() or t for t in (gold, prediction))
    tokens = _tokens(gold), _tokens(prediction)
    sides = [
        t[::2] if set(t[1::2]) == {"="} else [text]
        for t, text in zip(tokens, (gold, prediction), strict=True)
    ]
    named = [len(s) > 1 and bool(_NAME.fullmatch(s[0])) for s in sides]
    if len(sides[1]) > 1 and len(sides[0]) == 1:
        first, last = sides[1][0], sides[1][-1]
        claims = not re.search(r"[A-Za-z]", re.sub(r"\\[a-z]+", "", first))  # 8 = 7 is no way to say 7
        return gold, prediction if claims and not formulas_equal(first, last) else last
    if named[0] and len(sides[1]) == 1:
        return sides[0][-1], prediction
    if all(named) and sides[0][0].replace(" ", "") == sides[1][0].replace(" ", ""):
        return sides[0][-1], sides[1][-1]
    return gold, prediction


def _tokens(text: str) -> list[str]:
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


def _differences(text: str) -> list[tuple[str, Any]]:
    """A chain of relations as (sign, tree) pairs: `tree = 0`, `tree < 0` or `tree <= 0`."""
    tokens = _tokens(text)
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
    tokens = _tokens(text)
    signs = tokens[1::2]
    if not signs or any(s not in ("<", ">", r"\leq", r"\geq") for s in signs):
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
    """Fills the parser's caches, which processes forked from this one then share."""
    for gold, prediction in (
        (r"\frac{1}{2}x+3", r"x(3+0.5)^{2}"),
        (r"2\sqrt{8}-\pi", r"\sin y"),
        ("y=2", "2-y=1"),
    ):
        equal(gold, prediction)
