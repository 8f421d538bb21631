"""What samples for an evaluation: vLLM engines of its own with the model as it is, or the model in this process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from evaluation.config import EvaluationConfig
from evaluation.files import writing
from hpcgrpo import ports
from hpcgrpo.config_file import ConfigError
from hpcgrpo.launch import rendezvous, serve
from hpcgrpo.launch.children import block_signals
from hpcgrpo.types import Completion, Request, Sampling, Stopped

if TYPE_CHECKING:
    from torch import Tensor

ADDRESS = "127.0.0.1"
POLL_SECONDS = 0.25
ASK_SECONDS = 10.0
VERSION = 0  # an engine of an evaluation holds what it was started with

Say = Callable[[str], None]
Arrived = Callable[[int, Completion], None]


class Sampler(Protocol):
    """Gives each request's number and completion to `arrived` as it comes."""

    def stream(self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived) -> None: ...


@dataclass(frozen=True)
class Served:
    """The model as it is to be sampled."""

    model: str  # a folder or a name on the hub
    max_model_len: int  # tokens of the longest prompt and completion
    end_ids: Sequence[int]
    decode: Callable[[Sequence[int]], str]


def on_gpu(config: EvaluationConfig) -> bool:
    """Whether to sample on GPUs. Raises ConfigError where they are asked for and not there."""
    gpus = visible_gpus()
    if config.device == "cuda" and not gpus:
        raise ConfigError("device: cuda, but no GPU is visible here; set device=cpu, or ask for GPUs")
    return gpus > 0 and config.device != "cpu"


def visible_gpus() -> int:
    """GPUs that this process may use, found without torch."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = sum(1 for path in Path("/dev").glob("nvidia[0-9]*"))
    return min(there, len([x for x in named.split(",") if x.strip()])) if named is not None else there


@contextmanager
def sampler(
    config: EvaluationConfig, served: Served, *, folder: Path, stopping: Callable[[], bool], say: Say
) -> Iterator[Sampler]:
    """A sampler for the time of the block. `folder` gets the engines' logs; `stopping` is asked while they start and
    sample, and then Stopped is raised."""
    if config.backend == "transformers":
        yield in_process(config, served)
        return
    with engines(config, served, folder=folder, stopping=stopping, say=say) as found:
        yield found


def in_process(config: EvaluationConfig, served: Served) -> Sampler:
    """The model in this process."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from hpcgrpo.generation.transformers import TransformersGenerator

    logging.disable_progress_bar()  # one bar: the evaluation's own
    gpu = on_gpu(config)
    kind = ("bfloat16" if gpu else "float32") if config.dtype == "auto" else config.dtype
    model = AutoModelForCausalLM.from_pretrained(served.model, dtype=getattr(torch, kind))
    return TransformersGenerator(
        model.to("cuda" if gpu else "cpu"),
        decode=served.decode,
        eos_token_ids=served.end_ids,
        max_batch_tokens=config.max_batch_tokens or 2**16,
    )


