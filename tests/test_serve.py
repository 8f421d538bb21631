"""What a serve node starts, and that its engines come back, end whole and let nobody in."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm_server import Server, engine

from hpcgrpo import config, ports
from hpcgrpo.launch import serve

__all__ = ["engine"]
PROGRAM = Path(__file__).parent / "programs" / "stand_in_server.py"


def run_config(folder: Path, **keys: str) -> Any:
    file = folder / "run.yaml"
    file.write_text(
        """
name: run
model_name_or_path: some/model
algorithm: {name: igrpo, drafts: 2, base: {name: grpo, num_generations: 4}}
rewards: {accuracy: 1.0}
data: {preset: chain, options: {digits: 4}}
cluster: {nodes: 2, vllm_nodes: 1}
generation: {backend: vllm, max_prompt_length: 100, max_completion_length: 50}
train: {train_batch_size: 8}
"""
    )
    return config.load(file, [f"{key}={value}" for key, value in keys.items()])


def gpu_keys(gpus: int, size: int) -> dict[str, str]:
    return {
        "cluster.gpus_per_node": str(gpus),
        "train.train_batch_size": "32",
        "generation.vllm_tensor_parallel_size": str(size),
    }


def test_a_node_runs_as_many_engines_as_its_gpus_make(tmp_path: Path) -> None:
    for gpus, size, engines in ((8, 1, 8), (8, 4, 2), (4, 2, 2)):
        plan = serve.plan(run_config(tmp_path, **gpu_keys(gpus, size)))
        assert (plan.engines, plan.tensor_parallel_size, plan.device) == (engines, size, "cuda")
        assert (plan.dtype, plan.enforce_eager, plan.kv_cache_memory_bytes) == ("bfloat16", False, None)
        # The second prompt: question 100 + draft 50 + 64 for the template; then 50 tokens of completion.
        assert plan.max_model_len == 264


def test_a_cpu_runs_one_engine_in_float32(tmp_path: Path) -> None:
    plan = serve.plan(run_config(tmp_path))
    assert (plan.engines, plan.dtype, plan.enforce_eager, plan.device) == (1, "float32", True, "cpu")
    assert plan.kv_cache_memory_bytes == 2**28
    changed = serve.plan(run_config(tmp_path, **{"generation.vllm_dtype": "bfloat16", "seed": "7"}))
    assert (changed.dtype, changed.seed) == ("bfloat16", 7)


def test_the_command_line_says_it_all(tmp_path: Path) -> None:
    keys = {**gpu_keys(8, 2), "generation.vllm_extra_args": "[--max-num-seqs,'64']", "seed": "5"}
    words = serve.command(serve.plan(run_config(tmp_path, **keys)), 3, "10.0.0.4", 21003)
    assert words[:4] == [sys.executable, "-u", "-m", "hpcgrpo.generation.vllm_extension"]
    assert words[-2:] == ["--max-num-seqs", "64"]
    options = dict(itertools.pairwise(words))
    for name, value in {
        "--model": "some/model",
        "--served-model-name": "policy",
        "--host": "10.0.0.4",
        "--port": "21003",
        "--dtype": "bfloat16",
        "--max-model-len": "264",
        "--seed": "8",
        "--tensor-parallel-size": "2",
        "--logprobs-mode": "processed_logprobs",
        "--gpu-memory-utilization": "0.85",
        "--middleware": "hpcgrpo.generation.gate.Gate",
    }.items():
        assert options[name] == value
    assert "--enforce-eager" not in words


def test_every_engine_sees_its_own_gpus_and_the_secret_is_no_argument(tmp_path: Path) -> None:
    plan = serve.plan(run_config(tmp_path, **gpu_keys(8, 2)))
    secret = tmp_path / "secret"
    assert serve.environment(plan, 1, secret)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert serve.environment(plan, 1, secret, "4,5,6,7")["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert serve.environment(plan, 0, secret)["HPCGRPO_SECRET_FILE"] == str(secret)
    assert "CUDA_VISIBLE_DEVICES" not in serve.environment(serve.plan(run_config(tmp_path)), 0, secret)


def test_a_policy_that_writes_hints_has_engines_and_gpus_of_its_own(tmp_path: Path) -> None:
    """8 GPUs: 2 engines of 2 for the peer, so 4 engines of 1 for the actor, on the first four."""
    two = {
        **gpu_keys(8, 1),
        "algorithm": "{name: codistill, num_rollouts: 8, num_train: 4, hint_tokens: 5}",
        "peer": "{model_name_or_path: large/model, vllm_engines: 2, vllm_tensor_parallel_size: 2}",
    }
    actor, peer = serve.plans(run_config(tmp_path, **two))
    assert (actor.model, actor.engines, actor.tensor_parallel_size) == ("some/model", 4, 1)
    assert (peer.model, peer.engines, peer.tensor_parallel_size) == ("large/model", 2, 2)
    seen = [
        serve.environment(p, i, tmp_path)["CUDA_VISIBLE_DEVICES"]
        for p in (actor, peer)
        for i in range(p.engines)
    ]
    assert seen == ["0", "1", "2", "3", "4,5", "6,7"]
    without = two | {"algorithm": "{name: codistill, num_rollouts: 8, num_train: 4}"}
    assert [plan.engines for plan in serve.plans(run_config(tmp_path, **without))] == [8]
    with pytest.raises(
        ValueError, match=r"peer.vllm_engines: .* take 8 of a serve node's 8 GPUs, which leaves 0"
    ):
        run_config(tmp_path, **two, **{"peer.vllm_engines": "4"})


Start = Callable[..., serve.Engines]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Engines whose program is the stand-in; the supervision is the real one."""
    started: list[Any] = []
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    plan = serve.plan(run_config(tmp_path))

    def start(what: str, timeout_seconds: float = 60.0) -> serve.Engines:
        def command(plan: Any, index: int, host: str, port: int) -> list[str]:
            return [sys.executable, str(PROGRAM), str(port), what, str(tmp_path / "pids")]

        monkeypatch.setattr(serve, "command", command)
        (held,) = ports.take(1, str(tmp_path), "127.0.0.1")
        engines = serve.Engines(
            plan,
            address="127.0.0.1",
            ports=[held.port],
            secret_file=secret,
            log_folder=tmp_path,
            timeout_seconds=timeout_seconds,
        )
        started.extend((engines, held))
        engines.start()
        return engines

    yield start
    for one in started:
        one.stop() if isinstance(one, serve.Engines) else one.close()


