"""The code a job runs: a copy made when it is submitted, so that edits afterwards change nothing."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hpcgrpo

SKIPPED = ("__pycache__", ".git")
FILES = "files"  # below it, rewards named by a file's path, at that path


def take(rewards: Mapping[str, Any], root: Path, *, beside: Sequence[str] = ()) -> Path:
    """Copy this package and a run's own reward modules to root/code-<hash> -> that folder.

    `beside` names packages that lie where this one does, which are copied as well.

    The same code gives the same folder, which is then left as it is. Raises OSError where it cannot be written.
    """
    found = dict(sources(rewards, beside=beside))
    code = root / f"code-{_digest(found)}"
    if code.exists():
        return code
    draft = root / f".{code.name}.{os.getpid()}"
    try:
        for place, source in found.items():
            (draft / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, draft / place)
        draft.rename(code)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return code


def prune(root: Path, keep: Path) -> None:
    """Remove the copies that no job of the run needs: all but `keep`, since a run has one job at a time."""
    for folder in root.glob("code-*"):
        if folder != keep:
            shutil.rmtree(folder, ignore_errors=True)


def sources(rewards: Mapping[str, Any], *, beside: Sequence[str] = ()) -> Iterator[tuple[str, Path]]:
    """Every file that a job needs: (its place in the copy, where it is now)."""
    package = Path(hpcgrpo.__file__).parent
    yield from _below(package, package.parent)
    for name in beside:
        yield from _below(package.parent / name, package.parent)
    for key in rewards:
        place, colon, _ = key.rpartition(":")
        if not colon:
            continue
        if place.endswith(".py"):
            path = Path(place).expanduser().resolve()
            yield f"{FILES}{path}", path
        else:
            yield from _module(place)


def _module(name: str) -> Iterator[tuple[str, Path]]:
    """A user's module, with its whole package; none of what is installed, which nobody edits by the way."""
    top = importlib.util.find_spec(name.partition(".")[0])
    package = top is not None and top.origin is not None and Path(top.origin).name == "__init__.py"
    spec = top if package else importlib.util.find_spec(name)
    if spec is None or spec.origin is None or spec.name == "hpcgrpo":
        return
    origin = Path(spec.origin).resolve()
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")}
    if not origin.is_file() or any(origin.is_relative_to(folder) for folder in installed):
        return
    if package:
        yield from _below(origin.parent, origin.parent.parent)
    else:  # alone, or in a folder without __init__.py
        yield "/".join([*name.split(".")[:-1], origin.name]), origin


def _below(folder: Path, base: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not set(path.relative_to(folder).parts) & set(SKIPPED):
            yield str(path.relative_to(base)), path


def _digest(found: Mapping[str, Path]) -> str:
    total = hashlib.sha256()
    for part in _parts(found.items()):
        total.update(len(part).to_bytes(8, "big") + part)
    return total.hexdigest()[:16]


def _parts(found: Iterable[tuple[str, Path]]) -> Iterator[bytes]:
    for place, source in sorted(found):
        yield place.encode()
        yield source.read_bytes()
