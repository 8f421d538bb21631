"""A small HTTP/1.1 client for thousands of requests to a few servers.

httpx takes 3 ms of CPU time a request, and 16 ms with 256 of them in flight, on the machine where this takes
0.5 ms: that is a rank's own time while it waits.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 2.0  # a connection unused for longer is not used again; vLLM closes them after 5

# A node that vanishes sends nothing: the kernel finds out in 10 + 4 * 5 s, though an answer may take an hour.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


class NoAnswer(Exception):
    """The server took the request and did not answer in time."""


@dataclass(frozen=True)
class Response:
    """A server's answer; the names of the headers are in lower case."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON. Raises ValueError where it is none."""
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class Connection:
    """One connection to a server, kept between requests and opened anew as needed; one request at a time."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """url: scheme, host and port, http only; `headers` go with every request."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ValueError(f"server url {url}: http://HOST:PORT is expected")
        self.url, self._host, self._port = url, parts.hostname, parts.port
        self._head = "".join(
            f"{name}: {value}\r\n" for name, value in {"Host": parts.netloc, **headers}.items()
        )
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._used = 0.0

    async def request(self, method: str, path: str, body: bytes = b"", *, timeout_seconds: float) -> Response:
        """Ask and read the whole answer.

        Raises ConnectionError where there is no connection or it breaks, NoAnswer after `timeout_seconds`.
        """
        try:
            async with asyncio.timeout(timeout_seconds) as limit:
                reader, writer = await self._open()
                head = f"{method} {path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode("ascii") + body)
                await writer.drain()
                status, headers = _parse_head(await reader.readuntil(b"\r\n\r\n"))
                answer = await _read_body(reader, headers)
        except BaseException as error:
            self.close()  # the rest of the answer may still come
            raise _meaning(error, f"no answer within {timeout_seconds:g} s", limit.expired()) from None
        self._used = time.monotonic()
        if headers.get("connection", "").lower() == "close":
            self.close()
        return Response(self.url, status, headers, answer)

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is not None:
            idle = time.monotonic() - self._used > IDLE_SECONDS
            if not (idle or self._streams[0].at_eof() or self._streams[1].is_closing()):
                return self._streams
            self.close()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                self._streams = await asyncio.open_connection(self._host, self._port)
        except TimeoutError:
            raise ConnectionError(f"no connection within {CONNECT_SECONDS:g} s") from None
        except OSError as error:
            raise ConnectionError(os.strerror(error.errno) if error.errno else str(error)) from None
        connected: socket.socket = self._streams[1].get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        return self._streams

    def close(self) -> None:
        """Close it; a request in flight is thereby given up, which the server notices."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _meaning(error: BaseException, late: str, expired: bool) -> BaseException:
    """An error of sockets or streams as one of the two that callers know; others as they are."""
    if expired and isinstance(error, TimeoutError):
        return NoAnswer(late)
    if isinstance(error, asyncio.IncompleteReadError):
        return ConnectionError("the connection was closed before the answer was whole")
    if isinstance(error, OSError | ValueError | asyncio.LimitOverrunError):
        return ConnectionError(str(error) or type(error).__name__)
    return error


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, status, *_ = first.split(" ", 2)
    if not version.startswith("HTTP/1."):
        raise ValueError(f"no HTTP answer: {first[:40]}")
    fields = (line.partition(":") for line in lines if line)
    return int(status), {name.lower(): value.strip() for name, _, value in fields}


async def _read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        length = headers.get("content-length")
        return await (reader.read() if length is None else reader.readexactly(int(length)))
    chunks = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        chunks.append((await reader.readexactly(size + 2))[:-2])
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass  # trailers
    return b"".join(chunks)
