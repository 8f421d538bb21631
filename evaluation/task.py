"""What one process evaluates: a model on one benchmark, or on a share of its problems, as a file says it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from evaluation import files
from evaluation.config import EvaluationConfig, parse
from hpcgrpo.config_file import ConfigError


@dataclass(frozen=True)
class Task:
    """One element of a job array, or one benchmark in this process."""

    source: str  # as evaluation.source.find takes it
    config: EvaluationConfig
    benchmark: str
    folder: str  # of the results
    checkpoint: str | None = None  # a step of the run; None: the newest when the task starts
    shard: tuple[int, int] = (0, 1)  # its problems are number i, i + n, i + 2 n, ...
    waits_for: str | None = None  # the job whose end the task's job waits for

    @property
    def name(self) -> str:
        """For logs and files: the benchmark, and which share of it."""
        i, n = self.shard
        return self.benchmark if n == 1 else f"{self.benchmark}-{i}-of-{n}"

    def write(self, path: Path) -> None:
        """As JSON, atomically. Raises ConfigError where the disk is full."""
        values = {
            "source": self.source,
            "config": self.config.model_dump(mode="json"),
            "benchmark": self.benchmark,
            "folder": self.folder,
            "checkpoint": self.checkpoint,
            "shard": list(self.shard),
            "waits_for": self.waits_for,
        }
        files.write(path, json.dumps(values, indent=1) + "\n")


def read(path: Path) -> Task:
    """Raises ConfigError for a file that is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        i, n = values["shard"]
        return Task(
            source=values["source"],
            config=parse(values["config"], source=str(path)),
            benchmark=values["benchmark"],
            folder=values["folder"],
            checkpoint=values["checkpoint"],
            shard=(i, n),
            waits_for=values["waits_for"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: no evaluation task ({error!r}); queue the evaluation again") from None
