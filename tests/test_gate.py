"""The gate: nobody without the secret, nothing from weights that are too old. A real engine's is in test_serve."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from hpcgrpo.generation.gate import Gate

SECRET = "5f3a"
OWN = {"Authorization": f"Bearer {SECRET}"}


class Inner:
    """An app that says which paths reached it; `during` runs while it answers."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.during: Any = lambda: None
        self.content_type = b"application/json"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope.get("path", scope["type"]))
        self.during()
        headers = [(b"content-type", self.content_type)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    monkeypatch.setenv("HPCGRPO_SECRET_FILE", str(file))
    return Gate(Inner())


def ask(
    gate: Gate, method: str, path: str, headers: dict[str, str] | None = None, **more: Any
) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(gate)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await client.request(method, path, headers=headers or {}, **more)

    return asyncio.run(run())


def set_version(gate: Gate, version: int | None) -> None:
    assert ask(gate, "POST", "/hpcgrpo/version", OWN, json={"version": version}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer "}, {"Authorization": "Bearer 5f3b"}, {"Authorization": SECRET},
     {"Authorization": f"bearer {SECRET}"}, {"Authorization": f"Bearer {SECRET}x"}, {"X-Api-Key": SECRET}],
)  # fmt: skip
@pytest.mark.parametrize(
    "route",
    ["GET /", "GET /metrics", "POST /health", "GET /health/", "GET /v1//health", "GET /healthx", "GET /hpcgrpo/state",
     "POST /hpcgrpo/version", "POST /collective_rpc", "POST /v1/completions", "OPTIONS /v1/models"],
)  # fmt: skip
def test_nothing_but_health_is_answered_without_the_secret(
    gate: Gate, route: str, headers: dict[str, str]
) -> None:
    method, path = route.split()
    answer = ask(gate, method, path, headers, json={"version": 1} if method == "POST" else None)
    assert answer.status_code == 401
    assert gate.app.paths == []  # type: ignore[attr-defined]
    assert gate.version is None


def test_health_is_open_and_the_secret_opens_the_rest(gate: Gate) -> None:
    assert ask(gate, "GET", "/health").status_code == 200
    assert ask(gate, "GET", "/v1/models", OWN).status_code == 200
    assert gate.app.paths == ["/health", "/v1/models"]  # type: ignore[attr-defined]


def test_websockets_are_refused_with_the_secret_too(gate: Gate) -> None:
    async def run(extensions: dict[str, Any]) -> list[Any]:
        sent: list[Any] = []

        async def receive() -> dict[str, str]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"authorization", f"Bearer {SECRET}".encode())]
        scope = {"type": "websocket", "path": "/health", "headers": headers, "extensions": extensions}
        await gate(scope, receive, send)  # type: ignore[arg-type]
        return sent

    assert asyncio.run(run({}))[0]["type"] == "websocket.close"
    assert asyncio.run(run({"websocket.http.response": {}}))[0]["status"] == 401
    assert gate.app.paths == []  # type: ignore[attr-defined]


def test_the_version_starts_stale_and_is_what_was_set(gate: Gate) -> None:
    state = ask(gate, "GET", "/hpcgrpo/state", OWN).json()
    assert state == {"instance": gate.instance, "version": None, "busy": 0}
    assert len(gate.instance) == 16
    set_version(gate, 3)
    assert ask(gate, "GET", "/hpcgrpo/state", OWN).json()["version"] == 3
    set_version(gate, None)
    assert ask(gate, "GET", "/hpcgrpo/state", OWN).json()["version"] is None


@pytest.mark.parametrize(
    "body", ["", "x", "[]", "{}", '{"version": -1}', '{"version": 1.5}', '{"version": true}']
)
def test_a_version_that_is_none_is_refused(gate: Gate, body: str) -> None:
    set_version(gate, 3)
    assert ask(gate, "POST", "/hpcgrpo/version", OWN, content=body).status_code == 400
    assert gate.version == 3


def test_a_long_body_is_not_read(gate: Gate) -> None:
    answer = ask(gate, "POST", "/hpcgrpo/version", OWN, content=b" " * 5000 + b'{"version": 1}')
    assert answer.status_code == 400


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/v1/completions/"]
)
def test_too_old_weights_generate_nothing(gate: Gate, path: str) -> None:
    def generate(minimum: str | None) -> httpx.Response:
        return ask(gate, "POST", path, OWN | ({} if minimum is None else {"X-Minimum-Version": minimum}))

    stale = generate("0")
    assert stale.status_code == 409
    assert stale.json() == {"error": "stale", "held": None, "instance": gate.instance}
    set_version(gate, 4)
    assert generate("5").status_code == 409
    assert generate("5").json()["held"] == 4
    for wrong in (None, "", "-1", "4.0", "x"):
        assert generate(wrong).status_code == 400
    assert gate.app.paths == []  # type: ignore[attr-defined]
    for enough in ("4", "0"):
        assert generate(enough).status_code == 200
        assert generate(enough).headers["X-Weights-Version"] == "4"


def test_an_answer_names_the_older_of_the_weights_it_saw(gate: Gate) -> None:
    def during(version: int | None) -> str | None:
        set_version(gate, 4)
        gate.app.during = lambda: setattr(gate, "version", version)  # type: ignore[attr-defined]
        return ask(gate, "POST", "/v1/completions", OWN | {"X-Minimum-Version": "4"}).headers.get(
            "X-Weights-Version"
        )

    assert during(5) == "4"
    assert during(3) == "3"
    assert during(None) is None


def test_a_stream_names_no_weights(gate: Gate) -> None:
    set_version(gate, 4)
    gate.app.content_type = b"text/event-stream; charset=utf-8"  # type: ignore[attr-defined]
    answer = ask(gate, "POST", "/v1/completions", OWN | {"X-Minimum-Version": "4"})
    assert answer.status_code == 200
    assert "X-Weights-Version" not in answer.headers


def test_busy_counts_what_is_being_answered(gate: Gate) -> None:
    set_version(gate, 0)
    seen = []

    def during() -> None:
        seen.append(gate.busy)
        raise RuntimeError("the app fails")

    gate.app.during = during  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError):
        ask(gate, "POST", "/v1/completions", OWN | {"X-Minimum-Version": "0"})
    assert (seen, gate.busy) == ([1], 0)


def test_there_is_no_gate_without_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCGRPO_SECRET_FILE", raising=False)
    with pytest.raises(ValueError, match="is not set"):
        Gate(Inner())
    monkeypatch.setenv("HPCGRPO_SECRET_FILE", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="No such file"):
        Gate(Inner())
    (tmp_path / "empty").write_text("\n")
    monkeypatch.setenv("HPCGRPO_SECRET_FILE", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="must name the file"):
        Gate(Inner())
