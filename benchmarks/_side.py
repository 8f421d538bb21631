"""What the sides of `vs_trl.py` and `learner_step.py` share: pipe, clocks and reward. Standard library, but for a GPU.

A side builds its trainer, then calls `StepClock.boundary` between any two steps. There it waits for
`{"steps": K}` on stdin, runs K steps, and answers with one JSON line on what was stdout when it started.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def digits(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Share of the answer's digits that occur in the completion, minus a little for a length other than 32.

    Dense, so that an untrained model's groups have a spread, and cheap, so that it is not what is timed.
    """
    return [
        sum(ch in text for ch in set(truth)) / len(set(truth)) - 0.01 * abs(len(text) - 32) / 32
        for text, truth in zip(completions, answer, strict=True)
    ]


def descendants(pid: int) -> list[int]:
    """Process ids of all children of `pid`, theirs included."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended while we looked
            continue
    found = [pid]
    for seen in found:
        found.extend(child for child, parent in parents.items() if parent == seen)
    return found[1:]


def children_cpu_seconds() -> float:
    """CPU time of this process's descendants, ended and live ones."""
    ended = os.times()
    ticks = 0
    for pid in descendants(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return ended.children_user + ended.children_system + ticks / _TICKS_PER_SECOND


def resident_bytes(pid: int | str, key: str = "VmHWM") -> int:
    """`VmHWM` (peak) or `VmRSS` (now) of one process; 0 when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = [line for line in status.splitlines() if line.startswith(key + ":")]
    return int(lines[0].split()[1]) * 1024 if lines else 0


class StepClock:
    """Runs as many steps as the driver orders and reports wall, CPU, lengths and phases of each.

    It holds the pipe and the running step's start, so it is an object: the trainers call back into it.
    On a GPU ("cuda") clocks are read when the device is idle, and memory is what its allocator held.
    """

    def __init__(self, describe: Mapping[str, Any], device: str = "cpu") -> None:
        self._reply = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries print to stdout; the pipe must hold replies alone
        self._left = 0
        self._steps: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        self._phases: dict[str, list[float]] = {}
        self._started: tuple[float, float, float] | None = None
        self._base = 0
        self._noted: dict[str, float] = {}
        self._describe = dict(describe)
        self._cuda: Any = None
        if device == "cuda":
            import torch

            self._cuda = torch.cuda

    def ready(self, **more: Any) -> None:
        """Tell the driver that the trainer stands, with the settings it runs under; peaks count from here."""
        with suppress(OSError):  # not allowed here: the peak then counts from the start of the process
            Path("/proc/self/clear_refs").write_text("5")
        self._base = resident_bytes("self", "VmRSS")
        if self._cuda is not None:
            self._cuda.reset_peak_memory_stats()
            self._base = self._cuda.memory_allocated()
        self._send({**self._describe, **more, "base_rss_bytes": self._base})

    def note(self, **values: float) -> None:
        """Add to what is told of the running step: sums over its calls."""
        for name, value in values.items():
            self._noted[name] = self._noted.get(name, 0.0) + value

    def now(self) -> tuple[float, float]:
        """Wall and CPU seconds, once the device has done what it was given."""
        if self._cuda is not None:
            self._cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def lengths(self, lengths: Iterable[int]) -> None:
        """Completion lengths (tokens) of the running step."""
        self._lengths.extend(lengths)

    def timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """`function`, with its wall and CPU seconds added to a phase of the running step."""

        def call(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                wall_end, cpu_end = self.now()
                self.add_phase(phase, wall_end - wall, cpu_end - cpu)

        return call

    def add_phase(self, phase: str, wall_seconds: float, cpu_seconds: float) -> None:
        total = self._phases.setdefault(phase, [0.0, 0.0])
        total[0] += wall_seconds
        total[1] += cpu_seconds

    def boundary(self) -> bool:
        """To be called between two steps, before the first and after the last; False when told to stop."""
        if self._started is not None:
            self._finish()
        if self._left == 0:
            if self._steps:
                self._send({"steps": self._steps})
                self._steps = []
            order = json.loads(sys.stdin.readline() or '{"steps": 0}')
            self._left = order["steps"]
            if self._left == 0:
                self._send(self._memory())
                return False
        self._lengths, self._phases, self._noted = [], {}, {}
        self._started = (children_cpu_seconds(), *self.now())
        return True

    def _finish(self) -> None:
        assert self._started is not None
        wall, cpu = self.now()
        children, wall_start, cpu_start = self._started
        self._started = None
        self._left -= 1
        self._steps.append(
            {
                "wall_seconds": wall - wall_start,
                "cpu_seconds": cpu - cpu_start + children_cpu_seconds() - children,
                "lengths": self._lengths,
                "phases": self._phases,
                **self._noted,
            }
        )

    def _memory(self) -> dict[str, Any]:
        children = [resident_bytes(pid) for pid in descendants(os.getpid())]
        peak = resident_bytes("self") if self._cuda is None else self._cuda.max_memory_allocated()
        return {
            "peak_rss_bytes": peak,
            "peak_above_base_bytes": peak - self._base,
            "children_peak_rss_bytes": sum(children),
        }

    def _send(self, message: Mapping[str, Any]) -> None:
        self._reply.write(json.dumps(message) + "\n")
        self._reply.flush()
