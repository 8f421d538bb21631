"""The processes that a node starts: in groups of their own, deaf to Slurm's signals, ended for certain."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# Slurm sends its signals to every process of a step; only the node's own process acts on them.
OURS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def block_signals() -> None:
    """Keep `OURS` for `next_signal`; the block passes on to every child, across exec."""
    signal.pthread_sigmask(signal.SIG_BLOCK, OURS)


def next_signal(timeout_seconds: float) -> int | None:
    """Wait for one of `OURS` -> its number, or None when the time is over."""
    found = signal.sigtimedwait(OURS, timeout_seconds)
    return found.si_signo if found else None


class Child:
    """One child process and all that it starts."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> None:
        """Errors go to the end of `log`; what it prints, to this process's own output."""
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )

    def poll(self) -> int | None:
        """The exit code as a shell has it (128 + signal), None while it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def kill(self) -> None:
        """End it and everything in its group, at once."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


def without_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for what must not think that it is a step of the job: SLURM_* gone, SLURM_CONF kept."""
    leaks = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_", "SUBMITIT_")
    return {k: v for k, v in environment.items() if k == "SLURM_CONF" or not k.startswith(leaks)}
