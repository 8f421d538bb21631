"""Units behind numbers: found, told apart, left out. Standard library only."""

from __future__ import annotations

import re

FONT = (
    r"\\(?:math(?:rm|bf|it|sf|tt|cal|normal)|bm|boldsymbol|operatorname|[mh]box|text(?:rm|bf|it|normal|sf|tt)?"
    r"|emph|underline)"
)
FONTS = re.compile(FONT + r"\s*\{([^{}]*)\}")
FORMULA_FONTS = re.compile(FONT + r"\s*(?=\{[^{}]*\{)")  # the braces stay: they hold the formula together

_SHORT_UNITS = (
    "cm|mm|km|dm|nm|m|kg|mg|g|ft|in|yd|mi|lbs?|oz|hrs?|min|sec|s|ms|mph|kmh|kph|sq|cu|ml|mL|L|W|J|N|V|Hz|day|men"
    "|AM|PM|rad|deg|erg|mol|k?Pa|atm|[GMk]?eV|k[JNW]|MW|[GMk]Hz|AU|k?pc|Mpc|yrs?|rpm|dB|K|USD|EUR|GBP|INR"
)
_NO_UNITS = (
    "percent|infty|sqrt|frac|ldots|when|where|otherwise|else|times|choose|over|with|than|except|squared|cubed|dozen|"
    "plus|minus|"
    "alpha|beta|gamma|delta|epsilon|theta|lambda|sigma|omega|phi|infinity"
)
_UNIT_WORD = rf"(?:(?:{_SHORT_UNITS})(?![A-Za-z])|(?!(?:{_NO_UNITS})(?![A-Za-z]))[A-Za-z]{{4,}}(?![A-Za-z]))"
_UNIT = re.compile(
    rf"^(?P<value>.*[\d}})%])(?!\w(?![A-Za-z]))\s*"  # 10m may be ten times m, 10 m is a length
    rf"(?P<unit>{_UNIT_WORD}"
    # one way alone to match what follows, since a model writes it: whole words, no space that two parts could take
    r"(?:\s*(?:(?:[/^.]|-(?!\d))\s*)?\{?(?:(?!(?:or|and)\b)[A-Za-z]{2,}(?![A-Za-z])|-?\d)\}?|/[A-Za-z](?![A-Za-z]))*"
    rf"|\((?:{_UNIT_WORD})(?:[ /^]*(?:{_UNIT_WORD}|per(?![A-Za-z])|\d))*\)|\\(?:Omega|mu\s*[mgsFCJ]|AA))\s*$"
)
_MARKED = re.compile(r"^(?P<value>.*\S)\s*\\unit\{(?P<unit>[^{}]*)\}$")
_UPRIGHT = r"\\(?:text(?:rm|bf|it|normal)?|mathrm|[mh]box)\s*\{(?:[^{}]|\^\{-?\d\})*\}"
_GROUP = _UPRIGHT + r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_NEXT = r"\s*(?:(?:\\cdot|/|\.)\s*)?"
_SIDE = rf"\{{\s*{_GROUP}(?:{_NEXT}{_GROUP})*\s*\}}"
_GROUP = rf"(?:{_GROUP}|\\frac\s*{_SIDE}\s*{_SIDE})"
_UNIT_CHAIN = re.compile(rf"(?:\\mu\s*)?{_GROUP}(?:{_NEXT}{_GROUP})*\s*[.,]?\s*$")
_SENTENCE = re.compile(
    r"[^A-Za-z]*(?:or|and|if|when|where|for|is|are|was|not|no|mod|except|unless|than|to|such|with|where|otherwise"
    r"|of \d+|squared|cubed|dozen|plus|minus|[ap]\.?\s?m\b|AM|PM)\b",
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


def embraced(inner: str) -> bool:
    """Whether no bracket of the text closes one from before it."""
    depth = 0
    for char in inner:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return False
    return True


def unit_marked(text: str) -> str:
    r"""`10\text{ cm}^2` -> `10 \unit{cm^2}`, unless the words are a sentence's or the letter an own one."""
    chain = _UNIT_CHAIN.search(text)
    if chain is None or not chain.start():
        return text
    value, words = (
        text[: chain.start()].rstrip(),
        FORMULA_FONTS.sub("", FONTS.sub(r"\1", chain.group())).strip(),
    )
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


def other_unit(gold: str, prediction: str) -> bool:
    """Whether both are known units of one kind and not the same one, or to another power."""
    powers = [re.search(r"\d", unit) for unit in (gold, prediction)]
    if powers[0] and powers[1] and powers[0].group() != powers[1].group():
        return True
    found = []
    for unit in (gold, prediction):
        word = re.sub(r"[^A-Za-z].*", "", unit.lower())
        found.append(_KNOWN_UNITS.get(word) or _KNOWN_UNITS.get(word.removesuffix("s")))
    return None not in found and found[0][0] == found[1][0] and found[0] != found[1]  # type: ignore[index]
