"""Attention over packed rows, through transformers' AttentionInterface under the name "packed".

A row is a batch of one without padding. It holds whole sequences, and groups whose common prefix stands once:

    [prefix 0][prefix 1]...[tails of group 0][tails of group 1]...

Each segment attends causally to itself; each tail attends to its group's prefix as well. The two parts are
merged by their log-sum-exps, so every token sees exactly what it sees in a sequence of its own:

    out = sum_i exp(lse_i - lse) out_i,   lse = log sum_i exp(lse_i)

Their backward kernels give exact gradients of each part when handed the merged `out` and `lse`. Use:

    check_model(model.config); model.set_attn_implementation(ATTENTION)
    model(input_ids=ids, position_ids=position_ids(layout), use_cache=False, layout=layout)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

from hpcgrpo.served import unserved

ATTENTION = "packed"
FLASH = "flash_attention_2"

_aten = torch.ops.aten
Span = tuple[int, int]  # [start, end) in the row
Run = tuple[int, int, int]  # start, length, count: so many segments of that length, one after the other


@dataclass(frozen=True)
class Plan:
    """What attends to what in a row."""

    own: tuple[Run, ...]  # segments, each causal over itself; those of a run go through the kernel together
    cross: tuple[tuple[Span, Span], ...]  # (tails of a group, its prefix): every tail token sees all of it
    tokens: int  # length of the row

    @property
    def pairs(self) -> int:
        """Queries with a key that they attend to: what attention's arithmetic is in proportion to."""
        own = sum(count * length * (length + 1) // 2 for _, length, count in self.own)
        return own + sum((b - a) * (d - c) for (a, b), (c, d) in self.cross)


@dataclass(frozen=True)
class Layout:
    """The lengths of one packed row, in tokens: every group's prefix first, then every group's tails.

    A sequence that shares nothing is a prefix with `()` for tails. Tails may be empty.
    """

    prefixes: tuple[int, ...]  # [groups]
    tails: tuple[tuple[int, ...], ...]  # [groups][completions]

    @cached_property
    def plan(self) -> Plan:
        cross: list[tuple[Span, Span]] = []
        start, tail = 0, sum(self.prefixes)
        for size, tails in zip(self.prefixes, self.tails, strict=True):
            cross.append(((tail, tail + sum(tails)), (start, start + size)))
            tail += sum(tails)
            start += size
        full = [pair for pair in cross if all(a < b for a, b in pair)]
        lengths = [*self.prefixes, *(length for tails in self.tails for length in tails)]
        return Plan(tuple(_runs(lengths)), tuple(full), tail)


def _runs(lengths: Sequence[int]) -> Iterator[Run]:
    """Equal neighbours of a row of segments as one run each; empty segments are left out."""
    start = 0
    for length, same in groupby(length for length in lengths if length):
        count = len(list(same))
        yield start, length, count
        start += length * count


def _stacked(x: Tensor, run: Run) -> Tensor:
    """A view of a run's segments as a batch: [1, H, T, ...] -> [count, H, length, ...]."""
    start, length, count = run
    return x[:, :, start : start + length * count].unflatten(2, (count, length)).transpose(1, 2)[0]


def position_ids(layout: Layout) -> Tensor:
    """The position of each token in its own sequence, [1, T] int64: a tail goes on where its prefix ends."""
    sizes = [(0, size) for size in layout.prefixes]
    sizes += [
        (prefix, tail) for prefix, tails in zip(layout.prefixes, layout.tails, strict=True) for tail in tails
    ]
    parts = [torch.arange(first, first + size) for first, size in sizes]
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])[None]


def check_model(config: Any) -> None:
    """Refuse a model whose attention a packed row would change.

    config: a transformers PreTrainedConfig. Raises ValueError naming the features and the way out.
    """
    config = config.get_text_config()
    if reasons := unserved(config):
        raise ValueError(
            f"model type {config.model_type}: packed rows cannot serve {', '.join(reasons)}. "
            "They need full causal attention at fixed positions, as in Qwen2, Qwen3 or Llama; "
            "for this model set attn_implementation to sdpa."
        )


