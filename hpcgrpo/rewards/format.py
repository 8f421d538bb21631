"""1 for a completion that is a think block followed by an answer block, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hpcgrpo.rewards.base import Reward, Run, text_of

LENIENT = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
STRICT = re.compile(r"<think>.*</think>\n<answer>.*</answer>", re.DOTALL)  # CPPO, Appendix A
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def well_formed(text: str, *, strict: bool = False) -> bool:
    """Whether the whole text is one think block, then one answer block; strict: one line break between, no
    space around (CPPO's `^<think>.*?</think>\\n<answer>.*?</answer>$`, with each tag once)."""
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    return bool((STRICT if strict else LENIENT).fullmatch(text))


def format_reward(run: Run, *, strict: bool = False, think_in_prompt: bool = False) -> Reward:
    """`think_in_prompt`: the chat template ends the prompt with `<think>`, the completion starts inside."""

    def function(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        opening = "<think>" if think_in_prompt else ""
        return [float(well_formed(opening + text_of(c), strict=strict)) for c in completions]

    return Reward(function, scope="completion")


def cppo_format(run: Run, *, think_in_prompt: bool = False) -> Reward:
    """CPPO's format part (arXiv 2503.22342, Appendix A): the strict form."""
    return format_reward(run, strict=True, think_in_prompt=think_in_prompt)


def closing_tags(run: Run) -> Reward:
    """The share of `</think>` and `</answer>` that stand in a completion exactly once: 0, 0.5 or 1 (CoDistill-GRPO)."""

    def function(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        return [sum(text_of(c).count(tag) == 1 for tag in ("</think>", "</answer>")) / 2 for c in completions]

    return Reward(function, scope="completion")
