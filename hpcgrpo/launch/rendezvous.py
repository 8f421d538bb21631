"""How the nodes of a job find node 0: a file of this very attempt, and the run's secret."""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcgrpo.launch.channel import HopError


def secret_file(folder: Path) -> Path:
    """Where a run's secret lies, in its `slurm` folder."""
    return folder / "secret"


def run_secret(folder: Path, *, create: bool, patience_seconds: float = 120.0) -> str:
    """The run's secret; node 0 makes it where there is none, the others wait for it."""
    path = secret_file(folder)
    if create and not path.exists():
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
    deadline = time.monotonic() + patience_seconds
    while True:
        with suppress(OSError):
            if text := path.read_text().strip():
                return text
        if time.monotonic() > deadline:
            raise OSError(f"{path} cannot be read after {patience_seconds:.0f} s")
        time.sleep(0.2)


def await_server(folder: Path, attempt: str, deadline: float) -> dict[str, Any]:
    """server.json of this very attempt, once node 0 has written it. Raises HopError after `deadline`."""
    while True:
        with suppress(OSError):
            next(folder.iterdir(), None)  # some network file systems show a new file only after a look around
        about = load_json(folder / "server.json")
        if about and about.get("attempt") == attempt:
            return about
        if time.monotonic() > deadline:
            raise HopError(
                f"node 0 did not write {folder / 'server.json'}: it did not start, or the nodes do not share"
                f" {folder.parents[1]}; output_dir must be on a file system that all nodes see"
            )
        time.sleep(0.2)


def load_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None where there is none, or not all of it yet."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
