"""A process that has imported torch and forks one process a run, so that a study pays for the imports once.

It reads a line of JSON for each run from its standard input, {"config": path, "log": path}, and answers {"pid"}; when
that process ends, {"pid", "code"}. It ends with its standard input, and all runs end with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcgrpo import config
from hpcgrpo.launch import local, ranks
from hpcgrpo.launch.one_rank import errors_noted

LOOK_SECONDS = 0.1  # between two looks for processes that have ended


def main() -> int:
    """Serve until the standard input closes -> 0."""
    ranks.die_with_parent()
    _import()
    say({"ready": os.getpid()})
    pending = b""
    while True:
        if select.select([0], [], [], LOOK_SECONDS)[0]:
            received = os.read(0, 65536)
            if not received:
                return 0
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                say({"pid": fork(json.loads(line))})
        for pid, code in ended():
            say({"pid": pid, "code": code})


def _import() -> None:
    """Everything that a run imports; nothing that starts a thread, which a fork would lose."""
    import torch.distributed.checkpoint
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hpcgrpo.train

    assert torch.distributed.checkpoint and AutoModelForCausalLM and AutoTokenizer and hpcgrpo.train


def say(message: dict[str, Any]) -> None:
    """One line to the study."""
    os.write(1, json.dumps(message).encode() + b"\n")


def ended() -> list[tuple[int, int]]:
    """The processes that have ended: pid and exit code as a shell has it (128 + signal)."""
    found = []
    with suppress(ChildProcessError):
        while (said := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(said[1])
            found.append((said[0], code if code >= 0 else 128 - code))
    return found


def fork(job: dict[str, str]) -> int:
    """Start one run -> its process id."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    code = 1
    try:
        ranks.die_with_parent()
        if os.getppid() == parent:
            _redirect(Path(job["log"]))
            code = run(Path(job["config"]))
    except BaseException:  # nothing may return into the parent's loop
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _redirect(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    null, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)


def run(path: Path) -> int:
    """Train the run of a configuration in this process -> its exit code; 143 where a SIGTERM ended it early."""
    from hpcgrpo.train import rank_main

    loaded = config.load(path)
    attempt = local.stop_on_sigterm(loaded.folder / "torchrun")
    try:
        with errors_noted(attempt, 0):
            rank_main(loaded, sys.stderr)
    except ValueError as error:
        for line in str(error).splitlines():
            print(f"hpcgrpo: error: {line}", file=sys.stderr)
        return ranks.USER_ERROR
    if attempt.stop_request() is not None and not local.newest_checkpoint(loaded.folder, loaded.train)[1]:
        return 128 + signal.SIGTERM
    return 0


if __name__ == "__main__":
    sys.exit(main())
