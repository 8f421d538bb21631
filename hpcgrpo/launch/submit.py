"""Queue a run through submitit: with Slurm, as processes of this machine, or in this process."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import submitit

from hpcgrpo import checks
from hpcgrpo.config import ConfigError, to_yaml
from hpcgrpo.journal import claim, write_atomically
from hpcgrpo.launch import local, node, queue, sbatch, snapshot
from hpcgrpo.launch.follow import Submitted, follow, say
from hpcgrpo.launch.job import Job, imports, job_for
from hpcgrpo.sections import RunConfig

JOB_FILE = "job.json"  # in the run's slurm folder: the job that was submitted last
NO_LIMIT_MINUTES = 525_600.0  # submitit's local executor takes no run without one; a year

logging.getLogger("submitit").setLevel(logging.ERROR)


def submit(run: RunConfig, *, executor: str, wait: bool, fresh: bool, as_json: bool) -> int:
    """Check a run, then hand it over to `slurm`, `local` or `debug` -> exit code; the run's own with `wait`.

    Raises ConfigError for what the user can mend, and then nothing is queued and no earlier run is touched.
    """
    job = job_for(run, directory=Path.cwd())
    if executor == "debug":
        return _here(run, fresh)
    if executor == "slurm":
        queue.require()
    checks.inputs(run)
    live = find_live(run.folder)
    if live is not None:
        return _join(run, live, wait=wait, fresh=fresh, as_json=as_json)
    _check(run)
    if executor == "slurm":
        queue.check(job)
        queue.test_only(job, sbatch.render(job))
    if not local.prepare(run, fresh=fresh):
        if as_json:
            print(json.dumps({"job_id": None, "folder": job.folder, "log": None}))  # finished already
        return 0
    try:
        submitted = _hand_over(run, job, executor)
    except OSError as error:
        raise ConfigError(
            f"output_dir {run.output_dir}: {job.folder} cannot be written ({error}); set output_dir to a folder of"
            " yours, on a disk with space"
        ) from None
    _tell(run, submitted, as_json)
    return follow(submitted, out=sys.stderr if as_json else sys.stdout) if wait else 0


def _check(run: RunConfig) -> None:
    """What `hpcgrpo check` looks at, prompts and rewards too; tells what could not be looked at."""
    for text in checks.check(run)["not_checked"]:
        print(f"not checked: {text}", file=sys.stderr)


# ---- handing over


def record_job(
    folder: Path, job_id: str, logs: Sequence[Path], *, executor: str = "slurm", code: str = ""
) -> Any:
    """Note a run's job, so that no second one is queued beside it -> what was noted."""
    record = {
        "job_id": job_id,
        "executor": executor,
        "host": socket.gethostname(),
        "logs": [str(path.absolute()) for path in logs],
        "code": code,
    }
    write_atomically(folder / "slurm" / JOB_FILE, json.dumps(record, indent=1) + "\n")
    return record


def _hand_over(run: RunConfig, job: Job, executor: str) -> Submitted:
    slurm_folder = Path(job.folder) / "slurm"
    with claim(slurm_folder):  # two submissions at once: the second one is refused
        if find_live(run.folder) is not None:
            raise ConfigError(
                f"{run.folder}: another submission of this run was faster; its job is in the queue"
            )
        code = snapshot.take(run.rewards, slurm_folder)
        if executor == "slurm":
            job_id, logs = _to_slurm(replace(job, setup=(*job.setup, *imports(code, Path.cwd()))))
        else:
            job_id, logs = _to_local(run, job, code)
        record = record_job(Path(job.folder), job_id, logs, executor=executor, code=code.name)
        snapshot.prune(slurm_folder, keep=code)
    return _submitted(Path(job.folder), record)


def _to_slurm(job: Job) -> tuple[str, list[Path]]:
    with _variables(queue.environment(job.options)):
        executor = submitit.SlurmExecutor(folder=_submitit_folder(job), python=started(job))
        executor.update_parameters(**parameters(job))
        try:
            submitted = executor.submit(node.task, job.folder)
        except submitit.core.utils.FailedJobError as error:
            _sweep(Path(job.folder))
            raise queue.refusal(_words(error), job) from None
    return submitted.job_id, [Path(job.log.replace("%j", submitted.job_id))]


def started(job: Job) -> str:
    """What starts python on every node. submitit's own srun is --unbuffered, which gives a task a terminal."""
    return shlex.join(["srun", *job.srun_args, job.python])


