"""What a run asks of Slurm, as one value: made without asking anything, rendered by `sbatch` or handed to submitit."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpcgrpo.config import ConfigError
from hpcgrpo.sections import ClusterConfig, RunConfig

SIGNAL = "USR2"  # the one submitit sends, so that both ways of starting are warned alike
SIGNAL_SECONDS = 120  # before the time limit; a tenth of a limit of minutes

# Options that the job itself decides, and the key to use instead (None: nothing to choose).
OWN_OPTIONS: dict[str, str | None] = {
    "job-name": "name",
    "nodes": "cluster.nodes",
    "time": "cluster.timeout_min",
    "partition": "cluster.slurm_partition",
    "account": "cluster.slurm_account",
    "qos": "cluster.slurm_qos",
    "constraint": "cluster.slurm_constraint",
    "gres": "cluster.slurm_gres",
    "gpus-per-node": "cluster.gpus_per_node",
    "exclude": "cluster.slurm_exclude",
    "nodelist": "cluster.slurm_nodelist",
    "dependency": "cluster.slurm_dependency",
    "comment": "cluster.slurm_comment",
    "cpus-per-task": "cluster.cpus_per_task",
    "mem": "cluster.mem_gb",
    "exclusive": "cluster.slurm_exclusive",
    "array": None,
    "chdir": None,
    "error": None,
    "hold": None,
    "no-requeue": None,
    "ntasks": None,
    "ntasks-per-node": None,
    "open-mode": None,
    "output": None,
    "requeue": None,
    "signal": None,
    "test-only": None,
    "wait": None,
    "wrap": None,
}


@dataclass(frozen=True)
class Job:
    """A run's Slurm job. Every node runs one task, `command`."""

    name: str
    nodes: int
    options: Mapping[str, str | bool]  # sbatch's long options -> value, True for a flag; resources and policy
    folder: str  # the run's, as the job sees it
    command: tuple[str, ...]
    srun_args: tuple[str, ...]
    setup: tuple[str, ...]  # shell lines before the command
    config: str  # the run's configuration, as YAML without defaults
    directory: str | None = None  # where the job runs; None: where sbatch is called
    python: str = "python"

    @property
    def log(self) -> str:
        """Where all of the job's output goes; %j stands for the job's id, any other % for itself."""
        return f"{self.folder}/slurm/job-%j.log"


def job_for(config: RunConfig, *, directory: Path | None = None, python: str | None = None) -> Job:
    """The job of a run. With `directory` its paths are absolute; without, they hold where sbatch is called.

    `python` is this interpreter unless said. Raises ConfigError for an option or a folder that cannot be.
    """
    made = of_cluster(
        config.cluster,
        name=config.name,
        folder=str(directory / config.folder if directory else config.folder),
        directory=directory,
        python=python,
    )
    command = (made.python, "-u", "-m", "hpcgrpo.cli", "node", made.folder)
    return replace(made, command=command, config=_minimal(config))


def of_cluster(
    cluster: ClusterConfig,
    *,
    name: str,
    folder: str,
    directory: Path | None = None,
    python: str | None = None,
) -> Job:
    """A job without a command yet: what a cluster's keys ask of Slurm. Arguments and errors as `job_for` has them."""
    _check_folder(folder)
    where: dict[str, str | bool] = {"chdir": str(directory)} if directory else {}
    return Job(
        name=name,
        nodes=cluster.nodes,
        options={**_resources(cluster, name), **_policy(cluster), **where, **_additional(cluster)},
        folder=folder,
        command=(),
        srun_args=_srun_args(cluster),
        setup=cluster.slurm_setup,
        config="",
        directory=str(directory) if directory else None,
        python=python or _python(portable=directory is None),
    )


def _resources(cluster: ClusterConfig, name: str) -> dict[str, str | bool]:
    asked: dict[str, str | bool | None] = {
        "job-name": name,
        "nodes": str(cluster.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cluster.cpus_per_task or ""),
        "mem": _memory(cluster),
        "exclusive": cluster.slurm_exclusive,
        "time": str(cluster.timeout_min or ""),
    }
    if cluster.slurm_gres:
        asked["gres"] = cluster.slurm_gres
    elif cluster.gpus_per_node:
        asked["gpus-per-node"] = str(cluster.gpus_per_node)
    return {option: value for option, value in asked.items() if value}


