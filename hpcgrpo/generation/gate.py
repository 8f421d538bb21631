"""The door of every engine: who may come in, and which weights must be behind an answer.

An ASGI middleware around vLLM's whole API (`--middleware hpcgrpo.generation.gate.Gate`). Standard library only.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

SECRET_FILE = "HPCGRPO_SECRET_FILE"  # environment variable: the file that holds the run's secret
GENERATING = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
LONGEST_BODY = 4096  # bytes of what is posted to the gate itself


class Gate:
    """Asks for the run's secret on every path but `GET /health`, and knows how old the engine's weights are.

    `version` counts the optimizer steps behind the weights; None means stale: those of the start, or half updated.
    A generating request says what it needs in `X-Minimum-Version` and gets 409 where the engine has less. Its
    answer names the older of the versions at its start and its end in `X-Weights-Version`; a stream has none,
    since its head goes out before its end.

    Raises ValueError at the start without a readable secret.
    """

    def __init__(self, app: Application) -> None:
        self.app = app
        self.instance = secrets.token_hex(8)
        self.version: int | None = None
        self.busy = 0
        self._expected = b"Bearer " + read_secret(os.environ.get(SECRET_FILE)).encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await _refuse_socket(scope, receive, send)
        elif scope["path"] == "/health" and scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, send)
        elif not self._knows(scope):
            await _answer(
                send, 401, {"error": "this engine answers its own run alone: Authorization: Bearer SECRET"}
            )
        elif scope["path"].startswith("/hpcgrpo/"):
            await self._own(scope, receive, send)
        elif scope["path"].rstrip("/") in GENERATING:
            await self._generate(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _knows(self, scope: Message) -> bool:
        return hmac.compare_digest(_header(scope, b"authorization") or b"", self._expected)

    async def _own(self, scope: Message, receive: Receive, send: Send) -> None:
        route = scope["method"], scope["path"]
        if route == ("GET", "/hpcgrpo/state"):
            await _answer(send, 200, self._state())
        elif route == ("POST", "/hpcgrpo/version"):
            try:
                self.version = _version(await _body(receive))
            except ValueError as error:
                await _answer(send, 400, {"error": str(error)})
            else:
                await _answer(send, 200, self._state())
        else:
            await _answer(send, 404, {"error": f"no {' '.join(route)}"})

    def _state(self) -> dict[str, Any]:
        return {"instance": self.instance, "version": self.version, "busy": self.busy}

    async def _generate(self, scope: Message, receive: Receive, send: Send) -> None:
        wanted = _header(scope, b"x-minimum-version") or b""
        if not wanted.isdigit():
            await _answer(
                send, 400, {"error": f"X-Minimum-Version {wanted.decode('latin-1')!r}: say a whole number"}
            )
            return
        held = self.version
        if held is None or held < int(wanted):
            await _answer(send, 409, {"error": "stale", "held": held, "instance": self.instance})
            return

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start" and self.version is not None:
                message["headers"] = _stamp(message.get("headers", ()), min(held, self.version))
            await send(message)

        self.busy += 1
        try:
            await self.app(scope, receive, stamped)
        finally:
            self.busy -= 1


def read_secret(file: str | Path | None) -> str:
    """The run's secret. Raises ValueError where there is no such file or nothing in it."""
    try:
        secret = Path(file or "").read_text().strip() if file else ""
    except OSError as error:
        raise ValueError(f"{SECRET_FILE} {file}: {error.strerror}") from None
    if not secret:
        raise ValueError(f"{SECRET_FILE} {file or 'is not set'}: it must name the file with the run's secret")
    return secret


def _header(scope: Message, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _stamp(headers: Any, version: int) -> list[tuple[bytes, bytes]]:
    found = [(key, value) for key, value in headers]
    if any(key.lower() == b"content-type" and b"event-stream" in value for key, value in found):
        return found
    return [*found, (b"x-weights-version", str(version).encode())]


def _version(body: bytes) -> int | None:
    """Of `{"version": 3}` or `{"version": null}`."""
    content = json.loads(body)
    version = content["version"] if isinstance(content, dict) and "version" in content else ""
    if version is None or (type(version) is int and version >= 0):
        return version
    raise ValueError('send {"version": V}, V a whole number or null')


async def _body(receive: Receive) -> bytes:
    body = b""
    while len(body) <= LONGEST_BODY:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body", False):
            return body
    raise ValueError(f"a body of more than {LONGEST_BODY} bytes")


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _refuse_socket(scope: Message, receive: Receive, send: Send) -> None:
    """Nothing here is served over a websocket; closing before accepting is an HTTP refusal."""
    await receive()
    if "websocket.http.response" in scope.get("extensions", {}):
        await send({"type": "websocket.http.response.start", "status": 401, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b""})
    else:
        await send({"type": "websocket.close", "code": 1008})
