"""An HTTP server with the paths of one vLLM engine, for faults that a real one does not produce on demand.

`python stand_in_engine.py SECRET` prints its port and serves until its input ends. Completions count up from the sum
of prompt and seed. `POST /script` sets what it holds and how the next completions go wrong; `GET /log` tells what
was asked of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 409: "Conflict"}


class StandIn:
    """The state of the server: `faults` befall the next completions in turn, `always` all of them."""

    def __init__(self, secret: str) -> None:
        self.secret = secret
        self.version: int | None = 0
        self.faults: list[dict[str, Any]] = []
        self.always: dict[str, Any] = {}
        self.asked: list[dict[str, Any]] = []
        self.counters: dict[str, float] = {}  # of the prefix cache, as /metrics tells them
        self.busy = self.peak = self.cancelled = self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: request after request until either side closes it."""
        self.connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                path = head.split()[1]
                lines = [line.split(":", 1) for line in head.split("\r\n")[1:] if ":" in line]
                headers = {name.lower(): value.strip() for name, value in lines}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                data = json.loads(raw) if raw else {}
                answer = await self.within(reader, self.answer(path, headers, data))
                if answer is None:
                    break
                status, body, more = answer
                writer.write(response(status, body, more))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def within(self, reader: asyncio.StreamReader, work: Any) -> Any:
        """The answer, given up when the other side goes."""
        task = asyncio.create_task(work)
        gone = asyncio.create_task(reader.read(1))
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            self.cancelled += 1
            task.cancel()
            return None
        gone.cancel()
        await asyncio.wait({gone})  # two readers at once are not allowed
        return task.result()

    async def answer(self, path: str, headers: dict[str, str], data: Any) -> Any:
        if path == "/script":
            vars(self).update(data)
            return 200, {}, {}
        if path == "/log":
            shown = ("asked", "peak", "cancelled", "connections")
            return 200, {name: getattr(self, name) for name in shown}, {}
        if headers.get("authorization") != f"Bearer {self.secret}":
            return 401, {"error": "unauthorized"}, {}
        if path == "/metrics":
            rows = self.counters.items()
            return 200, "".join(f'vllm:prefix_cache_{k}_total{{engine="0"}} {v}\n' for k, v in rows), {}
        if path == "/hpcgrpo/state":
            return 200, {"instance": "a", "version": self.version, "busy": self.busy}, {}
        self.asked.append({**data, "minimum": headers.get("x-minimum-version")})
        self.busy += 1
        self.peak = max(self.peak, self.busy)
        try:
            return await self.complete(int(headers["x-minimum-version"]), data)
        finally:
            self.busy -= 1

    async def complete(self, minimum: int, data: Any) -> Any:
        fault = self.faults.pop(0) if self.faults else self.always
        version = self.version
        if version is None or version < minimum:
            return 409, {"error": "stale", "held": version, "instance": "a"}, {}
        self.version = fault.get("becomes", version)
        if seconds := fault.get("seconds"):
            await asyncio.sleep(seconds)
        if "hang_up" in fault:
            return None
        if "status" in fault:
            return fault["status"], {"error": {"message": fault.get("message", "broken")}}, {}
        start = (sum(data["prompt"]) + data.get("seed", 0)) % 1000
        ids = [start + i for i in range(data["max_tokens"])][: fault.get("tokens")]
        choice = {
            "text": "",
            "token_ids": ids,
            "prompt_token_ids": data["prompt"],
            "logprobs": {"token_logprobs": [-0.5] * len(ids)},
            "finish_reason": "length",
            **fault.get("choice", {}),
        }
        stamp = {} if self.version is None else {"X-Weights-Version": str(min(version, self.version))}
        return 200, {"choices": [choice]}, stamp


def response(status: int, body: Any, more: dict[str, str]) -> bytes:
    """An HTTP answer."""
    raw = (body if isinstance(body, str) else json.dumps(body)).encode()
    lines = [
        f"HTTP/1.1 {status} {REASONS.get(status, 'Internal Server Error')}",
        "Content-Type: application/json",
        f"Content-Length: {len(raw)}",
        *(f"{name}: {value}" for name, value in more.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + raw


async def main(secret: str, port: int) -> None:
    """Serve on the loopback interface."""
    server = await asyncio.start_server(StandIn(secret).serve, "127.0.0.1", port, backlog=512, limit=2**20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the test's process closes it or ends


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0))