def poll_until(engines: serve.Engines, true: Callable[[], bool], seconds: float = 60.0) -> None:
    def polled() -> bool:
        engines.poll()
        return true()

    wait_until(polled, seconds)


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_engine_is_started_counted_and_ended_with_all_it_started(stand_in: Start, tmp_path: Path) -> None:
    engines = stand_in("serve")
    assert engines.describe()[0]["state"] == "STARTING"
    assert engines.tokens_generated() is None
    poll_until(engines, lambda: engines.ready)
    assert engines.describe()[0]["state"] == "READY"
    wait_until(lambda: engines.tokens_generated() == 40.0)  # None where the answer takes half a second
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert all(map(lives, pids))
    began = time.monotonic()
    engines.stop()
    assert time.monotonic() - began < 20
    wait_until(lambda: not any(map(lives, pids)))


def test_an_engine_that_dies_comes_back_ever_later_and_is_given_up_in_the_end(
    stand_in: Start, tmp_path: Path
) -> None:
    engines = stand_in("serve")
    one = engines.engines[0]
    waits = []
    with pytest.raises(
        serve.EngineError, match=r"engine 0 \(http://127.0.0.1:\d+\) ended with code 7, after 6 starts"
    ):
        for fall in range(1, 7):
            poll_until(engines, lambda: one.state == "READY")
            assert one.process is not None
            os.kill(one.process.pid, signal.SIGUSR1)
            poll_until(engines, lambda count=fall: len(one.fell) == count)  # type: ignore[misc]
            waits.append(one.restart_at - one.fell[-1])
            assert engines.describe()[0]["state"] == "DEAD"
            one.restart_at = 0.0
    assert waits == pytest.approx([1, 2, 4, 8, 16])
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 12
    wait_until(lambda: not any(map(lives, pids)))


