"""What samples for the trainer: a copy of the model in every rank, or the client of the job's vLLM engines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from hpcgrpo.attempt import Attempt
from hpcgrpo.config import ConfigError
from hpcgrpo.exploring import Generator
from hpcgrpo.generation.transformers import TransformersGenerator
from hpcgrpo.generation.vllm import VllmGenerator
from hpcgrpo.generation.weights import WeightSync
from hpcgrpo.learning import parity
from hpcgrpo.learning.fsdp import FsdpLearner
from hpcgrpo.sections import RunConfig
from hpcgrpo.trainer import Trainer
from hpcgrpo.types import Stopped


def build_generator(
    config: RunConfig,
    trainer: Trainer,
    learner: FsdpLearner,
    tokenizer: Any,
    attempt: Attempt | None,
    *,
    policy: Literal["actor", "peer"] = "actor",
) -> Generator:
    """What samples: a whole copy of the model on every rank, or the job's vLLM engines; both filled by a sync.

    `policy` says whose model it is; the peer's ends a completion where the actor's does.
    """
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    if config.generation.backend == "vllm":
        ends = eos_token_ids(config, tokenizer)
        return engines_client(config, trainer, learner, decode, ends, attempt, policy)
    from transformers import AutoModelForCausalLM

    name = (
        config.model_name_or_path if policy == "actor" or not config.peer else config.peer.model_name_or_path
    )
    model = AutoModelForCausalLM.from_pretrained(name, dtype=learner.dtype)
    return TransformersGenerator(
        model.to(learner.device),
        decode=decode,
        eos_token_ids=eos_token_ids(config, tokenizer),
        max_batch_tokens=config.generation.max_batch_tokens,
    )


def eos_token_ids(config: RunConfig, tokenizer: Any) -> list[int]:
    """What ends a completion: the generation configuration's ids, else the tokenizer's."""
    from transformers import AutoConfig, GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(config.model_name_or_path).eos_token_id
    except OSError:  # a model without one
        ends = AutoConfig.from_pretrained(config.model_name_or_path).eos_token_id
    ends = ends if ends is not None else tokenizer.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    size = AutoConfig.from_pretrained(config.model_name_or_path).get_text_config().vocab_size
    if not all(0 <= end < size for end in ends):
        raise ConfigError(
            f"model_name_or_path {config.model_name_or_path}: end-of-sequence ids {ends}, but a vocabulary of"
            f" {size}; set eos_token_id in generation_config.json"
        )
    return ends


def engines_client(
    config: RunConfig,
    trainer: Trainer,
    learner: FsdpLearner,
    decode: Callable[..., str],
    ends: list[int],
    attempt: Attempt | None,
    policy: str,
) -> VllmGenerator:
    """The client of the job's engines, once they are up."""
    generation = config.generation
    if attempt is None:
        raise ConfigError("generation.backend: vllm needs a job that starts the engines: hpcgrpo submit")
    urls = await_engines(attempt, generation.vllm_server_timeout, policy)
    secret = (attempt.folder.parent / "secret").read_text().strip()
    sync = WeightSync(
        urls,
        secret=secret,
        rank=trainer.ranks.rank,
        gather=trainer.gather,
        transport=generation.weight_sync,
        address=os.environ["HPCGRPO_ADDRESS"],
        device=learner.device,
        bucket_bytes=generation.weight_sync_bucket_bytes,
        timeout_seconds=generation.weight_sync_timeout,
        folder=attempt.folder / ("weights" if policy == "actor" else f"weights-{policy}"),
        dtype=learner.dtype,
    )
    first = trainer.ranks.rank % len(urls)  # ranks with few requests do not all ask the same server
    return VllmGenerator(
        urls=[*urls[first:], *urls[:first]],
        secret=secret,
        sync=sync,
        decode=decode,
        stop_token_ids=ends,
        max_concurrency=generation.vllm_max_concurrency,
        request_timeout_seconds=generation.vllm_request_timeout,
        server_timeout_seconds=generation.vllm_server_timeout,
        max_staleness=trainer.setup.spare_staleness,
        stopping=attempt.urgent,
        starved=trainer.explorer.starved,
        moved=attempt.beat,
        counts=trainer.ranks.rank == 0,
    )


def await_engines(attempt: Attempt, timeout_seconds: float, policy: str = "actor") -> list[str]:
    """The urls of a policy's engines, once the launcher says that they are up. Raises Stopped when told to stop."""
    deadline = time.monotonic() + timeout_seconds
    while (server := attempt.read("server")) is None:
        if attempt.urgent():
            raise Stopped
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"no vLLM engine came up within {timeout_seconds:.0f} s (generation.vllm_server_timeout); see"
                f" engine-*.log in {attempt.folder}"
            )
        time.sleep(0.2)
    return [e["url"] for e in server["engines"] if e.get("policy", "actor") == policy]


def parity_check(
    config: RunConfig, trainer: Trainer, learner: FsdpLearner
) -> Callable[[Sequence[Any]], None] | None:
    """What the trainer asks before its first update: do generator and learner agree on the sampled tokens?"""
    generation = config.generation
    if not generation.parity_check:
        return None
    served = generation.backend == "vllm"
    default = "bfloat16" if learner.device.type == "cuda" else "float32"  # as launch.serve has it
    theirs = default if generation.vllm_dtype == "auto" else generation.vllm_dtype
    generated = parity.Generated(
        temperature=generation.temperature,
        dtype=theirs if served else None,
        fingerprints_agree=True if served else None,  # each push compares them
    )

    def check(rows: Sequence[Any]) -> None:
        parity.check(
            learner,
            rows,
            generated=generated,
            learner_dtype=str(learner.dtype),
            limit=generation.parity_threshold,
            gather=trainer.gather,
        )

    return check
