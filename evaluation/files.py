"""Writes an evaluation's files. One that cannot be written is told with its name and the way out."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcgrpo.config_file import ConfigError
from hpcgrpo.journal import write_atomically

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises ConfigError where the disk is full and where a folder lies in the file's place."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            way_out = "make room; what was graded is kept, and the same command goes on"
        elif isinstance(error, IsADirectoryError):
            way_out = "move it away; what was graded is kept, and the same command goes on"
        else:
            raise
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); {way_out}") from None


def write(path: Path, text: str) -> None:
    """As a whole or not at all. Raises ConfigError as `writing` does."""
    with writing(path):
        write_atomically(path, text)


def append(path: Path, text: str) -> None:
    """At the end, lines; a line that a crash cut off is ended first. Raises ConfigError as `writing` does."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                file.write(b"" if file.read() == b"\n" else b"\n")
            file.write(text.encode())