def attention_choice(requested: str, device_type: str) -> tuple[str, str | None]:
    """The attention that serves `requested` on this kind of device ("cpu", "cuda"), and a note where it is another.

    transformers refuses to build a model with flash_attention_2 where the package is missing or there is no GPU.
    """
    if requested != FLASH:
        return requested, None
    if device_type != "cuda":
        lacking = "a GPU"
    elif not is_flash_attn_2_available():
        lacking = "the package flash_attn (pip install 'hpcgrpo[flash-attn]')"
    else:
        return requested, None
    return ATTENTION, f"attn_implementation {FLASH} needs {lacking}; using {ATTENTION} instead"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D], as transformers calls it.

    Raises ValueError without the row's layout, or with anything the kernels would leave out.
    """
    known = {"position_ids", "use_cache"}
    odd = {name for name, x in extra.items() if name not in known and x is not None and x is not False}
    if layout is None:
        raise ValueError("packed attention needs the row's layout: call the model with layout=Layout(...).")
    if attention_mask is not None or dropout or odd or not getattr(module, "is_causal", True):
        found = sorted(odd) + ["a mask"] * (attention_mask is not None) + ["dropout"] * bool(dropout)
        raise ValueError(
            f"packed attention is causal attention alone, got {found or 'a bidirectional module'}."
        )
    tokens = layout.plan.tokens
    if {(x.shape[0], x.shape[2]) for x in (query, key)} != {(1, tokens)}:
        raise ValueError(
            f"the row has {tokens} tokens, the query {tuple(query.shape)} and the key {tuple(key.shape)}: "
            f"pass one row without padding and use_cache=False."
        )
    return _PackedAttention.apply(query, key, value, layout.plan, scaling).transpose(1, 2), None


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    op = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return op(grad, q, k, v, out, lse, 0.0, causal, scale=scale)


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """For half precision and head sizes that are multiples of 8. Written, not run yet: needs a GPU."""
    share = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `_cuda_forward`. Key and value gradients are summed over the query heads that share a head."""
    heads = k.shape[1]
    k, v = (x.repeat_interleave(q.shape[1] // heads, 1) for x in (k, v))
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state: there is no dropout
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused, scale=scale
    )
    return dq, *(x.unflatten(1, (heads, -1)).sum(2) for x in (dk, dv))


_KERNELS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "cpu": (_cpu_forward, _cpu_backward),
    "cuda": (_cuda_forward, _cuda_backward),
}


def _kernels(device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if device.type not in _KERNELS:
        raise ValueError(
            f"packed attention has no kernel for {device.type}: use one of {', '.join(_KERNELS)}."
        )
    return _KERNELS[device.type]


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float | None) -> Tensor:
        attend, _ = _kernels(q.device)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for run in plan.own:
            parts = attend(*(_stacked(x, run) for x in (q, k, v)), True, scale)
            for whole, made in zip((out, lse), parts, strict=True):
                _stacked(whole, run).copy_(made)
        for (a, b), (c, d) in plan.cross:
            far_out, far = attend(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], False, scale)
            near_out, near = out[:, :, a:b].to(lse.dtype), lse[:, :, a:b]
            both = torch.logaddexp(near, far)
            out[:, :, a:b] = near_out.lerp(far_out.to(lse.dtype), (far - both).exp_()[..., None])
            near.copy_(both)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        _, attend_backward = _kernels(q.device)
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

        for run in ctx.plan.own:
            *parts, normaliser = (_stacked(x, run) for x in (grad, q, k, v, out, lse))
            made = attend_backward(*parts, normaliser.contiguous(), True, ctx.scale)
            for whole, part in zip((dq, dk, dv), made, strict=True):
                _stacked(whole, run).copy_(part)
        for (a, b), (c, d) in ctx.plan.cross:
            mine = (x[:, :, a:b] for x in (grad, q))
            theirs = (x[:, :, c:d] for x in (k, v))
            ends = out[:, :, a:b], lse[:, :, a:b].contiguous()
            near, far_key, far_value = attend_backward(*mine, *theirs, *ends, False, ctx.scale)
            dq[:, :, a:b] += near
            dk[:, :, c:d] += far_key
            dv[:, :, c:d] += far_value
        return dq, dk, dv, None, None


AttentionInterface.register(ATTENTION, packed_attention)
