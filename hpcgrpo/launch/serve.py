"""A serve node's engines: which vLLM servers it starts and how, and their health while the run goes on.

`gpus / tensor_parallel_size` independent engines, since data parallelism inside one fails for dense models.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hpcgrpo.arithmetic import arithmetic
from hpcgrpo.sections import RunConfig

SERVED_NAME = "policy"
CPU_CACHE_BYTES = 2**28
PROBE_SECONDS = 0.5
HUNG_SECONDS = 120.0  # without an answer from an engine that was up
MAX_RESTARTS = 5
MAX_FIRST_STARTS = 2  # of an engine that has never been up: what stops it will hardly pass
RESTART_WINDOW_SECONDS = 600.0
LONGEST_BACKOFF_SECONDS = 60.0

State = Literal["STARTING", "READY", "DEAD"]


class EngineError(RuntimeError):
    """An engine does not come up, or dies again and again: names it, its log and its last lines."""


@dataclass(frozen=True)
class ServePlan:
    """What every engine of one policy is started with on a serve node."""

    model: str
    dtype: str
    max_model_len: int  # tokens
    tensor_parallel_size: int
    engines: int  # of one node
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    enforce_eager: bool
    seed: int
    device: Literal["cpu", "cuda"]
    extra_args: tuple[str, ...] = ()
    policy: Literal["actor", "peer"] = "actor"
    first_gpu: int = 0  # of the node's, the first that these engines take


def plans(config: RunConfig) -> list[ServePlan]:
    """What a serve node starts: the actor's engines, and the peer's where that samples too."""
    actor = plan(config)
    if config.peer is None or not config.peer_samples:
        return [actor]
    split = config.peer.vllm_tensor_parallel_size or config.generation.vllm_tensor_parallel_size
    peer = replace(
        actor,
        policy="peer",
        model=config.peer.model_name_or_path,
        tensor_parallel_size=split if actor.device == "cuda" else 1,
        engines=config.peer.vllm_engines if actor.device == "cuda" else 1,
        first_gpu=actor.engines * actor.tensor_parallel_size if actor.device == "cuda" else 0,
    )
    return [actor, peer]


def plan(config: RunConfig) -> ServePlan:
    """What follows for the actor's engines from a configuration."""
    generation, cluster = config.generation, config.cluster
    cuda = config.device == "cuda" or (config.device == "auto" and cluster.gpus_per_node > 0)
    size = generation.vllm_tensor_parallel_size if cuda else 1
    gpus = (cluster.gpus_per_node or 1) - (config.peer_gpus if cuda else 0)
    assert not cuda or gpus % size == 0  # checked where the configuration is read
    dtype = generation.vllm_dtype
    eager = generation.vllm_enforce_eager
    cache = generation.vllm_kv_cache_memory_bytes
    return ServePlan(
        model=config.model_name_or_path,
        dtype=("bfloat16" if cuda else "float32") if dtype == "auto" else dtype,
        max_model_len=arithmetic(config, config.build_algorithm(), None).max_model_length,
        tensor_parallel_size=size,
        engines=gpus // size if cuda else 1,
        gpu_memory_utilization=generation.vllm_gpu_memory_utilization,
        kv_cache_memory_bytes=cache if cuda or cache else CPU_CACHE_BYTES,
        enforce_eager=not cuda if eager is None else eager,
        seed=config.seed,
        device="cuda" if cuda else "cpu",
        extra_args=generation.vllm_extra_args,
    )


def command(plan: ServePlan, index: int, host: str, port: int) -> list[str]:
    """The command line of one engine."""
    words = [sys.executable, "-u", "-m", "hpcgrpo.generation.vllm_extension"]
    words += ["--model", plan.model, "--served-model-name", SERVED_NAME]
    words += ["--host", host, "--port", str(port)]
    words += ["--dtype", plan.dtype, "--max-model-len", str(plan.max_model_len)]
    words += ["--seed", str(plan.seed + index), "--tensor-parallel-size", str(plan.tensor_parallel_size)]
    words += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    words += ["--middleware", "hpcgrpo.generation.gate.Gate", "--disable-uvicorn-access-log"]
    words += ["--worker-extension-cls", "hpcgrpo.generation.vllm_extension.Extension"]
    if (
        plan.device == "cpu"
    ):  # its random generators cannot step back, as a seeded prompt read in pieces needs
        words += [
            "--no-enable-chunked-prefill",
            "--max-num-batched-tokens",
            str(max(8192, plan.max_model_len)),
        ]
    if plan.kv_cache_memory_bytes is not None:
        words += ["--kv-cache-memory-bytes", str(plan.kv_cache_memory_bytes)]
    else:
        words += ["--gpu-memory-utilization", str(plan.gpu_memory_utilization)]
    return [*words, *(["--enforce-eager"] if plan.enforce_eager else []), *plan.extra_args]


