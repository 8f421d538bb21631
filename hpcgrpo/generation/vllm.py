"""The client of the vLLM engines: token ids out and back, one HTTP request per completion.

An engine that fails costs its own requests and no others: they are asked again elsewhere. One that is gone or
holds older weights gets nothing until it holds what the step expects; where none is left, the weights are pushed
again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hpcgrpo.generation.decoded import Decoded
from hpcgrpo.generation.http import Connection, NoAnswer
from hpcgrpo.generation.prefix_cache import PrefixCache
from hpcgrpo.generation.routing import Lengths, Schedule
from hpcgrpo.generation.wire import Fault, Refused, body, read
from hpcgrpo.types import Arrived, Completion, Request, Sampling, Stopped

if TYPE_CHECKING:
    from torch import Tensor

TRIES = 3  # bad answers to one request before it is dropped; rounds without any answer before the run ends
POLL_SECONDS = 0.25
PROBE_SECONDS = 10.0  # for an engine to say what it holds
COUNT_SECONDS = 2.0  # for an engine to tell its counters
LOOK_AGAIN_SECONDS = 2.0  # between looks at the engines that are out
KEPT_REASONS = 16


class Sync(Protocol):
    """Brings weights to the engines; collective over the learner ranks."""

    def push(self, tensors: Callable[[], Iterable[tuple[str, Tensor]]], version: int) -> list[str]:
        """-> the urls of the engines that hold the version now."""
        ...


@dataclass
class _Server:
    """One engine as this client sees it."""

    url: str
    holds: bool = False  # the weights that the step expects, so it may be asked
    answers: bool = False  # when last looked at
    probing: bool = False
    load: int = 0  # requests of this client in flight
    last_error: str = "no weights were pushed to it"


@dataclass
class _Work:
    """One call of `generate`: what is asked, what came, what is still to do."""

    requests: Sequence[Request]
    sampling: Sampling
    minimum: int  # weights version that a completion must have been sampled with, or a later one
    todo: Schedule
    arrived: Arrived
    answered: int = 0
    failures: dict[int, int] = field(default_factory=dict)  # bad answers by request
    lengths: dict[int, list[int]] = field(default_factory=dict)  # of completions, in tokens, by question
    dropped: dict[int, str] = field(default_factory=dict)  # why, by request
    sizes: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # prompt, completion; by url
    systematic: bool = False  # a request was dropped for something that is not its own fault


class VllmGenerator:
    """Samples completions from the vLLM engines that hold the weights as last pushed.

    `dropped` counts the completions that no engine would give, `drop_reasons` holds the last messages.
    """

    def __init__(
        self,
        *,
        urls: Sequence[str],
        secret: str,
        sync: Sync,
        decode: Callable[[Sequence[int]], str],
        model: str = "policy",
        stop_token_ids: Collection[int],
        max_concurrency: int,
        request_timeout_seconds: float,
        server_timeout_seconds: float,
        max_staleness: int,
        stopping: Callable[[], bool],
        starved: Callable[[], None],
        moved: Callable[[], None],
        counts: bool = True,
    ) -> None:
        """`decode` turns token ids into text without special tokens; a completion ends with the first of
        `stop_token_ids`. `max_staleness` is in optimizer steps. `stopping` is asked four times a second; `starved`
        is called where engines answer but none holds the weights, and returns once all ranks pushed them again;
        `moved` is called for each completion. `counts`: whether `metrics` asks the engines, which one rank does.
        """
        self.sync, self.decode, self.model = sync, decode, model
        self.stop_token_ids = sorted(stop_token_ids)
        self.max_concurrency, self.max_staleness = max_concurrency, max_staleness
        self.request_timeout_seconds = request_timeout_seconds
        self.server_timeout_seconds = server_timeout_seconds
        self.stopping, self.starved, self.moved, self.counts = stopping, starved, moved, counts
        self.weights_version: int | None = None
        self.dropped = 0
        self.drop_reasons: deque[str] = deque(maxlen=KEPT_REASONS)
        self._decoded: dict[str, Decoded] = {}
        self._secret = secret
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._lengths = Lengths()
        self._homes: dict[Hashable, str] = {}  # the engine that has read a question, since the last update
        self._prefix_cache = PrefixCache()

    def update_weights(self, tensors: Callable[[], Iterable[tuple[str, Tensor]]], version: int) -> None:
        """Push the weights to every engine; collective. `tensors` gives a fresh iterator: a push may be repeated."""
        holding = {url.rstrip("/") for url in self.sync.push(tensors, version)}
        self.weights_version = version
        self._homes.clear()  # new weights leave nothing of what engines have read
        for server in self._servers:
            server.holds = server.url in holding
            if not server.holds:
                server.last_error = f"it did not take the weights of version {version}"

    def metrics(self) -> dict[str, float]:
        """`generation/prefix_cache_hit_rate`, as `PrefixCache.rate`; without engines that do not answer at once."""
        if self.counts:
            asyncio.run(self._count())
        rate = self._prefix_cache.rate()
        return {} if rate is None else {"generation/prefix_cache_hit_rate": rate}

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived | None = None
    ) -> list[Completion]:
        """One completion per request, in their order; otherwise as `stream`."""
        answers: dict[int, Completion] = {}

        def came(i: int, completion: Completion) -> None:
            answers[i] = completion
            if arrived is not None:
                arrived(i, completion)

        self.stream(requests, sampling, came)
        return [answers[i] for i in range(len(requests))]

    def stream(self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived) -> None:
        """Give each request's number and completion to `arrived` as it comes; nothing is kept here.

        The weights behind it are at most `max_staleness` updates old.

        `logprobs` are at the sampling temperature, at temperature 1 where it is 0 (greedy). A request that the
        engines refuse comes back empty with the finish reason `abort`.

        Raises Stopped when `stopping` says so; RuntimeError where no engine answers within
        `server_timeout_seconds`, where they refuse the secret, or where they give nothing at all; ValueError for
        log-probs that are not finite and for a prompt that did not arrive as it was sent.
        """
        if self.weights_version is None:
            raise ValueError(
                "no weights were pushed to the vLLM engines: call update_weights before generate."
            )
        minimum = max(0, self.weights_version - self.max_staleness)
        todo = Schedule(self._lengths.order(requests), requests, self._homes)
        work = _Work(requests, sampling, minimum, todo, arrived)
        fruitless = 0
        while todo.left:
            before = work.answered + len(work.dropped)
            self._run(work, self._ask_all)
            if not todo.left:
                break
            fruitless = 0 if work.answered + len(work.dropped) > before else fruitless + 1
            if fruitless == TRIES:
                raise RuntimeError(f"the vLLM engines take no request although they answer. {self._errors()}")
            self._recover(work)
        self._account(work)
        for url, sizes in work.sizes.items():
            done = self._decoded.get(url, Decoded())
            self._decoded[url] = done.then(Decoded.side_by_side(sizes))
        self._lengths.learn(work.lengths)
        for i in sorted(work.dropped):
            arrived(i, _aborted(requests[i]))

    def take_decoded(self) -> dict[str, Decoded]:
        """What each engine decoded for this rank since this was last asked, by its url."""
        done, self._decoded = self._decoded, {}
        return done

    def _account(self, work: _Work) -> None:
        self.dropped += len(work.dropped)
        self.drop_reasons.extend(work.dropped.values())
        several = len({r.prompt_token_ids for r in work.requests}) > 1  # a lone prompt may be at fault itself
        if work.dropped and not work.answered and (work.systematic or several):
            raise RuntimeError(
                f"the vLLM engines answered none of {len(work.requests)} requests: {self.drop_reasons[-1]}. See"
                " the engine-*.log files of this attempt."
            )

    # ---- one round: requests until all are answered or no engine may be asked

    def _run(self, work: _Work, job: Callable[[_Work], Awaitable[None]]) -> None:
        """Do the job; leave it, its requests given up, as soon as the run is to stop."""

        async def watched() -> None:
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(self._heed()), group.create_task(self._look_again(work))]
                await job(work)
                for task in beside:
                    task.cancel()

        try:
            asyncio.run(watched())
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    async def _heed(self) -> None:
        while not self.stopping():
            await asyncio.sleep(POLL_SECONDS)
        raise Stopped

    async def _look_again(self, work: _Work) -> None:
        """Take back the engines that hold the weights after all: pushed to late, or cut off for a while."""
        while True:
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
            await asyncio.gather(*(self._probe(s, work) for s in self._servers if not s.holds))

    async def _ask_all(self, work: _Work) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.max_concurrency, work.todo.left)):
                group.create_task(self._lane(work))

    async def _lane(self, work: _Work) -> None:
        """One request after the other, each to the engine that the schedule says, over connections of its own."""
        connections: dict[str, Connection] = {}
        try:
            while work.todo.left:
                holding = {s.url: s for s in self._servers if s.holds}
                if holding:
                    i, url = work.todo.take({u: s.load for u, s in holding.items()})
                    if url not in connections:
                        connections[url] = self._connection(url, work.minimum)
                    await self._ask(work, i, holding[url], connections[url])
                elif any(s.probing or s.load for s in self._servers):
                    await asyncio.sleep(POLL_SECONDS)
                else:
                    return
        finally:
            for connection in connections.values():
                connection.close()

    def _connection(self, url: str, minimum: int = 0) -> Connection:
        headers = {
            "Authorization": f"Bearer {self._secret}",
            "X-Minimum-Version": str(minimum),
            "Content-Type": "application/json",
        }
        return Connection(url, headers)

    async def _ask(self, work: _Work, i: int, server: _Server, connection: Connection) -> None:
        """One try at one request: it is answered, dropped, or back among those to do."""
        server.load += 1
        try:
            completion = await self._answer(work, i, server, connection)
        except Refused as refusal:
            work.systematic |= not refusal.own_fault
            work.dropped[i] = str(refusal)
        except Fault as fault:
            server.last_error = str(fault)
            alive = await self._suspect(work, server)
            work.failures[i] = work.failures.get(i, 0) + (alive or fault.counts)
            if work.failures[i] < TRIES:
                work.todo.repeat(i, server.url)
            else:
                work.dropped[i], work.systematic = f"{server.url} failed: {fault}", True
        else:
            work.answered += 1
            sizes = (len(work.requests[i].prompt_token_ids), len(completion.token_ids))
            work.sizes.setdefault(server.url, []).append(sizes)
            if (question := work.requests[i].question) is not None:
                work.lengths.setdefault(question, []).append(len(completion.token_ids))
            work.arrived(i, completion)
            self.moved()
        finally:
            server.load -= 1

    async def _answer(self, work: _Work, i: int, server: _Server, connection: Connection) -> Completion:
        request, sampling = work.requests[i], work.sampling
        asked = body(request, sampling, model=self.model, stop_token_ids=self.stop_token_ids)
        try:
            response = await connection.request(
                "POST", "/v1/completions", asked, timeout_seconds=self.request_timeout_seconds
            )
        except NoAnswer as error:
            raise Fault(f"{error} (generation.vllm_request_timeout)") from None
        except ConnectionError as error:
            raise Fault(str(error), counts=False) from None
        if response.status == 401:
            raise RuntimeError(_locked_out(server))
        return read(
            response,
            request,
            sampling,
            minimum=work.minimum,
            decode=self.decode,
            check_echo=not work.answered,
        )

    # ---- engines that fail, and their way back

    async def _suspect(self, work: _Work, server: _Server) -> bool:
        """Ask an engine that failed what it holds -> whether it may be asked again at once."""
        if not server.holds:
            return False  # another request found out
        server.holds = False
        await self._probe(server, work)
        return server.holds

    async def _probe(self, server: _Server, work: _Work) -> None:
        """Find out whether it answers and whether it holds what is expected."""
        if server.probing:
            return
        server.probing, server.answers = True, False
        connection = self._connection(server.url)
        try:
            response = await connection.request("GET", "/hpcgrpo/state", timeout_seconds=PROBE_SECONDS)
            if response.status == 401:
                raise RuntimeError(_locked_out(server))
            version = response.json().get("version") if response.status == 200 else None
        except (ConnectionError, NoAnswer, ValueError) as error:
            server.last_error = str(error)
        else:
            server.answers = response.status == 200
            server.holds = version is not None and version >= work.minimum
            if not server.holds:
                server.last_error = f"{response.status}: it holds version {version}, not {work.minimum}"
        finally:
            server.probing = False
            connection.close()

    async def _count(self) -> None:
        await asyncio.gather(*(self._count_one(s.url) for s in self._servers))

    async def _count_one(self, url: str) -> None:
        connection = self._connection(url)
        try:
            response = await connection.request("GET", "/metrics", timeout_seconds=COUNT_SECONDS)
        except (ConnectionError, NoAnswer):
            return  # a number for the log: whether the engine is well is found out elsewhere
        finally:
            connection.close()
        self._prefix_cache.read(url, response.text)

    def _recover(self, work: _Work) -> None:
        """Wait until an engine holds the weights, having them pushed again where one answers but holds others."""
        deadline = time.monotonic() + self.server_timeout_seconds
        while True:
            self._run(work, self._probe_all)
            if any(s.holds for s in self._servers):
                return
            if any(s.answers for s in self._servers):
                self.starved()
                return
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"no vLLM engine answered within {self.server_timeout_seconds:g} s"
                    f" (generation.vllm_server_timeout). {self._errors()}"
                )

    async def _probe_all(self, work: _Work) -> None:
        await asyncio.gather(*(self._probe(s, work) for s in self._servers))
        if not any(s.answers for s in self._servers):
            await asyncio.sleep(POLL_SECONDS)

    def _errors(self) -> str:
        seen = "; ".join(f"{s.url}: {s.last_error}" for s in self._servers)
        return f"Last errors: {seen}. See the engine-*.log files of this attempt."


def _locked_out(server: _Server) -> str:
    return (
        f"{server.url} refuses this run's secret: an engine of another run or attempt answers there. The secret"
        " is the file slurm/secret in the run's folder; engines and learners must read the same one."
    )


def _aborted(request: Request) -> Completion:
    return Completion(token_ids=(), logprobs=(), finish_reason="abort", text="", seed=request.seed)


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
