"""Final answers as text: find them, tidy them, and settle the plain cases. Standard library only.

What `settle` can't decide goes to `equivalence.equal`, in a process that can be killed (`grading.Grader`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from hpcgrpo.rewards.numbers import numbers_equal, ratio_value

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
_BEFORE = str.maketrans({"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}"})
_FONT = (
    r"\\(?:math(?:rm|bf|it|sf|cal|normal)|bm|boldsymbol|operatorname|[mh]box|text(?:rm|bf|it|normal|sf|tt)?)"
)
_FONTS = re.compile(_FONT + r"\s*\{([^{}]*)\}")
_END = r"(?![a-zA-Z])"  # of a command's name
_LATEX: list[tuple[re.Pattern[str], str]] = [  # in this order
    (re.compile(r"\s+"), " "),
    (re.compile(r"\\!\s*"), ""),
    (re.compile(r"(?<![A-Za-z])\{\s*([,:])\s*\}"), r"\1"),
    (re.compile(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<!\\)\\(?:[,;: ]|quad\b|qquad\b)|~"), " "),
    (re.compile(r"\\[$]|[$€£¥]|\\\(|\\\)|^\s*\\\[|\\\]\s*$"), ""),
    (re.compile(r"\\(?:left|right)\s*\.(?!\d)|\\(?:left|right|[bB]igg?[lrm]?)" + _END), ""),
    (re.compile(r"\\[dtc]frac" + _END), r"\\frac"),
    (re.compile(r"\\[dt]binom" + _END), r"\\binom"),
    (re.compile(r"\\(frac|binom)\s*(\d)\s*(?=[\d{])"), r"\\\1{\2}"),
    (re.compile(r"(\\(?:frac|binom)\s*\{[^{}]*\})\s*(\d)"), r"\1{\2}"),
    (re.compile(r"\\sqrt\s*(\d)(?!\d)"), r"\\sqrt{\1}"),
    (re.compile(r"\{\s*([^{}]+?)\s*\\choose" + _END + r"\s*([^{}]+?)\s*\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\{\s*([^{}]+?)\s*\\over" + _END + r"\s*([^{}]+?)\s*\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\(?:displaystyle|textstyle|limits|bf|rm|[lL]arge|LARGE|huge)" + _END), ""),
    (re.compile(r"\\(?:text)?color\s*\{[^{}]*\}"), ""),
    (re.compile(r"\\?%|\s*\b(?:percent(?:age)?|pct)\b"), "%"),
]
_SPELLINGS: list[
    tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]
] = [  # once fonts and units are settled; in this order
    (re.compile(r"\\lbrace" + _END), r"\\{"),
    (re.compile(r"\\rbrace" + _END), r"\\}"),
    (re.compile(r"\\langle" + _END), "("),
    (re.compile(r"\\rangle" + _END), ")"),
    (re.compile(r"\\[lr]?vert" + _END), "|"),
    (re.compile(r"\\varnothing|\\empty(?![a-z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\s*(?:\\degree(?![a-z])|\^\s*\{?\s*\\circ\s*\}?)"), r"^\\circ "),
    (re.compile(r"\\le" + _END + r"|\\leqslant|<="), r"\\leq "),
    (re.compile(r"\\ge" + _END + r"|\\geqslant|>="), r"\\geq "),
    (re.compile(r"\\ne" + _END + r"|\\not\s*=|!="), r"\\neq "),
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
    (re.compile(r"\\[pb]?mod\s*\{?\s*\w+\s*\}?\s*$|\(\s*\\?mod\s*\w+\s*\)\s*$"), r" \\pmod{}"),
    (re.compile(r"(?<=\d)\s*\b([ap])\.?\s?m\b\.?$", re.I), lambda m: f" {m.group(1).upper()}M"),
    (re.compile(r"\s+"), " "),
    (
        re.compile(r"(?<=[^\w,]) |(?<=,) (?!\d{3}(?!\d))|(?<=\w) (?=[^\w\\])"),
        "",
    ),
]
_PLAIN = re.compile(r"-?\d+(?:\.\d+)?|[A-Za-z]")
_LEAD = re.compile(
    r"(?:[A-Za-z ,']*\b)?answer(?:\s+is|\s*[:=])(?:\s*:)?\s*|#{2,}\s*|=\s*|\\approx" + _END + r"\s*", re.I
)
_MARKS = re.compile(r"(\*\*|__|`|\*)(.+)\1", re.S)
_SPACED_DIGITS = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_ORDINAL = re.compile(r"(?<=\d)\s*\^?\s*\{?\s*(?:st|nd|rd|th)\s*\}?$")
_PMOD = re.compile(r"\s*\\pmod\s*\{[^{}]*\}\s*$")

_SHORT_UNITS = (
    "cm|mm|km|dm|nm|m|kg|mg|g|ft|in|yd|mi|lbs?|oz|hrs?|min|sec|s|ms|mph|kmh|kph|sq|cu|ml|mL|L|W|J|N|V|Hz|day|men"
    "|AM|PM|rad|deg|erg|mol|k?Pa|atm|[GMk]?eV|k[JNW]|MW|[GMk]Hz|AU|k?pc|Mpc|yrs?|rpm|dB|K|USD|EUR|GBP|INR"
)
_NO_UNITS = (
    "percent|infty|sqrt|frac|ldots|when|where|otherwise|else|times|choose|over|with|than|except|"
    "alpha|beta|gamma|delta|epsilon|theta|lambda|sigma|omega|phi|infinity"
)
_UNIT_WORD = rf"(?:(?:{_SHORT_UNITS})(?![A-Za-z])|(?!(?:{_NO_UNITS})(?![A-Za-z]))[A-Za-z]{{4,}}(?![A-Za-z]))"
_UNIT = re.compile(
    rf"^(?P<value>.*[\d}})%])(?!\w(?![A-Za-z]))\s*"  # 10m may be ten times m, 10 m is a length
    rf"(?P<unit>{_UNIT_WORD}"
    rf"(?:\s*[/^. -]?\s*\{{?(?:(?!(?:or|and)\b)[A-Za-z]{{2,}}|-?\d)\}}?|/[A-Za-z](?![A-Za-z]))*"
    rf"|\((?:{_UNIT_WORD})(?:[ /^]*(?:{_UNIT_WORD}|per|\d))*\)|\\(?:Omega|mu\s*[mgsFCJ]|AA))\s*$"
)
_MARKED = re.compile(r"^(?P<value>.*\S)\s*\\unit\{(?P<unit>[^{}]*)\}$")
_GROUP = r"\\(?:text(?:rm|bf|it|normal)?|mathrm|[mh]box)\s*\{[^{}]*\}(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_UNIT_CHAIN = re.compile(rf"(?:\\mu\s*)?{_GROUP}(?:\s*(?:\\cdot|/|\.)?\s*{_GROUP})*\s*[.,]?\s*$")
_SENTENCE = re.compile(
    r"[^A-Za-z]*(?:or|and|if|when|where|for|is|are|was|not|no|mod|except|unless|than|to|such|with|where|otherwise"
    r"|[ap]\.?\s?m\b|AM|PM)\b",
    re.I,
)
_OWN_LETTER = re.compile(r"[eijdxyznk]")
_VALUE_END = re.compile(r"(?:[\d)}\]%]|(?<![A-Za-z\\])[A-Za-z]|\\(?:pi|circ|alpha|theta|lambda))$")
# unit -> (what it measures, its one name): amounts in two units of one kind are not compared
_KINDS = {
    "length": "mm|cm centimeter|m meter|km kilometer|in inch inche|ft foot feet|yd yard|mi mile",
    "time": "s sec second|min minute|h hr hour|day|week|month|year yr",
    "money": "cent|dollar usd|euro eur",
    "half of the day": "am|pm",
    "mass": "mg|g gram|kg kilogram|lb pound|oz ounce|ton",
}
_KNOWN_UNITS = {
    alias: (kind, group.split()[0])
    for kind, groups in _KINDS.items()
    for group in groups.split("|")
    for alias in group.split()
}


def clean(text: str) -> str:
    """Unicode made plain: digits of any script, superscripts as powers, no control or format characters."""
    if text.isascii() and text.isprintable():
        return text
    text = _SUPERSCRIPT.sub(lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT.sub(lambda m: "_{" + m.group().translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text.translate(_BEFORE))
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
    r"""One spelling for one answer: no delimiters, spacing, font or colour commands. A unit stays, as
    `\unit{cm}` where it was set in upright type."""
    text = text.strip()
    if _PLAIN.fullmatch(text):
        return text
    text = clean(text)
    text = last_box(text) or text
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = _unframed(_unit_marked(_unframed(text)))
    for _ in range(4):  # fonts inside fonts
        text, replaced = _FONTS.subn(r"\1", text)
        if not replaced:
            break
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _unframed(text)
    text = text.replace(" ", "") if _SPACED_DIGITS.fullmatch(text) else _ORDINAL.sub("", text)
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


def _unit_marked(text: str) -> str:
    r"""`10\text{ cm}^2` -> `10 \unit{cm^2}`, unless the words are a sentence's or the letter an own one."""
    chain = _UNIT_CHAIN.search(text)
    if chain is None or not chain.start():
        return text
    value, words = text[: chain.start()].rstrip(), _FONTS.sub(r"\1", chain.group()).strip()
    glued = chain.start() == len(value) and not re.search(r"\{\s", chain.group()[:12])
    if (
        not _VALUE_END.search(value)
        or not re.search(r"\d|\\pi|\\sqrt", value)
        or _SENTENCE.match(words)
        or (glued and _OWN_LETTER.fullmatch(words))
        or not embraced(value)
        or words.strip("()") == "%"
    ):
        return text
    return f"{value} \\unit{{{words.translate({ord(c): None for c in '{}'})}}}"


