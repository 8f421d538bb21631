"""Equations and inequalities: the intervals that they describe, and whether one is a multiple of another.

Runs where `equivalence` runs, in a process that can be killed.
"""

from __future__ import annotations

import re
from typing import Any

import sympy

from hpcgrpo.rewards import expressions
from hpcgrpo.rewards.formulas import sample_points, tree_of, value_at
from hpcgrpo.rewards.notations import tokens_of

_ORDERS = ("<", ">", r"\leq", r"\geq")


def interval(text: str) -> str | None:
    """The interval that a relation about one name describes: `0 < x \\leq 3` -> `(0,3]`."""
    tokens = tokens_of(text)
    signs = tokens[1::2]
    if signs == [r"\neq"] and re.fullmatch(r"\\?[A-Za-z]", tokens[0]):
        return rf"(-\infty,{tokens[2]})\cup ({tokens[2]},\infty)"
    if not signs or any(s not in _ORDERS for s in signs):
        return None
    tokens = _ascending(tokens)
    low = high = None
    if len(tokens) == 5 and re.fullmatch(r"\\?[A-Za-z]+", tokens[2]):
        low, high = (tokens[0], tokens[1]), (tokens[4], tokens[3])
    elif len(tokens) == 3 and re.fullmatch(r"[A-Za-z]|\\[a-z]+", tokens[0]) and tokens[0] != r"\infty":
        low, high = (r"-\infty", "<"), (tokens[2], tokens[1])
    elif len(tokens) == 3 and re.fullmatch(r"[A-Za-z]|\\[a-z]+", tokens[2]) and tokens[2] != r"\infty":
        low, high = (tokens[0], tokens[1]), (r"\infty", "<")
    elif len(tokens) == 3 and (bounds := _absolute(*tokens)):
        return bounds
    if low is None or high is None:
        return None
    return f"{'[' if low[1] != '<' else '('}{low[0]},{high[0]}{']' if high[1] != '<' else ')'}"


def _ascending(tokens: list[str]) -> list[str]:
    """The chain read from its other end if it descends."""
    if tokens[1] not in (">", r"\geq"):
        return tokens
    turned = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}
    return [turned.get(t, t) for t in reversed(tokens)]


def chained(first: str, second: str) -> str | None:
    """`x > 1`, `x < 3` -> `1<x<3`; None unless one bounds a name from below and the other the same from above."""
    halves = [tokens_of(text) for text in (first, second)]
    if any(len(h) != 3 or h[1] not in _ORDERS for h in halves):
        return None
    for below, above in (map(_ascending, halves), map(_ascending, reversed(halves))):
        if below[2] == above[0] and re.fullmatch(r"\\?[A-Za-z]+", below[2]):
            return "".join((*below, *above[1:]))
    return None


def _absolute(left: str, sign: str, right: str) -> str | None:
    r"""`|x| < 2` -> `(-2,2)`, `1 \leq |x|` -> `(-\infty,-1]\cup [1,\infty)`, where the bound is a positive number."""
    bar = re.compile(r"\|\\?[A-Za-z]+\|")
    bound = right if bar.fullmatch(left) else left
    if not (bar.fullmatch(left) or bar.fullmatch(right)) or (expressions.value_of(bound) or 0) <= 0:
        return None
    opening, closing = "[]" if sign == r"\leq" else "()"
    if bound == right:
        return f"{opening}-{bound},{bound}{closing}"
    return rf"(-\infty,-{bound}{closing}\cup {opening}{bound},\infty)"


def differences(text: str) -> list[tuple[str, Any]]:
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


def pairs_equal(gold: str, prediction: str) -> bool | None:
    """Whether two chains of relations are equal up to a constant factor, a positive one for an inequality; None where
    `expressions` doesn't read them."""
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


def proportional(a: Any, b: Any, any_sign: bool) -> bool:
    """Whether one tree is a constant times the other, a positive one unless `any_sign`."""
    ratios = []
    for point in sample_points((a, b)):
        x, y = value_at(a, point), value_at(b, point)
        if x is None or y is None or abs(y) < 1e-30 or abs(x) < 1e-30:
            return False
        ratios.append(x / y)
    first = ratios[0]
    return all(abs(r - first) <= 1e-20 * abs(first) for r in ratios) and (any_sign or sympy.re(first) > 0)
