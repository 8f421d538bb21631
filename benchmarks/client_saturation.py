"""Whether one client keeps eight vLLM engines busy, and what a request costs it, beside a client on httpx.

    .venv/bin/python benchmarks/client_saturation.py [--engines 8] [--capacity 32] [--tokens-per-second 10000] [--json]

The engines are stand-ins of known speed (`_stand_in_engines.py`); requests and answers are what goes to and comes from
vLLM: prompts of 512 to 2,048 tokens in groups of 8, completions of up to 4,096 tokens with their log-probs, checked and
decoded. A client's speed is taken over the middle half of its completions. The clients take turns in this process; both
read answers by the same function, and `bare` only moves the bytes, which shows what a busy machine lets a client have.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from typing import Any

import httpx
from _rows import at_least, compared, positive, row
from _stand_in_engines import VOCABULARY, drawn_lengths, learner_client, stand_ins

from hpcgrpo.generation.http import Connection, Response
from hpcgrpo.generation.wire import body, read
from hpcgrpo.types import Request, Sampling

GROUP, LONGEST, MEAN, ANSWERS = 8, 4096, 1024.0, 64
PROMPT_LENGTHS = (512, 2048)
SAMPLING = Sampling(temperature=1.0, max_completion_length=LONGEST)
Came = Callable[[], None]  # told of each completion
Client = Callable[[Sequence[str], Sequence[Request], int, Came], None]


@dataclass(frozen=True)
class Run:
    """One client's way through all requests."""

    requests: int
    seconds: float
    cpu_seconds: float
    rate: float  # requests a second, over the middle half of them
    bound: float  # that the engines can give


def ours(
    decode: Callable[[Sequence[int]], str],
    urls: Sequence[str],
    requests: Sequence[Request],
    lanes: int,
    came: Came,
) -> None:
    """The run's own client, as a learner rank has it."""
    client = learner_client(urls, decode, lanes)
    client.stream(requests, SAMPLING, lambda i, completion: came())


