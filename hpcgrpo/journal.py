"""A run's folder as it is written: metrics, rollouts, trackers, progress. Rank 0 alone has one."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

METRICS = "metrics.jsonl"
LINE_EVERY_SECONDS = 5.0  # off a terminal, so that a log stays readable
LOCK = ".lock"
LAUNCHER = (
    ".launcher"  # locked by who starts the ranks here, which lock the folder themselves when they are up
)


class FolderInUse(ValueError):
    """Another live run writes to the folder; `owner` is its process, as far as it is known."""

    def __init__(self, said: str, owner: str = "another process") -> None:
        super().__init__(said)
        self.owner = owner


def claim(folder: Path, name: str = LOCK, *, shared: bool = False) -> IO[str]:
    """Make the run's folder, private to the user, and lock it until the process ends; `name` is the lock's file.

    Who takes it `shared` keeps out those alone who do not. Raises FolderInUse, naming the process that holds it. The
    lock goes with the process, however it ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    lock = (folder / name).open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        owner = lock.read().rpartition("\n")[2].strip() or "another process"
        lock.close()
        raise FolderInUse(
            f"{folder}: a live run ({owner}) is writing here; wait for it, stop it, or give this run a name of its own",
            owner,
        ) from None
    lock.truncate(0)
    lock.write("\n" * shared + f"pid {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock


def gone(folder: Path) -> bool:
    """Whether whatever claimed the folder last was a process of this machine that has ended since."""
    locks = [path for path in (folder / LOCK, folder / LAUNCHER) if path.is_file()]
    owners = [path.read_text(encoding="utf-8", errors="replace") for path in locks]
    found = [re.fullmatch(r"pid (\d+) on (.*)", owner) for owner in owners]
    here = [int(owner[1]) for owner in found if owner and owner[2] == socket.gethostname()]
    return bool(here) and len(here) == len(owners) and not any(Path(f"/proc/{pid}").exists() for pid in here)


def why_denied(error: OSError) -> str:
    """One line for a path that may not be read or written, or runs through a file: whose it is, and the way out."""
    path = Path(os.fsdecode(error.filename))
    there, status = next(found for found in map(_status, (path, *path.absolute().parents)) if found)
    if isinstance(error, NotADirectoryError):
        return f"{path}: {there} is no folder; name another place (output_dir=... for what a command writes)"
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        owner = f"user {status.st_uid}"
    whose = "its owner" if there == path else f"the owner of {there}"
    return f"{path}: permission denied ({whose} is {owner}); ask for access, or name a folder of yours"


def _status(path: Path) -> tuple[Path, os.stat_result] | None:
    try:
        return path, path.stat()
    except OSError:
        return None


def write_atomically(path: Path, text: str) -> None:
    """Write to a temporary name beside `path`, then rename: a reader sees the old file or the new one.

    Of several writers, on other nodes too, the last one's text stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    own = f"{socket.gethostname()}-{os.getpid()}-{threading.get_native_id()}"
    temporary = path.with_name(f".{path.name}.{own}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; what a crash cut off or a disk damaged is left out."""
    path = folder / METRICS
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    kept = []
    for line in lines:
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and isinstance(found.get("step"), int):
                kept.append(found)
    return kept


@dataclass
class Journal:
    """Writes what a run measures. Steps after `resumed_step` that an earlier attempt wrote are dropped first."""

    folder: Path
    resumed_step: int
    report_to: tuple[str, ...]
    config: Mapping[str, Any]
    log_completions: bool
    trackers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        kept = [m for m in read_metrics(self.folder) if m["step"] <= self.resumed_step]
        write_atomically(self.folder / METRICS, "".join(json.dumps(m) + "\n" for m in kept))
        if "tensorboard" in self.report_to:
            self.trackers.append(_tensorboard(self.folder, self.resumed_step))
        if "wandb" in self.report_to:
            self.trackers.append(_wandb(self.folder, self.config))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line and hand the values to the trackers."""
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for tracker in self.trackers:
            tracker(step, values)

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]], kind: str = "step") -> None:
        """Everything that was sampled in a step, one JSON object a line, in rollouts/<kind>-<step>.jsonl."""
        if self.log_completions:
            text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
            write_atomically(self.folder / "rollouts" / f"{kind}-{step:06d}.jsonl", text)


def _tensorboard(folder: Path, resumed_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_step + 1)

    def track(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return track


def _wandb(folder: Path, config: Mapping[str, Any]) -> Any:
    """One Weights & Biases run for all attempts: its id is kept in the run's folder."""
    try:
        import wandb
    except ImportError:
        raise ValueError("report_to: wandb is not installed; pip install 'hpcgrpo[wandb]'") from None
    known = folder / "wandb_id"
    if not known.exists():
        write_atomically(known, wandb.util.generate_id())
    wandb.init(
        id=known.read_text().strip(), resume="allow", name=folder.name, dir=str(folder), config=dict(config)
    )
    return lambda step, values: wandb.log(dict(values), step=step)


def live_bar(name: str, total: int, done: int, stream: IO[str]) -> Any:
    """A rich bar that runs already: `update(0, completed=..., said=...)`, then `stop()`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[said]}"))
    bar = Progress(TextColumn(name), *columns, console=Console(file=stream))
    bar.start()
    bar.add_task(name, total=total, completed=done, said="")
    return bar


@dataclass
class ProgressLine:
    """The training's progress: a live bar on a terminal, a line every few seconds elsewhere."""

    total: int
    done: int
    name: str
    stream: IO[str] = field(default_factory=lambda: sys.stderr)
    bar: Any = None
    seconds: list[float] = field(default_factory=list)
    told: float = float("-inf")  # when the last line was printed

    def __enter__(self) -> ProgressLine:
        if self.stream is sys.stderr and self.stream.isatty():  # srun gives its tasks a terminal too
            self.bar = live_bar(self.name, self.total, self.done, self.stream)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step: reward, length, samples a second, and the time left from the last steps' median."""
        self.seconds.append(metrics["step_time"])
        value = metrics.get("reward")
        reward = "no group to learn from"
        if value is not None:
            reward = f"reward {value:.3f}" if abs(value) < 1e6 else f"reward {value:.3g}"
        said = (
            f"{reward} length {metrics.get('completions/mean_length', 0):.0f}"
            f" {metrics['perf/completions_per_second']:.1f} samples/s"
        )
        if self.bar is not None:
            self.bar.update(0, completed=step, said=said)
        elif step == self.total or time.monotonic() - self.told >= LINE_EVERY_SECONDS:
            self.told = time.monotonic()
            recent = sorted(self.seconds[-20:])
            left = recent[len(recent) // 2] * (self.total - step)
            print(
                f"{self.name} step {step}/{self.total} {said} left {_duration(left)}",
                file=self.stream,
                flush=True,
            )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
