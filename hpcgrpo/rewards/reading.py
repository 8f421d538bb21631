r"""Formulas read into trees, by recursive descent: what is ambiguous or of a rarer kind is not read."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

MAX_DEPTH = 100  # of brackets

Node = tuple[Any, ...]  # (kind, argument, ...), in kinds that `expressions` evaluates


class Unreadable(Exception):
    """The text is no formula that is read here."""


_TOKEN = re.compile(
    r"\s*(\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d.])|\d+\.?\d*|\.\d+|\\[A-Za-z]+|[A-Za-z]'*|[-+*/^_!(){}\[\]|]|\S)"
)
_GREEK = re.compile(
    r"alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|iota|kappa|lambda|mu|nu|xi|(?:var)?rho|sigma|tau"
    r"|upsilon|(?:var)?phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega|hbar|ell|pi|odot"
)
_ACCENT = re.compile(r"\\(?:wide)?hat|\\vec|\\d?dot|\\bar|\\tilde|\\overrightarrow|\\mathbf|\\boldsymbol")
_FUNCTION = re.compile(r"(?:arc)?(?:sin|cos|tan)|cot|sec|csc|(?:sin|cos|tan)h|ln|log|exp|lg")
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_TIMES = ("*", r"\cdot", r"\times")
_CLOSING = {"(": ")", "{": "}", "[": "]", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil", "|": "|"}


class _Reader:
    """Recursive descent over a formula's tokens."""

    def __init__(self, text: str) -> None:
        self.tokens = _TOKEN.findall(text)
        self.at = 0
        self.depth = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or (expected is not None and token != expected):
            raise Unreadable
        self.at += 1
        return token

    def sum(self) -> Node:
        terms = []
        while True:
            sign = self.take() if self.peek() in ("+", "-") else "+"
            term = self.product()
            terms.append(("mul", ("number", Fraction(-1)), term) if sign == "-" else term)
            if self.peek() not in ("+", "-"):
                return terms[0] if len(terms) == 1 else ("add", *terms)

    def product(self) -> Node:
        node, open_function = self.factors()
        while (operator := self.peek()) in (*_TIMES, "/", r"\div"):
            self.take()
            start = self.at
            right, right_open = self.factors()
            divides = operator in ("/", r"\div")
            if open_function or (divides and (right_open or self.count_factors > 1)):
                raise Unreadable  # \sin x/2, 1/2x: what is meant is not said
            open_function = right_open
            node = ("div", node, right) if divides else ("mul", node, right)
            assert self.at > start
        return node

    def factors(self) -> tuple[Node, bool]:
        """A run of factors without signs between them; whether it ends in a function without brackets."""
        literal = self.at
        found: list[Node] = []
        open_function = False
        while not found or self.starts_factor():
            if open_function and not self.starts_function() and not self.starts_exponential():
                raise Unreadable
            node, open_function = self.factor(first=not found)
            found.append(node)
        if len(found) > 1 and self.mixed(literal, found):
            found[:2] = [("add", found[0], found[1])]
        self.count_factors = len(found)
        return (found[0] if len(found) == 1 else ("mul", *found)), open_function

    def mixed(self, literal: int, found: list[Node]) -> bool:
        r"""Whether `2\frac{1}{2}` stands here, which is no product."""
        whole, part = found[:2]
        if whole[0] != "number" or not self.tokens[literal].isdigit() or part[0] != "div":
            return False
        if self.tokens[literal + 1] != r"\frac":
            return False  # 3(\frac12) is a product
        above, below = part[1:]
        return above[0] == below[0] == "number" and 0 < above[1] < below[1]

    def starts_factor(self) -> bool:
        token = self.peek()
        if token[:1].isdigit() or token[:1] == ".":
            raise Unreadable  # x 2
        return bool(token) and (
            token[0].isalpha()
            or token in ("(", "{", "[", r"\lfloor", r"\lceil")
            or (
                token[0] == "\\" and len(token) > 1 and token not in (*_TIMES, r"\div", r"\rfloor", r"\rceil")
            )
        )

    def starts_function(self) -> bool:
        return bool(_FUNCTION.fullmatch(self.peek()[1:]))

    def starts_exponential(self) -> bool:
        return self.tokens[self.at : self.at + 2] == ["e", "^"]

    def factor(self, *, first: bool) -> tuple[Node, bool]:
        token = self.peek()
        if token[:1] == "\\" and self.starts_function():
            return self.function(self.take()[1:])
        if not first and (token[:1].isdigit() or token == "|"):
            raise Unreadable
        return self.powers(self.atom()), False

    def powers(self, base: Node) -> Node:
        while self.peek() in ("^", "!"):
            if self.take() == "!":
                base = ("factorial", base)
                if self.peek() == "!":
                    raise Unreadable
            else:
                base = ("pow", base, self.exponent())
        return base

    def exponent(self) -> Node:
        """A brace, else what stands next: `x^10` is written by people who mean `x^{10}`."""
        if self.peek() in ("-", "+"):
            sign = Fraction(-1 if self.take() == "-" else 1)
            return ("mul", ("number", sign), self.exponent())
        node = self.atom()
        return ("pow", node, self.exponent()) if self.peek() == "^" and self.take() else node

    def function(self, name: str) -> tuple[Node, bool]:
        power: Node | None = None
        base: Node | None = None
        while (mark := self.peek()) in ("^", "_"):
            self.take()
            part = self.exponent() if mark == "^" else self.atom()
            power, base = (part, base) if mark == "^" else (power, part)
        if power == ("mul", ("number", Fraction(-1)), ("number", Fraction(1))):
            if name not in _INVERSES:
                raise Unreadable
            name, power = _INVERSES[name], None
        if base is not None and name != "log":
            raise Unreadable
        argument, is_open = self.argument()
        node: Node = ("log", argument, base) if base is not None else ("function", name, argument)
        if power is not None:
            if power[0] != "number" or power[1] < 1:
                raise Unreadable
            node = ("pow", node, power)
        return node, is_open

    def argument(self) -> tuple[Node, bool]:
        if self.peek() in ("(", "[", "{", "|"):
            node = self.atom()
            if self.peek() in ("^", "!"):
                raise Unreadable  # \sin(x)^2
            return node, False
        parts: list[Node] = []
        while not parts or (self.starts_factor() and not self.starts_function() and self.peek() not in "([|"):
            if self.starts_function():
                raise Unreadable
            if parts and self.starts_exponential():
                break  # \cos t e^{-t} is a product
            parts.append(self.powers(self.atom()))
        if self.peek() in ("(", "["):
            raise Unreadable  # \sin x(1+y)
        return (parts[0] if len(parts) == 1 else ("mul", *parts)), True

    def bracketed(self, opening: str) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable
        node = self.sum()
        self.take(_CLOSING[opening])
        self.depth -= 1
        return node

    def atom(self) -> Node:
        token = self.take()
        if token[0].isdigit() or token[0] == ".":
            return ("number", Fraction(token.replace(",", "").rstrip(".")))
        if token in ("(", "{", "["):
            return self.bracketed(token)
        if token == "|":
            return ("abs", self.bracketed(token))
        if token in (r"\lfloor", r"\lceil"):
            return (token[1:], self.bracketed(token))
        if token[0].isalpha():
            return self.named(token)
        return self.command(token)

    def named(self, token: str) -> Node:
        if token in ("f", "g", "h", "F") and self.peek() == "(":
            raise Unreadable  # a function, or a factor
        if "'" in token and self.peek() == "(":
            raise Unreadable
        if self.peek() == "_":
            self.take()
            token = f"{token}_{self.raw()}"
        if (
            token not in ("e", "i")
            and self.peek() == "("
            and re.fullmatch(r"\d+\)", "".join(self.tokens[self.at + 1 : self.at + 3]))
        ):
            return ("name", token + self.take() + self.take() + self.take())  # I(0) is a value of I
        if "_" in token:
            return ("name", token)
        return ("constant", token) if token in ("e", "i") else ("name", token)

    def command(self, token: str) -> Node:
        name = token[1:]
        if token == r"\pi" and self.peek() != "_":
            return ("constant", "pi")
        if _GREEK.fullmatch(name):
            return self.named(token) if self.peek() == "_" else ("name", token)
        if _ACCENT.fullmatch(token):
            accented = f"{token}{{{self.raw()}}}"
            return self.named(accented) if self.peek() == "_" else ("name", accented)
        if token == r"\frac":
            return ("div", self.single(), self.single())
        if token in (r"\binom", r"\dbinom", r"\tbinom"):
            return ("binom", self.single(), self.single())
        if token == r"\sqrt":
            degree = self.bracketed(self.take()) if self.peek() == "[" else ("number", Fraction(2))
            return ("root", self.single(), degree)
        raise Unreadable

    def single(self) -> Node:
        r"""TeX's next argument: a brace, or one character (`\frac12`, `\sqrt3`)."""
        token = self.peek()
        if token.isdigit() and len(token) > 1:
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        elif token in ("", "(", "[", "|", "-", "+") or (token[0] == "\\" and self.starts_function()):
            raise Unreadable
        return self.atom()

    def raw(self) -> str:
        """The text of a subscript, its spacing aside."""
        token = self.take()
        if token != "{":
            return token[0] if token[0].isdigit() else token
        parts: list[str] = []
        depth = 1
        while True:
            token = self.take()
            depth += (token == "{") - (token == "}")
            if not depth:
                return "".join(parts)
            parts.append(token)


@lru_cache(maxsize=512)  # a group's answers share the reference
def read(text: str) -> Node | None:
    """The formula as a tree of tuples; None where it is not of the kinds that are read here."""
    reader = _Reader(text)
    try:
        node = reader.sum()
    except (Unreadable, IndexError):
        return None
    return node if reader.at == len(reader.tokens) else None


def names(node: Node) -> set[str]:
    """The variables of a formula."""
    if node[0] == "name":
        return {node[1]}
    return {name for part in node[1:] if isinstance(part, tuple) for name in names(part)}
