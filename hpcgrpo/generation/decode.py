"""One token a row through a plain decoder, written out: fused projections, no bookkeeping between layers.

At small batches the wrappers of a transformers forward cost as much as its arithmetic. Equal to it within
rounding; the models it knows are in `PLAIN_DECODERS`, every other one keeps its own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcgrpo.generation.cache import Slab

PLAIN_DECODERS = ("llama", "qwen2", "qwen3")  # embedding, layers, norm, head, and nothing else


class PlainDecoder:
    """The decoding step of a model whose weights stay where they are: later updates in place are seen."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = [_Layer(layer) for layer in model.model.layers]

    def step(self, ids: Tensor, positions: Tensor, mask: Tensor | None, slabs: Sequence[Slab]) -> Tensor:
        """ids and positions [B, 1], mask [B, 1, 1, slots] or None -> logits [B, V]; slabs gain one slot."""
        decoder = self.model.model
        hidden = decoder.embed_tokens(ids)
        cos, sin = decoder.rotary_emb(hidden, position_ids=positions)
        half = cos.shape[-1] // 2
        rotary = (
            cos[..., :half].unsqueeze(2),
            sin[..., :half].unsqueeze(2),
        )  # [B, 1, 1, D / 2]: both halves agree
        for layer, slab in zip(self.layers, slabs, strict=True):
            hidden = layer(hidden, rotary, mask, slab)
        return self.model.lm_head(decoder.norm(hidden))[:, -1]


class _Layer:
    """One layer, its query, key and value projections in one matrix, its gate and up projections in another."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.attention, self.mlp = layer, layer.self_attn, layer.mlp
        self.size = self.attention.head_dim
        parts = self.attention.q_proj, self.attention.k_proj, self.attention.v_proj
        self.qkv, self.qkv_bias = fuse(parts)
        self.gate_up, self.gate_up_bias = fuse((self.mlp.gate_proj, self.mlp.up_proj))
        self.heads = [p.weight.shape[0] // self.size for p in parts]

    def __call__(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, slab: Slab
    ) -> Tensor:
        hidden = hidden + self._attend(self.layer.input_layernorm(hidden), rotary, mask, slab)
        x = F.linear(self.layer.post_attention_layernorm(hidden), self.gate_up, self.gate_up_bias)
        gate, up = x.chunk(2, -1)
        return hidden + self.mlp.down_proj(self.mlp.act_fn(gate) * up)

    def _attend(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, slab: Slab) -> Tensor:
        """The query heads that share a key head go in as that many queries: each key is read once."""
        rows = x.shape[0]
        projected = F.linear(x, self.qkv, self.qkv_bias).view(rows, 1, -1, self.size)
        query, key, value = projected.split(self.heads, 2)
        if hasattr(self.attention, "q_norm"):
            query, key = self.attention.q_norm(query), self.attention.k_norm(key)
        query, key = rotate(query, *rotary), rotate(key, *rotary)
        keys, values = slab.update(key.transpose(1, 2), value.transpose(1, 2))
        folded = query.reshape(rows, self.heads[1], -1, self.size)
        out = F.scaled_dot_product_attention(
            folded, keys, values, attn_mask=mask, scale=self.attention.scaling
        )
        return self.attention.o_proj(out.reshape(rows, 1, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x [B, 1, H, D], by cos and sin [B, 1, 1, D / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@torch.no_grad()
def fuse(parts: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One weight (and bias) for several projections of one input; theirs become views of it."""
    weight = torch.cat([p.weight for p in parts])
    bias = torch.cat([p.bias for p in parts]) if parts[0].bias is not None else None
    start = 0
    for part in parts:
        end = start + part.weight.shape[0]
        part.weight.data = weight[start:end]
        if bias is not None:
            part.bias.data = bias[start:end]
        start = end
    return weight, bias
