"""The queue as a login node sees it: is a job live, does the cluster have what a job asks for, why sbatch refuses."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from hpcgrpo.config import ConfigError
from hpcgrpo.launch import partitions
from hpcgrpo.launch.children import OURS
from hpcgrpo.launch.job import OWN_OPTIONS, Job

ASK_SECONDS = 60.0
SILENT = re.compile(
    r"(?i)unable to contact|connection|socket timed out|zero bytes|configuration source|timed out"
)
GONE = re.compile(r"(?i)invalid job id")

OVER = (
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE"),
    *("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED"),
)

# sbatch reads these from its environment, and they beat what stands in a script.
VARIABLES = {
    "time": "SBATCH_TIMELIMIT",
    "mem": "SBATCH_MEM_PER_NODE",
    "array": "SBATCH_ARRAY_INX",
    "kill-on-invalid-dep": "SBATCH_KILL_INVALID_DEP",
}

# What sbatch says -> the keys to look at (none: those of all the resources that the job asks for), and the way out.
REFUSALS: tuple[tuple[str, str, str], ...] = (
    (r"invalid partition", "cluster.slurm_partition", "`sinfo -s` lists the partitions"),
    (r"no partition specified|default partition", "cluster.slurm_partition", "name one; `sinfo -s` lists them"),
    (r"not permitted to use this partition", "cluster.slurm_partition", "ask who runs the cluster for access"),
    (r"account/partition combination", "cluster.slurm_account, slurm_partition", "`sacctmgr show assoc` lists yours"),
    (r"invalid qos", "cluster.slurm_qos", "`sacctmgr show assoc format=account,qos` lists yours"),
    (r"node count specification", "cluster.nodes", "ask for fewer; `sinfo -s` counts them"),
    (r"time limit is invalid", "cluster.timeout_min", "ask for less; `sinfo` shows each partition's limit"),
    (r"invalid feature", "cluster.slurm_constraint", "`sinfo -o '%N %f'` lists the features"),
    (r"invalid node name", "cluster.slurm_nodelist, slurm_exclude", "`sinfo -N` lists the nodes"),
    (r"generic resource", "cluster.gpus_per_node, slurm_gres", "`sinfo -o '%P %N %G'` lists the GPUs"),
    (r"memory specification", "cluster.mem_gb", "ask for less; `sinfo -o '%P %N %m'` lists the memory"),
    (r"cpu count|more processors", "cluster.cpus_per_task", "ask for fewer; `sinfo -o '%P %N %c'` lists them"),
    (r"dependency", "cluster.slurm_dependency", "give e.g. afterok:JOB with a job of the queue"),
    (r"violates accounting|qos policy|assoc\w*limit|qos\w*limit", "",
     "the account's or qos's limits are lower"),
    (r"invalid (wckey|license|reservation)|reservation", "cluster.slurm_additional_parameters", "mend that option"),
    (r"unrecognized option|invalid option|invalid .*specification|ambiguous", "cluster.slurm_additional_parameters",
     "`sbatch --help` lists the options"),
    (r"node configuration is not available|partition configuration", "",
     "no set of nodes has all of it at once; `sinfo -o '%P %D %c %m %G %f'` lists what there is"),
)  # fmt: skip


class Unreachable(ConfigError):
    """Slurm does not answer: nothing can be said about jobs or the cluster."""


@dataclass(frozen=True)
class Answer:
    """What one of Slurm's commands said."""

    code: int
    out: str
    error: str


def require() -> None:
    """Raises ConfigError where Slurm's commands are not installed."""
    missing = [name for name in ("sbatch", "squeue", "srun") if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"there is no Slurm on this machine ({', '.join(missing)} not found on the PATH): submit from a login node"
            " of the cluster, or run on this machine with --executor local or with `hpcgrpo train`"
        )


def environment(options: Mapping[str, object]) -> dict[str, str]:
    """This process's variables without an allocation's own, and without those that would beat a job of `options`."""
    ours = [name for name, key in OWN_OPTIONS.items() if key is None]  # whether this job sets them or not
    beaten = {VARIABLES.get(name, "SBATCH_" + name.upper().replace("-", "_")) for name in (*options, *ours)}
    return {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or not (name.startswith(("SLURM_", "SLURMD_", "SRUN_")) or name in beaten)
    }


