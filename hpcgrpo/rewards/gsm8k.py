"""CPPO's accuracy reward for GSM8K (arXiv 2503.22342, Appendix A): 2, 1.5 or 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from hpcgrpo.rewards.answers import MAX_LENGTH, last_tag
from hpcgrpo.rewards.base import Graded, Reward, Run, text_of

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?|-?\.\d+")


def cppo_accuracy(answer: str | None, reference: str) -> float:
    """2 for the very string, 1.5 where both sides hold exactly one number and these are equal, else 0."""
    if answer is None:
        return 0.0
    said, gold = (t.replace(",", "").strip() for t in (answer, reference.rsplit("####", 1)[-1]))
    if said == gold:
        return 2.0
    if len(said) > MAX_LENGTH:
        return 0.0
    numbers = _NUMBER.findall(said), _NUMBER.findall(gold)
    if len(numbers[0]) != 1 or len(numbers[1]) != 1:
        return 0.0
    return 1.5 if Fraction(numbers[0][0]) == Fraction(numbers[1][0]) else 0.0


def cppo_gsm8k(run: Run, *, answer_column: str = "answer") -> Reward:
    """Compares the last `<answer>` block, commas removed, with the reference (of which what follows `####`).
    Its format part is the reward `cppo_format`; together at most 3."""

    def function(
        prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[Graded]:
        answers = [last_tag(text_of(c)) for c in completions]
        values = [cppo_accuracy(a, str(r)) for a, r in zip(answers, columns[answer_column], strict=True)]
        return [
            (value, "unparsed" if answer is None else "right" if value else "wrong")
            for value, answer in zip(values, answers, strict=True)
        ]

    return Reward(function, columns=(answer_column,), scope="completion")
