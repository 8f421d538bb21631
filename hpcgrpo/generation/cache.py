"""Keys and values of a decoding batch in one allocation, and the attention that reads them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import CacheLayerMixin

ATTENTION = "cached"


class Slab(CacheLayerMixin):
    """One layer's keys and values, [rows, heads, slots, size], allocated once and written in place."""

    def __init__(self, like: Any, rows: int, longest: int, room: int) -> None:
        """For `rows` sequences of up to `longest` + `room` tokens, with the head sizes of layer `like`."""
        super().__init__()
        self.keys, self.values = (
            x.new_empty(rows, x.shape[1], longest + room, x.shape[3]) for x in (like.keys, like.values)
        )
        for x in (self.keys, self.values):
            x[:, :, :longest] = 0  # masked slots count for nothing, but 0 * NaN would be NaN
        self.rows, self.filled, self.is_initialized = rows, longest, True

    def place(self, other: Any, into: Tensor, source: Tensor, start: int) -> None:
        """Copy whole rows of the layer `other` to the slots from `start` on."""
        end = start + other.keys.shape[2]
        self.keys[into, :, start:end] = other.keys[source]
        self.values[into, :, start:end] = other.values[source]

    def move(self, source: Tensor, into: Tensor, rows: int) -> None:
        for x in (self.keys, self.values):
            x[into, :, : self.filled] = x[source, :, : self.filled]
        self.rows = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        start, self.filled = self.filled, self.filled + key_states.shape[2]
        self.keys[: self.rows, :, start : self.filled] = key_states
        self.values[: self.rows, :, start : self.filled] = value_states
        return self.keys[: self.rows, :, : self.filled], self.values[: self.rows, :, : self.filled]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("a slab is allocated when it is made")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.filled + query_length, 0

    def get_seq_length(self) -> int:
        return self.filled

    def get_max_length(self) -> int:
        return self.keys.shape[2]


def _cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **extra: Any,
) -> tuple[Tensor, None]:
    """query [B, Hq, T, D], key and value [B, Hkv, S, D] -> [B, T, Hq, D]; T is a whole prompt or one token.

    One token's query heads that share a key head are laid out as that many queries: the kernel then reads
    each key once, and grouped heads need no copies where there is a mask.
    """
    odd = {name for name, x in extra.items() if x is not None and x is not False} - {
        "position_ids",
        "use_cache",
    }
    if odd:
        raise ValueError(f"the in-process generator does not serve attention with {sorted(odd)}.")
    batch, heads, tokens, size = query.shape
    if tokens > 1:
        shared = heads != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=shared
        )
        return out.transpose(1, 2), None
    folded = query.reshape(batch, key.shape[1], -1, size)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, 1, heads, -1), None


AttentionInterface.register(ATTENTION, _cached_attention)
