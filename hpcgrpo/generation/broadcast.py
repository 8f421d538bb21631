"""Tensors from one sender to several receivers over a process group of their own: gloo or NCCL.

Both ends use this module; it needs torch alone. The stream describes itself: each bucket is the lengths of a JSON
list of (name, dtype, shape), the list, then the tensors: small ones packed into one, large ones as they are. The
store that the ends met at carries one word besides, `abort`, so that nobody waits for a bucket that never comes.
"""

from __future__ import annotations

import hashlib
import json
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PACKED_BYTES = 2**20  # tensors below this size share one broadcast
CONNECT_SECONDS = 60.0
FINGERPRINT_ELEMENTS = 4096

_stuck: list[Any] = []  # groups whose last broadcast has not ended: destroying one would wait for it

Entry = tuple[str, str, Sequence[int]]  # name, dtype, shape


class StreamError(RuntimeError):
    """The stream ended before its end: a peer died, was cut off, or called it off."""


class Group:
    """One end of the stream. Rank 0 sends; it listens for the others at `listener`, an open socket."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        backend: str,
        own_address: str,
        master: tuple[str, int],
        device: torch.device,
        timeout_seconds: float,
        listener: socket.socket | None = None,
    ) -> None:
        """Blocks until all have come. Raises StreamError where they have not in time."""
        self.device = device if backend == "nccl" else torch.device("cpu")
        self.timeout_seconds = timeout_seconds
        self.end = math.inf  # monotonic time after which nothing is waited for
        self._pending: list[Any] = []
        joining = timedelta(seconds=min(timeout_seconds, CONNECT_SECONDS))
        try:
            self.store = dist.TCPStore(
                master[0],
                master[1],
                world_size,
                rank == 0,
                timeout=joining,
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
            prefixed = dist.PrefixStore("weights", self.store)
            self.group = _BACKENDS[backend](prefixed, rank, world_size, own_address, timeout_seconds)
        except (RuntimeError, ValueError) as error:
            raise StreamError(
                f"the ends did not meet at {master[0]}:{master[1]}: {_first_line(error)}"
            ) from None

    def start(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Begin to broadcast each from rank 0 to all; `wait` for every one, in order."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self.timeout_seconds)
        works = [self.group.broadcast([tensor], options) for tensor in tensors]
        self._pending += works
        return works

    def wait(self, work: Any, watch: Callable[[], str | None]) -> None:
        """Until one is done. Raises StreamError when `watch` says why it never will be, or the time is up."""
        end, looks = min(self.end, time.monotonic() + self.timeout_seconds), 0
        while not work.is_completed():
            looks += 1
            time.sleep(0.0002 if looks < 100 else 0.002)
            why = watch() if looks % 50 == 0 else None
            if why is None and time.monotonic() > end:
                why = f"nothing came or went within {self.timeout_seconds:g} s"
            if why is not None:
                raise StreamError(why)
        self._pending.remove(work)
        try:
            work.wait()
        except RuntimeError as error:
            raise StreamError(_first_line(error)) from None

    def broadcast(self, tensors: Sequence[Tensor], watch: Callable[[], str | None]) -> None:
        """`start` and `wait` for all."""
        for work in self.start(tensors):
            self.wait(work, watch)

    def abort(self) -> None:
        """Tell the others that no more comes."""
        try:
            self.store.set("abort", "1")
        except RuntimeError:
            return

    def aborted(self) -> str | None:
        """Why no more will come, None while it may: for `watch`."""
        try:
            return "the sender called it off" if self.store.check(["abort"]) else None
        except RuntimeError as error:
            return f"the sender is gone: {_first_line(error)}"

    def close(self) -> None:
        """Leave the group, without waiting for a broadcast that hangs."""
        hanging = [work for work in self._pending if not work.is_completed()]
        if hanging:
            self.group.abort()
            _stuck.append((self.group, self.store, hanging))
        del self.group, self.store
        _stuck[:] = [held for held in _stuck if not all(work.is_completed() for work in held[2])]


def _gloo(store: Any, rank: int, world_size: int, own_address: str, timeout_seconds: float) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=min(timeout_seconds, CONNECT_SECONDS))
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def _nccl(store: Any, rank: int, world_size: int, own_address: str, timeout_seconds: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(
        seconds=2 * timeout_seconds + CONNECT_SECONDS
    )  # its watchdog ends the process
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


_BACKENDS: dict[str, Callable[..., Any]] = {"gloo": _gloo, "nccl": _nccl}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to `host`. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def send(group: Group, tensors: Sequence[tuple[str, Tensor]], watch: Callable[[], str | None]) -> None:
    """One bucket, from rank 0; none ends the stream. Raises StreamError."""
    entries = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors]
    header = json.dumps(entries).encode() if entries else b""
    lengths = torch.tensor([len(header)], dtype=torch.int64).to(group.device)
    if not entries:
        group.broadcast([lengths], watch)
        return
    parts = [lengths, torch.frombuffer(bytearray(header), dtype=torch.uint8).to(group.device)]
    small = [t for _, t in tensors if is_small(t.nbytes)]
    if any(t.nbytes for t in small):
        parts.append(torch.cat([_bytes(t) for t in small]).to(group.device))
    parts += [_bytes(t).to(group.device) for _, t in tensors if not is_small(t.nbytes)]
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)  # no gather may be under way beside the broadcast
    group.broadcast(parts, watch)


def receive(group: Group) -> Iterator[tuple[str, Tensor]]:
    """The stream's tensors up to its end, in any rank but 0. Raises StreamError."""
    while True:
        lengths = torch.empty(1, dtype=torch.int64, device=group.device)
        group.broadcast([lengths], group.aborted)
        if not int(lengths):
            return
        header = torch.empty(int(lengths), dtype=torch.uint8, device=group.device)
        group.broadcast([header], group.aborted)
        yield from _tensors(group, json.loads(bytes(header.tolist())))


