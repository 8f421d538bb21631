"""The development cluster is a real one: nodes with names and addresses of their own, which can crash."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cluster import Cluster

pytestmark = pytest.mark.slow


def test_it_is_up_within_ten_seconds_and_gone_with_its_owner() -> None:
    """Also when the test session that started it is killed."""
    import cluster

    if reason := cluster.cannot_run():
        pytest.skip(reason)
    assert any(up_then_gone() < 10 for _ in range(3)), "not up within ten seconds, three times in a row"


def up_then_gone() -> float:
    """Start a cluster in a process and kill that -> how many seconds the start took."""
    program = (
        "import cluster, time\n"
        "began = time.monotonic()\n"
        "with cluster.running(nodes=6) as c:\n"
        "    print(c.id, time.monotonic() - began, flush=True)\n"
        "    time.sleep(600)\n"
    )
    tests = Path(__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tests, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        number, seconds = owner.stdout.readline().split()
        found = Path(f"/tmp/devcluster{number}/run").glob("*.pid")
        pids = [int(p.read_text().split()[0]) for p in found if ".own." not in p.name]
        assert len(pids) == 9  # six nodes, slurmctld, munged, and what follows the owner
        owner.kill()
    deadline = time.monotonic() + 60
    while (alive := [p for p in pids if running(p)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not alive
    bridges = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    assert f"devcluster{number}:" not in bridges
    return float(seconds)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def test_nodes_have_names_addresses_and_processes_of_their_own(cluster: Cluster) -> None:
    shown = "echo $(hostname) $(hostname -i) $(ls -d /proc/[0-9]* | wc -l) $(wc -w <<<$CUDA_VISIBLE_DEVICES)"
    lines = cluster.login("srun", "-N6", "--gres=gpu:8", "bash", "-c", shown).stdout.split("\n")
    names, addresses, counts, _ = zip(*(line.split() for line in lines if line), strict=True)
    assert sorted(names) == [f"node{i}" for i in range(6)]
    assert len(set(addresses)) == 6
    assert not any(a.startswith("127.") for a in addresses)
    assert all(int(c) < 30 for c in counts), "a node sees the machine's processes"


def test_a_crashed_node_ends_its_processes_and_its_job_goes_on_elsewhere(cluster: Cluster) -> None:
    job = queue(cluster, "srun sleep 77", "-N2", "--requeue")
    cluster.until(lambda: len(cluster.processes("/sleep 77")) == 2, "sleeping on two nodes")
    victim = cluster.processes("/sleep 77")[0].node
    cluster.crash(victim)
    assert not cluster.processes(node=victim)
    cluster.wait_for(job, lambda f: f["JobState"] == "RUNNING" and f["Restarts"] == "1")
    again = cluster.until(lambda: cluster.processes("/sleep 77"), "sleeping again")
    assert victim not in {p.node for p in again}
    cluster.cancel(job)
    cluster.wait_for(job, "CANCELLED")
    cluster.boot(victim)
    assert cluster.enter(victim, "hostname").stdout.strip() == victim


def queue(cluster: Cluster, command: str, *options: str) -> str:
    """Submit one shell line -> the job's id, once it runs."""
    job = cluster.login("sbatch", "--parsable", "-o", "/dev/null", *options, "--wrap", command).stdout.strip()
    cluster.wait_for(job, "RUNNING")
    return str(job)


def test_what_a_test_leaves_behind_is_found_and_ended(cluster: Cluster) -> None:
    cluster.enter("node1", "sh", "-c", "sleep 88 >/dev/null 2>&1 &")
    job = queue(cluster, "sleep 99")
    assert cluster.settle(patience_seconds=10) == [f"job {job} RUNNING", "process 'sleep 88' on node1"]
    cluster.until(lambda: not cluster.processes(), "the end of what was killed")
    assert cluster.state(job) == "CANCELLED"


def test_without_accounting_sacct_has_nothing(cluster: Cluster) -> None:
    done = cluster.login("sacct", check=False)
    assert done.returncode != 0
    assert "accounting storage is disabled" in done.stderr


def test_with_accounting_sacct_knows_jobs_and_accounts_are_enforced(accounting_cluster: Cluster) -> None:
    cluster = accounting_cluster
    cluster.login("srun", "-N2", "true")
    cluster.until(
        lambda: "COMPLETED" in cluster.login("sacct", "-nXo", "state").stdout,
        "the job in sacct",
    )
    refused = cluster.login("sbatch", "--account=nobody", "--wrap", "true", check=False)
    assert refused.returncode != 0
    assert "Invalid account" in refused.stderr
