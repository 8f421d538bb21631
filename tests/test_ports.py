"""Ports: from the band, held, and never another holder's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpcgrpo import ports

OWN = f"of {os.getpid()}"  # the band begins elsewhere for another test session of this machine


def ephemeral_start() -> int:
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_the_band_lies_below_the_ephemeral_range_and_starts_by_the_job() -> None:
    every = list(ports.band("4711/hub"))
    assert max(every) == ephemeral_start() - 1
    assert len(set(every)) == len(every) == min(ports.BAND, ephemeral_start() - 1024)
    assert next(ports.band("4711/hub")) == every[0]
    assert next(ports.band("4712/hub")) != every[0]


def test_a_held_port_is_for_servers_with_reuseport_alone() -> None:
    held = ports.take(1, "a", "127.0.0.1")[0]
    try:
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("127.0.0.1", held.port))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            server.bind(("127.0.0.1", held.port))
            server.listen()
            with socket.create_connection(("127.0.0.1", held.port), timeout=60):
                pass
    finally:
        held.close()


def test_a_port_that_is_taken_is_passed_over() -> None:
    first = next(ports.band(f"job {OWN}"))
    with socket.create_server(("127.0.0.1", first)):
        taken = ports.take(2, f"job {OWN}", "127.0.0.1")
    try:
        assert first not in [t.port for t in taken]
        assert len({t.port for t in taken}) == 2
        again = ports.take(1, f"job {OWN}", "127.0.0.1")  # the listener is gone, the other two are held
        assert again[0].port == first
        again[0].close()
    finally:
        for one in taken:
            one.close()


def test_another_process_keeps_off_a_held_port_until_its_holder_dies() -> None:
    script = (
        f"import sys; from hpcgrpo import ports; h = ports.take(1, 'two {OWN}', '127.0.0.1')[0];"
        "h.release() if sys.argv[1] == 'released' else None; print(h.port, flush=True); sys.stdin.read()"
    )
    for how in ("held", "released"):  # released: its server is about to bind it
        child = subprocess.Popen(
            [sys.executable, "-c", script, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        port = int(child.stdout.readline())
        with pytest.raises(OSError):
            ports.hold(port, "127.0.0.1")
        child.kill()
        child.communicate()
        ports.hold(port, "127.0.0.1").close()


def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "BAND", 2)
    held = ports.take(2, f"full {OWN}", "127.0.0.1")
    try:
        with pytest.raises(OSError, match="fewer than 1 free TCP ports"):
            ports.take(1, f"full {OWN}", "127.0.0.1")
    finally:
        for one in held:
            one.close()