def environment(plan: ServePlan, index: int, secret_file: Path, visible: str | None = None) -> dict[str, str]:
    """What one engine's environment has beyond this process's; `visible` is CUDA_VISIBLE_DEVICES here."""
    own = {"HPCGRPO_SECRET_FILE": str(secret_file), "HPCGRPO_PARENT_PID": str(os.getpid())}
    if Path(plan.model).is_dir():
        own["HF_HUB_OFFLINE"] = "1"
    if plan.device == "cuda":
        size, first = plan.tensor_parallel_size, plan.first_gpu + index * plan.tensor_parallel_size
        here = visible.split(",") if visible else [str(i) for i in range(first + size)]
        own["CUDA_VISIBLE_DEVICES"] = ",".join(here[first : first + size])
    return own


@dataclass
class Engine:
    """One server process and what is known of it."""

    index: int
    url: str
    log: Path
    state: State = "DEAD"
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0  # monotonic, as the others
    probed: float = 0.0
    answered: float = 0.0
    starts: int = 0
    restart_at: float = 0.0
    fell: deque[float] = field(default_factory=deque)
    tokens: float = 0.0  # of its present start
    tokens_before: float = 0.0


class Engines:
    """The engines of this node. Call everything from one thread that lives as long as they shall: they die with it."""

    def __init__(
        self,
        plan: ServePlan,
        *,
        address: str,
        ports: Sequence[int],
        secret_file: Path,
        log_folder: Path,
        timeout_seconds: float,
    ) -> None:
        """One engine per port. `timeout_seconds` is what a start may take; logs are `log_folder/engine-<i>.log`, of
        the peer `engine-peer-<i>.log`."""
        assert len(ports) == plan.engines
        self.plan, self.address, self.secret_file = plan, address, secret_file
        self.timeout_seconds = timeout_seconds
        self.secret = secret_file.read_text().strip()
        self.engines = [
            Engine(i, f"http://{address}:{port}", log_folder / f"{self.name}-{i}.log")
            for i, port in enumerate(ports)
        ]
        self._ready_once: set[int] = set()

    @property
    def name(self) -> str:
        """What these engines are called in logs."""
        return "engine" if self.plan.policy == "actor" else "engine-peer"

    @property
    def urls(self) -> list[str]:
        """Of every engine, up or not; they stay the same over restarts."""
        return [engine.url for engine in self.engines]

    @property
    def ready(self) -> bool:
        """Whether every engine has been up at least once."""
        return len(self._ready_once) == len(self.engines)

    def describe(self) -> list[dict[str, Any]]:
        """One line per engine, for status files."""
        return [
            {
                "index": e.index,
                "url": e.url,
                "state": "RESTARTING" if e.state == "STARTING" and e.starts > 1 else e.state,
                "pid": e.process.pid if e.process else None,
                "starts": e.starts,
                "log": str(e.log),
            }
            for e in self.engines
        ]

    def start(self) -> None:
        """Start every engine, without waiting for it. Raises OSError for a log that cannot be written."""
        for engine in self.engines:
            self._start(engine)

    def poll(self) -> None:
        """See who died, who came up and who hangs; restart what is due. Call it every half second or so.

        Raises EngineError for an engine that does not come up in time, that falls twice before it was ever up, or
        that falls a sixth time within ten minutes.
        """
        for engine in self.engines:
            if engine.state == "DEAD":
                if time.monotonic() >= engine.restart_at:
                    self._start(engine)
            elif (code := _ended(engine)) is not None:
                self._fell(engine, f"ended with {code}")
            elif time.monotonic() - engine.probed >= PROBE_SECONDS:
                self._probe(engine)

    def tokens_generated(self) -> float | None:
        """Tokens sampled by all engines since the start, restarts included; None where none answers now.

        It only ever grows: what counts is that it moves.
        """
        answers = [self._count(engine) for engine in self.engines if engine.state == "READY"]
        total = sum(engine.tokens + engine.tokens_before for engine in self.engines)
        return total if any(answers) else None

    def stop(self) -> None:
        """Kill every engine with all its processes, at once."""
        for engine in self.engines:
            _signal(engine)
        for engine in self.engines:
            _kill(engine)
            engine.state, engine.restart_at = "DEAD", float("inf")

    def _start(self, engine: Engine) -> None:
        port = int(engine.url.rpartition(":")[2])
        own = environment(self.plan, engine.index, self.secret_file, os.environ.get("CUDA_VISIBLE_DEVICES"))
        engine.log.parent.mkdir(parents=True, exist_ok=True)
        with engine.log.open("ab") as log:
            engine.process = subprocess.Popen(
                command(self.plan, engine.index, self.address, port),
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        engine.state, engine.started = "STARTING", time.monotonic()
        engine.starts += 1

    def _probe(self, engine: Engine) -> None:
        healthy = _get(f"{engine.url}/health", PROBE_SECONDS) is not None
        engine.probed = time.monotonic()
        engine.answered = engine.probed if healthy else engine.answered
        if engine.state == "STARTING":
            if healthy:
                engine.state = "READY"
                self._ready_once.add(engine.index)
            elif engine.probed - engine.started > self.timeout_seconds:
                why = f"was not up within {self.timeout_seconds:g} s (generation.vllm_server_timeout)"
                _kill(engine)
                raise EngineError(_told(engine, why))
        elif engine.probed - engine.answered > HUNG_SECONDS:
            self._fell(engine, f"has not answered /health for {HUNG_SECONDS:g} s")

    def _fell(self, engine: Engine, why: str) -> None:
        """Kill what is left and set the time of the next start: 1, 2, 4, ... 60 s from now."""
        _kill(engine)
        now = time.monotonic()
        engine.state, engine.tokens_before, engine.tokens = "DEAD", engine.tokens_before + engine.tokens, 0.0
        engine.fell.append(now)
        while engine.fell[0] < now - RESTART_WINDOW_SECONDS:
            engine.fell.popleft()
        never = engine.index not in self._ready_once and engine.starts >= MAX_FIRST_STARTS
        if never or len(engine.fell) > MAX_RESTARTS:
            raise EngineError(_told(engine, f"{why}, after {engine.starts} starts"))
        engine.restart_at = now + min(2.0 ** (len(engine.fell) - 1), LONGEST_BACKOFF_SECONDS)

    def _count(self, engine: Engine) -> bool:
        text = _get(f"{engine.url}/metrics", PROBE_SECONDS, {"Authorization": f"Bearer {self.secret}"})
        if text is None:
            return False
        found = re.findall(r"^vllm:generation_tokens_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
        engine.tokens = max(engine.tokens, sum(map(float, found)))
        return True


def _get(url: str, timeout_seconds: float, headers: Mapping[str, str] | None = None) -> str | None:
    """The text at a URL, past any proxy; None where it is not there."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(
            urllib.request.Request(url, headers=dict(headers or {})), timeout=timeout_seconds
        ) as answer:
            return str(answer.read().decode(errors="replace"))
    except (OSError, urllib.error.URLError, ValueError):
        return None


def _ended(engine: Engine) -> str | None:
    """How the server ended, None while it runs; without reaping it, so that its group's number stays its own."""
    assert engine.process is not None
    ended = os.waitid(os.P_PID, engine.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return (
        f"code {ended.si_status}" if ended.si_code == os.CLD_EXITED else signal.Signals(ended.si_status).name
    )


def _signal(engine: Engine) -> None:
    """SIGKILL to an engine's process group."""
    if engine.process is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(engine.process.pid, signal.SIGKILL)


def _kill(engine: Engine) -> None:
    _signal(engine)
    if engine.process is not None:
        with suppress(subprocess.TimeoutExpired):
            engine.process.wait(timeout=2)
        engine.process = None


def _told(engine: Engine, why: str) -> str:
    lines = last_errors(engine.log)
    return f"engine {engine.index} ({engine.url}) {why}; its log is {engine.log}" + "".join(
        f"\n  {x}" for x in lines
    )


def last_errors(log: Path, count: int = 5) -> list[str]:
    """The lines of a log's end that look like errors, else its last lines."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2**16))
            lines = [x.strip() for x in file.read().decode(errors="replace").splitlines() if x.strip()]
    except OSError:
        return []
    errors = [x for x in lines if re.search(r"\w*(Error|Exception|Killed|error):", x) or "out of memory" in x]
    return [x[:300] for x in (errors or lines)[-count:]]