def ask(*command: str, text: str | None = None, options: Mapping[str, object] | None = None) -> Answer:
    """Run one of Slurm's commands. Raises Unreachable where the controller does not answer.

    The command is deaf to the signals that Slurm sends to every process of a job: half an sbatch may have queued one.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OURS)
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            env=environment(options or {}),
        )
    except FileNotFoundError:
        raise Unreachable(f"{command[0]} is not on this machine's PATH") from None
    except subprocess.TimeoutExpired:
        raise Unreachable(
            f"{command[0]}: no answer within {ASK_SECONDS:.0f} s; try again when Slurm is up"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if done.returncode and SILENT.search(done.stderr):
        said = done.stderr.strip().splitlines()[-1]
        raise Unreachable(
            f"{command[0]} does not reach Slurm's controller ({said}); try again when it is"
            " up (`scontrol ping`), or set SLURM_CONF where it stands elsewhere"
        )
    return Answer(done.returncode, done.stdout, done.stderr)


def state(job_id: str) -> str | None:
    """The state of a job in the queue, such as PENDING or RUNNING; None once it has left it. Needs no accounting."""
    answer = ask("squeue", "--noheader", "--jobs", job_id, "--states=all", "--format=%T")
    if answer.code:
        if GONE.search(answer.error):
            return None
        raise Unreachable(f"squeue: {' '.join(answer.error.split())}")
    found = answer.out.split()
    return found[0] if found and found[0] not in OVER else None


def reason(job_id: str) -> str:
    """Why a job waits, or on which nodes it runs: Slurm's own words, or nothing."""
    said = " ".join(ask("squeue", "--noheader", "--jobs", job_id, "--format=%R").out.split())
    return said.replace("(None)", "").strip()


@dataclass(frozen=True)
class End:
    """How a job ended; the state of one that is still in the queue is not one of OVER."""

    state: str
    code: int = 0
    signal: int = 0
    reason: str = ""  # Slurm's word, such as NonZeroExitCode or DependencyNeverSatisfied


def end(job_id: str) -> End | None:
    """As scontrol says while it remembers, else sacct; None where neither knows the job."""
    sacct = ("sacct", "-X", "--noheader", "--parsable2", "--jobs", job_id, "--format", "State,ExitCode")
    asked = (
        (
            r"\bJobState=(?P<state>\w+) Reason=(?P<reason>\S*).*?\bExitCode=(?P<code>\d+):(?P<signal>\d+)",
            ("scontrol", "show", "job", "--oneliner", job_id),
        ),
        (r"^(?P<state>\w+)[^|\n]*\|(?P<code>\d+):(?P<signal>\d+)(?P<reason>)", sacct),
    )
    for pattern, command in asked:
        with suppress(Unreachable):
            answer = ask(*command)
            if answer.code == 0 and (found := re.search(pattern, answer.out)):
                return End(found["state"], int(found["code"]), int(found["signal"]), found["reason"])
    return None


def final_state(job_id: str) -> str:
    """The state in which a job left the queue, or UNKNOWN."""
    found = end(job_id)
    return found.state if found else "UNKNOWN"


def check(job: Job) -> None:
    """Whether the partition, the nodes, their GPUs and the time exist, as far as Slurm lets itself be asked.

    Raises ConfigError with the key to change.
    """
    shown = ask("scontrol", "show", "partition", "--oneliner")
    known = partitions.read(shown.out) if shown.code == 0 else {}
    if not known:
        return
    asked = job.options.get("partition") or os.environ.get("SBATCH_PARTITION")
    names = partitions.choose(str(asked) if asked else None, known)
    if len(names) != 1:
        return  # one of several will do: sbatch itself tells
    partitions.check(job, known[names[0]])
    listed = ask("sinfo", "--noheader", "--Node", "--partition", names[0], "--format=%N|%G")
    if listed.code == 0:
        partitions.check_gpus(job, names[0], listed.out)


def test_only(job: Job, script: str) -> str:
    """sbatch's own check of a script -> what it says about the start. Raises ConfigError where it refuses."""
    answer = ask("sbatch", "--test-only", text=script, options=job.options)
    said = (answer.error + answer.out).strip()
    if answer.code and not re.search(r"(?i)required node not available|nodes.*busy|resources busy", said):
        raise refusal(said, job)
    return " ".join(said.split()).removeprefix("sbatch: ")


def refusal(said: str, job: Job) -> ConfigError:
    """sbatch's words with the keys to change and their values."""
    quiet = re.compile(r"^(sbatch: )?(error: )?(Batch job submission failed: |allocation failure: )?")
    if SILENT.search(said):
        return Unreachable(f"sbatch does not reach Slurm's controller ({said.splitlines()[-1]}); try again")
    words = "; ".join(dict.fromkeys(quiet.sub("", line) for line in said.splitlines() if line.strip()))
    asked = ", ".join(_asked_resources(job))
    for text, keys, way_out in REFUSALS:
        if re.search(text, said, re.IGNORECASE):
            return ConfigError(f"{keys or asked}: Slurm refuses the job ({words}): {way_out}. {_asked(job)}")
    return ConfigError(f"{asked}: Slurm refuses the job ({words}). {_asked(job)}")


def _asked(job: Job) -> str:
    quiet = {"job-name", "requeue", "open-mode", "signal", "chdir", "ntasks-per-node", "output"}
    options = [(name, value) for name, value in job.options.items() if name not in quiet]
    shown = " ".join(f"--{name}" + ("" if value is True else f"={value}") for name, value in options)
    return f"The job asks for {shown}"


def _asked_resources(job: Job) -> list[str]:
    """The keys of what the job asks for, but its name."""
    return [key for name in job.options if name != "job-name" and (key := OWN_OPTIONS.get(name))]
