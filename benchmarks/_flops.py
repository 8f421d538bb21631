"""What a learner step costs by count: FLOPs of a forward and backward pass over packed, shared and padded rows.

A matrix product of n x k by k x m is 2 n k m. Forward and backward are three of them for a weight (6 FLOPs a token and
weight), two and five for a pair of query and key (14 x hidden, scores being computed again in the backward pass).
Embedding, norms, activations and optimizer are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Groups = Sequence[Sequence[int]]  # completion lengths [groups][G]


@dataclass(frozen=True)
class Sizes:
    """Of the model."""

    hidden: int
    layers: int
    linear: int  # weights of all layers' matrices
    vocabulary: int


@dataclass(frozen=True)
class Count:
    """What the layers and the head see in one optimizer step."""

    tokens: int  # that go through the layers
    pairs: float  # of query and key whose score is computed, in each layer
    logits: int  # positions that go through the head
    head_products: int  # 3: forward, and two backward; 4 where logits are computed again in the backward pass

    def flops(self, sizes: Sizes) -> float:
        layers = 6 * self.tokens * sizes.linear + 14 * self.pairs * sizes.hidden * sizes.layers
        return layers + 2 * self.head_products * self.logits * sizes.vocabulary * sizes.hidden


def triangle(tokens: int) -> float:
    """Pairs of a causal segment."""
    return tokens * (tokens + 1) / 2


def packed(prompt: int, groups: Groups) -> Count:
    """Every sequence on its own, nothing padded; the last token predicts nothing and is left out."""
    rows = [c for group in groups for c in group]
    pairs = sum(triangle(prompt + c - 1) for c in rows)
    return Count(sum(prompt + c - 1 for c in rows), pairs, sum(rows), 4)


def shared(prompt: int, groups: Groups) -> Count:
    """A group's prompt once."""
    rows = [c for group in groups for c in group]
    pairs = len(groups) * triangle(prompt) + sum(triangle(c - 1) + (c - 1) * prompt for c in rows)
    return Count(len(groups) * prompt + sum(c - 1 for c in rows), pairs, sum(rows), 4)


def padded(prompt: int, groups: Groups) -> Count:
    """The best padded code: a group padded to its longest, causal without a mask, logits of real tokens alone."""
    widths = [(len(group), prompt + max(group) - 1) for group in groups]
    pairs = sum(n * triangle(width) for n, width in widths)
    return Count(sum(n * width for n, width in widths), pairs, sum(c for g in groups for c in g), 3)


def trl(prompt: int, groups: Groups, *, gpu: bool = False) -> Count:
    """TRL 1.16: all rows padded to the longest of the step; a mask as soon as anything is padded, and then all pairs.

    On a CPU its fused head computes every position, prompt and padding too; with Triton the completions' alone.
    """
    rows = [c for group in groups for c in group]
    width = prompt + max(rows)
    pairs = triangle(width) if min(rows) == max(rows) else float(width * width)
    logits = sum(rows) if gpu else len(rows) * (width - 1)
    return Count(len(rows) * width, len(rows) * pairs, logits, 4)
