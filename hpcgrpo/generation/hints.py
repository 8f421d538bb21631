"""Completions that one policy begins and another goes on with (CoDistill-GRPO's hints, arXiv 2605.08873)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hpcgrpo.types import Completion, Request, Sampling, stable_seed

Sample = Callable[[Sequence[Request], Sampling], list[Completion]]


def hinted(
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    length: int,
    begin: Sample,
    go_on: Sample,
    decode: Callable[[Sequence[int]], str],
) -> list[Completion]:
    """`begin` samples the first `length` tokens of each request, `go_on` the rest where none has ended by then.

    A completion carries the log-probs of whoever sampled each token, and `hint_length`.
    """
    asked = [replace(r, seed=stable_seed(r.seed, "hint")) for r in requests]
    hints = begin(asked, replace(sampling, max_completion_length=length))
    made = [
        replace(h, hint_length=len(h.token_ids), seed=r.seed) for h, r in zip(hints, requests, strict=True)
    ]
    still = [i for i, hint in enumerate(hints) if hint.finish_reason == "length"]
    longer = [
        replace(requests[i], prompt_token_ids=(*requests[i].prompt_token_ids, *hints[i].token_ids))
        for i in still
    ]
    rest = replace(sampling, max_completion_length=sampling.max_completion_length - length)
    for i, tail in zip(still, go_on(longer, rest), strict=True):
        token_ids = (*hints[i].token_ids, *tail.token_ids)
        made[i] = replace(
            tail,
            token_ids=token_ids,
            logprobs=(*hints[i].logprobs, *tail.logprobs),
            text=decode(token_ids),
            hint_length=length,
        )
    return made
