"""The chunked log-probs against the plain computation: values, gradients, and memory."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hpcgrpo.learning.logprobs import chosen_chunk_bytes, token_logprobs


def plain(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    p = torch.log_softmax(logits / temperature, -1)
    return p.gather(1, targets[:, None])[:, 0], -(p.exp() * p).sum(-1)


def inputs(dtype: torch.dtype, n: int = 37, v: int = 53, h: int = 16, spread: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, h), (v, h), (v,)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).mul(spread).to(dtype) for s in shapes]
    return [*(t.requires_grad_() for t in tensors), torch.randint(v, (n,), generator=generator)]


def value_and_gradients(function: Any, tensors: list[Tensor]) -> list[Tensor]:
    logprobs, entropy = function()
    scale = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)  # mixed signs, as advantages are
    return [logprobs, entropy, *torch.autograd.grad((logprobs * scale).sum(), tensors)]


def test_hand_worked_value() -> None:
    """Logits (0, ln 3) give probabilities 1/4 and 3/4; at temperature 1/2 they are 1/10 and 9/10."""
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3)]])
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([0, 1]), temperature=1.0)
    assert logprobs.tolist() == pytest.approx([math.log(1 / 4), math.log(3 / 4)])
    assert entropy.tolist() == pytest.approx([math.log(4) - 0.75 * math.log(3)] * 2)
    logprobs, _ = token_logprobs(hidden, weight, torch.tensor([0, 1]), temperature=0.5)
    assert logprobs.tolist() == pytest.approx([math.log(1 / 10), math.log(9 / 10)], rel=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 37, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 1e-13)])
def test_equals_the_plain_computation(
    chunk_tokens: int, softcap: float | None, with_bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    hidden, weight, bias, targets = inputs(dtype)
    tensors = [hidden, weight, bias] if with_bias else [hidden, weight]
    chosen = bias if with_bias else None
    ours = value_and_gradients(
        lambda: token_logprobs(
            hidden,
            weight,
            targets,
            bias=chosen,
            temperature=0.7,
            softcap=softcap,
            chunk_bytes=chunk_tokens * weight.shape[0] * max(4, weight.element_size()),
        ),
        tensors,
    )
    theirs = value_and_gradients(lambda: plain(hidden, weight, targets, chosen, 0.7, softcap), tensors)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck(softcap: float | None) -> None:
    hidden, weight, bias, targets = inputs(torch.float64, n=5, v=7, h=3)

    def function(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return token_logprobs(h, w, targets, bias=b, temperature=0.6, softcap=softcap, chunk_bytes=2 * 7 * 8)[
            0
        ]

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_bfloat16_is_as_near_to_the_truth_as_the_plain_computation() -> None:
    """Distance to the float64 result of the same bfloat16 numbers, chunked into five against whole."""
    hidden, weight, _, targets = inputs(torch.bfloat16, n=64, v=300, h=32, spread=0.5)
    tensors = [hidden, weight]
    size = 13 * 300 * 4
    ours = value_and_gradients(
        lambda: token_logprobs(hidden, weight, targets, temperature=0.8, chunk_bytes=size), tensors
    )
    whole = value_and_gradients(lambda: plain(hidden, weight, targets, None, 0.8, None), tensors)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    truth = value_and_gradients(lambda: plain(exact[0], exact[1], targets, None, 0.8, None), exact)
    for mine, theirs, true in zip(ours, whole, truth, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - true).norm() <= 1.5 * (theirs - true).norm() + 1e-9


def test_large_logits_and_low_temperature_stay_finite() -> None:
    hidden, weight, _, targets = inputs(torch.float32, spread=30.0)
    ours = value_and_gradients(lambda: token_logprobs(hidden, weight, targets, temperature=0.01), [hidden])
    assert all(x.isfinite().all() for x in ours)
    assert (ours[0] <= 0).all() and (ours[1] >= -1e-3).all()


def test_only_the_gradients_that_are_asked_for() -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    frozen = weight.detach()
    logprobs, entropy = token_logprobs(hidden, frozen, targets, temperature=1.0)
    assert not entropy.requires_grad
    logprobs.sum().backward()
    expected = torch.autograd.grad(plain(hidden, frozen, targets, None, 1.0, None)[0].sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert token_logprobs(hidden, weight, targets, temperature=1.0)[0].grad_fn is None
    assert token_logprobs(hidden, weight, targets, temperature=1.0, with_entropy=False)[1].isnan().all()


def test_no_tokens_give_zero_gradients() -> None:
    hidden, weight, _, targets = inputs(torch.float32, n=0)
    logprobs, _ = token_logprobs(hidden, weight, targets, temperature=1.0)
    logprobs.sum().backward()
    assert logprobs.shape == (0,) and weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize(
    ("options", "words"), [({"temperature": 0.0}, "temperature: 0.0"), ({"temperature": -1}, "-1")]
)
def test_bad_temperatures_are_named(options: dict[str, float], words: str) -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    with pytest.raises(ValueError, match=words):
        token_logprobs(hidden, weight, targets, **options)  # type: ignore[arg-type]


MEMORY = """
import sys, torch
from hpcgrpo.learning.logprobs import chosen_chunk_bytes, token_logprobs

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

def run(tokens):
    logprobs, _ = token_logprobs(hidden[:tokens], weight, targets[:tokens], temperature=0.7)
    logprobs.sum().backward()

n, v, h = 8192, 152064, 64
hidden = torch.randn(n, h, requires_grad=True)
weight = torch.randn(v, h, requires_grad=True)
targets = torch.randint(v, (n,))
before = peak()
run(n)
print(peak() - before)
"""


@pytest.mark.long
@pytest.mark.slow
def test_peak_memory_at_a_large_vocabulary() -> None:
    """8,192 tokens x 152,064 words: the float32 logits alone would take 4.98 GB; 1 GB is allowed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], env=environment, capture_output=True, text=True, check=True
    )
    extra_bytes = int(done.stdout)
    assert 0 < extra_bytes <= 10**9, f"{extra_bytes / 1e9:.2f} GB"


def test_the_chunk_that_is_chosen() -> None:
    """152,064 x 3,584: half the float32 weight is 1.09 GB, a sixteenth of 8 GB is less, and 64 MiB the least."""
    weight = torch.empty(152_064, 3_584, device="meta")
    assert chosen_chunk_bytes(weight, 80 * 10**9) == 152_064 * 3_584 * 2
    assert chosen_chunk_bytes(weight, 8 * 10**9) == 5 * 10**8
    assert chosen_chunk_bytes(weight, 10**6) == chosen_chunk_bytes(weight, None) == 2**26


def test_without_a_chunk_size_the_values_are_the_same() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    chosen, given = (
        token_logprobs(hidden, weight, targets, bias=bias, temperature=0.7, chunk_bytes=size)
        for size in (None, 2**26)
    )
    assert all(torch.equal(a, b) for a, b in zip(chosen, given, strict=True))
