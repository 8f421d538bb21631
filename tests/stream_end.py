"""One end of a broadcast stream, in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
from multiprocessing.connection import Connection

import torch

from hpcgrpo.generation import broadcast


def group(
    rank: int, *, port: int, world_size: int, timeout_seconds: float, listener: socket.socket | None = None
) -> broadcast.Group:
    """Join on this machine; rank 0 brings the listener."""
    return broadcast.Group(
        rank=rank,
        world_size=world_size,
        backend="gloo",
        own_address="127.0.0.1",
        master=("127.0.0.1", port),
        device=torch.device("cpu"),
        timeout_seconds=timeout_seconds,
        listener=listener,
    )


def run(
    rank: int, line: Connection, fault: str, *, port: int, world_size: int, timeout_seconds: float
) -> None:
    """Receive -> names and fingerprints, or the error, through `line`. `die` and `stop` come after one tensor."""
    torch.set_num_threads(1)
    line.send("ready")
    received = []
    try:
        stream = group(rank, port=port, world_size=world_size, timeout_seconds=timeout_seconds)
        for name, tensor in broadcast.receive(stream):
            received.append((name, broadcast.fingerprint(tensor)))
            if fault:
                os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
        line.send(received)
    except broadcast.StreamError as error:
        line.send(error)
    os._exit(0)