def _tensors(group: Group, entries: Sequence[Entry]) -> Iterator[tuple[str, Tensor]]:
    sizes = [math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in entries]
    lengths = [s for s in sizes if not is_small(s)]
    if packed := sum(s for s in sizes if is_small(s)):
        lengths.insert(0, packed)
    buffers = [torch.empty(length, dtype=torch.uint8, device=group.device) for length in lengths]
    coming = zip(buffers, group.start(buffers), strict=True)

    def arrived() -> Tensor:
        buffer, work = next(coming)
        group.wait(work, group.aborted)
        return buffer

    small, offset = arrived() if packed else torch.empty(0, dtype=torch.uint8, device=group.device), 0
    for (name, dtype, shape), size in zip(entries, sizes, strict=True):
        if is_small(size):
            flat = small[
                offset : offset + size
            ].clone()  # a view of another type must start at a multiple of it
            offset += size
        else:
            flat = arrived()
        yield name, flat.view(getattr(torch, dtype)).view(shape)


def is_small(size_bytes: int) -> bool:
    """Whether a tensor of this size is packed with others."""
    return size_bytes < PACKED_BYTES


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def ahead(items: Iterable[Any], count: int = 8) -> Iterator[Any]:
    """The same items, the next `count` of them made in a thread while the last one is used."""
    line: queue.Queue[tuple[str, Any]] = queue.Queue(count)
    left = threading.Event()  # nobody takes from the line any more

    def put(kind: str, value: Any) -> None:
        while not left.is_set():
            try:
                return line.put((kind, value), timeout=0.5)
            except queue.Full:
                continue

    def make() -> None:
        try:
            for item in items:
                put("item", item)
                if left.is_set():
                    return
        except Exception as error:
            put("error", error)
        else:
            put("end", None)

    threading.Thread(target=make, name="weights ahead", daemon=True).start()
    try:
        while (entry := line.get())[0] == "item":
            yield entry[1]
    finally:
        left.set()
    if entry[0] == "error":
        raise entry[1]


def fingerprint(tensor: Tensor) -> str:
    """Of a tensor's type, shape and values: all, or 4,096 evenly spread ones with the first and last among them."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() > FINGERPRINT_ELEMENTS:
        chosen = torch.linspace(0, flat.numel() - 1, FINGERPRINT_ELEMENTS, dtype=torch.float64).long()
        flat = flat[chosen.to(flat.device)]
    values = flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    about = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return hashlib.blake2b(about + values, digest_size=8).hexdigest()
