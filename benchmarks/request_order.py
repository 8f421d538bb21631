"""In which order and to which engine requests should go: the time of a step's sampling, simulated.

    .venv/bin/python benchmarks/request_order.py [--trials 5] [--json]

The client's own order and routing (`hpcgrpo/generation/routing.py`) beside what it did before (longest prompt first,
the engine with the fewest requests), on engines that decode all their requests in step: a step takes 8 ms and 0.034 ms
for each request, about what a 7B model takes on one H100, and reading a prompt holds the engine up by a second per
20,000 tokens unless it has read it before. Completions are log-normal, mean 1,024, cut at 4,096, half of the
variance between questions. Known are the means of an earlier epoch's 8 completions; each single length, which would be
better still, nobody knows.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from _rows import positive

from hpcgrpo.generation.routing import Lengths, Schedule
from hpcgrpo.types import Request

STEP, OF_A_REQUEST, OF_A_PROMPT_TOKEN = 8e-3, 3.4e-5, 1 / 20_000  # seconds
MEAN, LONGEST, SIGMA, SHARED, PROMPT = 1024, 4096, 1.0, 0.5, 512

# requests: questions x completions, over so many clients (learner ranks) of so many lanes, and engines of so many slots
CASES = {
    "1,024 requests, all at once": {"questions": 128, "group": 8, "clients": 8, "lanes": 256, "slots": 256},
    "4,096 requests, twice the lanes": {"questions": 512, "group": 8, "clients": 8, "lanes": 256, "slots": 256},
    "512 requests, one engine of 128": {
        "questions": 64, "group": 8, "clients": 1, "lanes": 256, "slots": 128, "engines": 1
    },
    "8,000 of an evaluation": {"questions": 500, "group": 16, "clients": 1, "lanes": 2048, "slots": 256},
}  # fmt: skip


@dataclass
class Engine:
    """Decodes up to `slots` requests in step; its clock counts the tokens that each of them has by now."""

    slots: int
    clock: float = 0.0
    at: float = 0.0  # seconds
    running: list[tuple[float, int, int]] = field(
        default_factory=list
    )  # the clock at its end, client, request
    waiting: list[tuple[int, int, int, int]] = field(default_factory=list)
    prompts: set[int] = field(default_factory=set)
    read: int = 0  # prompts

    @property
    def pace(self) -> float:
        return STEP + OF_A_REQUEST * len(self.running)

    def advance(self, to: float) -> None:
        if self.running and to > self.at:
            self.clock += (to - self.at) / self.pace
        self.at = max(self.at, to)

    def take(self, client: int, i: int, question: int, length: int) -> None:
        self.waiting.append((client, i, question, length))
        self.admit()

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            client, i, question, length = self.waiting.pop(0)
            if question not in self.prompts:
                self.prompts.add(question)
                self.read += 1
                self.at += PROMPT * OF_A_PROMPT_TOKEN
            heapq.heappush(self.running, (self.clock + length, client, i))

    def ends(self) -> float:
        """When its next request ends."""
        return self.at + (self.running[0][0] - self.clock) * self.pace if self.running else math.inf


class Before:
    """As it was: one request after the other, to the engine with the fewest."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.todo = [i for group in groups for i in group][::-1]

    @property
    def left(self) -> int:
        return len(self.todo)

    def take(self, loads: dict[str, int]) -> tuple[int, str]:
        return self.todo.pop(), min(loads, key=loads.__getitem__)


@dataclass
class Client:
    todo: Any  # a Schedule, or what was there before
    requests: Sequence[Request]
    lengths: Sequence[int]
    loads: dict[str, int]


def drawn(draws: random.Random, questions: int, group: int) -> tuple[list[list[int]], list[float]]:
    """The lengths of each question's completions, and the mean of eight others."""
    lengths, means = [], []
    for _ in range(questions):
        center = math.log(MEAN) - SIGMA**2 / 2 + draws.gauss(0, SIGMA * math.sqrt(SHARED))
        spread = SIGMA * math.sqrt(1 - SHARED)
        drawn = [min(LONGEST, max(1, round(math.exp(draws.gauss(center, spread))))) for _ in range(group + 8)]
        lengths.append(drawn[:group])
        means.append(statistics.fmean(drawn[group:]))
    return lengths, means


def simulate(
    lengths: Sequence[Sequence[int]],
    order: Callable[[Sequence[Request], Sequence[int]], Any],
    *,
    clients: int,
    lanes: int,
    slots: int,
    engines: int = 8,
) -> tuple[float, float]:
    """-> seconds until the last completion, and the share of the requests whose prompt had to be read."""
    urls = [str(i) for i in range(engines)]
    at = {url: Engine(slots) for url in urls}
    each = []
    for rank in range(clients):
        mine = [(q, n) for q in range(rank, len(lengths), clients) for n in lengths[q]]
        requests = [Request((q,), i, question=q) for i, (q, _) in enumerate(mine)]
        numbers = [n for _, n in mine]
        first = rank % engines
        loads = dict.fromkeys([*urls[first:], *urls[:first]], 0)
        each.append(Client(order(requests, numbers), requests, numbers, loads))

    def fill(rank: int, now: float) -> None:
        client = each[rank]
        while client.todo.left and sum(client.loads.values()) < lanes:
            i, url = client.todo.take(client.loads)
            client.loads[url] += 1
            at[url].advance(now)
            at[url].take(rank, i, client.requests[i].question or 0, client.lengths[i])

    for rank in range(clients):
        fill(rank, 0.0)
    now = 0.0
    for _ in range(sum(map(len, lengths))):
        url = min(urls, key=lambda u: at[u].ends())
        now = at[url].ends()
        at[url].advance(now)
        _, rank, _ = heapq.heappop(at[url].running)
        each[rank].loads[url] -= 1
        at[url].admit()
        fill(rank, now)
    return now, sum(e.read for e in at.values()) / sum(map(len, lengths))


def orders(means: Sequence[float]) -> dict[str, Callable[[Sequence[Request], Sequence[int]], Any]]:
    """The ways to send that are compared, by name."""
    nothing, known = Lengths(), Lengths()
    known.learn({q: [round(mean)] for q, mean in enumerate(means)})
    return {
        "before": lambda requests, _: Before(nothing.order(requests)),
        "groups on one engine": lambda requests, _: Schedule(nothing.order(requests), requests, {}),
        "and longest known first": lambda requests, _: Schedule(known.order(requests), requests, {}),
        "each by its length": lambda requests, numbers: Before(
            [sorted(range(len(requests)), key=lambda i: -numbers[i])]
        ),
    }


def measure(trials: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Mean seconds and share of prompts read, by case and way."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for case, options in CASES.items():
        runs: dict[str, list[tuple[float, float]]] = {}
        shape = {k: v for k, v in options.items() if k not in ("questions", "group")}
        for trial in range(trials):
            lengths, means = drawn(random.Random(trial), options["questions"], options["group"])
            for name, order in orders(means).items():
                runs.setdefault(name, []).append(simulate(lengths, order, **shape))
        found[case] = {
            name: (statistics.fmean(s for s, _ in rs), statistics.fmean(r for _, r in rs))
            for name, rs in runs.items()
        }
    return found


def main() -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=positive, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.trials)
    if options.json:
        print(json.dumps(found))
        return
    for case, ways in found.items():
        print(f"{case:34}{'seconds':>10}{'of before':>11}{'prompts read':>14}")
        for name, (seconds, read) in ways.items():
            print(f"  {name:32}{seconds:10.1f}{seconds / ways['before'][0]:11.3f}{read:14.3f}")


if __name__ == "__main__":
    main()
