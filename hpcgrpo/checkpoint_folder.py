"""What the folder of a checkpoint says of itself: its step, and whether all of it is there."""

from __future__ import annotations

import json
import stat
from pathlib import Path

MARKER = "COMPLETE"  # written last; lists every file with its size in bytes


def is_complete(path: Path) -> bool:
    """Whether the marker is there and every file that it lists has its size."""
    try:
        sizes = json.loads((path / MARKER).read_text())
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def open_to_readers(folder: Path) -> None:
    """Give the weights of a model's folder the mode of its config.json, which the umask chose.

    safetensors writes files that only their owner may read, whatever the umask says.
    """
    mode = stat.S_IMODE((folder / "config.json").stat().st_mode)
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def step_of(path: Path) -> int:
    """The step in a `checkpoint-<step>` folder's name, -1 for any other."""
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def complete(folder: Path) -> list[Path]:
    """The whole checkpoints in a run's `checkpoints` folder, the newest first."""
    return sorted(filter(is_complete, folder.glob("checkpoint-*")), key=step_of, reverse=True)


def damaged(folder: Path) -> list[Path]:
    """Folders with a checkpoint's name that are not whole, the oldest first."""
    return sorted((p for p in folder.glob("checkpoint-*") if not is_complete(p)), key=step_of)
