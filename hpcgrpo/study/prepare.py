"""What runs need before they can start: each command of a study's `prepare` once for each set of labels it names."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcgrpo.config import ConfigError
from hpcgrpo.study.cells import near
from hpcgrpo.study.design import Study

PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
KEPT = ("question", "draft")  # what a refinement template says itself


@dataclass(frozen=True)
class Command:
    """One command with all labels filled in."""

    words: tuple[str, ...]
    creates: Path | None

    @property
    def outstanding(self) -> bool:
        """Whether it has yet to be run."""
        return self.creates is None or not self.creates.exists()

    def __str__(self) -> str:
        return shlex.join(self.words)


def commands(study: Study) -> list[Command]:
    """Every command that the study's runs need, in the file's order. Raises ConfigError for an unknown placeholder."""
    found = [
        Command(
            tuple(_filled(word, cell.labels) for word in _words(item.run)), _path(item.creates, cell.labels)
        )
        for item in study.prepare
        for cell in study.cells
    ]
    return list(dict.fromkeys(found))


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"prepare: {text!r}: {error}") from None
    if not words:
        raise ConfigError("prepare: run is empty")
    return words


def _path(text: str | None, labels: Mapping[str, str]) -> Path | None:
    return Path(_filled(text, labels)) if text else None


def _filled(text: str, labels: Mapping[str, str]) -> str:
    def fill(match: re.Match[str]) -> str:
        if match[1] in KEPT:
            return match[0]
        if match[1] not in labels:
            hint = near(match[1], list(labels))
            raise ConfigError(f"prepare: {match[0]} is no axis{hint}; the axes are {', '.join(labels)}")
        return labels[match[1]]

    return PLACEHOLDER.sub(fill, text)


def run(command: Command) -> None:
    """Run one command to its end, its output to this process's errors. Raises ConfigError where it fails."""
    first, *rest = command.words
    words = [sys.executable, "-m", "hpcgrpo.cli", *rest] if first == "hpcgrpo" else [first, *rest]
    try:
        code = subprocess.run(words, stdout=sys.stderr).returncode
    except OSError as error:
        raise ConfigError(f"prepare: {command}: {error}") from None
    if code:
        raise ConfigError(f"prepare: {command}: ended with code {code}")
    if command.outstanding and command.creates is not None:
        raise ConfigError(
            f"prepare: {command}: ended well, but {command.creates} is not there; mend `creates`"
        )


def awaited(outstanding: list[Command]) -> Iterator[str]:
    """The folders that models come from, of commands that are yet to be run."""
    for command in outstanding:
        if command.creates is not None:
            yield from (str(command.creates), str(command.creates.parent))