def parameters(job: Job) -> dict[str, Any]:
    """A job as the parameters of submitit's Slurm executor: it asks sbatch for what the rendered script asks for."""
    defaults = {
        "nodes": job.nodes,
        "job_name": None,
        "time": None,
        "wckey": None,
    }  # not submitit's, which differ
    return {
        **defaults,
        "use_srun": False,
        "stderr_to_stdout": True,
        "setup": ["umask 077", *job.setup],
        "additional_parameters": {**job.options, "output": sbatch.pattern(job.log)},
    }


def _to_local(run: RunConfig, job: Job, code: Path) -> tuple[str, list[Path]]:
    """Every node a process here. Signals of the terminal are not theirs: they outlive this one."""
    path = os.pathsep.join([str(code), *filter(None, [os.environ.get("PYTHONPATH")]), str(Path.cwd())])
    variables = {**os.environ, "PYTHONSAFEPATH": "1", "HPCGRPO_CODE": str(code), "PYTHONPATH": path}
    cluster = run.cluster
    executor = submitit.LocalExecutor(folder=_submitit_folder(job))
    executor.update_parameters(
        tasks_per_node=job.nodes,
        timeout_min=float(cluster.timeout_min or NO_LIMIT_MINUTES),
        stderr_to_stdout=True,
        **_visible_gpus(cluster.gpus_per_node * job.nodes),
    )
    with _variables(variables), _ignored(signal.SIGINT, signal.SIGHUP):
        submitted = executor.submit(node.task, job.folder)
    pid = submitted.job_id
    logs = [submitit.core.utils.JobPaths(executor.folder, pid, task).stdout for task in range(job.nodes)]
    return f"local{pid}", logs


def _visible_gpus(needed: int) -> dict[str, Any]:
    """All nodes' GPUs together: each node takes its share of them."""
    visible = [int(x) for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x.isdigit()]
    if needed and visible and len(visible) < needed:
        raise ConfigError(
            f"cluster.gpus_per_node: {needed} GPUs over all nodes are needed here, and CUDA_VISIBLE_DEVICES shows"
            f" {len(visible)}; lower cluster.gpus_per_node or cluster.nodes"
        )
    return {"gpus_per_node": needed} | ({"visible_gpus": visible} if needed and visible else {})


def _here(run: RunConfig, fresh: bool) -> int:
    if run.cluster.nodes != 1:
        raise ConfigError(
            f"cluster.nodes {run.cluster.nodes}: --executor debug runs one node, in this process; set cluster.nodes=1"
            " cluster.vllm_nodes=0 generation.backend=transformers, or take --executor local"
        )
    live = find_live(run.folder)
    if live is not None:
        _join(run, live, wait=False, fresh=fresh, as_json=False)
    if not local.preflight(run, fresh=fresh):
        return 0
    executor = submitit.DebugExecutor(folder=run.folder.absolute() / "slurm" / "submitit" / "%j")
    return int(executor.submit(node.main, str(run.folder.absolute())).results()[0])


def _submitit_folder(job: Job) -> Path:
    return Path(job.folder) / "slurm" / "submitit" / "%j"


def _sweep(folder: Path) -> None:
    """What submitit leaves of a submission that sbatch refused."""
    for path in (folder / "slurm" / "submitit").glob("*"):
        if path.name.startswith(".submission_file_") or path.suffix == ".pkl":
            path.unlink()


def _words(error: Exception) -> str:
    """sbatch's own lines in submitit's error, which also holds the command and a traceback."""
    lines = [line for line in str(error).splitlines() if "sbatch:" in line]
    return "\n".join(line[line.index("sbatch:") :] for line in lines) or str(error)


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _ignored(*signals: signal.Signals) -> Iterator[None]:
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


# ---- the job of a run that is there already


def find_live(folder: Path) -> Submitted | None:
    """The run's job where it is still queued or running. Raises ConfigError where nobody can tell."""
    submitted = last(folder)
    if submitted is None:
        return None
    try:
        return submitted if submitted.state() is not None else None
    except queue.Unreachable as error:
        raise queue.Unreachable(
            f"{folder}: whether its job {submitted.job_id} is still live cannot be told: {error}"
        ) from None


