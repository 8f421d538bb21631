"""What a plan needs of a model: its sizes, from its config.json or from the table of the models that configs/ name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from hpcgrpo import pretrained
from hpcgrpo.config import ConfigError
from hpcgrpo.pretrained import Pretrained

# model_type -> has biases on queries, keys and values whatever config.json says, and norms on queries and keys
DENSE: Mapping[str, tuple[bool, bool]] = {
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder of attention and gated feed-forward layers."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool  # the output layer is the embedding
    attention_bias: bool  # on queries, keys and values
    qk_norm: bool
    kind: str  # "dense", or why no more than the parameters is known
    parameters: int  # all of them, a tied table once

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding table; an output layer that is not tied has as many again."""
        return self.vocabulary * self.hidden

    @property
    def root_parameters(self) -> int:
        """What no layer holds: the embedding, the output layer and the last norm."""
        return self.embedding_parameters * (1 if self.tied else 2) + self.hidden

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def linear_parameters(self) -> int:
        """Of one layer's matrices, which every token is multiplied with."""
        return self.hidden * (2 * self.query_width + 2 * self.kv_width + 3 * self.intermediate)

    @property
    def layer_parameters(self) -> int:
        """Of one layer, biases and norms included."""
        if self.kind != "dense":
            return (self.parameters - self.root_parameters) // self.layers
        return self.linear_parameters + _small(self)

    def flops_per_token(self, context: float, *, head: bool = True) -> float:
        """Forward floating-point operations of one token that attends to `context` tokens; 2 a multiplication.

        A backward pass takes twice as many.
        """
        attention = 4.0 * context * self.query_width
        logits = 2.0 * self.embedding_parameters if head else 0.0
        return self.layers * (2.0 * self.linear_parameters + attention) + logits

    def kv_bytes_per_token(self, item_bytes: int = 2) -> int:
        """Keys and values of one token in all layers, on all GPUs of an engine together."""
        return 2 * self.layers * self.kv_width * item_bytes


def of(model: Pretrained) -> Shape:
    """The shape of a model whose config.json is at hand.

    Raises ValueError where it is not, or names no sizes.
    """
    if not model.config:
        raise ValueError(_unknown(model.name))
    tied = bool(model.config.get("tie_word_embeddings"))
    twice = [math.prod(shape) for name, shape in model.shapes.items() if tied and name == "lm_head.weight"]
    return _from_config(model.name, model.config, model.parameters - sum(twice))


def known(name: str) -> Shape | None:
    """The shape of a model that configs/ name, without its files; None for any other."""
    table = _table()
    key = table["models"].get(name)
    return None if key is None else _from_config(name, table["shapes"][key], 0)


def find(name_or_path: str, *, offline: bool) -> Shape:
    """The shape of a model by its folder, its name in the hub's cache, or its name in the table.

    Raises ConfigError for a folder that is damaged or not there, ValueError for a name that nothing is known of.
    """
    try:
        model = pretrained.find(name_or_path, offline=offline)
    except ConfigError:
        if (shape := known(name_or_path)) is None:
            raise
        return shape
    return at_hand(model)


def at_hand(model: Pretrained) -> Shape:
    """The shape of a model by what is here of it, else by the table. Raises ValueError as `of` does."""
    shape = None if model.config else known(model.name)
    return shape if shape is not None else of(model)


def _from_config(name: str, config: Mapping[str, Any], counted: int) -> Shape:
    """`counted`: parameters in the weights' own headers, 0 where they are not at hand."""
    config = {**config, **(config.get("text_config") or {})}
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    kind = _kind(config)
    missing = [key for key in (*needed, "intermediate_size") if not config.get(key)]
    if missing and kind == "dense":
        raise ValueError(
            f"model {name}: its config.json lacks {', '.join(missing)}; copy the model's folder anew"
        )
    heads, hidden = int(config.get("num_attention_heads") or 1), int(config.get("hidden_size") or 0)
    always_bias, qk_norm = DENSE.get(str(config.get("model_type")), (False, False))
    shape = Shape(
        name=name,
        hidden=hidden,
        intermediate=int(config.get("intermediate_size") or 0),
        layers=int(config.get("num_hidden_layers") or 1),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocabulary=int(config.get("vocab_size") or 0),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=always_bias or bool(config.get("attention_bias")),
        qk_norm=qk_norm,
        kind=kind,
        parameters=counted or int(config.get("parameters") or 0),
    )
    if kind != "dense" and not shape.parameters:
        raise ValueError(f"model {name}: {kind}, and its weights are not here to be counted; give its folder")
    return shape if shape.parameters else _with_parameters(shape)


def _with_parameters(shape: Shape) -> Shape:
    each = shape.linear_parameters + _small(shape)
    return replace(shape, parameters=shape.layers * each + shape.root_parameters)


def _small(shape: Shape) -> int:
    """A layer's two norms, biases of queries, keys and values, and norms of queries and keys."""
    biases = shape.query_width + 2 * shape.kv_width if shape.attention_bias else 0
    return 2 * shape.hidden + biases + (2 * shape.head_dim if shape.qk_norm else 0)


def _kind(config: Mapping[str, Any]) -> str:
    found = str(config.get("model_type", "unknown"))
    if found in DENSE and not config.get("num_experts"):
        return "dense"
    return f"its type {found} is none of {', '.join(DENSE)}, whose layers are known"


def _unknown(name: str) -> str:
    planned = [n for n in sorted(_table()["models"]) if (shape := known(n)) and shape.kind == "dense"]
    return (
        f"model {name}: its config.json is not here and its sizes are in no table; give a folder that holds it, load it"
        f" once where there is a network (hf download {name} config.json), or name one of"
        f" {', '.join(planned)}"
    )


@cache
def _table() -> dict[str, Any]:
    import yaml

    loaded: dict[str, Any] = yaml.safe_load(
        (files("hpcgrpo") / "data" / "models.yaml").read_text(encoding="utf-8")
    )
    return loaded
