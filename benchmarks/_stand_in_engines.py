"""Engines of known speed: a process each that answers vLLM's completions after a fixed time, so many at once.

    with stand_ins(8, capacity=16, seconds=1.5, answers=answers) as urls: ...

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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
    def __init__(self, capacity: int, seconds: float, lengths: Sequence[int], longest: int) -> None:
        self.slots, self.seconds = asyncio.Semaphore(capacity), seconds
        self.answers = [answer(n, longest=longest, seed=i) for i, n in enumerate(lengths)]
        self.count = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = next(x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length"))
                asked = await reader.readexactly(int(size.split(b":")[1]))
                before, after = self.answers[self.count % len(self.answers)]
                self.count += 1
                async with self.slots:
                    await asyncio.sleep(self.seconds)
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


async def _main(capacity: str, seconds: str, longest: str, *lengths: str) -> None:
    engine = _Engine(int(capacity), float(seconds), [*map(int, lengths)], int(longest))
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, backlog=1024, limit=2**20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the benchmark closes it or ends


@contextmanager
def stand_ins(
    count: int, *, capacity: int, seconds: float, lengths: Sequence[int], longest: int
) -> Iterator[list[str]]:
    """-> the urls of `count` engines; each answers with completions of these lengths in turn."""
    command = [sys.executable, str(Path(__file__)), *map(str, (capacity, seconds, longest, *lengths))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(count)]  # type: ignore[call-overload]
    try:
        yield [f"http://127.0.0.1:{int(p.stdout.readline())}" for p in processes]
    finally:
        for process in processes:
            process.stdin.close()
        for process in processes:
            process.wait(10)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
