"""How tensors get into the engines: over a process group, or as files that both sides see. Rank 0 alone has one."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch
from torch import Tensor

from hpcgrpo.generation import broadcast

STATE_SECONDS = 5.0  # for an engine to say how it is
CALL_SECONDS = 60.0  # for what an engine answers at once

Answers = dict[str, list[dict[str, Any]] | str]  # by engine: what each of its processes says, or its error


class CallError(RuntimeError):
    """An engine did not answer, or answered with an error."""


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
        answers = self(url, "/collective_rpc", body, timeout_seconds=wait_seconds + STATE_SECONDS)["results"]
        for answer in answers:
            if "error" in answer:
                raise CallError(answer["error"])
        return list(answers)


class Transport(Protocol):
    """How tensors get into engines; rank 0 alone has one."""

    def begin(self, peers: Sequence[Peer], version: int, end: float) -> dict[str, str]:
        """Open a push to these engines, over by `end` (monotonic) -> those that cannot take part, with the reason."""

    def put(self, name: str, tensor: Tensor) -> None:
        """Send one. Raises StreamError."""

    def finish(self) -> Answers:
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

    def begin(self, peers: Sequence[Peer], version: int, end: float) -> dict[str, str]:
        """Open a push; forms the group where needed, at a port that the system chooses."""
        if self._group is None or set(peers) != set(self._members):
            self.close()
            failed = self._form(peers)
            if failed:
                return failed
        assert self._group is not None
        self._group.end = end
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
                timeout_seconds=self.timeout_seconds / 3,  # time is left for a push without one that hangs
                listener=listener,
            )  # fmt: skip
            self._members = tuple(peers)
        except broadcast.StreamError as error:
            why = str(error)
        failed = errors(joining)
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
        failed = errors(futures)
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
        failed = errors({url: future for url, future in self._loading.items() if future.done()})
        return "; ".join(f"{url}: {why}" for url, why in failed.items()) or None

    def finish(self) -> Answers:
        """Send the rest and the end of the stream."""
        assert self._group is not None
        self._flush()
        broadcast.send(self._group, [], self._watch)
        failed = errors(self._loading)
        if failed:
            self.close()
        return {url: failed.get(url) or future.result() for url, future in self._loading.items()}

    def fail(self) -> dict[str, str]:
        """Break the stream off; every engine hears of it within a second or so, unless it hangs."""
        self._bucket.clear()
        if self._group is not None:
            self._group.abort()
        wait(self._loading.values(), timeout=STATE_SECONDS)
        self.close()
        failed = errors({url: future for url, future in self._loading.items() if future.done()})
        hang = {
            url: "did not answer after the push was broken off" for url in self._loading if url not in failed
        }
        return hang | {url: why for url, why in failed.items() if not why.startswith("StreamError")}

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

    def begin(self, peers: Sequence[Peer], version: int, end: float) -> dict[str, str]:
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

    def finish(self) -> Answers:
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
        failed = errors(loading)
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


def errors(futures: Mapping[str, Future[Any]]) -> dict[str, str]:
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
