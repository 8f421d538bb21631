"""Weights reach the engine: the stream itself between plain processes, then pushes to a real vLLM."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import stream_end
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from vllm_server import Server, engine, serving

from hpcgrpo import tiny
from hpcgrpo.generation import broadcast, transports
from hpcgrpo.generation.weights import WeightSync, WeightSyncError, difference

__all__ = ["engine"]
Engine = subprocess.Popen[str]
PROGRAMS = Path(__file__).parent / "programs"
PROMPTS = torch.randint(3, 90, (6, 20), generator=torch.Generator().manual_seed(3))


class Stream:
    """A sender here and receivers in processes of their own."""

    def __init__(self, receivers: int, *, timeout_seconds: float = 60.0, fault: str = "") -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(["hpcgrpo.generation.broadcast"])  # torch is imported once for all
        lines = [forks.Pipe() for _ in range(receivers)]
        self.lines = [here for here, _ in lines]
        common = {"world_size": receivers + 1, "port": self.port, "timeout_seconds": timeout_seconds}
        self.receivers = [
            forks.Process(
                target=stream_end.run,
                kwargs={"rank": i + 1, "line": there, "fault": "" if i else fault} | common,
            )
            for i, (_, there) in enumerate(lines)
        ]
        for process, line in zip(self.receivers, self.lines, strict=True):
            process.start()
            assert line.recv() == "ready"
        self.group = stream_end.group(0, listener=listener, **common)

    def send(self, *tensors: tuple[str, Tensor]) -> None:
        broadcast.send(self.group, tensors, lambda: None)

    def output(self, rank: int) -> Any:
        """What a receiver got, or the error that it ended with."""
        line = self.lines[rank - 1]
        assert line.poll(120)
        return line.recv()

    def end(self) -> None:
        for process in self.receivers:
            process.kill()
            process.join()


def wait_until(met: Callable[[], bool]) -> None:
    """For a minute at most."""
    end = time.monotonic() + 60
    while not met():
        assert time.monotonic() < end
        time.sleep(0.05)


def tensors() -> list[tuple[str, Tensor]]:
    seeded = torch.Generator().manual_seed(0)
    return [
        ("one", torch.randn(3, 5, generator=seeded)),
        ("brain", torch.randn(7, generator=seeded).bfloat16()),
        ("large", torch.randn(600, 700, generator=seeded)),
        ("scalar", torch.tensor(2.5)),
        ("odd", torch.arange(3, dtype=torch.uint8)),
        ("turned", torch.randn(600, 700, generator=seeded).t()),
        ("empty", torch.empty(0, 4)),
        ("half", torch.randn(5, 3, generator=seeded).half()),
    ]


def test_what_is_sent_arrives_in_order_with_type_shape_and_values() -> None:
    sent = tensors()
    stream = Stream(2)
    try:
        stream.send(*sent[:6])
        stream.send(*sent[6:7])
        stream.send(*sent[7:])
        stream.send()
        expected = [(name, broadcast.fingerprint(tensor)) for name, tensor in sent]
        assert [stream.output(1), stream.output(2)] == [expected, expected]
    finally:
        stream.end()


def test_the_store_listens_on_the_named_address_alone() -> None:
    stream = Stream(1)
    try:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        rows += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
        at = {row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{stream.port:04X}")}
        assert at == {f"0100007F:{stream.port:04X}"}
    finally:
        stream.end()


def test_receivers_hear_at_once_that_the_sender_calls_it_off_or_dies() -> None:
    for fault in ("abort", "close"):
        stream = Stream(2)
        try:
            stream.send(*tensors()[:2])
            began = time.monotonic()
            if fault == "abort":
                stream.group.abort()
            else:
                stream.group.close()
            for rank in (1, 2):
                assert isinstance(stream.output(rank), broadcast.StreamError)
            assert time.monotonic() - began < 30
        finally:
            stream.end()


def test_a_receiver_that_dies_or_stops_ends_the_stream_in_time() -> None:
    for fault, timeout_seconds, seconds in (("die", 60.0, 30.0), ("stop", 4.0, 30.0)):
        stream = Stream(2, timeout_seconds=timeout_seconds, fault=fault)
        try:
            began = time.monotonic()
            with pytest.raises(broadcast.StreamError):
                while True:
                    stream.send(*tensors()[:3])
            assert time.monotonic() - began < seconds
            stream.group.abort()
            stream.group.close()
            assert time.monotonic() - began < seconds
            assert isinstance(stream.output(2), broadcast.StreamError)
        finally:
            stream.end()


def test_ends_that_do_not_meet_say_where() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with pytest.raises(broadcast.StreamError, match=f"did not meet at 127.0.0.1:{port}"):
        stream_end.group(0, port=port, world_size=2, timeout_seconds=1.0, listener=listener)


def test_a_fingerprint_tells_values_type_and_shape_apart() -> None:
    small, large = torch.arange(12.0), torch.arange(1_000_000.0)
    base = [broadcast.fingerprint(t) for t in (small, large)]
    assert base == [broadcast.fingerprint(t.clone()) for t in (small, large)]
    others = [small.view(3, 4), small.double(), small.flip(0), large.view(1000, 1000), large.roll(1)]
    for place in (0, -1):
        for tensor in (small, large):
            changed = tensor.clone()
            changed[place] += 1
            others.append(changed)
    assert len({*base, *(broadcast.fingerprint(t) for t in others)}) == 2 + len(others)


def test_making_ahead_keeps_the_order_and_ends_with_its_user() -> None:
    assert list(broadcast.ahead(range(100))) == list(range(100))

    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("the second")

    items = broadcast.ahead(failing())
    assert next(items) == 1
    with pytest.raises(ValueError, match="the second"):
        next(items)

    made: list[int] = []
    items = broadcast.ahead((made.append(i) or i for i in range(1000)), count=2)
    next(items)
    items.close()  # type: ignore[attr-defined]
    wait_until(lambda: all(thread.name != "weights ahead" for thread in threading.enumerate()))
    assert len(made) < 10


def test_a_difference_names_the_tensor() -> None:
    sent = {"a": "1", "b": "2"}
    assert difference(sent, [{"received": sent, "loaded": {"a": "1"}}] * 2) == ""
    assert "b: other bytes" in difference(sent, [{"received": {"a": "1"}, "loaded": {}}])
    assert "c: other bytes" in difference(sent, [{"received": {**sent, "c": "3"}, "loaded": {}}])
    assert "b: the model does not hold" in difference(sent, [{"received": sent, "loaded": {"b": "3"}}])


@pytest.fixture
def receiving(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts engines without a model; `urls_of` tells where they are."""
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    processes: list[Engine] = []

    def start(*fault: str) -> Engine:
        program = [sys.executable, str(PROGRAMS / "receiving_engine.py"), str(secret), *fault]
        processes.append(subprocess.Popen(program, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def urls_of(*engines: Engine) -> list[str]:
    """Once they listen."""
    return [f"http://127.0.0.1:{int(one.stdout.readline())}" for one in engines]  # type: ignore[union-attr]


def version_of(url: str) -> int | None:
    state = httpx.get(url, headers={"Authorization": "Bearer s3cret"}, timeout=60).json()
    return None if state["version"] is None else int(state["version"])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["die", "stop"])
def test_an_engine_lost_on_the_way_is_left_out_and_the_others_get_the_whole_push_again(
    receiving: Callable[..., Engine], tmp_path: Path, fault: str
) -> None:
    """One that hangs is noticed after a third of the time for a push, one that died long before."""
    timeout_seconds, longest = {"die": (180.0, 50), "stop": (45.0, 60)}[fault]
    urls = urls_of(receiving(), receiving(fault, "3"), receiving())
    rounds: list[list[str]] = []

    def pushed() -> Iterator[tuple[str, Tensor]]:
        rounds.append([])
        for i in range(8):
            rounds[-1].append(f"w{i}")
            yield f"w{i}", torch.full((1000,), float(i))

    sync = WeightSync(
        urls, secret="s3cret", rank=0, gather=lambda value: [value], transport="process_group",
        address="127.0.0.1", device=torch.device("cpu"), bucket_bytes=1, timeout_seconds=timeout_seconds,
        folder=tmp_path, dtype=torch.float32,
    )  # fmt: skip
    began = time.monotonic()
    assert sync.push(pushed, 3) == [urls[0], urls[2]]
    assert time.monotonic() - began < longest
    assert [version_of(url) for url in (urls[0], urls[2])] == [3, 3]
    assert rounds == [[f"w{i}" for i in range(8)]] * 2  # the broken round too: other ranks gather to its end
    assert sync.push(pushed, 4) == [urls[0], urls[2]]
    assert len(rounds) == 3
    sync.close()


def changed(folder: Path, seed: int) -> nn.Module:
    """The model in a folder with other weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def expected(model: Any, tokens: int = 16) -> list[list[int]]:
    mask = torch.ones_like(PROMPTS)
    ids = model.generate(
        PROMPTS, attention_mask=mask, do_sample=False, max_new_tokens=tokens, eos_token_id=None
    )
    return ids[:, PROMPTS.shape[1] :].tolist()


def answers(server: Server, version: int) -> list[list[int]]:
    answer = server.complete(PROMPTS.tolist(), version)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Weights-Version"] == str(version)
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter.detach()) for name, parameter in model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["process_group", "filesystem"])
def test_greedy_answers_are_the_pushed_weights_after_each_push(
    engine: Server, tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = broadcast.send

    def send(group: Any, bucket: Any, watch: Any) -> None:
        sizes.append(sum(t.nbytes for _, t in bucket))
        real(group, bucket, watch)

    monkeypatch.setattr(broadcast, "send", send)
    sync = engine.sync(tmp_path / "weights", transport, bucket_bytes=300_000)
    seen = []
    for version in range(3):
        model = changed(engine.model, version)
        assert sync.push(lambda model=model: named(model), version) == [engine.url]  # type: ignore[misc]
        assert engine.state()["version"] == version
        seen.append(answers(engine, version))
        assert seen[-1] == expected(model)
    assert len({str(s) for s in seen}) == 3
    assert engine.complete(PROMPTS.tolist(), 3).status_code == 409
    sync.close()
    if transport == "process_group":
        largest = max(p.nbytes for p in model.parameters())
        assert len(sizes) > 6
        assert max(sizes) <= max(300_000, largest)
    else:
        assert [p.name for p in (tmp_path / "weights").iterdir()] == ["version-2"]


@pytest.mark.slow
def test_other_bytes_are_noticed_and_the_engine_stays_stale(
    engine: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, real = changed(engine.model, 11), broadcast.send

    def damaged(group: Any, bucket: Any, watch: Any) -> None:
        real(
            group, [(n, t + 1 if n.endswith("layers.1.mlp.up_proj.weight") else t) for n, t in bucket], watch
        )

    sync = engine.sync(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(broadcast, "send", damaged)
        with pytest.raises(WeightSyncError, match=r"layers.1.mlp.up_proj.weight: other bytes arrived"):
            sync.push(lambda: named(model), 11)
    assert engine.state()["version"] is None
    assert engine.complete(PROMPTS.tolist(), 0).status_code == 409
    assert sync.push(lambda: named(model), 12) == [engine.url]
    assert answers(engine, 12) == expected(model)
    sync.close()


@pytest.mark.slow
def test_a_learner_that_dies_halfway_leaves_an_engine_that_takes_the_next_push(
    engine: Server, tmp_path: Path
) -> None:
    model = changed(engine.model, 21)
    program = f"""
import os, sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from transformers import AutoModelForCausalLM
from hpcgrpo.generation.weights import WeightSync
model = AutoModelForCausalLM.from_pretrained({str(engine.model)!r}, dtype=torch.float32)
def tensors():
    for name, parameter in model.named_parameters():
        yield name, parameter.detach() + 1
        if name.endswith("layers.0.self_attn.k_proj.weight"):
            os._exit(3)
WeightSync([{engine.url!r}], secret={engine.secret!r}, rank=0, gather=lambda v: [v], transport="process_group",
    address="127.0.0.1", device=torch.device("cpu"), bucket_bytes=1, timeout_seconds=60.0, folder=Path("."),
    dtype=torch.float32).push(tensors, 20)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=200).returncode == 3
    assert engine.state()["version"] is None
    began = time.monotonic()
    engine.push(model, 21, tmp_path)
    assert time.monotonic() - began < 50
    assert answers(engine, 21) == expected(model)


