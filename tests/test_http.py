"""The small HTTP client, against servers that speak byte by byte what a test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from hpcgrpo.generation import http
from hpcgrpo.generation.http import Connection, NoAnswer, Response

OK = b"HTTP/1.1 200 OK\r\nX-Weights-Version: 3\r\n"


def exchange(
    *answers: bytes | float,
    ask: Callable[[Connection], Awaitable[Response]] | None = None,
    times: int = 1,
) -> tuple[list[Response], list[bytes], int]:
    """Ask a server that writes these answers in turn (a number: it waits so long, b"": it hangs up).

    -> the responses, what the server read, the connections it saw.
    """
    read: list[bytes] = []
    left, connections = list(answers), 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while left:
            try:
                read.append(await reader.readuntil(b"\r\n\r\n"))
            except asyncio.IncompleteReadError:
                break
            answer = left.pop(0)
            if isinstance(answer, float):
                await asyncio.sleep(answer)
                break
            writer.write(answer)
            if not answer or b"close" in answer:
                break
        writer.close()

    async def run() -> list[Response]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connection = Connection(f"http://127.0.0.1:{port}", {"Authorization": "Bearer s"})
        asked = ask or (lambda c: c.request("GET", "/a", timeout_seconds=60))
        try:
            return [await asked(connection) for _ in range(times)]
        finally:
            connection.close()
            server.close()

    return asyncio.run(run()), read, connections


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is idle for too long, whatever else this machine does."""
    monkeypatch.setattr(http, "IDLE_SECONDS", 600.0)


@pytest.mark.usefixtures("patient")
def test_one_connection_serves_request_after_request() -> None:
    whole = OK + b"Content-Length: 7\r\n\r\n[1,2,3]"
    responses, read, connections = exchange(whole, whole, whole, times=3)
    assert connections == 1
    assert [(r.status, r.headers["x-weights-version"], r.json()) for r in responses] == [
        (200, "3", [1, 2, 3])
    ] * 3
    head = read[0].decode().split("\r\n")
    assert head[0] == "GET /a HTTP/1.1" and {"Authorization: Bearer s", "Content-Length: 0"} <= {*head}


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\ndefghijklm\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n8\r\nfghijklm\r\n0\r\nTrailer: 1\r\n\r\n",
        OK + b"Connection: close\r\n\r\nabcdefghijklm",
        OK + b"Connection: close\r\nContent-Length: 13\r\n\r\nabcdefghijklm",
    ],
)
@pytest.mark.usefixtures("patient")
def test_every_form_of_a_body_is_read_whole(answer: bytes) -> None:
    responses, _, connections = exchange(answer, answer, times=2)
    assert [r.body for r in responses] == [b"abcdefghijklm"] * 2
    assert connections == (2 if b"close" in answer else 1)


@pytest.mark.parametrize(
    "answer",
    [b"", OK, OK + b"Content-Length: 9\r\nConnection: close\r\n\r\nabc", b"220 smtp close\r\n\r\n"],
    ids=["hangs up", "half a head", "half a body", "another protocol"],
)
def test_a_broken_answer_is_a_connection_error(answer: bytes) -> None:
    with pytest.raises(ConnectionError):
        exchange(answer + b"close" if answer == OK else answer)


def test_a_late_answer_is_told_from_a_broken_one() -> None:
    with pytest.raises(NoAnswer, match=r"no answer within 0\.2 s"):
        exchange(30.0, ask=lambda c: c.request("GET", "/", timeout_seconds=0.2))


def test_a_connection_that_lay_idle_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.05)

    async def ask(connection: Connection) -> Response:
        await asyncio.sleep(0.2)
        return await connection.request("GET", "/", timeout_seconds=60)

    whole = OK + b"Content-Length: 0\r\n\r\n"
    assert exchange(whole, whole, ask=ask, times=2)[2] == 2


def test_nobody_listening_says_so() -> None:
    async def ask() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        await Connection(f"http://127.0.0.1:{port}", {}).request("GET", "/", timeout_seconds=60)

    began = time.monotonic()
    with pytest.raises(ConnectionError, match="Connection refused"):
        asyncio.run(ask())
    assert time.monotonic() - began < 50


@pytest.mark.parametrize("url", ["https://a:1", "a:1", "http://a"])
def test_only_plain_http_urls_are_taken(url: str) -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT is expected"):
        Connection(url, {})
