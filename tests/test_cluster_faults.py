"""What breaks on a cluster costs minutes, not the run: real jobs on a real Slurm, each hurt in the middle of a step.

Every run here ends with the very weights, metrics and rollouts of a run that nothing happened to.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from cluster import REPORT, Cluster, write_cluster_config
from runs import hpcgrpo, metrics, rollouts, tensors

from hpcgrpo import ports

pytestmark = pytest.mark.slow
STEPS = 12
STEP_SECONDS = 1.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the module's runs are; `logs/unbroken` is the one that nothing happens to, on this machine."""
    folder = tmp_path_factory.mktemp("faults")
    config = write_cluster_config(folder, name="unbroken", nodes=1, nproc=2, steps=STEPS)
    done = hpcgrpo("train", str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def same_as_unbroken(folder: Path, run: Path, scratch: Path) -> None:
    """No step was lost or done twice, and what was sampled and learnt is equal bit for bit."""
    unbroken = folder / "logs" / "unbroken"
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))
    assert metrics(run) == metrics(unbroken)
    assert rollouts(run) == rollouts(unbroken)
    positions = [
        json.loads(line)["position"] for text in rollouts(run).values() for line in text.splitlines()
    ]
    assert sorted(set(positions)) == list(range(4 * STEPS))  # 16 completions a step in groups of 4
    expected, found = (tensors(r / f"checkpoints/checkpoint-{STEPS}/state", scratch) for r in (unbroken, run))
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[key]) for key, tensor in expected.items())
    before = tensors(unbroken / "checkpoints/checkpoint-2/state", scratch)
    assert any(not torch.equal(before[k], found[k]) for k in before if k.startswith("/model/")), (
        "nothing was learnt"
    )


