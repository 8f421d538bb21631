"""Final answers as text: find them, tidy them, and settle the plain cases. Standard library only.

What `settle` can't decide goes to `equivalence.equal`, in a process that can be killed (`grading.Grader`).
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

MAX_LENGTH = 1_000  # characters; what is longer is no final answer
MAX_DIGITS = 400  # of a plain number, its exponent included
MIN_ROUNDED_DIGITS = 6  # a decimal of fewer significant digits does not stand for 1/3 or \sqrt{2}

_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_LAST_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)(?:/\d+)?%?")

# ---------------------------------------------------------------------------------------------- extraction


def last_tag(text: str) -> str | None:
    """Content of the last complete `<answer>...</answer>`, or None."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    match = _TAG.match(text, start) if start >= 0 else None
    return match.group(1).strip() if match else None


def last_box(text: str) -> str | None:
    r"""Content of the last balanced `\boxed{...}` (or `\fbox`), or None. One pass, linear in the text."""
    open_braces: list[int | None] = []  # where the content begins if the brace is a box's
    best: tuple[int, int] | None = None
    for token in _BRACE.finditer(text):
        mark = token.group()
        if mark == "{":
            open_braces.append(None)
        elif mark == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None and (best is None or start > best[0]):
                best = (start, token.start())
        elif mark.endswith("{") and len(mark) > 2:
            open_braces.append(token.end())
    return None if best is None else text[best[0] : best[1]].strip()


def last_number(text: str) -> str | None:
    """The last number that stands in a text, None where there is none."""
    found = None
    for match in _LAST_NUMBER.finditer(text):
        found = match.group() or found
    return found


def extract_answer(text: str, *, require_box_or_tag: bool = True) -> str | None:
    r"""The final answer of a completion: the last `<answer>` block (a box inside it first), else the last
    balanced `\boxed{}`, else None - or, with `require_box_or_tag=False`, the last number of the text."""
    tag = last_tag(text)
    answer = last_box(text) if tag is None else last_box(tag) or tag
    if answer is None and not require_box_or_tag:
        answer = last_number(text)
    return answer


