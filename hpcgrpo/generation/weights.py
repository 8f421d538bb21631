"""The learner's weights into every engine after each update: one client, two transports.

All learner ranks take part, since gathering a sharded tensor is collective; rank 0 alone talks to the engines. What
happens to a push is decided by rank 0 and told to all, so that no rank waits for one that has given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hpcgrpo.generation import broadcast
from hpcgrpo.generation.transports import (
    STATE_SECONDS,
    Answers,
    Calls,
    FilesystemTransport,
    Peer,
    ProcessGroupTransport,
    Transport,
    errors,
)

RETRY_SECONDS = 1.0  # between looks for an engine that lives
OWN_FAILURES = 2  # of one engine in one push, after which it is left out

Tensors = Callable[[], Iterable[tuple[str, Tensor]]]


class WeightSyncError(RuntimeError):
    """No engine took the weights: names each with what happened to it."""


@dataclass(frozen=True)
class Verdict:
    """What rank 0 tells the others to do next."""

    act: Literal["wait", "send", "again", "done", "fail"]
    urls: tuple[str, ...] = ()
    reason: str = ""


@dataclass
class Attempts:
    """What one push has seen so far."""

    version: int
    end: float  # monotonic
    peers: list[Peer] = field(default_factory=list)
    sent: dict[str, str] = field(default_factory=dict)  # fingerprints
    problems: dict[str, str] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    broken: str = ""

    def blame(self, url: str, why: str, failures: int = 1) -> None:
        """Note a failure that is the engine's own."""
        self.problems[url] = why
        self.failures[url] = self.failures.get(url, 0) + failures


