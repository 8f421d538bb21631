"""Engines of known speed: a process each that answers vLLM's completions after a known time, so many at once.

    with stand_ins(8, capacity=16, seconds=1.5, lengths=[...], longest=4096) as urls: ...

What it costs them is little, so that the client is measured and not they: answers are made before, from token ids and
log-probs of the lengths asked for, in the format that vLLM 0.32 gives for `logprobs: 0` and `return_token_ids`; the
prompt's ids are copied from the request.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VOCABULARY = 152_064
MARK = b'"prompt":['


def answer(length: int, *, longest: int, seed: int) -> tuple[bytes, bytes]:
    """A completion of so many tokens as vLLM writes it, up to the prompt's ids and from there on."""
    draws = random.Random(seed)
    ids = [draws.randrange(VOCABULARY) for _ in range(length)]
    logprobs = [-draws.expovariate(2.0) for _ in range(length)]
    names = [f"token_id:{i}" for i in ids]
    choice = {
        "index": 0,
        "text": " a word" * length,
        "logprobs": {
            "text_offset": [11 * i for i in range(length)],
            "token_logprobs": logprobs,
            "tokens": names,
            "top_logprobs": [{name: value} for name, value in zip(names, logprobs, strict=True)],
        },
        "finish_reason": "length" if length == longest else "stop",
        "stop_reason": None,
        "token_ids": ids,
        "prompt_logprobs": None,
        "prompt_token_ids": [],
    }
    whole = {"id": "cmpl-0", "object": "text_completion", "model": "policy", "choices": [choice]}
    before, after = json.dumps(whole, separators=(",", ":")).encode().split(b'"prompt_token_ids":[')
    return before + b'"prompt_token_ids":[', after


def drawn_lengths(count: int, *, mean: float, longest: int, seed: int = 0) -> list[int]:
    """Log-normal with sigma 1, cut at `longest`; `mean` is that before the cut."""
    draws = random.Random(seed)
    return [max(1, min(longest, round(mean * draws.lognormvariate(-0.5, 1.0)))) for _ in range(count)]


class _Engine:
    def __init__(
        self, capacity: int, seconds: float, token_seconds: float, lengths: Sequence[int], longest: int
    ) -> None:
        self.slots, self.capacity = asyncio.Semaphore(capacity), capacity
        self.busy = self.ramp = 0
        self.seconds = [seconds + token_seconds * n for n in lengths]
        self.answers = [answer(n, longest=longest, seed=i) for i, n in enumerate(lengths)]
        self.count = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = next(x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length"))
                asked = await reader.readexactly(int(size.split(b":")[1]))
                which = self.count % len(self.answers)
                before, after = self.answers[which]
                self.count += 1
                await self.work(self.seconds[which])
                start = asked.index(MARK) + len(MARK)
                prompt = asked[start : asked.index(b"]", start)]
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Weights-Version: 0\r\n"
                    b"Content-Length: %d\r\n\r\n" % (len(before) + len(prompt) + len(after))
                )
                writer.writelines([before, prompt, after])
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def work(self, seconds: float) -> None:
        """Take this long for it, once there is room. After a pause the first few end one after the other over that
        time: as many at once would go on ending at once, which completions of different lengths do not."""
        self.ramp = self.ramp + 1 if self.busy else 1
        self.busy += 1
        share = min(1.0, self.ramp / self.capacity)
        try:
            async with self.slots:
                await asyncio.sleep(seconds * share)
        finally:
            self.busy -= 1


async def _main(capacity: str, seconds: str, token_seconds: str, longest: str, *lengths: str) -> None:
    times = float(seconds), float(token_seconds)
    engine = _Engine(int(capacity), *times, [*map(int, lengths)], int(longest))
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, backlog=1024, limit=2**20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the benchmark closes it or ends


@contextmanager
def stand_ins(
    count: int,
    *,
    capacity: int,
    lengths: Sequence[int],
    longest: int,
    seconds: float = 0.0,
    token_seconds: float = 0.0,
) -> Iterator[list[str]]:
    """-> the urls of `count` engines; each answers with completions of these lengths in turn, `seconds` after it has
    begun with one and `token_seconds` more for each of its tokens."""
    given = (capacity, seconds, token_seconds, longest, *lengths)
    command = [sys.executable, str(Path(__file__)), *map(str, given)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(count)]  # type: ignore[call-overload]
    try:
        yield [f"http://127.0.0.1:{int(p.stdout.readline())}" for p in processes]
    finally:
        for process in processes:
            process.stdin.close()
        for process in processes:
            process.terminate()
            process.wait(10)


class _Started:
    """A sync for engines that hold their weights from the start."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = list(urls)

    def push(self, tensors: Any, version: int) -> list[str]:
        return self.urls


def learner_client(urls: Sequence[str], decode: Callable[[Sequence[int]], str], lanes: int) -> Any:
    """The client of a learner rank, for engines that hold version 0."""
    from hpcgrpo.generation.vllm import VllmGenerator

    client = VllmGenerator(
        urls=urls,
        secret="s",
        sync=_Started(urls),
        decode=decode,
        stop_token_ids=[2],
        max_concurrency=lanes,
        request_timeout_seconds=600.0,
        server_timeout_seconds=60.0,
        max_staleness=0,
        stopping=lambda: False,
        starved=lambda: None,
        moved=lambda: None,
    )
    client.update_weights(list, 0)
    return client


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