@pytest.mark.slow
def test_a_path_that_holds_no_weights_leaves_the_model_as_it_is(engine: Server, tmp_path: Path) -> None:
    model = changed(engine.model, 31)
    engine.push(model, 31, tmp_path)
    calls = transports.Calls(engine.secret)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "files.json").write_text('["a.safetensors"]')
    (tmp_path / "damaged" / "a.safetensors").write_bytes(b"\xff" * 100)
    for path in ("none", "damaged"):
        with pytest.raises(transports.CallError, match=r"Error"):
            calls.extension(engine.url, "reload", path=str(tmp_path / path))
    assert answers(engine, 31) == expected(model)


@pytest.mark.slow
def test_an_engine_names_the_hop_that_fails(engine: Server) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        calls = transports.Calls(engine.secret)
        where = f"{socket.gethostname()} cannot reach 127.0.0.1:{port}: ConnectionRefused"
        with pytest.raises(transports.CallError, match=where):
            calls.extension(engine.url, "probe", master_address="127.0.0.1", master_port=port)
    assert calls.extension(engine.url, "dtype") == [{"dtype": "float32"}]
    with pytest.raises(transports.CallError, match="HTTP 401"):
        transports.Calls("0000").extension(engine.url, "dtype")


@pytest.mark.slow
def test_a_dead_engine_is_left_out(engine: Server, tmp_path: Path) -> None:
    model = changed(engine.model, 41)
    sync = engine.sync(tmp_path)
    sync.urls = ("http://127.0.0.1:9", engine.url)
    assert sync.push(lambda: named(model), 41) == [engine.url]
    sync.urls = ("http://127.0.0.1:9",)
    sync.timeout_seconds = 2.0
    began = time.monotonic()
    with pytest.raises(
        WeightSyncError, match=r"version 42 within 2 s .*http://127.0.0.1:9: /hpcgrpo/state: Connect"
    ):
        sync.push(lambda: named(model), 42)
    assert time.monotonic() - began < 60
    sync.close()


