"""A reward is a function with TRL's signature, and what `Rewards` has to know about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# f(prompts, completions, completion_ids=..., **columns) -> one value a completion; None = not applicable.
# A value may come with its outcome, as a pair: (1.0, "right").
RewardFunction = Callable[..., Any]
Graded = tuple[float | None, str | None]
# What a value depends on: its completion (and row) alone, the completions of its prompt, or all of a call.
Scope = Literal["completion", "group", "batch"]


@dataclass(frozen=True)
class Run:
    """What a reward may take from the run that it serves."""

    max_completion_length: int  # tokens
    num_processes: int  # for grading, on this rank


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Reward:
    """A reward function, the columns that no row may lack, and how to let go of what it holds.

    Where `scope` is not the whole batch, the function is called with a part of a step's completions while others are
    still sampled, in a thread of its own, one call at a time.
    """

    function: RewardFunction
    columns: tuple[str, ...] = ()
    close: Callable[[], None] = _nothing
    scope: Scope = "batch"


def text_of(item: str | Sequence[Mapping[str, str]]) -> str:
    """The text of a prompt or completion in TRL's two forms: a string, or messages (of which the last)."""
    return item if isinstance(item, str) else item[-1]["content"]
