"""What a job asks of Slurm while it runs. Needs no accounting: scontrol alone, with time limits."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

ASK_SECONDS = 20.0


@dataclass(frozen=True)
class Place:
    """Where a process stands: which job and start, which of its nodes."""

    job: str
    restart: int
    node: int
    hosts: tuple[str, ...]  # one a node
    slurm: bool

    @property
    def attempt(self) -> str:
        return f"{self.job}.{self.restart}"


def place(environment: Mapping[str, str]) -> Place:
    """From Slurm's variables, else from those of a local launcher, else a job of one node."""
    if "SLURM_JOB_ID" in environment:
        job, node = _job(environment), int(environment.get("SLURM_NODEID", "0"))
        restart = int(environment.get("SLURM_RESTART_COUNT", "0"))
        return Place(
            job, restart, node, hostnames(environment.get("SLURM_JOB_NODELIST", "localhost")), slurm=True
        )
    if "SUBMITIT_LOCAL_GLOBALID" in environment:
        nodes = int(environment["SUBMITIT_LOCAL_NTASKS"])
        job = f"local{environment['SUBMITIT_LOCAL_JOB_ID']}"
        return Place(job, 0, int(environment["SUBMITIT_LOCAL_GLOBALID"]), ("localhost",) * nodes, slurm=False)
    return Place(f"here{os.getpid()}", 0, 0, ("localhost",), slurm=False)


def _job(environment: Mapping[str, str]) -> str:
    """The job's id as the queue lists it and takes it: an array's element is `<array>_<index>`."""
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def hostnames(nodelist: str) -> tuple[str, ...]:
    """node[1-2] -> node1, node2. Slurm expands it itself."""
    if "[" not in nodelist:
        return tuple(nodelist.split(","))
    return tuple(_ask("scontrol", "show", "hostnames", nodelist).split())


def end_time(job: str) -> float | None:
    """When the job's time limit ends, in epoch seconds; None for no limit. Raises OSError where Slurm is silent."""
    said = _field(job, "EndTime")
    try:
        return time.mktime(time.strptime(said, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None  # Unknown: no limit


def state(job: str) -> str:
    """The job's state, such as RUNNING, CANCELLED, PREEMPTED. Raises OSError where Slurm is silent."""
    return _field(job, "JobState")


def requeue(job: str, restart: int, patience_seconds: float = 120.0) -> None:
    """Put the job's start number `restart` back into the queue; Slurm then ends it here.

    Nothing is done where Slurm has done so itself: a later start must not be hit. A controller that does not answer
    is asked again for `patience_seconds`. Raises OSError with Slurm's words.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            if int(_field(job, "Restarts")) == restart:
                _ask("scontrol", "requeue", job)
            return
        except OSError as error:
            refused = re.search(
                r"(?i)disabled|invalid|denied|not permitted|only batch|already|requeue", str(error)
            )
            if time.monotonic() > deadline or (refused and not re.search(r"(?i)contact|connect", str(error))):
                raise
            time.sleep(5)


def _field(job: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\S+)", _ask("scontrol", "show", "job", "-o", job))
    if found is None:
        raise OSError(f"scontrol show job {job} says no {name}")
    return found[1]


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS)
    except subprocess.TimeoutExpired:
        raise OSError(f"{' '.join(command)}: no answer within {ASK_SECONDS:.0f} s (cannot contact)") from None
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