@pytest.mark.slow
def test_a_request_in_flight_goes_on_and_counts_as_the_older_weights(engine: Server, tmp_path: Path) -> None:
    older, model = changed(engine.model, 50), changed(engine.model, 51)
    got: list[httpx.Response] = []
    for _ in range(
        20
    ):  # an answer may come before it is seen to be asked, or amid the push: then no version is known
        engine.push(older, 50, tmp_path)
        got.clear()
        thread = threading.Thread(
            target=lambda: got.append(engine.complete(PROMPTS.tolist(), 50, tokens=230))
        )
        thread.start()
        while not (busy := engine.state()["busy"]) and thread.is_alive():
            pass
        engine.push(model, 51, tmp_path)
        thread.join()
        assert got[0].status_code == 200
        if busy and "X-Weights-Version" in got[0].headers:
            break
    assert busy and got[0].headers["X-Weights-Version"] == "50"
    assert answers(engine, 51) == expected(model)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["process_group", "filesystem"])
def test_sharded_ranks_push_together_and_fail_together(
    engine: Server, tmp_path: Path, transport: str
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    arguments = [engine.url, engine.secret, str(engine.model), str(tmp_path), transport]
    done = subprocess.run(
        [*command, str(PROGRAMS / "push_ranks.py"), *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reports = sorted(
        (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")),
        key=lambda r: r["rank"],
    )
    assert [r["held"] for r in reports] == [[[engine.url]] * 3] * 2
    assert reports[0]["same"] == [True] * 3
    assert reports[0]["error"] == reports[1]["error"]
    assert "http://127.0.0.1:9: /hpcgrpo/state: Connect" in reports[0]["error"]


def is_a_core(command: Path) -> bool:
    """Whether a process, by its file in /proc, computes for an engine."""
    try:
        return "EngineCore" in command.read_text()
    except OSError:  # it has ended
        return False


@pytest.mark.long
@pytest.mark.slow
def test_an_engine_killed_in_a_broadcast_comes_back_stale_and_takes_the_weights_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Untied embeddings and loading by layer here; the shared engine's are tied and loaded in place."""
    pytest.importorskip("vllm")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    folder = tmp_path / "model"
    tiny.save(tiny.build_tiny_model(), tiny.build_character_tokenizer(), folder)
    layerwise = ("--worker-extension-cls", "layerwise.Layerwise")
    with serving(tmp_path, folder, extra_args=layerwise) as server:
        model = changed(folder, 61)
        sync = server.sync(tmp_path / "weights", timeout_seconds=15.0, bucket_bytes=1)
        assert sync.push(lambda: named(model), 60) == [server.url]
        before, instance = answers(server, 60), server.state()["instance"]
        assert before == expected(model)

        def failing() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in named(model):
                yield name, tensor + 1
                if name.endswith("layers.0.self_attn.k_proj.weight"):  # half of a fused projection
                    raise RuntimeError("the gather failed")

        with pytest.raises(RuntimeError, match="the gather failed"):
            sync.push(failing, 60)
        assert server.state()["version"] is None
        assert sync.push(lambda: named(model), 60) == [server.url]
        assert answers(server, 60) == before
        one = server.engines.engines[0]
        assert one.process is not None
        listed = Path(f"/proc/{one.process.pid}/task/{one.process.pid}/children").read_text().split()
        children = [Path(f"/proc/{pid}/cmdline") for pid in listed]
        assert any(map(is_a_core, children))

        def killing() -> Iterator[tuple[str, Tensor]]:
            for count, item in enumerate(named(model)):
                if count == 8:
                    os.kill(one.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
                yield item

        began = time.monotonic()
        with pytest.raises(
            WeightSyncError, match=rf"no engine took the weights of version 61 .*{server.url}: "
        ):
            sync.push(killing, 61)
        assert time.monotonic() - began < 60
        wait_until(lambda: not any(map(is_a_core, children)))
        server.poll_until(lambda: one.state == "DEAD")
        server.poll_until(lambda: one.state == "READY")
        assert server.state()["version"] is None
        assert server.state()["instance"] != instance
        assert server.complete(PROMPTS.tolist(), 0).status_code == 409
        assert sync.push(lambda: named(model), 61) == [server.url]
        assert answers(server, 61) == before
        sync.close()
