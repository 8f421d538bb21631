"""Which models packed rows and the in-process generator cannot serve, by their configuration alone; without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

FULL = "full_attention"


def unserved(config: Any) -> list[str]:
    """What of a model packed rows would change. config: a transformers PreTrainedConfig's text part, or `of_json`."""
    reasons = [reason for reason, holds in _UNSERVED.items() if holds(config)]
    return reasons + [f"layers of the type {kind}" for kind in other_layers(config)]


def other_layers(config: Any) -> list[str]:
    """The types of its layers other than full attention.

    Qwen2 and its kind name them layer by layer; Mistral's kind has one window for the whole model.
    """
    named = getattr(config, "layer_types", None)
    windowed = named is None and getattr(config, "sliding_window", None) is not None
    return sorted(set(named or ()) - {FULL} | ({"sliding_attention"} if windowed else set()))


def of_json(settings: Mapping[str, Any]) -> SimpleNamespace:
    """A model's config.json as the functions here take it; what only transformers' defaults say is not known."""
    text = dict(settings.get("text_config") or settings)
    text.setdefault("model_type", settings.get("model_type"))
    switched = text.get("use_sliding_window", not str(text["model_type"]).startswith("qwen"))
    if not switched:
        text["sliding_window"] = None
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    text["rope_parameters"] = {"rope_type": rope.get("type"), **rope} if rope else None
    return SimpleNamespace(**text)


def _rope_types(config: Any) -> set[str]:
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)] or [rope]
    return {str(part.get("rope_type")) for part in nested}


def _has(config: Any, *names: str) -> bool:
    return any(getattr(config, name, None) for name in names)


# Reason -> does it hold for this config? Rotary types that look at the longest position of the batch would
# make one sequence depend on its neighbours.
_UNSERVED: Mapping[str, Callable[[Any], bool]] = {
    "attention softcaps": lambda c: _has(c, "attn_logit_softcapping"),
    "attention sinks": lambda c: (
        c.model_type in {"gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"}
    ),
    "dynamic rotary positions": lambda c: any("dynamic" in t or t == "longrope" for t in _rope_types(c)),
    "position biases": lambda c: _has(c, "alibi"),
    "attention dropout": lambda c: _has(c, "attention_dropout"),
    "state-space layers": lambda c: _has(c, "ssm_state_size", "state_size", "mamba_d_state", "mamba_d_ssm"),
    "heads whose queries and values differ in size": lambda c: _has(c, "kv_lora_rank"),
    "encoder-decoder models": lambda c: _has(c, "is_encoder_decoder"),
}
