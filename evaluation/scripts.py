"""The jobs of an evaluation as scripts: an array with an element for each task, and the small ones around it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evaluation.task import Task
from hpcgrpo.config_file import ConfigError
from hpcgrpo.launch import sbatch
from hpcgrpo.launch.job import Job, of_cluster
from hpcgrpo.sections import ClusterConfig

STOPPED = 75  # exit code of a task or a watch that was told to stop, and is to be started again
LARGEST = 1000  # elements of one array: Slurm's own limit where nobody has raised it
MERGE = "merge"
MERGE_MINUTES = 30
MERGE_GB = 8.0


@dataclass(frozen=True)
class Commands:
    """What the jobs run, after the interpreter; a file or folder follows."""

    task: tuple[str, ...] = ("-u", "-m", "hpcgrpo.cli", "eval-task")  # TASK.json
    merge: tuple[str, ...] = ("-u", "-m", "hpcgrpo.cli", "eval-merge")  # FOLDER
    watch: tuple[str, ...] = ("-u", "-m", "hpcgrpo.cli", "eval-watch")  # FILE


COMMANDS = Commands()


@dataclass(frozen=True)
class Script:
    """A job, and what its script does."""

    job: Job
    folder: Path  # logs go there, exit codes to `slurm` in it
    log: str  # in `folder`, without its suffix; of an array the tasks' names take its place
    names: tuple[str, ...] = ()  # of an array's tasks
    requeues: int = 0


def arranged(
    tasks: Sequence[Task],
    *,
    cluster: ClusterConfig,
    after: str | None,
    name: str,
    folder: Path,
    merge_cluster: ClusterConfig | None = None,
    commands: Commands = COMMANDS,
) -> tuple[list[Script], Script]:
    """The arrays (one, unless the tasks are too many for it) and the merge, which waits for nothing yet.

    Raises ConfigError for a cluster that asks for several nodes and for tasks that are named alike.
    """
    _check_tasks(tasks, cluster, after)
    logs = folder / "jobs"
    job = of_cluster(cluster, name=name, folder=str(folder), directory=Path.cwd())
    waits = ",".join(filter(None, [f"afterok:{after}" if after else None, cluster.slurm_dependency]))
    options = {**job.options, **({"dependency": waits, "kill-on-invalid-dep": "yes"} if waits else {})}
    array = replace(job, options=options, command=(job.python, *commands.task))
    arrays = []
    for i in range(0, len(tasks), LARGEST):
        names = tuple(task.name for task in tasks[i : i + LARGEST])
        told = {"array": f"0-{len(names) - 1}", "output": sbatch.pattern(f"{logs}/slurm/array-%A_%a.out")}
        part = replace(array, options={**array.options, **told})
        arrays.append(Script(part, logs, "", names, cluster.max_requeues))
    return arrays, single(merge_cluster or small(cluster), name=f"{name}-merge", logs=logs, log=MERGE,
                           command=(*commands.merge, str(folder)))  # fmt: skip


def single(
    cluster: ClusterConfig, *, name: str, logs: Path, log: str, command: Sequence[str], requeues: int = 0
) -> Script:
    """A job that is no array; `command` follows the interpreter."""
    job = of_cluster(cluster, name=name, folder=str(logs.parent), directory=Path.cwd())
    output = sbatch.pattern(f"{logs}/slurm/{log}-%j.out")
    job = replace(job, options={**job.options, "output": output}, command=(job.python, *command))
    return Script(job, logs, log, (), requeues)


def small(cluster: ClusterConfig) -> ClusterConfig:
    """The same partition, account and set-up for a job that needs a processor alone."""
    graphics = ("gpu", "gres", "tres", "mem-per", "mem_per", "ntasks", "cpus-per", "cpus_per")
    further = {
        key: value
        for key, value in cluster.slurm_additional_parameters.items()
        if not any(word in key for word in graphics)
    }
    return cluster.model_copy(
        update={
            "gpus_per_node": 0,
            "slurm_gres": None,
            "slurm_exclusive": False,
            "slurm_dependency": None,
            "cpus_per_task": 1,
            "mem_gb": min(cluster.mem_gb or MERGE_GB, MERGE_GB),
            "timeout_min": min(cluster.timeout_min or MERGE_MINUTES, MERGE_MINUTES),
            "slurm_additional_parameters": further,
        }
    )


def _check_tasks(tasks: Sequence[Task], cluster: ClusterConfig, after: str | None) -> None:
    assert tasks, "an evaluation has at least one task"
    if cluster.nodes != 1:
        raise ConfigError(
            f"cluster.nodes {cluster.nodes}: an element of an evaluation runs on one node; set cluster.nodes=1, and"
            " share a large benchmark over several elements with shards.NAME=N"
        )
    names = [task.name for task in tasks]
    twice = sorted({name for name in names if names.count(name) > 1 or name == MERGE})
    if twice:
        raise ConfigError(
            f"benchmarks: {twice[0]} is there twice or is a name of our own; give it another one"
        )
    check_after(after)


def check_after(after: str | None) -> None:
    """Raises ConfigError for a training that Slurm knows nothing of."""
    if after is not None and not after.replace("_", "", 1).isdigit():
        raise ConfigError(
            f"the training's job {after} is none of Slurm's, so that no job of Slurm can wait for it; evaluate when it"
            " has ended, or on this machine (--executor local)"
        )


def render(script: Script) -> str:
    """The text for sbatch. Every start of a task appends to its log; one that was stopped is queued again."""
    job, folder = script.job, shlex.quote(str(script.folder))
    if script.names:
        head = ["names=(", *(f"  {shlex.quote(name)}" for name in script.names), ")"]
        head += ["name=${names[$SLURM_ARRAY_TASK_ID]}", "job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"]
        command = f'{shlex.join(["srun", *job.srun_args, *job.command])} "$jobs/$name.json"'
    else:
        head = [f"name={shlex.quote(script.log)}", "job=$SLURM_JOB_ID"]
        command = shlex.join(["srun", *job.srun_args, *job.command])
    lines = [
        "#!/bin/bash",
        f"# {job.name}: written by `hpcgrpo eval`.",
        *sbatch.directives(job),
        "",
        "umask 077",
        f"jobs={folder}",
        *head,
        'mkdir -p "$jobs/slurm" || exit',
        'echo "all further output: $jobs/$name.log"',
        'exec >>"$jobs/$name.log" 2>&1',
        'rm -f "$jobs/$name.reason" "$jobs/slurm/$name.code"',
        "",
        *job.setup,
        command,
        "code=$?",
        *(_again(script.requeues) if script.requeues else []),
        'echo "$code" >"$jobs/slurm/$name.code"',
        'exit "$code"',
        "",
    ]
    return "\n".join(lines)


def _again(requeues: int) -> list[str]:
    """Back into the queue after a stop, unless Slurm sees to that itself or the job was cancelled."""
    return [
        f"if ((code == {STOPPED} && ${{SLURM_RESTART_COUNT:-0}} < {requeues})); then",
        "  for try in {1..24}; do",
        '    state=$(scontrol show job --oneliner "$job") || { sleep 5; continue; }',
        "    [[ $state == *JobState=RUNNING* ]] || break",
        '    scontrol requeue "$job" && sleep 120 # by then Slurm has ended this script',
        "    sleep 5",
        "  done",
        "fi",
    ]