def on_httpx(
    decode: Callable[[Sequence[int]], str],
    urls: Sequence[str],
    requests: Sequence[Request],
    lanes: int,
    came: Came,
) -> None:
    """The obvious alternative: an httpx.AsyncClient for each engine, engines in turn, as many requests in flight."""

    async def lane(clients: Mapping[str, httpx.AsyncClient], todo: Iterator[tuple[int, str]]) -> None:
        for i, url in todo:
            content = body(requests[i], SAMPLING, model="policy", stop_token_ids=[2])
            answer = await clients[url].post("/v1/completions", content=content)
            response = Response(url, answer.status_code, answer.headers, answer.content)
            read(response, requests[i], SAMPLING, minimum=0, decode=decode, check_echo=not i)
            came()

    async def run() -> None:
        headers = {"Authorization": "Bearer s", "X-Minimum-Version": "0", "Content-Type": "application/json"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
        todo = iter(zip(range(len(requests)), cycle(urls), strict=False))
        async with AsyncExitStack() as stack:
            options: dict[str, Any] = {
                "headers": headers,
                "limits": limits,
                "timeout": 600.0,
                "trust_env": False,
            }
            opened = [httpx.AsyncClient(base_url=url, **options) for url in urls]
            clients = {url: await stack.enter_async_context(c) for url, c in zip(urls, opened, strict=True)}
            await asyncio.gather(*(lane(clients, todo) for _ in range(lanes)))

    asyncio.run(run())


def bare(urls: Sequence[str], requests: Sequence[Request], lanes: int, came: Came) -> None:
    """The control: bytes out and bytes in, nothing read or checked; what it misses, the machine misses."""
    asked = body(requests[0], SAMPLING, model="policy", stop_token_ids=[2])

    async def lane(url: str, todo: Iterator[int]) -> None:
        connection = Connection(url, {"X-Minimum-Version": "0"})
        for _ in todo:
            await connection.request("POST", "/v1/completions", asked, timeout_seconds=600.0)
            came()
        connection.close()

    async def run() -> None:
        each = [iter(range(k, len(requests), len(urls))) for k in range(len(urls))]
        await asyncio.gather(*(lane(urls[i % len(urls)], each[i % len(urls)]) for i in range(lanes)))

    asyncio.run(run())


def made_requests(count: int) -> list[Request]:
    """Groups of one prompt each."""
    draws = random.Random(1)
    prompts = [
        tuple(draws.randrange(VOCABULARY) for _ in range(draws.randint(*PROMPT_LENGTHS)))
        for _ in range(-(-count // GROUP))
    ]
    return [Request(prompts[i // GROUP], seed=i, question=i // GROUP) for i in range(count)]


def decoder() -> Callable[[Sequence[int]], str]:
    """A byte-level tokenizer's decode, with as many tokens as Qwen2's."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={f"Ġ{i:x}": i for i in range(VOCABULARY)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return partial(PreTrainedTokenizerFast(tokenizer_object=tokenizer).decode, skip_special_tokens=True)


def timed(client: Client, urls: Sequence[str], requests: Sequence[Request], lanes: int, bound: float) -> Run:
    times: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()
    client(urls, requests, lanes, lambda: times.append(time.perf_counter()))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    quarter = len(times) // 4
    rate = 2 * quarter / (times[3 * quarter] - times[quarter])
    return Run(len(requests), seconds, cpu, rate, bound)


def measure(options: argparse.Namespace) -> dict[str, list[Run]]:
    """Every client's runs, taking turns."""
    lengths = drawn_lengths(ANSWERS, mean=MEAN, longest=LONGEST)
    slots = options.engines * options.capacity
    seconds = options.capacity * statistics.mean(lengths) / options.tokens_per_second
    requests, bound = made_requests(options.waves * slots), slots / seconds
    decode = decoder()
    clients: dict[str, Client] = {
        "ours": partial(ours, decode),
        "httpx": partial(on_httpx, decode),
        "bare": bare,
    }
    runs: dict[str, list[Run]] = {name: [] for name in clients}
    with stand_ins(
        options.engines, capacity=options.capacity, seconds=seconds, lengths=lengths, longest=LONGEST
    ) as urls:
        for _ in range(options.rounds):
            for name, client in clients.items():
                runs[name].append(timed(client, urls, requests, options.lanes, bound))
    return runs


def rows(runs: Mapping[str, Sequence[Run]], engines: int) -> list[dict[str, Any]]:
    """For `table.py`."""
    mine = runs["ours"]
    each = {name: [r.cpu_seconds / r.requests for r in found] for name, found in runs.items()}
    return [
        row(
            f"client of {engines} engines: what they can give",
            statistics.median(r.rate / r.bound for r in mine),
            of="requests/s",
            bound=1.0,
            bound_is="stand-in engines of known speed",
            promised=0.95,
        ),
        row("client: one on httpx", **compared(each["httpx"], each["ours"]), of="CPU-seconds a request"),
    ]


def line(name: str, runs: Sequence[Run], engines: int) -> str:
    seconds, cpu, rate = (
        statistics.median(x) for x in zip(*((r.seconds, r.cpu_seconds, r.rate) for r in runs), strict=True)
    )
    each = cpu / runs[0].requests
    return (
        f"{name:6}{runs[0].bound:10.1f}{rate:10.1f}{rate / runs[0].bound:10.1%}{cpu / seconds:10.2f}"
        f"{1000 * each:12.2f}{engines / each / runs[0].bound:12.1f}"
    )


def main() -> None:
    """Print the table, or one JSON object with every run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=positive, default=8)
    parser.add_argument("--capacity", type=positive, default=32, help="completions at once, of one engine")
    parser.add_argument("--lanes", type=positive, default=384, help="requests in flight, of the client")
    parser.add_argument("--tokens-per-second", type=at_least(1.0), default=10_000, help="of one engine")
    parser.add_argument(
        "--waves", type=positive, default=6, help="requests: so many times engines x capacity"
    )
    parser.add_argument("--rounds", type=positive, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    count = options.waves * options.engines * options.capacity
    if count < 8:
        parser.error(f"--waves x --engines x --capacity is {count} requests; the middle half needs 8 in all")
    runs = measure(options)
    if options.json:
        found = {name: [asdict(r) for r in rs] for name, rs in runs.items()}
        print(json.dumps({"rows": rows(runs, options.engines), "runs": found}))
        return
    print(
        f"{'client':6}{'bound/s':>10}{'reached/s':>10}{'fraction':>10}{'cores':>10}{'CPU ms each':>12}{'engines':>12}"
    )
    for name, rs in runs.items():
        print(line(name, rs, options.engines))
    print("engines: of this speed, that one core of client would keep busy")


if __name__ == "__main__":
    main()
