"""Verdicts on a batch of completions: one function for each kind of problem, one call of the grader for them all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evaluation.benchmarks import LETTERS, Kind, Problem
from evaluation.samples import Outcome
from hpcgrpo.rewards.answers import MAX_LENGTH, extract_answer, last_box, last_tag, tidy

if TYPE_CHECKING:
    from hpcgrpo.rewards.grading import Grader


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a completion came to."""

    outcome: Outcome  # right | wrong | unparsed | timeout | error
    answer: str | None  # as found in the text; of a choice the letter; None where there was none


@dataclass(frozen=True, slots=True)
class Pair:
    """A question to the grader: is the prediction the reference, within a tolerance?"""

    gold: str
    prediction: str
    tolerance: float | None = None  # absolute


@dataclass(frozen=True, slots=True)
class Case:
    """What the grader is to be asked about a completion, and what its outcomes, one a pair, come to."""

    pairs: tuple[Pair, ...]
    decide: Callable[[Sequence[Outcome]], Verdict]


def judge(
    problems: Sequence[Problem], texts: Sequence[str], grader: Grader, *, require_box_or_tag: bool
) -> list[Verdict]:
    r"""One verdict a completion: `texts[i]` answers `problems[i]`.

    The answer is the last `<answer>` block, else the last `\boxed{}`; with `require_box_or_tag=False` else the last
    number of the text, or of a choice the last "answer is (B)". Raises RuntimeError if no grading process starts.
    """
    cases = [
        KINDS[problem.kind](problem, text, require_box_or_tag)
        for problem, text in zip(problems, texts, strict=True)
    ]
    outcomes = iter(_grade([pair for case in cases for pair in case.pairs], grader))
    return [case.decide([next(outcomes) for _ in case.pairs]) for case in cases]


def _grade(pairs: Sequence[Pair], grader: Grader) -> list[Outcome]:
    asked = [(pair.gold, pair.prediction) for pair in pairs]
    tolerances = [pair.tolerance for pair in pairs]
    if all(tolerance is None for tolerance in tolerances):
        return list(grader.grade(asked))
    return list(grader.grade(asked, tolerances))


def _settled(outcome: Outcome, answer: str | None) -> Case:
    return Case((), lambda _: Verdict(outcome, answer))


def _any(answer: str, pairs: Iterator[Pair]) -> Case:
    """Right where one of several readings of the same answer is."""
    return Case(tuple(dict.fromkeys(pairs)), lambda outcomes: Verdict(_best(outcomes), answer))


def _best(outcomes: Sequence[Outcome]) -> Outcome:
    for outcome in ("right", "timeout", "error"):
        if outcome in outcomes:
            return outcome
    return "wrong"


# --- math and Minerva -------------------------------------------------------------------------------------


def _math(problem: Problem, text: str, require: bool) -> Case:
    answer = extract_answer(text, require_box_or_tag=require)
    if answer is None:
        return _settled("unparsed", None)
    return _any(answer, iter([Pair(problem.gold, answer)]))


def _minerva(problem: Problem, text: str, require: bool) -> Case:
    """As math: the references are exact where they are numbers (8.7e8), and no paper states a tolerance."""
    answer = extract_answer(text, require_box_or_tag=require)
    if answer is None:
        return _settled("unparsed", None)
    return _any(answer, iter([Pair(_without_python(problem.gold), _without_python(answer))]))


def _without_python(text: str) -> str:
    """Three references are Python: `np.arcsin(10/13)`, `-1./3`."""
    return re.sub(r"(?<=\d)\.(?=\s*/)", "", re.sub(r"\bnp\.(?=[a-z])", "", text))


# --- OlympiadBench ----------------------------------------------------------------------------------------

_WORDS = re.compile(r"\s*,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*")
_NAMED = re.compile(r"[^=<>]*[^=<>\s]\s*=\s*([^=<>]+)")
_BEFORE_INTERVAL = re.compile(r"^\s*\\?[A-Za-z]+\s*(?:\\in(?![a-z]))?\s*(?=[(\[])")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def _olympiad(problem: Problem, text: str, require: bool) -> Case:
    """Several answers count as a set, each right once; a unit may stand or not; `error` is an absolute tolerance
    (He et al. 2024, the judge of their repository)."""
    answer = _boxes_together(problem, text) or extract_answer(text, require_box_or_tag=require)
    if answer is None:
        return _settled("unparsed", None)
    if len(answer) > MAX_LENGTH:
        return _settled("wrong", answer)
    if any(tolerance is not None for tolerance in problem.tolerance):
        return _within(problem, answer)
    golds, predictions = _gold_readings(problem), _readings(problem, answer)
    return _any(answer, (Pair(gold, prediction) for gold in golds for prediction in predictions))


