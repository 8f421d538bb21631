"""The line between the nodes of a job: JSON objects, one a line, over TCP, both directions probed first.

Node 0 listens. Every other node connects, says which node it is and proves that it knows the run's secret; node 0
then connects back to it. So a network that lets only one side in is found, and named, before anything waits on it.
"""

from __future__ import annotations

import hmac
import json
import queue
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hpcgrpo.ports import Held

Message = dict[str, Any]
CONNECT_SECONDS = 10.0
LONGEST_LINE = 2**20  # bytes


class HopError(RuntimeError):
    """One node cannot reach another: names both and the port."""


class Line:
    """One connection. Messages that come in wait in `inbox`; `closed` once the other side is gone."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.settimeout(None)
        self.peer, self.closed = peer, False
        self.inbox: queue.Queue[Message] = queue.Queue()
        self._connection, self._writing = connection, threading.Lock()
        self._reader = connection.makefile("rb")

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message; a line that is gone is noted in `closed`, not raised."""
        with self._writing:
            try:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self.closed = True

    def receive(self, timeout_seconds: float) -> Message:
        """One message, before `listen` was called. Raises OSError, ValueError."""
        self._connection.settimeout(timeout_seconds)
        line = self._reader.readline(LONGEST_LINE)
        self._connection.settimeout(None)
        if not line:
            raise ConnectionError(f"{self.peer} closed the connection")
        return dict(json.loads(line))

    def listen(self) -> None:
        """Fill `inbox` from now on, in a thread."""
        threading.Thread(target=self._listen, name=f"line to {self.peer}", daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError, ValueError):
            while line := self._reader.readline(LONGEST_LINE):
                self.inbox.put(json.loads(line))
        self.closed = True

    def messages(self) -> list[Message]:
        """What has come in since the last call."""
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self.inbox.get_nowait())
        return found

    def close(self) -> None:
        """End the connection."""
        self.closed = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Hub:
    """Node 0's side: takes every other node's line and probes the way back."""

    def __init__(self, held: Held, *, address: str, secret: str, name: str) -> None:
        self.port, self.address, self.name = held.port, address, name
        self.lines: dict[int, Line] = {}
        self.refused: list[str] = []  # hops that failed, in words
        self._secret = secret
        held.release()
        self._server = socket.create_server((address, held.port), backlog=128)
        threading.Thread(target=self._accept, name="hub", daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, source = self._server.accept()
                threading.Thread(target=self._welcome, args=(connection, source[0]), daemon=True).start()

    def _welcome(self, connection: socket.socket, source: str) -> None:
        line = Line(connection, source)
        try:
            hello = line.receive(CONNECT_SECONDS)
            known = hmac.compare_digest(str(hello["secret"]).encode(), self._secret.encode())
            node, port, peer = int(hello["node"]), int(hello["port"]), str(hello["name"])
        except (OSError, ValueError, KeyError, TypeError):
            return line.close()
        if not known:
            line.send({"error": "another run's secret"})
            return line.close()
        line.peer = peer
        try:
            probe(source, port)
        except OSError as error:
            said = f"{self.name} ({self.address}) cannot reach {peer} at {source}, port {port}: {error}"
            self.refused.append(said)
            line.send({"error": said})
            return line.close()
        line.send({"welcome": self.name})
        line.listen()
        self.lines[node] = line

    def send(self, message: Mapping[str, Any]) -> None:
        """To every node."""
        for line in list(self.lines.values()):
            line.send(message)

    def close(self) -> None:
        """Close every line and the listening port."""
        self._server.close()
        for line in self.lines.values():
            line.close()


def connect(address: str, port: int, *, node: int, name: str, own: str, secret: str, deadline: float) -> Line:
    """Another node's side: reach the hub, let it reach us -> the line.

    `deadline` is in time.monotonic() seconds. Raises HopError naming the hop that failed.
    """
    while True:
        with socket.create_server((own, 0)) as back:
            threading.Thread(target=_answer, args=(back,), daemon=True).start()
            try:
                connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise HopError(
                        f"{name} ({own}) cannot reach node 0 at {address}, port {port}: {error}"
                    ) from None
                time.sleep(0.5)
                continue
            line = Line(connection, "node 0")
            try:
                line.send({"node": node, "name": name, "port": back.getsockname()[1], "secret": secret})
                answer = line.receive(2 * CONNECT_SECONDS)
            except (OSError, ValueError) as error:
                answer = {"error": f"node 0 at {address}, port {port} does not answer {name}: {error}"}
        if "welcome" in answer:
            line.listen()
            return line
        line.close()
        if time.monotonic() > deadline:
            raise HopError(str(answer.get("error")))
        time.sleep(0.5)


def probe(address: str, port: int) -> None:
    """Connect and be greeted. Raises OSError."""
    with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as connection:
        if connection.recv(16) != b"hpcgrpo":
            raise ConnectionError("something else answers there")


def _answer(server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"hpcgrpo")