class WeightSync:
    """Pushes weights into every engine that lives. `push` is collective over the learner ranks."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        secret: str,
        rank: int,
        gather: Callable[[Any], list[Any]],
        transport: Literal["process_group", "filesystem"],
        address: str,
        device: torch.device,
        bucket_bytes: int,
        timeout_seconds: float,
        folder: Path,
        dtype: torch.dtype,
    ) -> None:
        """`gather` brings a small value of every rank to every rank. `address` is rank 0's, as the engines reach it.

        Floating-point tensors go out as `dtype`. Rank 0 holds `bucket_bytes` of whole tensors and one more at most.
        `folder` is where the file transport writes.
        """
        self.urls, self.rank, self.gather = tuple(urls), rank, gather
        self.timeout_seconds, self.dtype = timeout_seconds, dtype
        if rank == 0:
            self._calls = Calls(secret)
            self._pool = ThreadPoolExecutor(2 * len(urls) + 2, thread_name_prefix="engine calls")
            limits: dict[str, Any] = {"timeout_seconds": timeout_seconds, "bucket_bytes": bucket_bytes}
            self._transport: Transport = (
                ProcessGroupTransport(self._calls, self._pool, address=address, device=device, **limits)
                if transport == "process_group"
                else FilesystemTransport(self._calls, self._pool, folder=folder, **limits)
            )

    def push(self, tensors: Tensors, version: int) -> list[str]:
        """Load the tensors into every engine that lives -> the engines that hold `version` now.

        A push that fails on the way is repeated with the engines that are left; `tensors` is called once each time.
        Raises WeightSyncError, on all ranks, when no engine took them within the time.
        """
        attempts = Attempts(version, time.monotonic() + self.timeout_seconds)
        while True:
            verdict = self._agree(lambda: self._prepare(attempts))
            if verdict.act == "send":
                self._send(attempts, tensors)
                verdict = self._agree(lambda: self._finish(attempts))
            if verdict.act == "done":
                return list(verdict.urls)
            if verdict.act == "fail":
                raise WeightSyncError(verdict.reason)

    def close(self) -> None:
        """Leave the group; the engines stay as they are."""
        if self.rank == 0:
            self._transport.close()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _agree(self, decide: Callable[[], Verdict]) -> Verdict:
        """Rank 0's verdict on every rank; an error of its own is a verdict too, so that no rank waits for it."""
        verdict = None
        if self.rank == 0:
            try:
                verdict = decide()
            except Exception as error:
                verdict = Verdict("fail", reason=f"{type(error).__name__}: {error}")
        found = self.gather(verdict)[0]
        assert isinstance(found, Verdict)
        return found

    def _prepare(self, attempts: Attempts) -> Verdict:
        """Find who lives, make them stale, pause them and open the push."""
        living = self._living(attempts)
        attempts.sent, attempts.broken = {}, ""
        attempts.peers = self._all(living, self._pause, attempts)
        if attempts.peers:
            failed = self._transport.begin(attempts.peers, attempts.version, attempts.end)
            for url, why in failed.items():
                attempts.blame(url, why, failures=OWN_FAILURES if "could not reach" in why else 1)
            if not failed:
                return Verdict("send")
        return self._unless_over(attempts, "wait")

    def _living(self, attempts: Attempts) -> list[Peer]:
        futures = {url: self._pool.submit(self._state, url) for url in self.urls}
        failed = errors(futures)
        attempts.problems |= failed
        return [
            Peer(url, future.result()["instance"])
            for url, future in futures.items()
            if url not in failed and attempts.failures.get(url, 0) < OWN_FAILURES
        ]

    def _state(self, url: str) -> Any:
        return self._calls(url, "/hpcgrpo/state", method="GET", timeout_seconds=STATE_SECONDS)

    def _pause(self, peer: Peer) -> None:
        self._calls(peer.url, "/hpcgrpo/version", {"version": None})
        self._calls(peer.url, "/pause?mode=keep")

    def _all(self, peers: Sequence[Peer], call: Callable[[Peer], None], attempts: Attempts) -> list[Peer]:
        """Call for all at once -> those with which it went well."""
        failed = errors({peer.url: self._pool.submit(call, peer) for peer in peers})
        for url, why in failed.items():
            attempts.blame(url, why)
        return [peer for peer in peers if peer.url not in failed]

    def _send(self, attempts: Attempts, tensors: Tensors) -> None:
        """Go through the tensors once. Where gathering them fails, the engines are let go before the error."""
        try:
            for name, tensor in tensors():
                self._put(attempts, name, tensor)
        except BaseException:
            if self.rank == 0:
                self._transport.fail()
            raise

    def _put(self, attempts: Attempts, name: str, tensor: Tensor) -> None:
        """Send one tensor. A push that broke goes on without sending: the other ranks gather to the end."""
        if self.rank != 0 or attempts.broken:
            return
        try:
            if tensor.is_floating_point():
                tensor = tensor.to(self.dtype)
            self._transport.put(name, tensor)
            attempts.sent[name] = broadcast.fingerprint(tensor)
        except Exception as error:
            attempts.broken = f"{type(error).__name__}: {error}"

    def _finish(self, attempts: Attempts) -> Verdict:
        """End the push, compare what came with what was sent, and let the engines that hold it go on."""
        answers: Answers = {}
        try:
            if not attempts.broken:
                answers = self._transport.finish()
        except (broadcast.StreamError, OSError) as error:
            attempts.broken = f"{type(error).__name__}: {error}"
        if attempts.broken:
            attempts.problems |= {peer.url: attempts.broken for peer in attempts.peers}
            for url, why in self._transport.fail().items():
                attempts.blame(url, why)
        good = [
            peer for peer in attempts.peers if peer.url in answers and self._holds(peer, answers, attempts)
        ]
        good = self._all(good, lambda peer: self._release(peer, attempts.version), attempts)
        if good:
            return Verdict("done", tuple(peer.url for peer in good))
        return self._unless_over(attempts, "again")

    def _holds(self, peer: Peer, answers: Answers, attempts: Attempts) -> bool:
        found = answers[peer.url]
        why = found if isinstance(found, str) else difference(attempts.sent, found)
        if why:
            attempts.blame(peer.url, why)
        return not why

    def _release(self, peer: Peer, version: int) -> None:
        """The version comes last: until then the gate lets nobody in."""
        self._calls(peer.url, "/update_weight_version", {"new_version": str(version)})
        self._calls(peer.url, "/reset_prefix_cache?reset_running_requests=true")
        self._calls(peer.url, "/resume")
        self._calls(peer.url, "/hpcgrpo/version", {"version": version})

    def _unless_over(self, attempts: Attempts, act: Literal["wait", "again"]) -> Verdict:
        """Another attempt, a moment later, unless the time is up or every engine is out."""
        out = all(attempts.failures.get(url, 0) >= OWN_FAILURES for url in self.urls)
        if time.monotonic() < attempts.end and not out:
            time.sleep(RETRY_SECONDS)
            return Verdict(act)
        each = "; ".join(f"{url}: {attempts.problems.get(url, 'no answer')}" for url in self.urls)
        within = f"within {self.timeout_seconds:g} s (generation.weight_sync_timeout)"
        return Verdict(
            "fail", reason=f"no engine took the weights of version {attempts.version} {within}: {each}"
        )


def difference(sent: Mapping[str, str], answers: Sequence[Mapping[str, Any]]) -> str:
    """What differs between the fingerprints sent and those that each process has, "" if nothing."""
    for answer in answers:
        received, loaded = answer["received"], answer["loaded"]
        for name in sent.keys() | received.keys():
            if sent.get(name) != received.get(name):
                return f"{name}: other bytes arrived than were sent"
        for name, print_ in loaded.items():
            if sent[name] != print_:
                return f"{name}: the model does not hold what was sent"
    return ""