def last(folder: Path) -> Submitted | None:
    """The job that was submitted last for a run, live or not."""
    path = folder / "slurm" / JOB_FILE
    try:
        return _submitted(folder.absolute(), json.loads(path.read_text(encoding="utf-8")))
    except OSError:
        return None
    except ValueError:
        raise ConfigError(
            f"{path}: damaged; see with `squeue --me` that no job of this run is live, then delete it"
        ) from None


def _submitted(folder: Path, record: Mapping[str, Any]) -> Submitted:
    job_id = str(record["job_id"])
    number = job_id.removeprefix("local")
    on_slurm = record["executor"] == "slurm"
    here = record["host"] == socket.gethostname()
    return Submitted(
        job_id=job_id,
        folder=folder,
        logs=tuple(Path(path) for path in record["logs"]),
        cancel=f"scancel {job_id}"
        if on_slurm
        else f"kill {number}" + ("" if here else f" on {record['host']}"),
        state=lambda: queue.state(job_id) if on_slurm else _process_state(number) if here else None,
        reason=lambda: queue.reason(job_id) if on_slurm else "",
        final_state=lambda: queue.final_state(job_id) if on_slurm else "nothing",
    )


def _process_state(pid: str) -> str | None:
    """RUNNING while submitit's process is there; a process that only waits to be collected is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    return "RUNNING" if state not in "ZX" and b"submitit" in command else None


def is_same(run: RunConfig) -> bool:
    """Whether the run that lies in its folder has this configuration, so that a live one can be followed."""
    written = run.folder / local.CONFIG_FILE
    return written.exists() and written.read_text(encoding="utf-8") == to_yaml(run)


def _join(run: RunConfig, live: Submitted, *, wait: bool, fresh: bool, as_json: bool) -> int:
    """A run that is live is followed where that is what was asked for, and never submitted twice."""
    if wait and is_same(run) and not fresh:
        say(f"{run.name} is live as job {live.job_id}; following it")
        if as_json:
            _tell(run, live, as_json)
        return follow(live, out=sys.stderr if as_json else sys.stdout)
    raise ConfigError(
        f"{run.folder}: the run is live as job {live.job_id} ({live.state()}). End it with `{live.cancel}`, follow it"
        f" with --wait and the same configuration, or give this run a name of its own (name=...)"
    )


# ---- what the user sees


def _tell(run: RunConfig, submitted: Submitted, as_json: bool) -> None:
    log = str(submitted.logs[0])
    if as_json:
        print(json.dumps(in_words(submitted)), flush=True)
        return
    nodes = f"{run.cluster.nodes} node" + ("s" if run.cluster.nodes > 1 else "")
    print(f"job {submitted.job_id}: {run.name} on {nodes}")
    for what, value in (("folder", submitted.folder), ("log", log), ("to end it", submitted.cancel)):
        print(f"  {what:<10} {value}", flush=True)


def in_words(submitted: Submitted) -> dict[str, str]:
    """A job as `--json` tells it."""
    return {
        "job_id": submitted.job_id,
        "folder": str(submitted.folder),
        "log": str(submitted.logs[0]),
    }


def dry_run(run: RunConfig, *, as_json: bool) -> int:
    """Try a submission out and print what came of it: see `tried`."""
    said = tried(run)
    if as_json:
        print(json.dumps(said))
        return 0
    for what, value in said.items():
        print(f"{'to submit' if what == 'command' else what:<10} {value}")
    return 0


def tried(run: RunConfig) -> dict[str, str]:
    """Check a run, write its script and configuration to slurm/dry-run in its folder, and let sbatch check the script.

    -> script, config, what sbatch says, and the command that submits. An existing run is left as it is. Raises
    ConfigError for what the user can mend.
    """
    _check(run)
    job = job_for(run, directory=Path.cwd())
    folder = Path(job.folder) / "slurm" / "dry-run"
    script, written = folder / f"{run.name}.sbatch", folder / local.CONFIG_FILE
    try:
        Path(job.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(script, sbatch.render(job))
        write_atomically(written, to_yaml(run))
    except OSError as error:
        raise ConfigError(f"output_dir {run.output_dir}: {folder} cannot be written ({error})") from None
    command = shlex.join(["sbatch", str(script)])
    return {"script": str(script), "config": str(written), "sbatch": _checked(job), "command": command}


def _checked(job: Job) -> str:
    try:
        queue.require()
    except ConfigError as error:
        return f"not asked: {error}"
    try:
        queue.check(job)
        return queue.test_only(job, sbatch.render(job))
    except queue.Unreachable as error:  # the script stands all the same
        return f"not asked: {error}"
