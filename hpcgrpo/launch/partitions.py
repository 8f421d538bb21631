"""A cluster's partitions: what `scontrol` and `sinfo` say of them, and whether a job fits into one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from hpcgrpo.config import ConfigError
from hpcgrpo.launch.job import Job

Partition = Mapping[str, str]  # scontrol's own fields


def read(text: str) -> dict[str, Partition]:
    """The output of `scontrol show partition --oneliner` -> a partition's fields by its name."""
    rows = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines()]
    return {row["PartitionName"]: row for row in rows if row.get("PartitionName")}


def choose(asked: str | None, known: Mapping[str, Partition]) -> list[str]:
    """The partitions a job goes to: those it names, else the default one. Raises ConfigError for unknown ones."""
    listed = ", ".join(known)
    if asked is None:
        default = [name for name, fields in known.items() if fields.get("Default") == "YES"]
        if not default:
            raise ConfigError(
                f"cluster.slurm_partition: this cluster has no default one; name one of {listed}"
            )
        return default
    names = asked.split(",")
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"cluster.slurm_partition {name}: no such partition{hint}; there are {listed}")
    return names


def check(job: Job, partition: Partition) -> None:
    """Whether a partition has as many nodes as a job asks for, and grants its time. Raises ConfigError."""
    name = partition["PartitionName"]
    limits = [int(partition[k]) for k in ("TotalNodes", "MaxNodes") if partition.get(k, "").isdigit()]
    if limits and job.nodes > min(limits):
        raise ConfigError(
            f"cluster.nodes {job.nodes}: partition {name} grants a job {min(limits)} at most; ask for fewer, or set"
            " cluster.slurm_partition to a larger one"
        )
    longest, asked = minutes(partition.get("MaxTime", "")), job.options.get("time")
    if longest is not None and asked and int(asked) > longest:
        raise ConfigError(
            f"cluster.timeout_min {asked}: partition {name} grants {longest:g} minutes at most; ask for that, since"
            " a job that reaches its limit saves and queues itself again, or set cluster.slurm_partition to another"
        )


def check_gpus(job: Job, name: str, listed: str) -> None:
    """Whether enough nodes of a partition have a job's GPUs; `listed` holds lines of `node|gres`."""
    wanted = job.options.get("gpus-per-node") or job.options.get("gres")
    if not wanted:
        return
    kind, count = _request(str(wanted))
    if not count:
        return
    held = {node: _gpus(gres, kind) for node, _, gres in (line.partition("|") for line in listed.split())}
    fitting = sum(held_count >= count for held_count in held.values())
    key = "cluster.slurm_gres" if "gres" in job.options else "cluster.gpus_per_node"
    if held and fitting < job.nodes:
        what = f"{count} {kind or ''} GPUs".replace("  ", " ")
        most = max(held.values())
        raise ConfigError(
            f"{key} {wanted}: {job.nodes} nodes with {what} each are asked for, and partition {name} has {fitting}"
            f" (the most on one node is {most}); ask for less, or set cluster.slurm_partition to another"
        )


def _request(wanted: str) -> tuple[str | None, int]:
    """`8`, `gpu:8`, `gpu:a100:8` -> kind and count; (None, 0) for what is not about GPUs alone."""
    found = re.fullmatch(r"(?:gpu:(?:(?P<kind>[A-Za-z]\w*):)?)?(?P<count>\d+)", wanted)
    return (found["kind"], int(found["count"])) if found else (None, 0)


def _gpus(gres: str, kind: str | None) -> int:
    """`gpu:a100:8(S:0-1),nvme:1` -> 8."""
    held = re.findall(r"\bgpu(?::([A-Za-z][^:,()]*))?:(\d+)", gres)
    return sum(int(count) for have, count in held if kind is None or have == kind)


def minutes(limit: str) -> float | None:
    """Slurm's `days-hours:minutes:seconds` in minutes; None for no limit or what cannot be read."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", limit)
    if not found:
        return None
    days, hours, mins, seconds = (int(part or 0) for part in found.groups())
    return days * 1440 + hours * 60 + mins + seconds / 60