# -------------------------------------------------------------------------------------------------- tidying

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_SYMBOLS = {
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\leq ",
    "≥": r"\geq ",
    "×": r"\times ",
    "·": r"\cdot ",
    "÷": "/",
    "−": "-",
    "–": "-",
    "⁄": "/",
    "∪": r"\cup ",
    "∈": r"\in ",
    "°": r"^\circ ",
    "∅": r"\emptyset ",
    "，": ",",
}
_LATEX = [  # in this order
    (re.compile(r"\s+"), " "),
    (re.compile(r"\\!\s*"), ""),
    (re.compile(r"\{\s*,\s*\}"), ","),
    (re.compile(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<!\\)\\(?:[,;: ]|quad\b|qquad\b)|~"), " "),
    (re.compile(r"\\[$]|[$€£¥]|\\\(|\\\)|^\s*\\\[|\\\]\s*$"), ""),
    (re.compile(r"\\(?:left|right)\s*\.(?!\d)|\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:displaystyle|textstyle|limits)(?![a-zA-Z])"), ""),
    (re.compile(r"\\(?:text)?color\s*\{[^{}]*\}"), ""),
    (
        re.compile(
            r"\\(?:math(?:rm|bf|it|sf|cal)|operatorname|mbox|text(?:rm|bf|it|normal)?)\s*\{([^{}]*)\}"
        ),
        r"\1",
    ),
    (re.compile(r"\\varnothing|\\empty(?![a-z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\s*(?:\\degree(?![a-z])|\^\s*\{?\s*\\circ\s*\}?)"), r"^\\circ "),
    (re.compile(r"\\le(?![a-zA-Z])|\\leqslant|<="), r"\\leq "),
    (re.compile(r"\\ge(?![a-zA-Z])|\\geqslant|>="), r"\\geq "),
    (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
    (re.compile(r"(?<![\w}])\+\s*\\infty"), r"\\infty"),
    (re.compile(r"\\?%|\s*\b(?:percent(?:age)?|pct)\b"), "%"),
    (re.compile(r"\\[pb]?mod\s*\{?\s*\w+\s*\}?\s*$|\(\s*\\?mod\s*\w+\s*\)\s*$"), r" \\pmod{}"),
    (re.compile(r"\s+"), " "),
    (
        re.compile(
            r"(?<=[^\w,]) |(?<=,) (?!\d{3}(?!\d))|(?<=\w) (?=[^\w\\])|(?<=\d) (?=[A-Za-z](?![A-Za-z]))"
        ),
        "",
    ),
]
_PMOD = re.compile(r"\s*\\pmod\s*\{[^{}]*\}\s*$")
_SHORT_UNITS = (
    "cm|mm|km|dm|m|kg|mg|g|ft|in|yd|mi|lbs?|oz|hrs?|min|sec|s|ms|mph|kmh|kph|sq|cu|ml|L|W|J|N|V|Hz|day|men"
)
_UNIT_WORD = rf"(?:(?:{_SHORT_UNITS})(?![A-Za-z])|(?!percent|infty|sqrt|frac)[A-Za-z]{{4,}}(?![A-Za-z]))"
_UNIT = re.compile(
    rf"^(?P<value>.*[\d}})%])\s*"
    rf"(?P<unit>{_UNIT_WORD}"
    rf"(?:\s*[/^. -]?\s*\{{?(?:{_UNIT_WORD}|per|of|-?\d)\}}?|/[A-Za-z](?![A-Za-z]))*)\s*$"
)


def clean(text: str) -> str:
    """Unicode made plain: digits of any script, superscripts as powers, no control or format characters."""
    if text.isascii() and text.isprintable():
        return text
    text = _SUPERSCRIPT.sub(lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", text)
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(r"√\s*(\w+|\([^()]*\))", r"\\sqrt{\1}", text)
    kept = []
    for char in text:
        kind = unicodedata.category(char)
        if kind == "Nd":
            kept.append(str(unicodedata.decimal(char)))
        elif char in "\t\n\r\f\v":
            kept.append(" ")
        elif kind not in ("Cc", "Cf", "Cs", "Co", "Cn"):
            kept.append(_SYMBOLS.get(char, char))
    return "".join(kept)


def tidy(text: str) -> str:
    """One spelling for one answer: no delimiters, spacing, font or colour commands; units stay."""
    text = clean(text)
    text = last_box(text) or text
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip("\\").strip()
    text = re.sub(r"[.,;:]+$", "", text).strip()
    if re.fullmatch(r"\(\s*[A-Za-z]\s*\)", text):  # (B) is the choice B
        text = text[1:-1].strip()
    while text.startswith("{") and text.endswith("}") and embraced(text[1:-1]):
        text = text[1:-1].strip()
    return text


def embraced(inner: str) -> bool:
    """Whether no bracket of the text closes one from before it."""
    depth = 0
    for char in inner:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return False
    return True


def without_unit(text: str) -> str:
    """`10 cm^2` -> `10`; a unit is a known short one or words of four letters and more after a number."""
    match = _UNIT.match(text)
    return match["value"].strip() if match and re.search(r"\d", match["value"]) else text


# -------------------------------------------------------------------------------------------- plain numbers

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<whole>{_INTEGER})?(?:\.(?P<part>\d*))?(?P<exp>[eE][-+]?\d{{1,3}})?"
)
_TIMES_TEN = re.compile(r"\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*([-+]?\d{1,3})\s*\}?$")
_RATIO = re.compile(
    r"(?P<sign>[-+]?)\s*(?:\\frac\s*\{?\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}|(\d+)\s*/\s*(\d+))"
)
_MIXED = re.compile(r"(?P<sign>[-+]?)\s*(\d+)\s*(?:\\frac\s*\{(\d+)\}\s*\{(\d+)\}|(?<=\d) (\d+)\s*/\s*(\d+))")


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
    """Value of `a/b`, `\\frac{a}{b}` or of a proper mixed number such as `2 2/3`."""
    if len(text) > MAX_DIGITS:
        return None
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


def _numbers_equal(gold: str, prediction: str) -> bool | None:
    """None: not both are plain numbers."""
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
    """A decimal stands for a number if it is that number rounded to at least six significant digits."""
    value, digits, half = decimal
    return digits >= MIN_ROUNDED_DIGITS and abs(value - exact) <= half


def settle(gold: str, prediction: str) -> bool | None:
    """Whether two tidied answers are equal, where text or rational arithmetic decides it; else None."""
    if not gold or not prediction:
        return False
    if gold == prediction:
        return "nan" not in gold.lower()
    if len(prediction) > MAX_LENGTH or len(gold) > MAX_LENGTH:
        return False
    values = [without_unit(text) for text in (gold, prediction)]
    percent = [text.endswith("%") for text in values]
    bare = [text.rstrip("% ") for text in values]
    verdict = _numbers_equal(*bare)
    if verdict is False and percent[0] != percent[1]:  # 28% is 0.28 as well as 28
        part = [b + r" \times 10^{-2}" if p else b for b, p in zip(bare, percent, strict=True)]
        return bool(_numbers_equal(*part))
    return verdict


def pmod_free(text: str) -> str:
    """A congruence without its modulus in brackets, which says nothing of the answer."""
    return _PMOD.sub("", text)
