"""Runs that cannot fit their GPUs, learner or server: the part that is too large, and ways out that were tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from hpcgrpo.arithmetic import arithmetic
from hpcgrpo.config_file import ConfigError
from hpcgrpo.models import on_gpu
from hpcgrpo.planner import hardware, memory, serving_memory, shapes
from hpcgrpo.planner.shapes import Shape
from hpcgrpo.pretrained import Pretrained
from hpcgrpo.sections import RunConfig

GPU_SIZES_GB = (24, 40, 48, 80, 96, 141, 192, 288)
WAYS_OUT = 3
LENGTHS = ("max_completion_length", "max_prompt_length")
DOUBT = 0.05  # of a GPU's memory: what exceeds it by less may fit after all


@dataclass(frozen=True)
class Verdict:
    """What can be said of a run's memory before it starts."""

    needed_bytes: int | None = None  # of a learner GPU; None: it uses no GPUs, or its model is not known
    gpu: str | None = None  # the device that Slurm's keys name
    gpu_memory_bytes: int | None = None
    warning: str = ""  # it hardly fits
    not_checked: str = ""  # why no more is said


def verdict(config: RunConfig, model: Pretrained, peer: Pretrained | None) -> Verdict:
    """Whether learner and server fit the GPUs that the configuration names.

    Raises ConfigError for a run that cannot fit, naming the part that is too large and ways out.
    """
    if not on_gpu(config):
        return Verdict()
    try:
        shape = shapes.at_hand(model)
        other = shapes.at_hand(peer) if peer is not None else None
        needed = memory.learner(config, shape, peer=other).needed_bytes
    except ValueError as error:
        return Verdict(not_checked=f"cluster.gpus_per_node: whether the run fits these GPUs: {error}")
    named = hardware.named(config)
    if named is None:
        return Verdict(
            needed,
            not_checked="cluster.gpus_per_node: whether the run fits these GPUs: by hpcgrpo plan a learner's needs"
            f" {needed / 1e9:.1f} GB, but which GPUs they are is not said; name them in cluster.slurm_gres (such as"
            " gpu:a100:8) or cluster.slurm_constraint",
        )
    gpu, by = named
    room = int(gpu.memory_bytes)
    said = refusal(config, shape, room, peer=other) or ""
    if said and refusal(config, shape, int(room * (1 + DOUBT)), peer=other):
        raise ConfigError(f"{by}: {said}")
    return Verdict(needed, gpu.name, room, warning=said and f"{by}: it may not fit: {said}")


def refusal(
    config: RunConfig, shape: Shape, gpu_memory_bytes: int, *, peer: Shape | None = None
) -> str | None:
    """Why the run cannot fit GPUs of that much memory, with three ways out that do; None where it fits or where no
    more than the model's parameters is known.

    Raises ValueError as `arithmetic` does.
    """
    if shape.kind != "dense" or (peer is not None and peer.kind != "dense"):
        return None
    found = memory.learner(config, shape, peer=peer)
    if found.needed_bytes > gpu_memory_bytes:
        return _too_large(config, shape, gpu_memory_bytes, peer, found)
    return serving_memory.refusal(config, shape, gpu_memory_bytes)


def _too_large(
    config: RunConfig, shape: Shape, gpu_memory_bytes: int, peer: Shape | None, found: memory.Parts
) -> str:
    part = max(found.parts, key=found.parts.__getitem__)
    return (
        f"the learner needs {found.needed_bytes / 1e9:.1f} GB a GPU ({found.peak_gb:.1f} allocated, in the"
        f" {found.phase}), but it has {gpu_memory_bytes / 1e9:.1f}, so it is"
        f" {(found.needed_bytes - gpu_memory_bytes) / 1e9:.1f} GB too large; the largest part is the {part},"
        f" {found.parts[part] / 1e9:.1f} GB. {_what_fits(config, shape, gpu_memory_bytes, peer, found, part)}"
    )


