"""What a run takes: memory, throughput and time, as Appendix D of the iGRPO paper (arXiv 2602.09000) defines them."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

PHASES = (
    *("explore", "generate", "grade", "exchange", "compare", "logprobs", "update"),
    *("peer_logprobs", "peer_update", "sync", "save", "evaluate"),
)


def samples_per_second(
    global_step: int, per_device_batch: int, devices: int, elapsed_seconds: float
) -> float:
    """Appendix D's throughput: optimizer steps x per-device batch x data-parallel devices / elapsed seconds.

    Gradient accumulation is not in the published formula, so it undercounts by that factor.
    """
    return global_step * per_device_batch * devices / elapsed_seconds


def gpu_hours(devices: int, elapsed_seconds: float) -> float:
    """All reserved devices, the generation node's included, times the hours they were held."""
    return devices * elapsed_seconds / 3600


def reset_peak_memory() -> None:
    """Start of training: later peaks count from here (GPU allocator; on a CPU the kernel's high-water mark)."""
    if _cuda():
        import torch

        torch.cuda.reset_peak_memory_stats()
    # Not Linux, or not allowed: the peak then counts from the start of the process.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_gb() -> float:
    """Peak since `reset_peak_memory` in GB of 10^9 bytes, the paper's unit: allocated on the GPU, resident on a CPU."""
    if _cuda():
        import torch

        return torch.cuda.max_memory_allocated() / 1e9
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e9
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_initialized()


@dataclass
class Profile:
    """Seconds by phase: of the step at hand, and in total over all attempts of the run."""

    step_seconds: dict[str, float] = field(default_factory=dict)
    step_cpu_seconds: dict[str, float] = field(default_factory=dict)  # of this process, all its threads
    total_seconds: dict[str, float] = field(default_factory=dict)
    elapsed_before_seconds: float = 0.0  # earlier attempts, up to their last checkpoint
    started: float = field(default_factory=time.perf_counter)
    moved: Callable[[], None] = lambda: None  # called where a phase begins or ends

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`; blocks may nest, the outer then holds the inner's time too."""
        assert name in PHASES, name
        begin, begin_cpu = time.perf_counter(), time.process_time()
        self.moved()
        try:
            yield
        finally:
            self.moved()
            spent, spent_cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
            self.step_seconds[name] = self.step_seconds.get(name, 0.0) + spent
            self.step_cpu_seconds[name] = self.step_cpu_seconds.get(name, 0.0) + spent_cpu

    def end_step(self) -> dict[str, float]:
        """The step's phases, which are then added to the totals and cleared; so are its CPU-seconds."""
        done, self.step_seconds, self.step_cpu_seconds = self.step_seconds, {}, {}
        for name, seconds in done.items():
            self.total_seconds[name] = self.total_seconds.get(name, 0.0) + seconds
        return done

    @property
    def elapsed_seconds(self) -> float:
        return self.elapsed_before_seconds + time.perf_counter() - self.started
