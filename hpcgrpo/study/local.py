"""Running a study's runs on this machine: some at once, resumed where they stopped, ended cleanly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hpcgrpo.config import ConfigError, to_yaml
from hpcgrpo.journal import write_atomically
from hpcgrpo.launch.ranks import CONFIG_FILE, die_with_parent
from hpcgrpo.sections import RunConfig
from hpcgrpo.study.cells import Cell

LOG = "output.log"  # in a run's folder: what it printed
LOOK_SECONDS = 0.2
REPORT_SECONDS = 60.0  # between two lines about what runs


class Process(Protocol):
    """A run's process."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code as a shell has it (128 + signal), None while it runs."""
        ...


class Command:
    """A run as `hpcgrpo train`, with as many ranks as it asks for."""

    def __init__(self, cell: Cell) -> None:
        with (cell.run.folder / LOG).open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hpcgrpo.cli", "train", str(cell.run.folder / CONFIG_FILE)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is the study's
                preexec_fn=die_with_parent,
            )
        self.pid = self.process.pid

    def poll(self) -> int | None:
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code


class Resident:
    """The process that has torch imported and forks the runs of one rank; started with the first of them."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.codes: dict[int, int] = {}  # of runs that have ended
        self._pids: list[int] = []  # of runs that were started, in order
        self._pending = b""

    def start(self, cell: Cell) -> Forked:
        """Fork one run."""
        if self.process is None or self.process.poll() is not None:
            self._open()
        assert self.process is not None and self.process.stdin is not None
        job = {"config": str(cell.run.folder / CONFIG_FILE), "log": str(cell.run.folder / LOG)}
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        while not self._pids:
            self._take(wait=True)
        return Forked(self, self._pids.pop(0))

    def _open(self) -> None:
        environment = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hpcgrpo.study.resident"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    def _take(self, *, wait: bool = False) -> None:
        """Read what the process has said."""
        assert self.process is not None and self.process.stdout is not None
        said = self.process.stdout.read()
        if said is None and wait:
            time.sleep(0.02)
        if said == b"" and self.process.wait() is not None and wait:
            raise RuntimeError(f"the process that starts runs ended with code {self.process.returncode}")
        *lines, self._pending = (self._pending + (said or b"")).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "code" in message:
                self.codes[message["pid"]] = message["code"]
            elif "pid" in message:
                self.codes.pop(message["pid"], None)  # of an earlier run with this number
                self._pids.append(message["pid"])

    def look(self) -> None:
        """Learn which runs have ended."""
        if self.process is not None:
            self._take()

    @property
    def gone(self) -> bool:
        """Whether it has ended, and every run with it."""
        return self.process is None or self.process.poll() is not None

    def close(self) -> None:
        """End it, and every run that is left."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@dataclass
class Forked:
    """A run that the resident process forked."""

    resident: Resident
    pid: int

    def poll(self) -> int | None:
        self.resident.look()
        code = self.resident.codes.get(self.pid)
        return 128 + signal.SIGKILL if code is None and self.resident.gone else code


@dataclass
class Queue:
    """The runs that are to come, those that run, and how the others ended."""

    waiting: list[Cell]
    jobs: int
    total: int  # runs of the study
    done: int  # finished, before this start too
    say: Callable[[str], None]
    resident: Resident = field(default_factory=Resident)
    running: dict[str, tuple[Cell, Process, float]] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # that runs took
    stopping: int | None = None  # the signal
    told: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Until all have ended, or those that run have after a signal."""
        while self.running or (self.waiting and self.stopping is None):
            while self.waiting and len(self.running) < self.jobs and self.stopping is None:
                self._start(self.waiting.pop(0))
            time.sleep(LOOK_SECONDS)
            for name in [n for n, (_, process, _) in self.running.items() if process.poll() is not None]:
                self._end(name)
            if time.monotonic() - self.told > REPORT_SECONDS:
                self._report("")

    def _start(self, cell: Cell) -> None:
        write_atomically(cell.run.folder / CONFIG_FILE, to_yaml(shared(cell.run, self.jobs)))
        process: Process = self.resident.start(cell) if forkable(cell.run) else Command(cell)
        self.running[cell.name] = (cell, process, time.monotonic())

    def _end(self, name: str) -> None:
        _, process, began = self.running.pop(name)
        code, took = process.poll(), time.monotonic() - began
        self.seconds.append(took)
        if code == 0:
            self.done += 1
        elif self.stopping is None:
            self.failed[name] = int(code or 0)
        how = "finished" if code == 0 else "stopped" if self.stopping is not None else f"FAILED (code {code})"
        self._report(f"{name} {how} after {took:.0f} s; ")

    def _report(self, what: str) -> None:
        self.told = time.monotonic()
        failed = f", {len(self.failed)} failed" if self.failed else ""
        running = f"; running {', '.join(self.running)}" if self.running and not what else ""
        left = self._left_seconds()
        eta = f"; about {_duration(left)} left" if left is not None else ""
        self.say(f"{what}{self.done} of {self.total} done{failed}{running}{eta}")

    def _left_seconds(self) -> float | None:
        if not self.seconds or self.stopping is not None or not (self.waiting or self.running):
            return None
        each, now = sum(self.seconds) / len(self.seconds), time.monotonic()
        running = sum(max(0.0, each - (now - began)) for _, _, began in self.running.values())
        return (each * len(self.waiting) + running) / self.jobs

    def stop(self, number: int) -> None:
        """Have what runs save and end; asked again, end it at once."""
        again, self.stopping = self.stopping is not None, number
        if not again:
            self.say(
                f"{signal.Signals(number).name}: {len(self.running)} runs save and end; once more ends them now"
            )
        for _, process, _ in self.running.values():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL if again else signal.SIGTERM)


def forkable(run: RunConfig) -> bool:
    """Whether the run is one process without torchrun."""
    return run.cluster.ranks == 1


def shared(run: RunConfig, jobs: int) -> RunConfig:
    """The run with its share of the machine's cores where several run at once and it does not say."""
    if jobs == 1:
        return run
    share = max(1, len(os.sched_getaffinity(0)) // jobs)
    threads = run.cluster.threads_per_rank or max(1, share // run.cluster.ranks_per_node)
    cluster = run.cluster.model_copy(update={"threads_per_rank": threads})
    return run.model_copy(update={"cluster": cluster, "grader_processes": run.grader_processes or threads})


def run(cells: Sequence[Cell], *, jobs: int, total: int, done: int, say: Callable[[str], None]) -> Queue:
    """Run what is not finished -> how it went. Raises ConfigError for runs that need a cluster."""
    for cell in cells:
        if cell.run.cluster.nodes > 1:
            raise ConfigError(
                f"{cell.name}: cluster.nodes is {cell.run.cluster.nodes}: run the study with --executor slurm, or on"
                " this machine with cluster.nodes=1 cluster.vllm_nodes=0 generation.backend=transformers"
            )
    queue = Queue(list(cells), jobs, total, done, say)
    try:
        with _signals(queue.stop):
            queue.run()
    finally:
        queue.resident.close()
    return queue


@contextmanager
def _signals(handler: Callable[[int], None]) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before: Mapping[int, Any] = {n: signal.signal(n, lambda number, _: handler(number)) for n in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def last_words(folder: Path, count: int = 5) -> list[str]:
    """The end of what a run printed."""
    with suppress(OSError):
        return (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
    return []