def _what_fits(
    config: RunConfig,
    shape: Shape,
    gpu_memory_bytes: int,
    peer: Shape | None,
    found: memory.Parts,
    largest: str,
) -> str:
    """A smaller model is a way out only where `largest` grows with its parameters: activations do not."""
    chosen: dict[str, str] = {}  # the gentlest value of each key
    for text, changed in ways_out(config):
        if memory.learner(changed, shape, peer=peer).needed_bytes <= gpu_memory_bytes:
            chosen.setdefault(text.partition("=")[0], text)
    ways = [*chosen.values()]
    if enough := [size for size in GPU_SIZES_GB if size * 10**9 >= found.needed_bytes]:
        ways.append(f"GPUs of {enough[0]} GB")
    if largest in memory.STATIC:
        ways += _smaller(config, shape, gpu_memory_bytes, peer)
    if len(ways) < WAYS_OUT:
        ways = [*islice(_together(config, shape, gpu_memory_bytes, peer), WAYS_OUT - len(ways)), *ways]
    if not ways:
        return "Nothing that was tried fits; the prompts and completions are too long for any model of this width"
    return f"What fits: {'; '.join(ways)}"


def _smaller(config: RunConfig, shape: Shape, gpu_memory_bytes: int, peer: Shape | None) -> Iterator[str]:
    """The largest model of this width that fits."""
    for layers in range(shape.layers - 1, 0, -1):
        size = layers * shape.layer_parameters + shape.root_parameters
        trial = replace(shape, layers=layers, parameters=size)
        if memory.learner(config, trial, peer=peer).needed_bytes <= gpu_memory_bytes:
            yield f"a model of at most {size / 1e9:.1f} G parameters"
            return


def ways_out(config: RunConfig) -> list[tuple[str, RunConfig]]:
    """Changes that lower a learner's peak, each alone, the gentlest value of each first: as the command line has it."""
    cluster = config.cluster
    found: list[tuple[str, RunConfig]] = []
    if not memory.machine_of(config).checkpointing:
        found.append(_changed(config, "train", "gradient_checkpointing", True))
    longest = arithmetic(config, config.build_algorithm(), rows=None).max_model_length
    budget = memory.token_budget(config)
    sizes = {max(longest, budget * share // 8) for share in (6, 4, 3, 2, 1)} - {budget}
    found += [
        _changed(config, "train", "max_tokens_per_device", size) for size in sorted(sizes, reverse=True)
    ]
    found += [
        _changed(config, "cluster", "nodes", cluster.vllm_nodes + cluster.learn_nodes * times)
        for times in (2, 3, 4, 6, 8, 12, 16)
    ]
    for key in LENGTHS:
        length = getattr(config.generation, key)
        found += [
            _changed(config, "generation", key, length * share // 16)
            for share in (12, 8, 4, 2, 1)
            if length >= 16
        ]
    return [each for each in found if _valid(each[1])]


def _changed(config: RunConfig, section: str, key: str, value: object) -> tuple[str, RunConfig]:
    part = getattr(config, section).model_copy(update={key: value})
    shown = str(value).lower() if isinstance(value, bool) else value
    return f"{section}.{key}={shown}", config.model_copy(update={section: part})


def _valid(config: RunConfig) -> bool:
    try:
        arithmetic(config, config.build_algorithm(), rows=None)
    except ValueError:
        return False
    return True


def _together(config: RunConfig, shape: Shape, gpu_memory_bytes: int, peer: Shape | None) -> Iterator[str]:
    """Where little alone is enough: for shorter and shorter sequences, the least nodes that take them one at a time."""
    for share in (16, 12, 8, 6, 4, 3, 2, 1):
        thrifty, said = config, []
        for key in LENGTHS if share < 16 else ():
            length = max(1, getattr(config.generation, key) * share // 16)
            text, thrifty = _changed(thrifty, "generation", key, length)
            said.append(text)
        text, thrifty = _changed(thrifty, "train", "gradient_checkpointing", True)
        if not _valid(thrifty):
            continue
        longest = arithmetic(thrifty, thrifty.build_algorithm(), rows=None).max_model_length
        more, thrifty = _changed(thrifty, "train", "max_tokens_per_device", longest)
        for times in (1, 2, 4, 8, 16, 32, 64, 128):
            nodes = config.cluster.vllm_nodes + config.cluster.learn_nodes * times
            wider, trial = _changed(thrifty, "cluster", "nodes", nodes)
            if _valid(trial) and memory.learner(trial, shape, peer=peer).needed_bytes <= gpu_memory_bytes:
                yield " ".join((*said, text, more, wider))
                break
