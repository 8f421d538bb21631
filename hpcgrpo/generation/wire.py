"""What goes over the wire to vLLM's completions endpoint, and what an answer of it is worth."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hpcgrpo.generation.http import Response
from hpcgrpo.types import Completion, Request, Sampling


class Fault(Exception):
    """No usable answer, but another try may bring one; `counts` against the request, not the engine alone."""

    def __init__(self, message: str, *, counts: bool = True) -> None:
        super().__init__(message)
        self.counts = counts


class Refused(Exception):
    """The engine refuses the request and would again; `own_fault`: for what is in it, e.g. its length."""

    def __init__(self, message: str, *, own_fault: bool) -> None:
        super().__init__(message)
        self.own_fault = own_fault


def body(request: Request, sampling: Sampling, *, model: str, stop_token_ids: Collection[int]) -> bytes:
    """The JSON of one request: token ids in and out, log-probs of the sampled tokens alone.

    What ends a completion is said here (`stop_token_ids`, which are part of it), not by the engine's own model
    configuration. Seeds keep their lower 63 bits.
    """
    fields: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt_token_ids,
        "n": 1,
        "max_tokens": request.length or sampling.max_completion_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # spares the engine the decoding of single tokens
        "ignore_eos": True,
        "stop_token_ids": [] if request.length else list(stop_token_ids),
    }
    if sampling.temperature:
        fields["seed"] = request.seed % 2**63
    return json.dumps(fields, separators=(",", ":")).encode()


def read(
    response: Response,
    request: Request,
    sampling: Sampling,
    *,
    minimum: int,
    decode: Callable[[Sequence[int]], str],
    check_echo: bool,
) -> Completion:
    """The completion in an answer.

    Raises Fault and Refused as above; ValueError where the prompt that was sampled from is not the one sent
    (`check_echo`) and where log-probs are not finite; RuntimeError for an answer that vLLM would not give.
    """
    status = response.status
    if status == 409 or status >= 500:
        raise Fault(f"{status} {message(response)}", counts=status != 409)
    if status != 200:
        raise Refused(f"{status} {message(response)}", own_fault=status == 400)
    version = response.headers.get("x-weights-version")
    if version is None or int(version) < minimum:
        raise Fault(f"its weights were of version {version} in the end, {minimum} is expected")
    try:
        choice = response.json()["choices"][0]
        ids, logprobs = tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])
        reason, echo = choice["finish_reason"], choice["prompt_token_ids"]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise RuntimeError(
            f"{response.url} answered without {error}: it must be vLLM 0.32 with this project's gate"
        ) from None
    if check_echo and tuple(echo) != request.prompt_token_ids:
        raise ValueError(
            f"{response.url} sampled from other prompt tokens than were sent ({echo[:8]}... for"
            f" {list(request.prompt_token_ids[:8])}...): it must serve the run's own model, without truncation"
        )
    if reason not in ("stop", "length"):
        raise Fault(f"it ended a completion with the reason {reason}")
    asked = request.length or sampling.max_completion_length
    if reason == "length" and len(ids) < asked:
        raise Refused(
            f"cut at {len(ids)} of {asked} tokens: a prompt of"
            f" {len(request.prompt_token_ids)} tokens leaves no more within the engine's max_model_len",
            own_fault=True,
        )
    if len(logprobs) != len(ids) or not _finite(logprobs):
        raise ValueError("the engine's log-probs are not finite: its weights hold NaN or infinity.")
    return Completion(ids, logprobs, reason, decode(ids), request.seed, int(version))


def message(response: Response) -> str:
    """What a server says went wrong: vLLM's {"error": {"message": ...}}, else the answer's first words."""
    try:
        return str(response.json()["error"]["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def _finite(values: Sequence[Any]) -> bool:
    """Whether all are finite numbers; by their sum, which takes a tenth of the time of asking each."""
    try:
        return math.isfinite(sum(values))
    except TypeError:
        return False
