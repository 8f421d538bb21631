"""1 for a final answer that equals the reference, else 0 (iGRPO Eq. 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcgrpo.rewards.answers import extract_answer
from hpcgrpo.rewards.base import Graded, Reward, Run, text_of
from hpcgrpo.rewards.grading import Grader


def accuracy(
    run: Run,
    *,
    answer_column: str = "answer",
    require_box_or_tag: bool = True,
    time_limit_seconds: float = 2.0,
    memory_limit_bytes: int = 1 << 30,
) -> Reward:
    r"""Last `<answer>` block, else last balanced `\boxed{}`, against the reference by math-verify.

    No box and no tag is `unparsed` and 0; `require_box_or_tag=False` then takes the last number of the text.
    A grading beyond its CPU seconds or address space is `timeout` or `error` and 0.
    """
    if time_limit_seconds <= 0 or memory_limit_bytes < 1 << 28:
        raise ValueError(
            f"accuracy: time_limit_seconds={time_limit_seconds} must be > 0 and memory_limit_bytes="
            f"{memory_limit_bytes} at least {1 << 28} (256 MiB), below which the parser does not load"
        )
    grader = Grader(
        num_processes=run.num_processes,
        time_limit_seconds=time_limit_seconds,
        memory_limit_bytes=memory_limit_bytes,
    )

    def function(
        prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[Graded]:
        answers = [extract_answer(text_of(c), require_box_or_tag=require_box_or_tag) for c in completions]
        found = [i for i, answer in enumerate(answers) if answer is not None]
        pairs = [(str(columns[answer_column][i]), answers[i] or "") for i in found]
        outcomes: list[str] = ["unparsed"] * len(answers)
        for i, outcome in zip(found, grader.grade(pairs), strict=True):
            outcomes[i] = outcome
        return [(1.0 if outcome == "right" else 0.0, outcome) for outcome in outcomes]

    return Reward(function, columns=(answer_column,), close=grader.close, scope="completion")
