"""Final answers as text: find them, tidy them, and settle the plain cases. Standard library only.

What `settle` can't decide goes to `equivalence.equal`, in a process that can be killed (`grading.Grader`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from hpcgrpo.rewards.numbers import numbers_equal, ratio_value
from hpcgrpo.rewards.units import FONT, FONTS, FORMULA_FONTS, embraced, other_unit, unit_marked, with_unit

MAX_LENGTH = 1_000  # characters; what is longer is no final answer

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

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻₀₁₂₃₄₅₆₇₈₉", "0123456789-0123456789")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_SYMBOLS = {
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\leq ",
    "≥": r"\geq ",
    "≠": r"\neq ",
    "≈": r"\approx ",
    "≡": r"\equiv ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "•": r"\cdot ",
    "÷": "/",
    "−": "-",
    "–": "-",
    "‑": "-",
    "⁄": "/",
    "′": "'",
    "’": "'",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∠": r"\angle ",
    "°": r"^\circ ",
    "¢": r"\text{ cents}",
    "∅": r"\emptyset ",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "⟨": "(",
    "⟩": ")",
    "，": ",",
    **{letter: rf"\{unicodedata.name(letter).split()[-1].lower()} " for letter in "αβγδεζηθικλμνξρστυφχψω"},
    **{letter: rf"\{unicodedata.name(letter).split()[-1].capitalize()} " for letter in "ΓΔΘΞΠΣΦΨΩ"},
    "λ": r"\lambda ",
    "Λ": r"\Lambda ",
}
_BEFORE = str.maketrans(
    {"º": "°", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}"}
)
_END = r"(?![a-zA-Z])"  # of a command's name


def _rows_listed(match: re.Match[str]) -> str:
    """The rows of `aligned`, `cases`, ... as a list; a definition by cases, which has conditions, stays."""
    if "&" in match.group(1) and "cases" in match.group():
        return match.group()
    rows = [row.replace("&", "").strip() for row in re.split(r"\\\\(?:\[[^\]]*\])?", match.group(1))]
    return ", ".join(row.rstrip(",;") for row in rows if row)


def _scaled(match: re.Match[str]) -> str:
    r"""`1.5 million` -> `1.5 \times 10^{6}`; the font command that the word stands in stays."""
    return rf" \times 10^{{{_MAGNITUDES[match.group(2)]}}}{match.group(1) or ''} "


_MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_Spelling = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]
_LATEX: list[_Spelling] = [  # in this order
    (re.compile(r"\s+"), " "),
    (re.compile(r"\\[hv]?phantom\s*\{[^{}]*\}|\\[hv]space\*?\s*\{[^{}]*\}"), " "),
    (re.compile(r"\\(?:enspace|thinspace|thickspace|medspace)" + _END), " "),
    (
        re.compile(r"\\begin\s*\{(?:aligned|align\*?|gathered|split|cases)\}(.*?)\\end\s*\{[a-z*]+\}"),
        _rows_listed,
    ),
    (
        re.compile(r"\\left\s*\\\{\s*\\begin\s*\{array\}\s*\{[lcr]+\}(.*?)\\end\s*\{array\}\s*\\right\s*\."),
        _rows_listed,
    ),
    (re.compile(r"\\!\s*"), ""),
    (re.compile(r"(?<![A-Za-z])\{\s*([,:])\s*\}"), r"\1"),
    (re.compile(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<!\\)\\(?:[,;: ]|quad\b|qquad\b)|~"), " "),
    (
        re.compile(
            r"\\[$]|\\textdollar(?![a-z])|[$€£¥]|\b(?:USD|EUR|GBP)\s*(?=\d)|\\\(|\\\)|^\s*\\\[|\\\]\s*$"
        ),
        "",
    ),
    (re.compile(r"\\(?:left|right)\s*\.(?!\d)|\\(?:left|right|[bB]igg?[lrm]?)" + _END), ""),
    (re.compile(r"\\[dtc]frac" + _END), r"\\frac"),
    (re.compile(r"\\[dt]binom" + _END), r"\\binom"),
    (re.compile(r"\\(frac|binom)\s*(\d)\s*(?=[\d{])"), r"\\\1{\2}"),
    (re.compile(r"(\\(?:frac|binom)\s*\{[^{}]*\})\s*(\d)"), r"\1{\2}"),
    (re.compile(r"\\sqrt\s*(\d)(?!\d)"), r"\\sqrt{\1}"),
    (re.compile(r" {2,}"), " "),
    (re.compile(r"\{\s*([^{}]+?)\s*\\choose" + _END + r"\s*([^{}]+?)\s*\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\{\s*([^{}]+?)\s*\\over" + _END + r"\s*([^{}]+?)\s*\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\(?:displaystyle|textstyle|limits|bf|rm|[lL]arge|LARGE|huge)" + _END), ""),
    (re.compile(r"\\(?:text)?color\s*\{[^{}]*\}"), ""),
    (re.compile(rf"(?<=\d)\s*({FONT}\s*\{{\s*)?\b({'|'.join(_MAGNITUDES)})\b\s*"), _scaled),
    (re.compile(FONT + r"\s*\{\s*\}"), ""),
    (re.compile(r"\\?%|\s*\b(?:percent(?:age)?|pct)\b"), "%"),
]
_SPELLINGS: list[_Spelling] = [  # once fonts and units are settled; in this order
    (re.compile(r"\\lbrace" + _END), r"\\{"),
    (re.compile(r"\\rbrace" + _END), r"\\}"),
    (re.compile(r"\\middle" + _END), ""),
    (re.compile(r"\\colon" + _END), ":"),
    (re.compile(r"\\big(cup|cap)" + _END), r"\\\1 "),
    (re.compile(r"\\mathbb\s*([A-Z])"), r"\\mathbb{\1}"),
    (
        re.compile(r"\\(?:backslash|smallsetminus)" + _END + r"|(?<=\\mathbb\{[A-Z]\})\s*-\s*(?=\\\{)"),
        r"\\setminus ",
    ),
    (re.compile(r"\\cr" + _END), r"\\\\"),
    (re.compile(r"(?:all )?real numbers|all reals"), r"\\mathbb{R}"),
    (re.compile(r"\\langle" + _END), "("),
    (re.compile(r"\\rangle" + _END), ")"),
    (re.compile(r"\\[lr]?vert" + _END), "|"),
    (re.compile(r"\\varnothing|\\empty(?![a-z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\s*(?:\\degree(?![a-z])|\^\s*\{?\s*\\circ\s*\}?)"), r"^\\circ "),
    (re.compile(r"(?<=\^\\circ) \s*([CF])$"), r" \\unit{\1}"),
    (re.compile(r"\\le" + _END + r"|\\leqslant|<="), r"\\leq "),
    (re.compile(r"\\ge" + _END + r"|\\geqslant|>="), r"\\geq "),
    (re.compile(r"\\ne" + _END + r"|\\not\s*=|(?<![\d)}])!="), r"\\neq "),
    (re.compile(r"\\lt" + _END), "<"),
    (re.compile(r"\\gt" + _END), ">"),
    (re.compile(r"(?<![\w}])\+\s*\\infty"), r"\\infty"),
    (re.compile(r"\\(?:dots[cb]?|[chl]dots)" + _END + r"|\.{3,}"), r"\\ldots "),
    (re.compile(r"(?<=[\w)}\]])\s*\*\*\s*(?=[\w({-])"), "^"),
    (re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)"), r"\\times "),
    (re.compile(r"(?<=[\])}])\s*[U∪]\s*(?=[\[({\\])"), r"\\cup "),
    (re.compile(r"\b(?:infinity|inf)\b"), r"\\infty "),
    (re.compile(r"_\s*(\\[A-Za-z]+|[A-Za-z0-9])"), r"_{\1}"),
    (re.compile(r"_\s*\{\s*([^{}]*?)\s*\}"), r"_{\1}"),
    (re.compile(r"(\\equiv[^\\]*?|\(\s*)\\bmod" + _END), r"\1\\pmod"),  # elsewhere an operator
    (
        re.compile(r"\(?\s*(?:\\p?mod|(?<=\()\s*mod)(?![a-z])\s*\{?\s*([\w^+-]+)\s*\}?\s*\)?\s*$"),
        r" \\pmod{\1}",
    ),
    (re.compile(r"(?<=\d)\s*([ap])\.?\s?m\b\.?$", re.I), lambda m: f" {m.group(1).upper()}M"),
    (re.compile(r"\s+"), " "),
    (
        re.compile(r"(?<=[^\w,]) |(?<=,) (?!\d{3}(?!\d))|(?<=\w) (?=[^\w\\])"),
        "",
    ),
]
_PLAIN = re.compile(r"-?\d+(?:\.\d+)?|[A-Za-z]")
_LEAD = re.compile(
    r"(?:[A-Za-z ,']*\b)?answer(?:\s+is|\s*[:=])(?:\s*:)?\s*|#{2,}\s*|=\s*|\\approx" + _END + r"\s*"
    r"|(?:option|choice)\s*(?=\(?[A-J]\)?$)",
    re.I,
)
_MARKS = re.compile(r"(\*\*|__|`|\*)(.+)\1", re.S)
_SPACED_DIGITS = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_SPACED_EXPONENT = re.compile(r"([-+]?\d+\.?\d*) ?[eE] ?([-+]?\d+)")
_FOR_ALL = re.compile(
    r"[, ]*(?:\bfor (?:all|any|every)|\\forall) *(?:real |integers? )?(?:numbers? )?[a-z]"
    r"(?: *\\in *\\mathbb\{[NQRZ]\})?$"
)
_ORDINAL = re.compile(r"(?<=\d)\s*\^?\s*\{?\s*(?:st|nd|rd|th)\s*\}?$")
_PMOD = re.compile(r"\s*\\pmod\s*\{([^{}]*)\}\s*$")


def _fraction_of(char: str) -> str:
    value = Fraction(unicodedata.numeric(char)).limit_denominator(10)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def clean(text: str) -> str:
    """Unicode made plain: digits of any script, superscripts as powers, no control or format characters."""
    if text.isascii() and text.isprintable():
        return text
    text = _SUPERSCRIPT.sub(lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT.sub(lambda m: "_{" + m.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _VULGAR.sub(lambda m: _fraction_of(m.group()), text.translate(_BEFORE))
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(r"√\s*(?=\{)", r"\\sqrt", text)
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
    r"""One spelling for one answer: no delimiters, spacing, font or colour commands. A unit stays, as
    `\unit{cm}` where it was set in upright type."""
    text = text.strip()
    if _PLAIN.fullmatch(text):
        return text
    text = clean(text)
    text = last_box(text) or text
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = _unframed(unit_marked(_unframed(text)))
    for _ in range(4):  # fonts inside fonts
        text, replaced = FONTS.subn(r"\1", text)
        if not replaced:
            break
    text = FORMULA_FONTS.sub("", text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _FOR_ALL.sub("", _unframed(text)) if "=" in text else _unframed(text)
    spaced = _SPACED_DIGITS.fullmatch(text) or _SPACED_EXPONENT.fullmatch(text)
    text = text.replace(" ", "") if spaced else _ORDINAL.sub("", text)
    while text.startswith("{") and text.endswith("}") and embraced(text[1:-1]):
        text = text[1:-1].strip()
    return text


def _unframed(text: str) -> str:
    """Without what stands around an answer: `the answer is`, Markdown's marks, a full stop, a choice's brackets."""
    text = text.strip()
    if lead := _LEAD.match(text):
        text = text[lead.end() :] or text
    while marked := _MARKS.fullmatch(text):
        text = marked.group(2).strip()
    text = text.strip().rstrip("\\").strip()
    if not text.endswith("..."):
        text = text.rstrip(".,;:").strip()
    choice = re.fullmatch(r"\(?\s*([A-Za-z])\s*\)", text)  # (B) is the choice B
    return choice.group(1) if choice else text


# ------------------------------------------------------------------------------------------------ verdicts


def settle(gold: str, prediction: str) -> bool | None:
    """Whether two tidied answers are equal, where text or rational arithmetic decides it; else None."""
    if not gold or not prediction:
        return False
    if gold == prediction or _squeezed(gold) == _squeezed(prediction):
        return "nan" not in gold.lower()
    if len(prediction) > MAX_LENGTH or len(gold) > MAX_LENGTH:
        return False
    (gold, unit), (prediction, other) = with_unit(gold), with_unit(prediction)
    if unit and other and other_unit(unit, other):
        return False
    values = [gold, prediction]
    percent = [text.endswith("%") for text in values]
    bare = [text.rstrip("% ") for text in values]
    verdict = numbers_equal(*bare)
    if verdict is False and percent[0] != percent[1]:  # 28% is 0.28 as well as 28
        part = [b + r" \times 10^{-2}" if p else b for b, p in zip(bare, percent, strict=True)]
        verdict = numbers_equal(*part)
        return verdict if any(ratio_value(b) is not None for b in bare) else bool(verdict)
    return verdict


def _squeezed(text: str) -> str:
    """Without its spaces, unless they part two digits, and without the mark of a unit."""
    if r"\unit" in text:
        text = re.sub(r"\\unit\{([^{}]*)\}", r"\1", text)
    return text if re.search(r"\d \d", text) else text.replace(" ", "")


def same_text(gold: str, prediction: str, tolerance: float | None = None) -> bool:
    """Whether two answers are the same by `settle` alone: as text, or as plain numbers."""
    return bool(settle(tidy(gold), tidy(prediction)))


def modulus_split(text: str) -> tuple[str, str]:
    r"""`x \equiv 3 \pmod{7}` -> (`x \equiv 3`, `7`); an empty modulus where there is none."""
    match = _PMOD.search(text)
    return (text[: match.start()], match.group(1)) if match else (text, "")
