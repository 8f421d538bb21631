"""How fast weights reach an engine, beside what the network gives.

    python benchmarks/weight_sync.py [--layers 12] [--json]

One real vLLM engine on this machine takes pushes of a Qwen2-shaped model in float32, through the process group (gloo)
and through files. The yardstick, in the same run: gloo's broadcast of as many bytes between two plain processes.
A push is everything from the first request to the engine answering with the new weights: pausing, sending, loading,
comparing fingerprints, clearing caches. Medians; the engine's and the sender's CPU-seconds stand beside wall time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from _rows import add_device, at_least, positive, row

from hpcgrpo import ports, tiny
from hpcgrpo.generation import broadcast
from hpcgrpo.generation.weights import WeightSync
from hpcgrpo.launch import serve

ADDRESS = "127.0.0.1"


def build(hidden: int, layers: int, vocabulary: int) -> Any:
    """A Qwen2-shaped model, float32, heads of 64."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    heads = hidden // 64
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2),
            intermediate_size=3 * hidden,
            max_position_embeddings=256,
            tie_word_embeddings=False,
        )
    )


def own_device(kind: str, rank: int) -> torch.device:
    """Of the sender (rank 0) or the engine, which takes the first GPU: the two cannot share one."""
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", 1 - rank)


def join(kind: str, rank: int, port: int, listener: socket.socket | None = None) -> broadcast.Group:
    """One of two ends on this machine."""
    return broadcast.Group(
        rank=rank,
        world_size=2,
        backend="gloo" if kind == "cpu" else "nccl",
        own_address=ADDRESS,
        master=(ADDRESS, port),
        device=own_device(kind, rank),
        timeout_seconds=120.0,
        listener=listener,
    )


def take(line: Connection, kind: str, port: int, size_bytes: int, repeats: int) -> None:
    """The other process of the yardstick."""
    torch.set_num_threads(1)
    line.send("ready")
    group = join(kind, 1, port)
    buffer = torch.empty(size_bytes, dtype=torch.uint8, device=own_device(kind, 1))
    for _ in range(repeats):
        group.group.broadcast([buffer], torch.distributed.BroadcastOptions()).wait()
    synchronize(kind)
    os._exit(0)


def synchronize(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


def bandwidth(kind: str, size_bytes: int, repeats: int) -> list[float]:
    """Seconds of each plain broadcast of so many bytes; the first, which touches the memory, is left out."""
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=take, args=(there, kind, port, size_bytes, repeats + 1)
    )
    process.start()
    here.recv()
    group = join(kind, 0, port, listener)
    buffer = torch.ones(size_bytes, dtype=torch.uint8, device=own_device(kind, 0))
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        group.group.broadcast([buffer], torch.distributed.BroadcastOptions()).wait()
        synchronize(kind)
        seconds.append(time.perf_counter() - began)
    group.close()
    process.join()
    return seconds[1:]


