"""Checkpoints that are either whole or not there: written under a temporary name, marked COMPLETE, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from hpcgrpo.checkpoint_folder import MARKER, complete

FAILURES = (Exception, CheckpointException)  # the latter derives from BaseException
State = dict[str, Any]


@dataclass
class _Pending:
    """A save under way: what is being written, and where it will stand."""

    step: int
    temporary: Path
    extra: Mapping[str, Any]
    files: Future[None]
    shards: Any  # a future of torch.distributed.checkpoint, or None


@dataclass
class Checkpoints:
    """The `checkpoint-<step>` folders of one run. Methods but `latest` are collective over `group` (gloo)."""

    folder: Path
    keep: int | None  # how many complete ones stay; None: all
    group: dist.ProcessGroup
    pending: _Pending | None = None
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))

    def latest(self) -> Path | None:
        """The newest complete checkpoint; half-written ones and those with a missing file are passed over."""
        return next(iter(complete(self.folder)), None)

    def start(
        self,
        step: int,
        *,
        state: State,
        extra: Mapping[str, Any],
        export: Callable[[Path], Callable[[], None]],
        wait: bool,
    ) -> None:
        """Begin to save `state` (sharded tensors), `extra` (JSON) and the export; `wait` ends it here as well.

        Raises OSError on every rank, having removed what was written, when one of them cannot write.
        """
        self.finish()
        temporary = self.folder / f".checkpoint-{step}.tmp"
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        self._first(lambda: (temporary / "state").mkdir(parents=True))
        write = export(temporary)
        writer = dcp.FileSystemWriter(temporary / "state", sync_files=True)
        shards = None
        try:
            if wait:
                dcp.save(state, storage_writer=writer, process_group=self.group)
            else:
                shards = dcp.async_save(state, storage_writer=writer, process_group=self.group)
            failure = None
        except FAILURES as error:  # every rank gets it: a disk that is full, a quota
            failure = error
        self.pending = _Pending(step, temporary, extra, self.threads.submit(write), shards)
        if failure is not None:
            self._abandon(failure)
        if wait:
            self.finish()

    def finish(self) -> Path | None:
        """Wait for the save under way, put its marker and its name in place, and remove surplus old ones."""
        if self.pending is None:
            return None
        pending = self.pending
        try:
            self._together(lambda: self._written(pending))
        except OSError as error:
            self._abandon(error)
        self.pending = None
        final = self.folder / f"checkpoint-{pending.step}"
        self._first(lambda: self._publish(pending, final))
        return final

    def _written(self, pending: _Pending) -> None:
        pending.files.result()
        if pending.shards is not None:
            pending.shards.result()

    def _publish(self, pending: _Pending, final: Path) -> None:
        (pending.temporary / "trainer_state.json").write_text(json.dumps(pending.extra, indent=1))
        sizes = {
            str(p.relative_to(pending.temporary)): p.stat().st_size
            for p in sorted(pending.temporary.rglob("*"))
            if p.is_file()
        }
        for name in sizes:
            _fsync(pending.temporary / name)
        (pending.temporary / MARKER).write_text(json.dumps(sizes, indent=1))
        _fsync(pending.temporary / MARKER)
        if final.exists():
            shutil.rmtree(final)
        pending.temporary.rename(final)
        _fsync(self.folder)
        for old in complete(self.folder)[self.keep :] if self.keep else []:
            shutil.rmtree(old, ignore_errors=True)

    def _abandon(self, error: BaseException) -> None:
        assert self.pending is not None
        pending, self.pending = self.pending, None
        with suppress(*FAILURES):
            self._written(pending)  # nobody may still be writing when the folder goes
        temporary = pending.temporary
        dist.barrier(self.group)
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(self.folder).free / 1e6  # torch's writer does not say that the disk is full
        raise OSError(
            f"checkpoint could not be written to {self.folder}: {_cause(error)}; {free:,.0f} MB are free there"
        ) from error

    def _first(self, act: Callable[[], Any]) -> None:
        """Run `act` on rank 0; if it fails, every rank raises."""
        self._together(act if dist.get_rank() == 0 else lambda: None)

    def _together(self, act: Callable[[], Any]) -> None:
        """Run `act` on every rank; if it fails on one, every rank raises OSError with that one's message."""
        failure = None
        try:
            act()
        except FAILURES as error:
            failure = _cause(error)
        failures: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(failures, failure, group=self.group)
        first = next((f for f in failures if f), None)
        if first:
            raise OSError(first)


def load(path: Path, state: State) -> tuple[State, dict[str, Any]]:
    """Read a checkpoint into `state`'s tensors, resharded as they are, and its `trainer_state.json`."""
    dcp.load(state, checkpoint_id=path / "state")
    return state, json.loads((path / "trainer_state.json").read_text())


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: BaseException) -> str:
    """What went wrong at the bottom: the first rank's error of several, without torch's wrapping."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return str(error) or repr(error)
