"""One question with its answer: what every source of data gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcgrpo.types import Message

Columns = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One question with its answer, checked."""

    index: int  # place in the file or data set, from 0
    messages: tuple[Message, ...]  # the last one is the user's; a question in plain text is one message
    columns: Columns  # everything the row holds; the answer also stands under "answer", as text
    conversational: bool = False  # the row gave a chat, not text

    @property
    def question(self) -> str:
        return self.messages[-1]["content"]