def _memory(cluster: ClusterConfig) -> str | None:
    if cluster.mem_gb is None:
        return "0" if cluster.slurm_exclusive else None  # 0: all of the node's
    whole = cluster.mem_gb == int(cluster.mem_gb)
    return f"{int(cluster.mem_gb)}G" if whole else f"{round(cluster.mem_gb * 1024)}M"


def _policy(cluster: ClusterConfig) -> dict[str, str | bool]:
    asked = {
        "partition": cluster.slurm_partition,
        "account": cluster.slurm_account,
        "qos": cluster.slurm_qos,
        "constraint": cluster.slurm_constraint,
        "exclude": cluster.slurm_exclude,
        "nodelist": cluster.slurm_nodelist,
        "dependency": cluster.slurm_dependency,
        "comment": cluster.slurm_comment,
    }
    seconds = min(SIGNAL_SECONDS, 6 * (cluster.timeout_min or SIGNAL_SECONDS))
    given: dict[str, str | bool] = {option: value for option, value in asked.items() if value}
    return {**given, "requeue": True, "open-mode": "append", "signal": f"{SIGNAL}@{seconds}"}


def _additional(cluster: ClusterConfig) -> dict[str, str | bool]:
    """The user's further options by their long names, none of which may speak for what the job decides."""
    extra: dict[str, str | bool] = {}
    for key, value in cluster.slurm_additional_parameters.items():
        option = key.strip().lstrip("-").replace("_", "-")
        at = f"cluster.slurm_additional_parameters: {key}"
        if option in OWN_OPTIONS:
            own = OWN_OPTIONS[option]
            raise ConfigError(f"{at}: use {own}" if own else f"{at}: is set by the job itself; leave it out")
        if value is False or value is None or isinstance(value, dict | list) or len(option) < 2:
            raise ConfigError(
                f"{at}: {value!r}: give sbatch's option by its long name, with a text or number, or true for a flag"
            )
        extra[option] = value if value is True else str(value)
    return extra


def _srun_args(cluster: ClusterConfig) -> tuple[str, ...]:
    """One end ends all; a node's one task may use all its processors; srun does not read sbatch's count of them."""
    counted = (f"--cpus-per-task={cluster.cpus_per_task}",) if cluster.cpus_per_task else ()
    return ("--kill-on-bad-exit=1", "--cpu-bind=none", *counted, *cluster.slurm_srun_args)


def _check_folder(folder: str) -> None:
    """Slurm and submitit put a job's number where %j stands, and Slurm reads a backslash as an escape."""
    bad = [mark for mark in ("%j", "%t", "%A", "%a", "\\") if mark in folder]
    bad += [repr(c) for c in folder if not c.isprintable()]
    if bad:
        raise ConfigError(
            f"output_dir: the run's folder {folder} has {', '.join(bad)} in its path, which Slurm would read as"
            " something else; set output_dir to a folder without"
        )


def _python(*, portable: bool) -> str:
    """This interpreter; for a script that is to be passed on, by its path from here where it lies below."""
    here = Path(sys.executable)
    if (plain := here.with_name("python")).exists():  # rather than python3: one name, whoever renders
        here = plain
    below = portable and here.is_relative_to(Path.cwd())
    return str(here.relative_to(Path.cwd())) if below else str(here)


def _minimal(config: RunConfig) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(config.model_dump(mode="json", exclude_defaults=True))


def imports(code: Path, directory: Path) -> tuple[str, ...]:
    """Shell lines after which a job imports `code` before all else, and only then what lies in `directory`.

    PYTHONSAFEPATH: `python -m` would look into the working folder first, and find the edited files there.
    """
    first, last = shlex.quote(str(code)), shlex.quote(str(directory))
    return (
        "export PYTHONSAFEPATH=1",
        f"export HPCGRPO_CODE={first}",
        f"export PYTHONPATH={first}${{PYTHONPATH:+:$PYTHONPATH}}:{last}",
    )
