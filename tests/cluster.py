"""A real Slurm cluster for tests (slurm/devcluster.sh): submit to it, watch it, break it.

The fixtures `cluster` and `accounting_cluster` of conftest.py hand out a `Cluster`, one for the whole session; the
machine keeps nothing of it afterwards, however the session ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "slurm" / "devcluster.sh"
SLOW_REWARD = Path(__file__).parent / "programs" / "slow_reward.py"
REPORT: list[str] = []  # what tests measured, for the end of the session
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"}
REQUEUE_SECONDS = 60.0  # a final state may still be followed by a requeue for so long
DAEMONS = re.compile(r"^(bash \S*/node-init |\S*slurmd |\S*slurmd:|sleep 1$)")
LAST_LINES = 40  # of each log, shown when a test fails


@dataclass(frozen=True)
class Process:
    """A process on a node. `pid` is this machine's, so that `os.kill` reaches it."""

    pid: int
    node: str
    command: str


@dataclass
class Cluster:
    """A running development cluster. Every method that waits raises AssertionError when its time is over."""

    nodes: int
    accounting: bool = False
    id: int = 1
    runs: list[Path] = field(default_factory=list)  # folders of the runs that the present test submitted
    seen: set[str] = field(default_factory=set)  # ids of the jobs that it submitted

    # ----------------------------------------------------------------------------------------- commands

    @property
    def environment(self) -> dict[str, str]:
        """What a user's shell on the login node has."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SUBMITIT_", "PYTEST_"))}
        return {**own, **self.settings, "SLURM_CONF": f"{self.folder}/slurm.conf"}

    @property
    def settings(self) -> dict[str, str]:
        return {
            "DEVCLUSTER_ID": str(self.id),
            "DEVCLUSTER_DIR": str(self.folder),
            "DEVCLUSTER_ACCT": str(int(self.accounting)),
            "DEVCLUSTER_OWNER": str(os.getpid()),
        }

    @property
    def folder(self) -> Path:
        return Path(f"/tmp/devcluster{self.id}")

    def script(self, *arguments: str, timeout_seconds: float = 60, check: bool = True, **options: Any) -> Any:
        """Run devcluster.sh -> CompletedProcess."""
        return _run([str(SCRIPT), *arguments], self.environment, timeout_seconds, check, **options)

    def login(self, *command: str, timeout_seconds: float = 60, check: bool = True, **options: Any) -> Any:
        """Run a command as on the login node -> CompletedProcess; `options` are subprocess.run's (cwd, ...)."""
        return self.script("login", *command, timeout_seconds=timeout_seconds, check=check, **options)

    def enter(self, node: str, *command: str, timeout_seconds: float = 60, check: bool = True) -> Any:
        """Run a command on a node, past Slurm -> CompletedProcess."""
        return self.script("enter", node, *command, timeout_seconds=timeout_seconds, check=check)

    def hpcgrpo(
        self, *arguments: str, timeout_seconds: float = 120, check: bool = False, **options: Any
    ) -> Any:
        """The command line on the login node -> CompletedProcess."""
        command = (sys.executable, "-m", "hpcgrpo.cli", *arguments)
        return self.login(*command, timeout_seconds=timeout_seconds, check=check, **options)

    # ---------------------------------------------------------------------------------------------- jobs

    def submit(self, config: Path, *overrides: str, wait: bool = False, timeout_seconds: float = 240) -> str:
        """`hpcgrpo submit` -> the job's id; with `wait`, once it is COMPLETED."""
        done = self.hpcgrpo("submit", str(config), *overrides, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        answer = json.loads(done.stdout)
        job = str(answer["job_id"])
        self.track(job, Path(answer["folder"]))
        if wait:
            self.wait_for(job, "COMPLETED", timeout_seconds=timeout_seconds)
        return job

    def track(self, job: str, folder: Path | None = None) -> None:
        """Make a job known that was submitted in another way: it must be over at the test's end."""
        self.seen.add(job)
        if folder is not None:
            self.runs.append(folder)

    def job(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job` (JobState, Restarts, NodeList, ...); {} where it does not answer."""
        done = self.login("scontrol", "-o", "show", "job", job, check=False)
        return dict(re.findall(r"(\w[\w/:]*)=(\S*)", done.stdout)) if done.returncode == 0 else {}

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, ...; empty while slurmctld is down."""
        return self.job(job).get("JobState", "")

    def wait_for(
        self,
        job: str,
        wanted: str | Callable[[dict[str, str]], bool],
        *,
        timeout_seconds: float = 120,
    ) -> dict[str, str]:
        """Wait until a job has a state, or its fields satisfy a predicate -> the fields.

        Gives up early on a job that ended in another way.
        """
        reached = wanted if callable(wanted) else (lambda fields: fields.get("JobState") == wanted)
        deadline, over_since = time.monotonic() + timeout_seconds, None
        while True:
            fields = self.job(job)
            if fields and reached(fields):
                return fields
            now = time.monotonic()
            over_since = (over_since or now) if fields.get("JobState") in FINAL else None
            assert now < deadline and (over_since is None or now - over_since < REQUEUE_SECONDS), (
                f"job {job} did not reach {wanted}: {fields}\n{self.job_log(job)}"
            )
            time.sleep(0.3)

    def until(self, met: Callable[[], Any], what: str, *, timeout_seconds: float = 120) -> Any:
        """Wait until `met` returns something true -> that."""
        deadline = time.monotonic() + timeout_seconds
        while not (value := met()):
            assert time.monotonic() < deadline, f"not within {timeout_seconds} s: {what}"
            time.sleep(0.2)
        return value

    def cancel(self, job: str) -> None:
        self.login("scancel", job)

    def job_log(self, job: str) -> str:
        """What the job itself printed (its standard output), as far as it got."""
        path = Path(self.job(job).get("StdOut", ""))
        return path.read_text(errors="replace") if path.is_file() else ""

    # --------------------------------------------------------------------------------------------- faults

    def crash(self, node: str) -> None:
        """Cut a node's network and kill all that runs on it; `slurmctld` stops the controller."""
        self.script("crash", node)

    def boot(self, node: str) -> None:
        """Power a node on again, with nothing running."""
        self.script("boot", node)

    def address(self, node: str) -> str:
        """A node's address."""
        return f"10.213.{57 + self.id}.{10 + int(node.removeprefix('node'))}"

    def processes(self, pattern: str = "", *, node: str | None = None) -> list[Process]:
        """What runs on the nodes (on one of them) but Slurm's daemons, where the command line matches."""
        names = self._node_names()
        found = [p for p in _processes(names) if node in (None, p.node) and not DAEMONS.match(p.command)]
        return [p for p in found if re.search(pattern, p.command)]

    def kill(self, processes: Sequence[Process], number: int = signal.SIGKILL) -> None:
        """Send a signal to processes, which must all be there."""
        assert processes
        for process in processes:
            os.kill(process.pid, number)

    def _node_names(self) -> dict[str, str]:
        """PID namespace -> node, of the nodes that are on."""
        names = {}
        for i in range(self.nodes):
            if pid := _read(self.folder / "run" / f"node{i}.pid").split():
                outer = pid[0]
                children = _read(Path(f"/proc/{outer}/task/{outer}/children")).split()
                names.update({_link(f"/proc/{c}/ns/pid"): f"node{i}" for c in children})
        return names

    # --------------------------------------------------------------------------------------- per test

    def settle(self, patience_seconds: float = 30) -> list[str]:
        """Bring the cluster back to idle after a test -> what the test had left behind.

        Processes, Slurm's own step daemons too, have `patience_seconds` to go.
        """
        self.boot("slurmctld")
        queued = self.login("squeue", "-h", "-o", "%A %T").stdout.split("\n")
        left = [f"job {line}" for line in queued if line and "COMPLETING" not in line]
        if left:
            self.login("scancel", *(line.split()[1] for line in left))
        for i in range(self.nodes):
            self.boot(f"node{i}")
        self._wait_idle()
        deadline = time.monotonic() + patience_seconds
        while (stray := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        left += [f"process {p.command!r} on {p.node}" for p in stray]
        for process in stray:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.runs.clear()
        self.seen.clear()
        return left

    def _wait_idle(self) -> None:
        """Downed nodes are resumed; a node that stays up is idle once its last job has been cleared away."""
        deadline = time.monotonic() + 120
        while True:
            lines = self.login("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").stdout.split("\n")
            busy = [line for line in lines if line and not line.endswith(" idle")]
            if not busy:
                return
            assert time.monotonic() < deadline, f"the development cluster does not come to rest: {busy}"
            for line in busy:
                name, state = line.split()
                if state.startswith(("down", "drain")) and not state.endswith("*"):
                    self.login("scontrol", "update", f"nodename={name}", "state=resume", check=False)
            time.sleep(0.3)

    def tails(self) -> str:
        """The last lines of every log of the present test's runs, for a failure's report."""
        logs = [
            p
            for run in self.runs
            for p in sorted((run / "slurm").rglob("*"))
            if p.suffix in (".log", ".json")
        ]
        shown = [f"--- {p}\n" + "\n".join(_read(p).splitlines()[-LAST_LINES:]) for p in logs if p.is_file()]
        jobs = [f"--- job {job}: {self.job(job)}" for job in sorted(self.seen)]
        return "\n".join([*jobs, *shown])


def cannot_run(*, accounting: bool = False) -> str | None:
    """Why this machine cannot run the cluster; None where it can."""
    done = subprocess.run(
        [SCRIPT, "can"],
        env={**os.environ, "DEVCLUSTER_ACCT": str(int(accounting))},
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() if done.returncode else None


@contextmanager
def running(*, nodes: int, accounting: bool = False) -> Iterator[Cluster]:
    """A cluster of its own beside whatever else runs on this machine, for as long as the block lasts.

    It ends with this process too, even if that is killed.
    """
    number, lock = _free_id()
    cluster = Cluster(nodes=nodes, accounting=accounting, id=number)
    try:
        cluster.script("start", str(nodes), timeout_seconds=300)
        yield cluster
    finally:
        cluster.script("stop", check=False, timeout_seconds=120)
        os.close(lock)


def _free_id() -> tuple[int, int]:
    """A number that no other test session on this machine has, and the lock that keeps it so."""
    for number in range(1, 20):
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(f"/tmp/devcluster-test{number}.lock", flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return number, lock
    raise AssertionError("19 development clusters run on this machine already")


def _run(
    command: Sequence[str], environment: dict[str, str], timeout_seconds: float, check: bool, **options: Any
) -> subprocess.CompletedProcess[str]:
    shared = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    done = subprocess.run(command, env=environment, timeout=timeout_seconds, **shared, **options)
    said = f"{shlex.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
    assert not check or done.returncode == 0, said
    return done


def _processes(names: dict[str, str]) -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (node := names.get(_link(f"{entry}/ns/pid"))):
            command = _read(entry / "cmdline").replace("\0", " ").strip()
            if command:  # a zombie has none
                yield Process(int(entry.name), node, command)


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:  # it has ended
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------ configurations

CONFIG = """
name: {name}
model_name_or_path: {model}
output_dir: {folder}/logs
algorithm: {{name: grpo, num_generations: 4}}
rewards:
  accuracy: {{weight: 1.0, require_box_or_tag: false}}
  "{slow}:slowly": {{weight: 1.0, seconds: {seconds}{hold}}}
data: {{preset: chain, max_samples: 64, options: {{digits: 4}}}}
generation: {{backend: {backend}, max_prompt_length: 32, max_completion_length: 8, vllm_server_timeout: 180,
             vllm_request_timeout: 60, vllm_max_concurrency: 32, weight_sync_timeout: 60, vllm_dtype: float32}}
train: {{train_batch_size: 16, max_steps: {steps}, learning_rate: 1.0e-3, save_steps: {save_steps},
        save_total_limit: null}}
cluster: {{nodes: {nodes}, vllm_nodes: {vllm_nodes}, nproc_per_node: {nproc}, threads_per_rank: 1, timeout_min: 30,
          slurm_partition: main, cpus_per_task: 8, rendezvous_timeout: 150, idle_timeout_min: 8}}
device: cpu
grader_processes: 1
report_to: []
"""


def write_cluster_config(
    folder: Path,
    *,
    name: str = "run",
    nodes: int = 2,
    vllm_nodes: int = 0,
    nproc: int = 1,
    backend: str = "transformers",
    steps: int = 4,
    save_steps: int = 2,
    step_seconds: float = 0.0,
    hold: Path | None = None,
) -> Path:
    """A small run for the cluster -> its YAML. The model is made once per folder; a step lasts `step_seconds` longer.

    Every start does one step, and no more for as long as there is a file `hold`.
    Anything else is set by overrides. What is sampled and learnt depends on no argument but `steps`, and on
    `backend` and `nodes` by rounding only.
    """
    from runs import make_model  # which imports torch

    if not (folder / "model").exists():
        make_model(folder / "model")
    path = folder / f"{name}.yaml"
    values = {"nodes": nodes, "vllm_nodes": vllm_nodes, "nproc": nproc, "backend": backend, "steps": steps}
    text = CONFIG.format(
        name=name, model=folder / "model", folder=folder, slow=SLOW_REWARD, seconds=step_seconds,
        hold="" if hold is None else f", hold: {hold}, free: 1", save_steps=save_steps, **values,
    )  # fmt: skip
    path.write_text(text)
    return path