def cpu_seconds(pid: int) -> float:
    """Of a process and its children that live."""
    total, ticks = 0.0, os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if pid in (int(stat.parent.name), int(fields[1])):
            total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def pushes(
    model: Any, make: Callable[[str], WeightSync], transport: str, pid: int, repeats: int
) -> dict[str, Any]:
    """Wall and CPU seconds of pushes; the first, which forms the group, is told apart."""
    sync = make(transport)
    wall, engine_cpu, own_cpu = [], [], []
    for version in range(repeats + 1):
        started = time.perf_counter(), cpu_seconds(pid), time.process_time()
        held = sync.push(lambda: ((n, p.detach()) for n, p in model.named_parameters()), version)
        assert held == list(sync.urls)
        wall.append(time.perf_counter() - started[0])
        engine_cpu.append(cpu_seconds(pid) - started[1])
        own_cpu.append(time.process_time() - started[2])
    sync.close()
    return {
        "first_push_seconds": wall[0],
        "push_seconds": statistics.median(wall[1:]),
        "fastest_push_seconds": min(wall[1:]),
        "engine_cpu_seconds": statistics.median(engine_cpu[1:]),
        "sender_cpu_seconds": statistics.median(own_cpu[1:]),
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the engine, then yardstick and pushes in turn."""
    torch.set_num_threads(1)
    kind, device = options.device, own_device(options.device, 0)
    model = build(options.hidden, options.layers, options.vocabulary)
    size = sum(p.nbytes for p in model.parameters())
    tiny.save(model, tiny.build_character_tokenizer(), folder / "model")
    model = model.to(device)
    secret_file = folder / "secret"
    secret_file.write_text(secrets.token_hex(16))
    secret_file.chmod(0o600)
    (held,) = ports.take(1, str(os.getpid()), ADDRESS)
    plan = serve.ServePlan(str(folder / "model"), "float32", 128, 1, 1, 0.85, 2**26, True, 0, kind)
    engines = serve.Engines(
        plan, address=ADDRESS, ports=[held.port], secret_file=secret_file, log_folder=folder, timeout_seconds=600.0,
    )  # fmt: skip

    def make(transport: Any) -> WeightSync:
        return WeightSync(
            engines.urls, secret=engines.secret, rank=0, gather=lambda value: [value], transport=transport,
            address=ADDRESS, device=device, bucket_bytes=options.bucket_mib * 2**20,
            timeout_seconds=300.0, folder=folder / "weights", dtype=torch.float32,
        )  # fmt: skip

    engines.start()
    try:
        while not engines.ready:
            engines.poll()
            time.sleep(0.5)
        pid = engines.describe()[0]["pid"]
        before = bandwidth(kind, size, options.repeats)
        found = {
            name: pushes(model, make, name, pid, options.repeats) for name in ("process_group", "filesystem")
        }
        plain = statistics.median(before + bandwidth(kind, size, options.repeats))
    finally:
        engines.stop()
        held.close()
    return {
        "rows": [
            row(
                "weight sync, process group: plain broadcast",
                plain / found["process_group"]["push_seconds"],
                of="seconds of a push",
                bound=1.0,
                bound_is=f"{'nccl' if kind == 'cuda' else 'gloo'}, as many bytes",
            )
        ],
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": size,
        "gloo_broadcast_seconds": plain,
        "gloo_gb_per_second": size / plain / 1e9,
        "ratio_to_broadcast": plain / found["process_group"]["push_seconds"],
        "best_ratio_to_broadcast": plain / found["process_group"]["fastest_push_seconds"],
        **found,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--hidden", type=positive, default=768)
    parser.add_argument("--layers", type=positive, default=12)
    parser.add_argument("--vocabulary", type=at_least(tiny.VOCABULARY_SIZE), default=16384)
    parser.add_argument("--bucket-mib", type=positive, default=256)
    parser.add_argument("--repeats", type=positive, default=5)
    add_device(parser, gpus=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.hidden % 128:
        parser.error(f"--hidden {options.hidden} is not a multiple of 128: heads of 64, two to one of keys")
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(options, Path(scratch))
    if options.json:
        print(json.dumps(found))
        return
    print(f"{found['parameters'] / 1e6:.0f} M parameters, {found['bytes'] / 1e6:.0f} MB in float32")
    print(f"gloo broadcast between two processes: {found['gloo_broadcast_seconds']:.3f} s")
    for name in ("process_group", "filesystem"):
        one = found[name]
        print(
            f"push by {name}: {one['push_seconds']:.3f} s (fastest {one['fastest_push_seconds']:.3f} s)",
            end="; ",
        )
        print(f"CPU: engine {one['engine_cpu_seconds']:.2f} s, sender {one['sender_cpu_seconds']:.2f} s")
    print(f"process group to plain broadcast: {found['ratio_to_broadcast']:.2f} of its bandwidth")


if __name__ == "__main__":
    main()
