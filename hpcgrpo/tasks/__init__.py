"""Rows of a data set, or of a generated task, and the prompts they become.

`load_rows` reads and checks rows; a `Renderer` turns a row into a `Prompt` through the model's chat template;
`Prompts` is the endless, resumable order in which a run sees them. Nothing here imports torch.
"""

from __future__ import annotations

from hpcgrpo.tasks.generated import GENERATED, chain
from hpcgrpo.tasks.prompts import (
    SYSTEM_PROMPTS,
    Prompts,
    Renderer,
    build_prompts,
    build_renderer,
    epoch_order,
    fill,
)
from hpcgrpo.tasks.row import Row
from hpcgrpo.tasks.rows import PRESETS, load_rows

__all__ = [
    "GENERATED",
    "PRESETS",
    "SYSTEM_PROMPTS",
    "Prompts",
    "Renderer",
    "Row",
    "build_prompts",
    "build_renderer",
    "chain",
    "epoch_order",
    "fill",
    "load_rows",
]