def embraced(inner: str) -> bool:
    """Whether no bracket of the text closes one from before it."""
    depth = 0
    for char in inner:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return False
    return True


def with_unit(text: str) -> tuple[str, str]:
    """`10 cm^2` -> (`10`, `cm^2`); a unit is marked as one, a known short one or words of four letters and more
    after a number."""
    match = _MARKED.match(text) or _UNIT.match(text)
    if match is None or not (r"\unit" in text or re.search(r"\d", match["value"])):
        return text, ""
    if match["unit"] in ("AM", "PM") and ":" in text:
        return text, ""
    return match["value"].strip(), match["unit"].strip()


def without_unit(text: str) -> str:
    """`10 cm^2` -> `10`."""
    return with_unit(text)[0]


def _other_unit(gold: str, prediction: str) -> bool:
    """Whether both are known units of one kind and not the same one, or to another power."""
    powers = [re.search(r"\d", unit) for unit in (gold, prediction)]
    if powers[0] and powers[1] and powers[0].group() != powers[1].group():
        return True
    found = []
    for unit in (gold, prediction):
        word = re.sub(r"[^A-Za-z].*", "", unit.lower())
        found.append(_KNOWN_UNITS.get(word) or _KNOWN_UNITS.get(word.removesuffix("s")))
    return None not in found and found[0][0] == found[1][0] and found[0] != found[1]  # type: ignore[index]


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
    if unit and other and _other_unit(unit, other):
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
    """Without its spaces, unless they part two digits."""
    return text if re.search(r"\d \d", text) else text.replace(" ", "")


def same_text(gold: str, prediction: str, tolerance: float | None = None) -> bool:
    """Whether two answers are the same by `settle` alone: as text, or as plain numbers."""
    return bool(settle(tidy(gold), tidy(prediction)))


def pmod_free(text: str) -> str:
    """A congruence without its modulus in brackets, which says nothing of the answer."""
    return _PMOD.sub("", text)
