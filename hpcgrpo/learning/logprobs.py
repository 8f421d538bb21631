"""The one function that turns hidden states into token log-probabilities.

Every stream (old, new, reference, peer) goes through it, at the sampling temperature, so that ratios compare
like with like. It never holds the [tokens, vocabulary] matrix: logits live one chunk of tokens at a time and
are computed again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BYTES = (
    2**26
)  # of logits; on a CPU more is hardly faster, and less is slower (benchmarks/logprobs.py --chunks)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    with_entropy: bool = True,
    chunk_bytes: int | None = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy of the distribution it was drawn from.

    `log_softmax(z / temperature)[target]` with `z = cap(hidden @ weight.T + bias)` and, where a softcap is
    given, `cap(z) = softcap * tanh(z / softcap)` (Gemma 2, arXiv 2408.00118, section 2).

    hidden [N, H], weight [V, H] (a plain tensor: call it inside FSDP's forward), targets [N] int64, bias [V].
    Returns log-probs [N] and entropy [N], both in nats and float32 (float64 for float64 inputs). The entropy
    carries no gradient; it is NaN where `with_entropy` is off.

    `chunk_bytes` bounds the float32 logits of a chunk (None: as `chosen_chunk_bytes` has it); the peak is
    about three such chunks, and V * H * 4 bytes more where the weight is in half precision and takes a
    gradient. The matrix product runs in the input type: bfloat16 inputs give logits rounded to bfloat16, as
    the model's own head does. Everything after it is float32; the weight's gradient is a sum in float32 of
    the chunks' products.

    Raises ValueError for a temperature or softcap that is not positive.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature: {temperature} is not above 0. Log-probs are taken at the sampling temperature; "
            f"score greedy samples at temperature 1."
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: {softcap} is not above 0. Leave it out for a model that caps no logits.")
    assert hidden.ndim == 2 and targets.shape == hidden.shape[:1], (hidden.shape, targets.shape)
    assert hidden.dtype == weight.dtype, (hidden.dtype, weight.dtype)
    options = (temperature, softcap, with_entropy, _tokens_per_chunk(weight, chunk_bytes))
    return _TokenLogprobs.apply(hidden, weight, bias, targets, options)


def chosen_chunk_bytes(weight: Tensor, free_bytes: int | None) -> int:
    """Bytes of a chunk's float32 logits for an output layer [V, H] with so much free memory; None: on a CPU.

    On a GPU every chunk adds a product of the weight's size to its gradient, [V, H] in float32. Half as many logits
    as that, H / 2 tokens, keep the additions below a sixth of the products' time, by an H100's rates; a sixteenth of
    the free memory is the limit.
    """
    if free_bytes is None:
        return CHUNK_BYTES
    return max(CHUNK_BYTES, min(4 * weight.numel() // 2, free_bytes // 16))


def _free_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _tokens_per_chunk(weight: Tensor, chunk_bytes: int | None) -> int:
    if not chunk_bytes:
        chunk_bytes = chosen_chunk_bytes(weight, _free_bytes(weight.device))
    return max(1, chunk_bytes // (weight.shape[0] * max(4, weight.element_size())))


def _scaled_logits(
    out: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> None:
    """Write the chunk's logits over temperature into `out` [n, V], a buffer that all chunks share."""
    if out.dtype == weight.dtype:
        torch.mm(hidden, weight.T, out=out)
        if bias is not None:
            out.add_(bias)
    else:
        out.copy_(F.linear(hidden, weight, bias))
    if softcap is not None:
        out.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1:
        out.div_(temperature)


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the log-normaliser of each token; logits are made again, chunk by chunk, in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: tuple[float, float | None, bool, int],
    ) -> tuple[Tensor, Tensor]:
        temperature, softcap, with_entropy, size = options
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, normalisers = (hidden.new_empty(len(targets), dtype=dtype) for _ in range(2))
        entropy = hidden.new_full((len(targets),), torch.nan, dtype=dtype)
        # fresh memory costs the CPU more than the arithmetic, so the chunks share two buffers
        buffers = hidden.new_empty(2, min(size, len(targets)), len(weight), dtype=dtype)
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            logits, weights = buffers[:, : len(targets[part])]
            _scaled_logits(logits, hidden[part], weight, bias, temperature, softcap)
            peak = logits.amax(-1, keepdim=True)
            chosen = logits.sub_(peak).gather(1, targets[part, None]).squeeze(1)
            total = torch.exp(logits, out=weights).sum(-1)
            log_total = total.log()
            logprobs[part] = chosen - log_total
            normalisers[part] = peak.squeeze(1) + log_total
            if with_entropy:  # H = log Z - sum p z, which a common shift of the logits leaves as it is
                entropy[part] = log_total - logits.mul_(weights).sum(-1).div_(total)
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers)
        ctx.options = options
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalisers = ctx.saved_tensors
        temperature, softcap, _, size = ctx.options
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        dtype = normalisers.dtype
        d_hidden = torch.empty_like(hidden) if for_hidden else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if for_weight else None
        d_bias = torch.zeros_like(bias, dtype=dtype) if for_bias else None
        buffer = hidden.new_empty(min(size, len(targets)), len(weight), dtype=dtype)
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            logits = buffer[: len(targets[part])]
            _scaled_logits(logits, hidden[part], weight, bias, temperature, softcap)
            slope = None if softcap is None else 1 - (logits * (temperature / softcap)).square_()
            # d logprob / d z = (onehot - p) / temperature, times 1 - tanh(z / softcap)^2 under a softcap
            scale = grads[0][part, None].to(dtype) / temperature
            d_logits = logits.sub_(normalisers[part, None]).exp_().mul_(-scale)
            d_logits.scatter_add_(1, targets[part, None], scale)
            if slope is not None:
                d_logits.mul_(slope)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[part])
            if d_weight is not None:
                _add_product(d_weight, d_logits, hidden[part])
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None or bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None


def _add_product(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """total [V, H] += d_logits.T @ hidden, with the sum in total's type."""
    if total.dtype == hidden.dtype:
        total.addmm_(d_logits.T, hidden)
    else:
        total += d_logits.T @ hidden