def plan(config: EvaluationConfig, served: Served) -> serve.ServePlan:
    """What the engines are started with."""
    gpu = on_gpu(config)
    split = config.vllm_tensor_parallel_size if gpu else 1
    count = config.engines or (visible_gpus() // split if gpu else 1)
    if gpu and (count < 1 or count * split > visible_gpus()):
        raise ConfigError(
            f"engines {config.engines} of vllm_tensor_parallel_size {split}: {visible_gpus()} GPUs are visible here;"
            " lower one of them"
        )
    cache = config.vllm_kv_cache_memory_bytes
    eager = config.vllm_enforce_eager
    return serve.ServePlan(
        model=served.model,
        dtype=("bfloat16" if gpu else "float32") if config.dtype == "auto" else config.dtype,
        max_model_len=served.max_model_len,
        tensor_parallel_size=split,
        engines=count,
        gpu_memory_utilization=config.vllm_gpu_memory_utilization,
        kv_cache_memory_bytes=cache if gpu or cache else serve.CPU_CACHE_BYTES,
        enforce_eager=not gpu if eager is None else eager,
        seed=config.seed,
        device="cuda" if gpu else "cpu",
        extra_args=config.vllm_extra_args,
    )


@contextmanager
def engines(
    config: EvaluationConfig, served: Served, *, folder: Path, stopping: Callable[[], bool], say: Say
) -> Iterator[Sampler]:
    """vLLM engines on this machine and their client; they end with the block, however it ends."""
    from hpcgrpo.generation.vllm import VllmGenerator

    planned = plan(config, served)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        secret = rendezvous.run_secret(folder, create=True)
    held = ports.take(planned.engines, str(folder), ADDRESS)
    keeper = _Keeper(
        partial(
            serve.Engines,
            planned,
            address=ADDRESS,
            ports=[h.port for h in held],
            secret_file=rendezvous.secret_file(folder),
            log_folder=folder,
            timeout_seconds=config.vllm_server_timeout,
        )
    )
    try:
        keeper.start()
        say(f"starting {planned.engines} vLLM engine{'s' * (planned.engines > 1)}; logs in {folder}")
        began = time.monotonic()
        keeper.wait(stopping)
        say(f"engines ready after {time.monotonic() - began:.0f} s")
        client = VllmGenerator(
            urls=keeper.urls,
            secret=secret,
            sync=_AsStarted(keeper.urls, secret),
            decode=served.decode,
            stop_token_ids=served.end_ids,
            max_concurrency=config.vllm_max_concurrency,
            request_timeout_seconds=config.vllm_request_timeout,
            server_timeout_seconds=config.vllm_server_timeout,
            max_staleness=0,
            stopping=lambda: keeper.error is not None or stopping(),
            starved=lambda: client.update_weights(_nothing, VERSION),
            moved=lambda: None,
        )
        client.update_weights(_nothing, VERSION)
        yield _Watched(client, keeper)
    finally:
        keeper.end()
        for port in held:
            port.close()


def _nothing() -> Iterable[tuple[str, Tensor]]:
    return ()


@dataclass(frozen=True)
class _AsStarted:
    """Tells every engine that answers that the weights of its start are the ones to sample from."""

    urls: Sequence[str]
    secret: str

    def push(self, tensors: Callable[[], Iterable[tuple[str, Tensor]]], version: int) -> list[str]:
        return [url for url in self.urls if self._told(url, version)]

    def _told(self, url: str, version: int) -> bool:
        headers = {"Authorization": f"Bearer {self.secret}"}
        with suppress(httpx.HTTPError), httpx.Client(trust_env=False, timeout=ASK_SECONDS) as client:
            answer = client.post(f"{url}/hpcgrpo/version", json={"version": version}, headers=headers)
            return answer.status_code == 200
        return False


@dataclass
class _Watched:
    """The client, with the engines' own error where that is why it stopped."""

    client: Any
    keeper: _Keeper

    def stream(self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived) -> None:
        try:
            self.client.stream(requests, sampling, arrived)
        except (Stopped, RuntimeError):
            self.keeper.check()
            raise


@dataclass
class _Keeper:
    """A thread that starts the engines, looks after them and ends them: they die with the thread that started them."""

    make: Callable[[], serve.Engines]
    error: BaseException | None = None
    urls: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        block_signals()  # Slurm sends its warnings to every process of a step: the servers inherit the block
        found = None
        try:
            found = self.make()
            found.start()
            while not self.over.wait(POLL_SECONDS):
                found.poll()
                if found.ready and not self.ready.is_set():
                    self.urls = found.urls
                    self.ready.set()
        except BaseException as error:
            self.error = error
        finally:
            if found is not None:
                found.stop()

    def wait(self, stopping: Callable[[], bool]) -> None:
        """Until all engines are up. Raises what stopped them, or Stopped."""
        while not self.ready.wait(POLL_SECONDS):
            self.check()
            if stopping():
                raise Stopped

    def check(self) -> None:
        """Raises EngineError, or whatever else ended the thread."""
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """Ends the engines and waits for the thread."""
        self.over.set()
        if self.thread is not None:
            self.thread.join()
