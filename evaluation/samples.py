"""What one completion of a benchmark came to, and the file that such records are appended to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

# right | wrong: graded. unparsed: no answer to be found. timeout | error: of the grader. unanswered: the engine gave
# nothing, and is asked again when the evaluation is.
Outcome = Literal["right", "wrong", "unparsed", "timeout", "error", "unanswered"]
FinishReason = Literal["stop", "length", "abort"]  # length: truncated


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of one problem."""

    problem: str  # its id in the benchmark
    sample: int  # 0 … num_samples - 1
    seed: int
    outcome: Outcome
    answer: str | None  # as it was found in the text; None where there was none
    finish_reason: FinishReason
    num_tokens: int
    text: str
    asked: str = ""  # hash of the question and its answer; empty in records of a version that kept none
    grader: str = ""  # hash of the grader's version, likewise
    fixed: str = ""  # hash of the settings that may not change, likewise

    @property
    def right(self) -> bool:
        return self.outcome == "right"

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


def to_lines(samples: Iterable[Sample]) -> str:
    """One JSON object a line."""
    return "".join(json.dumps(asdict(s), ensure_ascii=False) + "\n" for s in samples)


def read(path: Path) -> list[Sample]:
    """The records of a file in its order, none of a missing one; a line that is none is left out, such as one that a
    crash cut off."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            sample = Sample(**json.loads(line))
        except (ValueError, TypeError, RecursionError):
            continue
        if _is_record(sample):
            found.append(sample)
    return found


def _is_record(s: Sample) -> bool:
    """Whether the values are what a record may hold; a file may hold anything."""
    texts = (s.problem, s.text, s.asked, s.grader, s.fixed, "" if s.answer is None else s.answer)
    numbers = (s.sample, s.seed, s.num_tokens)
    return (
        all(isinstance(text, str) for text in texts)
        and all(type(number) is int for number in numbers)  # True is an int by isinstance
        and min(numbers) >= 0
        and s.outcome in get_args(Outcome)
        and s.finish_reason in get_args(FinishReason)
    )


def by_problem(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Each problem's samples in the order of their numbers; of two with one number the later record counts."""
    latest = {(s.problem, s.sample): s for s in samples}
    found: dict[str, list[Sample]] = {}
    for key in sorted(latest):
        found.setdefault(key[0], []).append(latest[key])
    return found