def _boxes_together(problem: Problem, text: str) -> str | None:
    """Where each of several answers has a box of its own: all of them."""
    if not problem.multiple:
        return None
    tag = last_tag(text)
    boxes = list(dict.fromkeys(_boxes(text.rpartition("</think>")[2] if tag is None else tag)))
    count = len(_parts(problem.gold))
    if count < 2 or len(boxes) != count or len(boxes[-1]) > MAX_LENGTH or len(_parts(boxes[-1])) > 1:
        return None
    return "; ".join(boxes)


def _boxes(text: str) -> list[str]:
    r"""Contents of the balanced `\boxed{...}` that stand in no other one, in their order."""
    open_braces: list[int | None] = []  # where the content begins if the brace is a box's
    found: list[tuple[int, int]] = []
    for token in _BRACE.finditer(text):
        mark = token.group()
        if mark == "{":
            open_braces.append(None)
        elif mark == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None:
                while found and found[-1][0] > start:
                    found.pop()
                found.append((start, token.start()))
        elif mark.endswith("{") and len(mark) > 2:
            open_braces.append(token.end())
    return [text[start:end].strip() for start, end in found]


def _parts(text: str) -> list[str]:
    """Several answers one by one: separated by commas, semicolons, and, or, outside of any bracket."""
    text = _WORDS.sub(";", tidy(text))
    if text.startswith(r"\{") and text.endswith(r"\}") and text.count(r"\{") == 1:
        text = text[2:-2]
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char in ",;" and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part for part in map(str.strip, (*parts, text[start:])) if part]


def _gold_readings(problem: Problem) -> list[str]:
    if problem.multiple:
        parts = [_without_unit(part, problem.unit) for part in _parts(problem.gold)]
        values = [match.group(1) if (match := _NAMED.fullmatch(part)) else part for part in parts]
        return (
            [";".join(parts), ";".join(values)] if problem.answer_type == "Numerical" else [";".join(parts)]
        )
    gold = _without_unit(problem.gold, problem.unit)
    return [gold, _BEFORE_INTERVAL.sub("", tidy(gold))] if problem.answer_type == "Interval" else [gold]


def _readings(problem: Problem, answer: str) -> list[str]:
    """A comma between several answers separates them, or thousands: `2,500 and 7,500`."""
    if not problem.multiple:
        return [answer, _without_unit(answer, problem.unit)]
    closed_up = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer)
    readings = ([_without_unit(p, problem.unit) for p in _parts(text)] for text in (answer, closed_up))
    return [";".join(parts) for parts in readings]


def _without_unit(text: str, unit: str) -> str:
    """The text without the unit at its end, however that is spaced, braced or put into \\text{}."""
    letters = re.sub(r"[\s{}]", "", tidy(unit)) if unit else ""
    if not letters:
        return text
    pattern = r"[\s{}]*".join(map(re.escape, letters)) + r"s?[\s{}]*$"
    return re.sub(pattern, "", tidy(text)).strip() or text


def _within(problem: Problem, answer: str) -> Case:
    golds, predictions = (
        ([problem.gold], [answer]) if not problem.multiple else (_parts(problem.gold), _parts(answer))
    )
    if len(golds) != len(predictions):
        return _settled("wrong", answer)
    tolerances = problem.tolerance if len(problem.tolerance) > 1 else problem.tolerance * len(golds)
    if len(tolerances) != len(golds):
        raise ValueError(
            f"problem {problem.id}: {len(golds)} answers with {len(tolerances)} tolerances; one for all, or one each"
        )
    golds, predictions = ([_without_unit(t, problem.unit) for t in texts] for texts in (golds, predictions))
    pairs = tuple(
        Pair(gold, p, tolerance)
        for gold, tolerance in zip(golds, tolerances, strict=True)
        for p in predictions
    )

    def decide(outcomes: Sequence[Outcome]) -> Verdict:
        count = len(golds)
        right = [[o == "right" for o in outcomes[i : i + count]] for i in range(0, len(outcomes), count)]
        failed = [o for o in outcomes if o in ("timeout", "error")]
        return Verdict("right" if _matched(right) else _best(failed), answer)

    return Case(pairs, decide)


def _matched(right: Sequence[Sequence[bool]]) -> bool:
    """Whether each row can have a column of its own in which it is right (augmenting paths)."""
    owner: dict[int, int] = {}

    def place(row: int, tried: set[int]) -> bool:
        for column, fits in enumerate(right[row]):
            if fits and column not in tried:
                tried.add(column)
                if column not in owner or place(owner[column], tried):
                    owner[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(right)))


# --- multiple choice --------------------------------------------------------------------------------------