def steps_done(run: Path) -> int:
    try:
        return len((run / "metrics.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0


def caught_up(attempt: Path, before: int) -> bool:
    """Whether an attempt has done a step after `before`."""
    found = [json.loads(path.read_text()) for path in attempt.glob("status-*.json")]
    return any(status["step"] > max(before, status["first_step"]) for status in found)


class Suffering:
    """A run on the cluster to which things are done; how long it takes each time to get further goes to REPORT."""

    def __init__(self, cluster: Cluster, config: Path, *overrides: str) -> None:
        self.cluster, self.config, self.overrides = cluster, config, overrides
        self.run = config.parent / "logs" / config.stem
        self.job = self.submit()

    def submit(self) -> str:
        self.job = self.cluster.submit(self.config, *self.overrides)
        return self.job

    def reach(self, step: int) -> None:
        """Wait until a step is over and the next one is about half done."""
        self.cluster.until(lambda: steps_done(self.run) >= step, f"step {step}", timeout_seconds=240)
        time.sleep(STEP_SECONDS / 2)

    def started_again(self, what: str, times: int) -> None:
        """Wait until the job has made up for a fault that happens now: has done the step that it was at."""
        began, before = time.monotonic(), steps_done(self.run)
        self.cluster.wait_for(self.job, lambda f: f["Restarts"] == str(times) and f["JobState"] == "RUNNING")
        queued = time.monotonic() - began
        attempt = self.run / "slurm" / f"{self.job}.{times}"
        self.cluster.until(
            lambda: caught_up(attempt, before), f"step {before + 1} again", timeout_seconds=240
        )
        lost = time.monotonic() - began
        REPORT.append(f"lost to {what}: {lost:.0f} s, of which {queued:.0f} s in Slurm's queue")

    def nodes(self) -> list[str]:
        names = self.cluster.login("scontrol", "show", "hostnames", self.cluster.job(self.job)["NodeList"])
        return str(names.stdout).split()

    def finish(self) -> None:
        self.cluster.wait_for(self.job, "COMPLETED", timeout_seconds=240)


def test_everything_that_can_break(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    """One job, one fault after the other, since each costs a start.

    A stale server.json and taken ports at the start, a checkpoint that finds the disk full, kill -9 of a rank, a
    crashed node, preemption, and a controller that is away when the run ends.
    """
    config = write_cluster_config(
        folder, name="hurt", nodes=2, steps=STEPS, save_steps=1, step_seconds=STEP_SECONDS
    )
    with small_disk(cluster, folder / "logs/hurt/checkpoints") as disk:
        filler = fill(disk)
        hurt = Suffering(cluster, config, "cluster.slurm_partition=low", LATER)
        with crowded(cluster, hurt) as taken:
            cluster.login("scontrol", "update", f"jobid={hurt.job}", "starttime=now")
            log = hurt.run / "slurm" / f"{hurt.job}.0" / "rank-0.log"
            told = "checkpoint could not be written"
            cluster.until(
                lambda: log.exists() and told in log.read_text(), "a full disk", timeout_seconds=240
            )
            filler.unlink()
            server = json.loads(log.with_name("server.json").read_text())
            assert server["attempt"] == f"{hurt.job}.0" and server["host"] == "node0"
            assert server["control_port"] not in taken

            hurt.reach(3)
            ranks = cluster.processes(r"hpcgrpo\S* rank ", node=hurt.nodes()[1])
            assert len(ranks) == 1
            cluster.kill(ranks)
            hurt.started_again("kill -9 of a rank", 1)

        hurt.reach(5)
        crashed = hurt.nodes()[1]
        cluster.crash(crashed)
        hurt.started_again("a crashed node", 2)
        assert crashed not in hurt.nodes()

        hurt.reach(6)
        wanted = ["--exclusive", f"--nodelist={','.join(hurt.nodes())}", "-N2"]
        other = cluster.login(
            "sbatch", "--parsable", "-pmain", *wanted, "-o/dev/null", "--wrap=sleep 2"
        ).stdout
        cluster.track(other.strip())
        hurt.started_again("preemption", 3)

        cluster.crash("slurmctld")
        ended = hurt.run / "slurm" / "ended.json"
        cluster.until(ended.exists, "the run's end without a controller", timeout_seconds=120)
        cluster.boot("slurmctld")
        hurt.finish()
        same_as_unbroken(folder, hurt.run, tmp_path)


LATER = "cluster.slurm_additional_parameters={begin: now+3600}"
LISTEN = "import socket,sys,time; held=[socket.create_server((str(),int(p))) for p in sys.argv[1:]]; time.sleep(600)"


@contextmanager
def crowded(cluster: Cluster, waiting: Suffering) -> Iterator[list[int]]:
    """An earlier start's server.json where the job's first start will look, and its first ports taken on node0."""
    attempt = waiting.run / "slurm" / f"{waiting.job}.0"
    attempt.mkdir(mode=0o700)
    stale = {"attempt": f"{int(waiting.job) - 1}.0", "address": cluster.address("node2"), "control_port": 9}
    (attempt / "server.json").write_text(json.dumps(stale | {"pid": 1, "host": "node2", "engines": []}))
    taken = [next(ports.band(f"{waiting.job}/{what}")) for what in ("hub", "master")]
    cluster.enter(
        "node0", "sh", "-c", f"{sys.executable} -c '{LISTEN}' {taken[0]} {taken[1]} >/dev/null 2>&1 &"
    )
    listening = cluster.until(lambda: cluster.processes("create_server", node="node0"), "ports taken")
    try:
        yield taken
    finally:
        cluster.kill(listening)


@contextmanager
def small_disk(cluster: Cluster, folder: Path) -> Iterator[Path]:
    """`folder` on the cluster's file system of 100 MB, which is empty again afterwards."""
    place = cluster.folder / "disk" / "run"
    place.mkdir(mode=0o700)
    folder.parent.mkdir(parents=True, mode=0o700)
    folder.symlink_to(place)
    try:
        yield place
    finally:
        shutil.rmtree(place)


def fill(disk: Path) -> Path:
    """Leave 1 MB of a file system -> the file that takes the rest."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - 2**20)
    return filler


@pytest.mark.long
def test_scancel_then_the_time_limit(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    """A cancelled run leaves nothing and goes on once submitted again; one too long for its job goes on by itself."""
    step_seconds = 130 / STEPS  # more than the job's 120 s in all, however fast the machine is
    config = write_cluster_config(
        folder, name="limited", nodes=2, steps=STEPS, save_steps=100, step_seconds=step_seconds
    )
    limited = Suffering(cluster, config)
    limited.reach(1)
    began = time.monotonic()
    cluster.cancel(limited.job)
    cluster.until(lambda: not cluster.processes(), "nothing left running")
    REPORT.append(f"scancel: nothing left running after {time.monotonic() - began:.1f} s")
    cluster.wait_for(limited.job, "CANCELLED")

    limited.overrides = ("cluster.timeout_min=2",)  # Slurm tells the job 90 s before, up to 30 s late
    limited.submit()
    fields = cluster.wait_for(limited.job, "COMPLETED", timeout_seconds=600)
    starts = [json.loads(p.read_text()) for p in (limited.run / "slurm").glob(f"{limited.job}.*/ended.json")]
    assert len(starts) == int(fields["Restarts"]) + 1 >= 2
    assert {s["reason"] for s in starts} <= {"saved: time limit", "saved: SIGUSR2", "finished"}
    assert max(s["last_step"] for s in starts if s["requeued"]) >= 1, "nothing was saved before the limit"
    same_as_unbroken(folder, limited.run, tmp_path)
