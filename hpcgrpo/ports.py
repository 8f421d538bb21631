"""TCP ports of a job: from a band below the ephemeral range, held from their choice to their end.

A held port is bound and never listened on, with SO_REUSEPORT, so that the server it is meant for can bind it too
(vLLM's does) while nothing else gets it. Other jobs of this package keep off it by a lock that dies with its holder.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BAND = 12000  # ports below the ephemeral range that jobs choose from


@dataclass(frozen=True)
class Held:
    """A port that is this process's until `close`."""

    port: int
    bound: socket.socket
    lock: socket.socket

    def release(self) -> None:
        """Let a server without SO_REUSEPORT bind the port; the lock stays."""
        self.bound.close()

    def close(self) -> None:
        """Give the port back."""
        self.bound.close()
        self.lock.close()


def hold(port: int, address: str = "") -> Held:
    """Hold one port of `address` ("": every address). Raises OSError where it is taken."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0hpcgrpo-port-{port}")  # abstract: one per network namespace, gone with the process
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))  # fails where somebody else holds or listens
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((address, port))
    except OSError:
        lock.close()
        bound.close()
        raise
    return Held(port, bound, lock)


def take(count: int, key: str, address: str = "") -> list[Held]:
    """Hold the first `count` free ports of the band, starting where `key` (the job's id) says.

    Raises OSError where the band has not that many.
    """
    held: list[Held] = []
    for port in band(key):
        if len(held) == count:
            break
        with suppress(OSError):
            held.append(hold(port, address))
    if len(held) < count:
        for one in held:
            one.close()
        raise OSError(f"fewer than {count} free TCP ports from {min(band(key))} to {max(band(key))}")
    return held


def band(key: str) -> Iterator[int]:
    """Every port of the band once, from a place that depends on `key` alone."""
    top = _ephemeral_start()
    low = max(1024, top - BAND)
    start = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") % (top - low)
    yield from range(low + start, top)
    yield from range(low, low + start)


def _ephemeral_start() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768
