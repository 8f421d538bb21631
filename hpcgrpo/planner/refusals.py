"""Runs that cannot fit their GPUs, learner or server: the part that is too large, and ways out that were tried."""

from __future__ import annotations

from dataclasses import replace

from hpcgrpo.arithmetic import arithmetic
from hpcgrpo.planner import memory, serving_memory
from hpcgrpo.planner.shapes import Shape
from hpcgrpo.sections import RunConfig

GPU_SIZES_GB = (24, 40, 48, 80, 96, 141, 192, 288)


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
    ways = [
        text
        for text, changed in ways_out(config)
        if memory.learner(changed, shape, peer=peer).needed_bytes <= gpu_memory_bytes
    ]
    chosen: dict[str, str] = {}  # the gentlest value of each key
    for text in ways:
        chosen.setdefault(text.partition("=")[0], text)
    if not ways:
        chosen["together"] = _together(config, shape, gpu_memory_bytes, peer)
    if enough := [size for size in GPU_SIZES_GB if size * 10**9 >= found.needed_bytes]:
        chosen["gpus"] = f"GPUs of {enough[0]} GB"
    chosen["model"] = _smaller(config, shape, gpu_memory_bytes, peer)
    return (
        f"the learner needs {found.needed_bytes / 1e9:.1f} GB a GPU ({found.peak_gb:.1f} allocated, in the"
        f" {found.phase}), but it has {gpu_memory_bytes / 1e9:.1f}; the largest part is the {part},"
        f" {found.parts[part] / 1e9:.1f} GB. What fits: {'; '.join(v for v in chosen.values() if v)}"
    )


def _smaller(config: RunConfig, shape: Shape, gpu_memory_bytes: int, peer: Shape | None) -> str:
    """The largest model of this width that fits."""
    for layers in range(shape.layers - 1, 0, -1):
        size = layers * shape.layer_parameters + shape.root_parameters
        trial = replace(shape, layers=layers, parameters=size)
        if memory.learner(config, trial, peer=peer).needed_bytes <= gpu_memory_bytes:
            return f"a model of at most {size / 1e9:.1f} G parameters"
    return "a smaller model"


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
    length = config.generation.max_completion_length
    found += [
        _changed(config, "generation", "max_completion_length", length * share // 4) for share in (3, 2, 1)
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


def _together(config: RunConfig, shape: Shape, gpu_memory_bytes: int, peer: Shape | None) -> str:
    """Where nothing alone is enough: the least nodes with checkpointing and the smallest micro-batches."""
    _, thrifty = _changed(config, "train", "gradient_checkpointing", True)
    longest = arithmetic(config, config.build_algorithm(), rows=None).max_model_length
    _, thrifty = _changed(thrifty, "train", "max_tokens_per_device", longest)
    for times in (1, 2, 4, 8, 16, 32):
        nodes = config.cluster.vllm_nodes + config.cluster.learn_nodes * times
        text, more = _changed(thrifty, "cluster", "nodes", nodes)
        if _valid(more) and memory.learner(more, shape, peer=peer).needed_bytes <= gpu_memory_bytes:
            return f"train.gradient_checkpointing=true train.max_tokens_per_device={longest} {text}"
    return ""
