"""The learner's weights into every engine after each update: one client, two transports.

All learner ranks take part, since gathering a sharded tensor is collective; rank 0 alone talks to the engines. What
happens to a push is decided by rank 0 and told to all, so that no rank waits for one that has given up.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx
import torch
from torch import Tensor

from hpcgrpo.generation import broadcast

STATE_SECONDS = 5.0  # for an engine to say how it is
CALL_SECONDS = 60.0  # for what an engine answers at once
RETRY_SECONDS = 1.0  # between looks for an engine that lives
OWN_FAILURES = 2  # of one engine in one push, after which it is left out

Tensors = Callable[[], Iterable[tuple[str, Tensor]]]


class WeightSyncError(RuntimeError):
    """No engine took the weights: names each with what happened to it."""


class CallError(RuntimeError):
    """An engine did not answer, or answered with an error."""


@dataclass(frozen=True)
class Verdict:
    """What rank 0 tells the others to do next."""

    act: Literal["wait", "send", "again", "done", "fail"]
    urls: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Peer:
    """An engine that lives: its address and which start of it."""

    url: str
    instance: str


class Calls:
    """HTTP to the engines, with the run's secret."""

    def __init__(self, secret: str) -> None:
        headers = {"Authorization": f"Bearer {secret}"}
        self._client = httpx.Client(headers=headers, trust_env=False, timeout=CALL_SECONDS)

    def __call__(
        self,
        url: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        method: str = "POST",
        timeout_seconds: float = CALL_SECONDS,
    ) -> Any:
        """The answer's JSON. Raises CallError."""
        limits = httpx.Timeout(timeout_seconds, connect=min(timeout_seconds, STATE_SECONDS))
        try:
            answer = self._client.request(method, url + path, json=body, timeout=limits)
        except httpx.HTTPError as error:
            raise CallError(f"{path}: {type(error).__name__} {error}") from None
        if answer.status_code != 200:
            raise CallError(f"{path}: HTTP {answer.status_code} {answer.text[:300]}")
        return answer.json() if answer.content else None

    def extension(
        self, url: str, method: str, wait_seconds: float = CALL_SECONDS, **arguments: Any
    ) -> list[dict[str, Any]]:
        """What `Extension.method` says in each of the engine's processes. Raises CallError where one has an error."""
        body = {"method": method, "kwargs": arguments, "timeout": wait_seconds}
        answers = self(url, "/collective_rpc", body, timeout_seconds=wait_seconds + STATE_SECONDS)[
            "results"
        ]
        for answer in answers:
            if "error" in answer:
                raise CallError(answer["error"])
        return list(answers)


class Transport(Protocol):
    """How tensors get into engines; rank 0 alone has one."""

    def begin(self, peers: Sequence[Peer], version: int) -> dict[str, str]:
        """Open a push to these engines -> those that cannot take part, with the reason."""

    def put(self, name: str, tensor: Tensor) -> None:
        """Send one. Raises StreamError."""

    def finish(self) -> dict[str, list[dict[str, Any]] | str]:
        """End the push -> what each engine's processes loaded, or its error. Raises StreamError."""

    def fail(self) -> dict[str, str]:
        """Break a push off -> errors by engine, of those that have one of their own."""

    def close(self) -> None: ...


