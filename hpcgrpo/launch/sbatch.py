"""A job as the text of an sbatch script, for those who submit by hand and for sbatch's own check."""

from __future__ import annotations

import shlex

from hpcgrpo.launch.job import Job

CONFIG_END = "END_OF_CONFIGURATION"


def render(job: Job) -> str:
    """The script. Sent to the queue by hand, it makes the run's folder and configuration itself."""
    where = "" if job.directory else " Submit it from the folder that its paths start in."
    parts = [
        "#!/bin/bash",
        f"# {job.name}: written by `hpcgrpo render`.{where}",
        *directives(job),
        "",
        *_log(job),
        *([*job.setup, ""] if job.setup else []),
        *_prepare(job),
        shlex.join(["srun", *job.srun_args, *job.command]),
        "",
    ]
    return "\n".join(parts)


def directives(job: Job) -> list[str]:
    """The `#SBATCH` lines: what the job asks of Slurm."""
    return [f"#SBATCH --{name}" + ("" if v is True else f"={quote(v)}") for name, v in job.options.items()]


def quote(value: str | bool) -> str:
    """A value as sbatch reads it in a script: quoted where the shell would need it."""
    return shlex.quote(str(value))


def pattern(path: str) -> str:
    """A path with %j in its last part only, as Slurm's file name patterns want it: any other % doubled."""
    folder, _, name = path.rpartition("/")
    return f"{folder.replace('%', '%%')}/{name}"


def _log(job: Job) -> list[str]:
    """Slurm starts no job whose --output folder is missing, and says so nowhere: so the script opens it."""
    folder, _, name = job.log.rpartition("/")
    return [
        "umask 077",
        f"mkdir -p {shlex.quote(folder)} || exit",
        f"log={shlex.quote(folder)}/{name.replace('%j', '$SLURM_JOB_ID')}",
        'echo "all further output: $log"',
        'exec >>"$log" 2>&1',
        "",
    ]


def _prepare(job: Job) -> list[str]:
    command = shlex.join([job.python, "-u", "-m", "hpcgrpo.launch.prepare"])
    return [
        "# The run's configuration; refused where the folder holds another run.",
        "if [[ -z ${SLURM_RESTART_COUNT:-} ]]; then",
        f"{command} <<'{CONFIG_END}' || exit",
        job.config.rstrip("\n"),
        CONFIG_END,
        "fi",
        "",
    ]