def test_tokens_only_grow_over_a_restart(stand_in: Start) -> None:
    engines = stand_in("serve")
    poll_until(engines, lambda: engines.ready)
    wait_until(lambda: engines.tokens_generated() == 40.0)
    one = engines.engines[0]
    assert one.process is not None
    os.kill(one.process.pid, signal.SIGKILL)
    poll_until(engines, lambda: one.state == "DEAD")
    assert engines.ready
    poll_until(engines, lambda: one.state == "STARTING")
    assert engines.describe()[0]["state"] == "RESTARTING"
    poll_until(engines, lambda: one.state == "READY")
    wait_until(lambda: engines.tokens_generated() == 80.0)


def test_what_never_comes_up_is_given_up_with_its_reason(stand_in: Start, tmp_path: Path) -> None:
    engines = stand_in("fail")
    with pytest.raises(serve.EngineError) as caught:
        poll_until(engines, lambda: engines.ready)
    assert "ended with code 1, after 2 starts" in str(caught.value)
    assert str(tmp_path / "engine-0.log") in str(caught.value)
    assert "ValueError: the weights are damaged" in str(caught.value)
    assert not engines.ready


def test_a_start_that_takes_too_long_is_an_error(stand_in: Start) -> None:
    engines = stand_in("silent", timeout_seconds=1.5)
    began = time.monotonic()
    with pytest.raises(serve.EngineError, match=r"not up within 1.5 s \(generation.vllm_server_timeout\)"):
        poll_until(engines, lambda: engines.ready)
    assert time.monotonic() - began < 30


PARENT = """
import os, subprocess, sys, time
child = "import os, time; from hpcgrpo.generation import vllm_extension as x; x.end_with(int(os.environ['P'])); "
child += "print('bound', os.getpid(), flush=True); time.sleep(300)"
subprocess.Popen([sys.executable, "-c", child], env=os.environ | {"P": sys.argv[1] or str(os.getpid())})
time.sleep(300)
"""


def test_an_engine_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, ""], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline().split()[1])
    assert lives(pid)
    parent.kill()
    parent.wait()
    wait_until(lambda: not lives(pid))


def test_an_engine_whose_parent_died_before_it_looked_ends() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, "1"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    try:
        wait_until(lambda: bool(children.read_text().split()))
        pid = int(children.read_text().split()[0])
        wait_until(lambda: not lives(pid))
    finally:
        parent.kill()
        parent.communicate()


@pytest.mark.slow
def test_a_stranger_gets_401_on_every_path_of_the_engine(engine: Server) -> None:
    with httpx.Client(base_url=engine.url, timeout=60) as client:
        routes = client.get("/openapi.json", headers=engine.headers).json()["paths"]
        asked = [(method.upper(), path) for path, methods in routes.items() for method in methods]
        assert len(asked) > 20
        assert ("POST", "/collective_rpc") in asked
        asked += [("GET", path) for path in ("/metrics", "/docs", "/redoc", "/openapi.json", "/", "/none")]
        asked += [
            ("POST", "/health"),
            ("GET", "/hpcgrpo/state"),
            ("POST", "/hpcgrpo/version"),
            ("TRACE", "/"),
        ]
        for method, path in asked:
            if (method, path) == ("GET", "/health"):
                continue
            for headers in ({}, {"Authorization": f"Bearer {'0' * len(engine.secret)}"}):
                answer = client.request(method, path, headers=headers, json={} if method == "POST" else None)
                assert answer.status_code == 401, (method, path, answer.status_code)
        assert client.get("/health").status_code == 200
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
                   "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}  # fmt: skip
        for path in ("/v1/realtime", "/health"):
            for headers in (upgrade, upgrade | engine.headers):
                assert client.get(path, headers=headers).status_code in (401, 403)


@pytest.mark.slow
def test_the_secret_is_on_no_command_line_and_in_no_log(engine: Server) -> None:
    one = engine.engines.engines[0]
    assert one.process is not None
    assert engine.secret not in Path(f"/proc/{one.process.pid}/cmdline").read_text()
    assert engine.secret not in one.log.read_text(errors="replace")