class ProcessGroupTransport:
    """Buckets over gloo or NCCL, in a group that is formed anew whenever the set of engines is another one."""

    def __init__(
        self, calls: Calls, pool: ThreadPoolExecutor, *, address: str, device: torch.device, timeout_seconds: float,
        bucket_bytes: int,
    ) -> None:  # fmt: skip
        self.calls, self.pool, self.address, self.device = calls, pool, address, device
        self.timeout_seconds, self.bucket_bytes = timeout_seconds, bucket_bytes
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._group: broadcast.Group | None = None
        self._members: tuple[Peer, ...] = ()
        self._loading: dict[str, Future[list[dict[str, Any]]]] = {}
        self._bucket: list[tuple[str, Tensor]] = []

    def begin(self, peers: Sequence[Peer], version: int) -> dict[str, str]:
        """Open a push; forms the group where needed, at a port that the system chooses."""
        if self._group is None or set(peers) != set(self._members):
            self.close()
            failed = self._form(peers)
            if failed:
                return failed
        self._bucket.clear()
        self._loading = {
            peer.url: self.pool.submit(self.calls.extension, peer.url, "receive", self.timeout_seconds)
            for peer in self._members
        }
        return {}

    def _form(self, peers: Sequence[Peer]) -> dict[str, str]:
        listener = socket.create_server((self.address, 0), backlog=1024)
        at = {"master_address": self.address, "master_port": listener.getsockname()[1]}
        sizes, failed = self._each(peers, lambda peer: self._reach(peer, at))
        _drop_waiting(listener)
        if failed:
            listener.close()
            return failed
        offset, world = 1, 1 + sum(sizes.values())
        joining: dict[str, Future[Any]] = {}
        about = {"world_size": world, "backend": self.backend, "timeout_seconds": self.timeout_seconds, **at}
        for peer in peers:
            arguments = {"rank_offset": offset, **about}
            joining[peer.url] = self.pool.submit(self.calls.extension, peer.url, "connect", **arguments)
            offset += sizes[peer.url]
        why = ""
        try:
            self._group = broadcast.Group(
                rank=0, world_size=world, backend=self.backend, own_address=self.address,
                master=(self.address, at["master_port"]), device=self.device,
                timeout_seconds=self.timeout_seconds, listener=listener,
            )  # fmt: skip
            self._members = tuple(peers)
        except broadcast.StreamError as error:
            why = str(error)
        failed = _errors(joining)
        if failed or why:
            self.close()
        return failed or ({peer.url: why for peer in peers} if why else {})

    def _reach(self, peer: Peer, at: Mapping[str, Any]) -> int:
        """Processes of the engine, once each has reached the learner's port."""
        try:
            answers = self.calls.extension(peer.url, "probe", **at)
        except CallError as error:
            raise CallError(f"engine {peer.url} could not reach the learner: {error}") from None
        return len(answers)

    def _each(
        self, peers: Sequence[Peer], call: Callable[[Peer], Any]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        futures = {peer.url: self.pool.submit(call, peer) for peer in peers}
        failed = _errors(futures)
        return {url: future.result() for url, future in futures.items() if url not in failed}, failed

    def put(self, name: str, tensor: Tensor) -> None:
        """Into the bucket, which is sent first where it would grow too large. Raises StreamError."""
        if self._bucket and sum(t.nbytes for _, t in self._bucket) + tensor.nbytes > self.bucket_bytes:
            self._flush()
        self._bucket.append((name, tensor))

    def _flush(self) -> None:
        assert self._group is not None
        if self._bucket:
            broadcast.send(self._group, self._bucket, self._watch)
            self._bucket.clear()

    def _watch(self) -> str | None:
        failed = _errors({url: future for url, future in self._loading.items() if future.done()})
        return "; ".join(f"{url}: {why}" for url, why in failed.items()) or None

    def finish(self) -> dict[str, list[dict[str, Any]] | str]:
        """Send the rest and the end of the stream."""
        assert self._group is not None
        self._flush()
        broadcast.send(self._group, [], self._watch)
        failed = _errors(self._loading)
        if failed:
            self.close()
        return {url: failed.get(url) or future.result() for url, future in self._loading.items()}

    def fail(self) -> dict[str, str]:
        """Break the stream off; every engine hears of it within a second or so."""
        self._bucket.clear()
        if self._group is not None:
            self._group.abort()
        failed = _errors(self._loading)
        self.close()
        return {url: why for url, why in failed.items() if not why.startswith("StreamError")}

    def close(self) -> None:
        """Leave the group; the engines leave it when they join another."""
        group, self._group, self._members = self._group, None, ()
        if group is not None:
            group.close()


class FilesystemTransport:
    """Safetensors in a folder that learner and engines share: a folder a version, whole or not there."""

    def __init__(
        self,
        calls: Calls,
        pool: ThreadPoolExecutor,
        *,
        folder: Path,
        timeout_seconds: float,
        bucket_bytes: int,
    ) -> None:
        self.calls, self.pool, self.folder = calls, pool, folder
        self.timeout_seconds, self.bucket_bytes = timeout_seconds, bucket_bytes
        self._peers: tuple[Peer, ...] = ()
        self._bucket: dict[str, Tensor] = {}
        self._files: list[str] = []
        self._target = folder

    def begin(self, peers: Sequence[Peer], version: int) -> dict[str, str]:
        """Empty the place of this version. Raises OSError."""
        self._peers, self._bucket, self._files = tuple(peers), {}, []
        self._target = self.folder / f"version-{version}"
        self._staged.mkdir(parents=True, exist_ok=True, mode=0o700)
        return {}

    @property
    def _staged(self) -> Path:
        return self.folder / f".{self._target.name}"

    def put(self, name: str, tensor: Tensor) -> None:
        """Into the file that is written when it would grow too large. Raises OSError."""
        if self._bucket and sum(t.nbytes for t in self._bucket.values()) + tensor.nbytes > self.bucket_bytes:
            self._flush()
        self._bucket[name] = tensor.detach().cpu().contiguous()

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if self._bucket:
            self._files.append(f"{len(self._files):05d}.safetensors")
            save_file(self._bucket, self._staged / self._files[-1])
            self._bucket = {}

    def finish(self) -> dict[str, list[dict[str, Any]] | str]:
        """Name the folder as it will be loaded, have all load it, remove the older ones."""
        self._flush()
        (self._staged / "files.json").write_text(json.dumps(self._files))
        shutil.rmtree(self._target, ignore_errors=True)
        self._staged.replace(self._target)
        path = str(self._target.resolve())
        loading = {
            peer.url: self.pool.submit(
                self.calls.extension, peer.url, "reload", self.timeout_seconds, path=path
            )
            for peer in self._peers
        }
        failed = _errors(loading)
        self._remove_others()
        return {url: failed.get(url) or future.result() for url, future in loading.items()}

    def _remove_others(self) -> None:
        for pattern in ("version-*", ".version-*"):
            for other in self.folder.glob(pattern):
                if other != self._target:
                    shutil.rmtree(other, ignore_errors=True)

    def fail(self) -> dict[str, str]:
        """Forget what was written."""
        self._bucket = {}
        shutil.rmtree(self._staged, ignore_errors=True)
        return {}

    def close(self) -> None:
        """Nothing is held open."""


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

    def blame(self, url: str, why: str, weight: int = 1) -> None:
        """Note a failure that is the engine's own."""
        self.problems[url] = why
        self.failures[url] = self.failures.get(url, 0) + weight


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
                for name, tensor in tensors():
                    if self.rank == 0 and not attempts.broken:
                        self._put(attempts, name, tensor)
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
        """Rank 0's verdict on every rank; what it did not expect is a verdict too."""
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
        attempts.peers = self._all(living, self._pause, attempts) if living else []
        if attempts.peers:
            failed = self._transport.begin(attempts.peers, attempts.version)
            for url, why in failed.items():
                attempts.blame(url, why, weight=OWN_FAILURES if "could not reach" in why else 1)
            if not failed:
                return Verdict("send")
        if time.monotonic() > attempts.end or self._all_out(attempts):
            return Verdict("fail", reason=self._reason(attempts))
        time.sleep(RETRY_SECONDS)
        return Verdict("wait")

    def _living(self, attempts: Attempts) -> list[Peer]:
        futures = {url: self._pool.submit(self._state, url) for url in self.urls}
        failed = _errors(futures)
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
        failed = _errors({peer.url: self._pool.submit(call, peer) for peer in peers})
        for url, why in failed.items():
            attempts.blame(url, why)
        return [peer for peer in peers if peer.url not in failed]

    def _put(self, attempts: Attempts, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        try:
            self._transport.put(name, tensor)
            attempts.sent[name] = broadcast.fingerprint(tensor)
        except (broadcast.StreamError, OSError) as error:
            attempts.broken = str(error)

    def _finish(self, attempts: Attempts) -> Verdict:
        """End the push, compare what came with what was sent, and let the engines that hold it go on."""
        answers: dict[str, list[dict[str, Any]] | str] = {}
        if not attempts.broken:
            try:
                answers = self._transport.finish()
            except (broadcast.StreamError, OSError) as error:
                attempts.broken = str(error)
        if attempts.broken:
            own = self._transport.fail()
            attempts.problems |= {peer.url: attempts.broken for peer in attempts.peers}
            for url, why in own.items():
                attempts.blame(url, why)
        good = []
        for peer in attempts.peers if answers else ():
            found = answers[peer.url]
            why = found if isinstance(found, str) else difference(attempts.sent, found)
            if why:
                attempts.blame(peer.url, why)
            else:
                good.append(peer)
        good = self._all(good, lambda peer: self._release(peer, attempts.version), attempts)
        if good:
            return Verdict("done", tuple(peer.url for peer in good))
        if time.monotonic() > attempts.end or self._all_out(attempts):
            return Verdict("fail", reason=self._reason(attempts))
        return Verdict("again")

    def _release(self, peer: Peer, version: int) -> None:
        """The version comes last: until then the gate lets nobody in."""
        self._calls(peer.url, "/update_weight_version", {"new_version": str(version)})
        self._calls(peer.url, "/reset_prefix_cache?reset_running_requests=true")
        self._calls(peer.url, "/resume")
        self._calls(peer.url, "/hpcgrpo/version", {"version": version})

    def _all_out(self, attempts: Attempts) -> bool:
        return all(attempts.failures.get(url, 0) >= OWN_FAILURES for url in self.urls)

    def _reason(self, attempts: Attempts) -> str:
        each = "; ".join(f"{url}: {attempts.problems.get(url, 'no answer')}" for url in self.urls)
        return f"no engine took the weights of version {attempts.version} within {self.timeout_seconds:g} s: {each}"


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


def _errors(futures: Mapping[str, Future[Any]]) -> dict[str, str]:
    """Wait for all -> the errors of those that failed."""
    found = {url: future.exception() for url, future in futures.items()}
    for error in found.values():
        if error is not None and not isinstance(error, CallError):
            raise error
    return {url: str(error) for url, error in found.items() if error is not None}


def _drop_waiting(listener: socket.socket) -> None:
    """Take and end the connections of the probes, so that the store meets its members alone."""
    listener.setblocking(False)
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            break
    listener.setblocking(True)
