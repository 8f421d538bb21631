"""What one completion of a benchmark came to, and the file that such records are appended to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

# right | wrong: graded. unparsed: no answer to be found. timeout | error: of the grader. unanswered: the engine gave
# nothing, and is asked again when the evaluation is.
Outcome = Literal["right", "wrong", "unparsed", "timeout", "error", "unanswered"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of one problem."""

    problem: str  # its id in the benchmark
    sample: int  # 0 … num_samples - 1
    seed: int
    outcome: Outcome
    answer: str | None  # as it was found in the text; None where there was none
    finish_reason: Literal["stop", "length", "abort"]  # length: truncated
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
    """The records of a file in its order, none of a missing one; a last line cut off by a crash is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            found.append(Sample(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def by_problem(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Each problem's samples in the order of their numbers; of two with one number the later record counts."""
    latest = {(s.problem, s.sample): s for s in samples}
    found: dict[str, list[Sample]] = {}
    for key in sorted(latest):
        found.setdefault(key[0], []).append(latest[key])
    return found
