"""An engine that takes weights in layer by layer on a CPU too, as it does on a GPU."""

from __future__ import annotations

from typing import Any

from hpcgrpo.generation.vllm_extension import Extension


class Layerwise(Extension):
    """`--worker-extension-cls layerwise.Layerwise`, with this folder in PYTHONPATH."""

    def _holds_plain(self, model: Any) -> bool:
        return False