_FONT = re.compile(
    r"\\(?:text|mathrm|mathbf|mathit|mathsf|boldsymbol|operatorname)(?:bf|rm|it|sf)?\s*\{([^{}]*)\}"
)
_OPTION = re.compile(
    r"^(?i:the\s+)?(?i:correct\s+)?(?i:option|choice|answer)\s*(?i:is|:)?\s*(?=\W?[A-Za-z]\b)"
)
_ALONE = re.compile(r"[(\[]?\s*([A-Za-z])\s*[)\]]?\s*[.:]?")
_BEFORE_TEXT = re.compile(r"(?:[(\[]([A-Z])[)\]]|([A-Z])\s*[.:)])\s*[^\s.:)].*", re.DOTALL)
_STATEMENT = re.compile(  # runs of spaces are bounded, since a text may hold very long ones
    r"\b(?i:answer|choice|option)\b[\s*]{0,8}(?i:\bis\b|:|=)[\s:*$]{0,16}(?:\\[a-z]+\s{0,4}\{\s{0,4})?"
    r"(?i:(?:option|choice)\s{1,4})?[\s*$]{0,8}"
    r"(?:[(\[]([A-Za-z])[)\]]|([A-Z])(?![\w'’])(?P<end>[*$}\s]{0,8}(?:[.,;:)!]|$|\n))?)"
)


def _choice(problem: Problem, text: str, require: bool) -> Case:
    """The letter, or the text of exactly one of the choices. Letters beyond the choices are wrong."""
    answer = extract_answer(text)
    if answer is None and not require:
        return _stated(problem, text)
    if answer is None:
        return _settled("unparsed", None)
    place = _chosen(problem, answer)
    if place is not None:
        return _lettered(problem, place)
    return _by_text(problem, answer) if len(answer) <= MAX_LENGTH else _settled("wrong", answer)


def _lettered(problem: Problem, place: int) -> Case:
    letter = LETTERS[place]
    return _settled("right" if letter == problem.gold else "wrong", letter)


def _stated(problem: Problem, text: str) -> Case:
    """The last "answer is (B)" of the text, or a text of one line that is but a choice."""
    rest = text.rpartition("</think>")[2].strip()
    place = _last_statement(problem, rest)
    if place is None and len(rest) <= MAX_LENGTH and "\n" not in rest:
        place = _letter(rest)
    if place is None:
        return _settled("unparsed", None)
    return _lettered(problem, place)


def _last_statement(problem: Problem, text: str) -> int | None:
    found = None
    for match in _STATEMENT.finditer(text):
        place = LETTERS.index((match.group(1) or match.group(2)).upper())
        # "the answer is I think ..." names no choice; "the answer is K." names one that there is not
        if match.group(1) or match["end"] is not None or place < len(problem.choices):
            found = place
    return found


def _chosen(problem: Problem, answer: str) -> int | None:
    """The place of the choice that an answer names; None where its letter or wording settles nothing."""
    if len(answer) <= MAX_LENGTH:
        wording = _wording(answer)
        same = [i for i, choice in enumerate(problem.choices) if _wording(choice) == wording]
        if len(same) == 1 and len(wording) > 1:  # before the letter: a choice may read "C. elegans"
            return same[0]
    place = _letter(answer)
    place = _last_statement(problem, answer) if place is None else place
    return place if place is not None and place < len(problem.choices) else None


def _wording(text: str) -> str:
    return " ".join(tidy(text).casefold().split())


def _letter(answer: str) -> int | None:
    r"""B of `B`, `(B)`, `\text{(B)}`, `B.`, `B. 12 m/s`, `**B**`, `option B`."""
    text = re.sub(r"[*`$]", "", last_box(answer) or answer)
    text = _OPTION.sub("", _FONT.sub(r"\1", _FONT.sub(r"\1", text)).strip()).strip()
    if match := _ALONE.fullmatch(text):
        return LETTERS.index(match.group(1).upper())
    if match := _BEFORE_TEXT.fullmatch(text):
        return LETTERS.index(match.group(1) or match.group(2))
    return None


def _by_text(problem: Problem, answer: str) -> Case:
    """Right where the grader takes the answer for the right choice and for no other."""
    pairs = tuple(Pair(choice, answer) for choice in problem.choices)

    def decide(outcomes: Sequence[Outcome]) -> Verdict:
        same = [i for i, outcome in enumerate(outcomes) if outcome == "right"]
        if len(same) == 1:
            letter = LETTERS[same[0]]
            return Verdict("right" if letter == problem.gold else "wrong", letter)
        return Verdict("wrong" if same else _best(outcomes), answer)

    return Case(pairs, decide)


KINDS: dict[Kind, Callable[[Problem, str, bool], Case]] = {
    "math": _math,
    "minerva": _minerva,
    "olympiad": _olympiad,
    "choice": _choice,
}
