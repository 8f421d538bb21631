"""The machine a run is planned for: what one device computes, reads and sends in a second."""

from __future__ import annotations

import difflib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from hpcgrpo.config_file import ConfigError
from hpcgrpo.sections import RunConfig

BENCHMARK_SECONDS = 0.05  # of CPU time, each of the two measurements
LISTS = ("matches", "device_names", "sources")  # keys that may be left out
GPU_KEYS = ("slurm_gres", "slurm_constraint", "slurm_partition")  # of `cluster`, that may name one
DEFAULT_GPU = "a100-80gb"  # where a configuration names none: the papers' machine


@dataclass(frozen=True)
class Hardware:
    """One device (a GPU, or a core of a CPU) and its links; nominal rates, efficiencies are in `speed`."""

    name: str
    title: str
    device: str  # cuda | cpu
    memory_bytes: float  # of one device; of a CPU the machine's
    bf16_flops_per_second: (
        float  # dense matrix products in the type trained in; on a CPU float32, of one core
    )
    memory_bytes_per_second: float
    link_bytes_per_second: float  # of one device to the others of its machine, one direction
    network_bytes_per_second: float  # of one device's share to other machines, one direction
    storage_bytes_per_second: float  # one writer on the file system that holds the checkpoints
    matches: tuple[str, ...] = ()  # how Slurm's gres and constraints write it
    device_names: tuple[str, ...] = ()  # how the driver writes it: torch.cuda.get_device_name
    sources: tuple[str, ...] = ()


def find(name_or_path: str) -> Hardware:
    """A known device by its name, `cpu` (measured here), or a YAML file of one.

    Raises ConfigError for an unknown name, with the nearest, and for a file that is none.
    """
    if name_or_path == "cpu":
        return measured_cpu()
    known = table()
    for hardware in known.values():
        if name_or_path.lower() in (hardware.name, *hardware.matches):
            return hardware
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return _read(path.read_text(encoding="utf-8"), str(path))
    near = difflib.get_close_matches(name_or_path.lower(), [*known, "cpu"], n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise ConfigError(
        f"--hardware {name_or_path}: neither a known device ({', '.join([*known, 'cpu'])}) nor a file{hint} A file has"
        " the keys of configs/hardware/example.yaml"
    )


def of(config: RunConfig) -> tuple[Hardware, str]:
    """The device that a configuration names, and why: by Slurm's keys, else the papers' A100; or the CPU."""
    cluster = config.cluster
    if config.device == "cpu" or not (cluster.gpus_per_node or cluster.slurm_gres or config.device == "cuda"):
        return measured_cpu(), "no GPUs asked for; measured on this machine"
    for key in GPU_KEYS:
        said = str(getattr(cluster, key) or "").lower()
        for hardware in table().values():
            if any(match in said for match in hardware.matches):
                return hardware, f"by cluster.{key}={getattr(cluster, key)}"
    return table()[DEFAULT_GPU], "assumed; name another with --hardware"


def by_device_name(name: str) -> Hardware | None:
    """The device that the driver calls `name`; None for one whose rates are not known here.

    Nothing but the whole name counts: the PCIe form of a GPU has other rates.
    """
    known = table().values()
    return next((h for h in known if name.lower() in (n.lower() for n in h.device_names)), None)


def named(config: RunConfig) -> tuple[Hardware, str] | None:
    """The GPU that a word of Slurm's keys names, and the key with its value; None where none does without a doubt.

    Stricter than `of`: h100_nvl is not an h100.
    """
    for key in GPU_KEYS:
        said = str(getattr(config.cluster, key) or "")
        words = {re.sub(r"^nvidia[_-]", "", word) for word in re.split(r"[^a-z0-9_-]+", said.lower())}
        for hardware in table().values():
            if words & {hardware.name, *hardware.matches}:
                return hardware, f"cluster.{key} {said}"
    return None


def table() -> dict[str, Hardware]:
    """The devices that come with the package, by name."""
    folder = resources.files("hpcgrpo") / "data" / "hardware"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    found = [_read(file.read_text(encoding="utf-8"), file.name) for file in files]
    return {hardware.name: hardware for hardware in found}


def measured_cpu() -> Hardware:
    """This machine, as a benchmark of two tenths of a second finds it; rates are of one core and its CPU-seconds."""
    import numpy

    stack = numpy.ones((64, 64, 64), dtype=numpy.float32)  # small products: numpy keeps them to one thread
    block = numpy.ones(2**22, dtype=numpy.float32)
    into = numpy.empty_like(block)
    products = numpy.empty_like(stack)
    flops = _rate(lambda: numpy.matmul(stack, stack, out=products), 2.0 * 64**4)
    copied = _rate(lambda: numpy.copyto(into, block), 2.0 * block.nbytes)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(
        name="cpu",
        title=f"this machine's CPU ({len(os.sched_getaffinity(0))} cores), measured",
        device="cpu",
        memory_bytes=float(memory),
        bf16_flops_per_second=flops,
        memory_bytes_per_second=copied,
        link_bytes_per_second=copied / 4,  # through shared memory: written and read on both sides
        network_bytes_per_second=1.25e8,  # 1 Gb/s; between the nodes of a CPU cluster
        storage_bytes_per_second=2e8,
        sources=("measured with numpy",),
    )


def replaced(hardware: Hardware, values: Mapping[str, Any]) -> Hardware:
    """The same device with some of its numbers taken from elsewhere, such as a calibration's own measurement."""
    return replace(hardware, **{k: v for k, v in values.items() if k in asdict(hardware)})


def _rate(work: Any, amount: float) -> float:
    """`amount` of one call over its CPU-seconds, the best of three."""
    work()
    best = 0.0
    for _ in range(3):
        calls, began = 0, time.process_time()
        while (spent := time.process_time() - began) < BENCHMARK_SECONDS / 3 or not calls:
            work()
            calls += 1
        best = max(best, amount * calls / max(spent, 1e-9))
    return best


def _read(text: str, source: str) -> Hardware:
    from yaml import YAMLError, safe_load

    try:
        values = safe_load(text)
    except YAMLError as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: holds no mapping of keys to values; see configs/hardware/example.yaml")
    values = {"title": values.get("name"), "device": "cuda", **values}
    names = {field.name for field in fields(Hardware)}
    missing, unknown = names - set(values) - set(LISTS), set(values) - names
    if missing or unknown:
        what = [f"{key} is missing" for key in sorted(missing)]
        what += [f"{key} is no key{_near(key, names)}" for key in sorted(map(str, unknown))]
        raise ConfigError(f"{source}: {'; '.join(what)}; see configs/hardware/example.yaml")
    for key in sorted(names):
        if key.endswith(("_bytes", "_second")):
            values[key] = _positive(values[key], f"{source}: {key}")
    lists = {key: tuple(map(str, values.get(key) or ())) for key in LISTS}
    texts = {key: str(values[key]) for key in ("name", "title", "device")}
    return Hardware(**{**values, **texts, **lists})


def _positive(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"{where} is {value!r}, but it must be a number above 0, such as 85.0e9")
    return number


def _near(key: str, names: set[str]) -> str:
    near = difflib.get_close_matches(key, sorted(names), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
