"""What fits a GPU of vLLM's: the weights, and how many sequences the blocks of its key-value cache hold."""

from __future__ import annotations

from dataclasses import dataclass

from hpcgrpo.arithmetic import arithmetic
from hpcgrpo.models import on_gpu
from hpcgrpo.planner.shapes import Shape
from hpcgrpo.sections import RunConfig

BLOCK_TOKENS = 16  # of a block of the cache
BATCHED_TOKENS = 8192  # of a step of vLLM's, for which it sets memory aside; its default, as is the next
SEQUENCES = 1024
GRAPH_BYTES = 1_000_000_000  # CUDA graphs and the like, taken out of its share; an assumption


@dataclass(frozen=True)
class Server:
    """One GPU of an engine, in bytes; the sequences are those of the whole engine."""

    weight_bytes: int
    workspace_bytes: int  # what a step computes with, and CUDA graphs
    cache_bytes: int  # of keys and values; 0 or less: the weights do not fit
    blocks: int
    cache_tokens: int
    longest_tokens: int  # the run's longest prompt and completion together
    longest_sequences: int  # so many of that length at once
    mean_tokens: int
    mean_sequences: int


def server(
    config: RunConfig, shape: Shape, gpu_memory_bytes: int, *, mean_tokens: int | None = None
) -> Server:
    """What one GPU of the actor's engines holds; `mean_tokens` of a prompt and completion (None: half the longest).

    Without the weights' own split it is an even one over the tensor-parallel GPUs. Raises ValueError as
    `arithmetic` does.
    """
    generation, item = config.generation, item_bytes(config)
    split = generation.vllm_tensor_parallel_size
    weights = item * shape.parameters // split
    wide = item * BATCHED_TOKENS * (4 * shape.hidden + 3 * max(shape.intermediate, shape.hidden) // split)
    workspace = wide + SEQUENCES * shape.vocabulary * (4 + item) // split + GRAPH_BYTES * on_gpu(config)
    room = int(gpu_memory_bytes * generation.vllm_gpu_memory_utilization) - weights - workspace
    cache = generation.vllm_kv_cache_memory_bytes or room
    each = 2 * shape.layers * max(1, shape.kv_heads // split) * shape.head_dim * item
    blocks = max(0, cache) // (each * BLOCK_TOKENS)
    longest = arithmetic(config, config.build_algorithm(), rows=None).max_model_length
    mean = mean_tokens or -(-longest // 2)
    return Server(
        weight_bytes=weights,
        workspace_bytes=workspace,
        cache_bytes=cache,
        blocks=blocks,
        cache_tokens=blocks * BLOCK_TOKENS,
        longest_tokens=longest,
        longest_sequences=blocks // _blocks(longest),
        mean_tokens=mean,
        mean_sequences=blocks // _blocks(mean),
    )


def refusal(config: RunConfig, shape: Shape, gpu_memory_bytes: int) -> str | None:
    """Why an engine's GPU cannot serve the run, with ways out that do; None where it can."""
    if config.generation.backend != "vllm" or not on_gpu(config):
        return None
    found = server(config, shape, gpu_memory_bytes)
    if found.longest_sequences:
        return None
    gpu, share = gpu_memory_bytes / 1e9, config.generation.vllm_gpu_memory_utilization
    if found.cache_bytes <= 0:
        why = (
            f"the weights ({found.weight_bytes / 1e9:.1f} GB) and the memory of a step"
            f" ({found.workspace_bytes / 1e9:.1f} GB) leave nothing"
        )
    else:
        why = (
            f"the key-value cache holds {found.cache_tokens} tokens, but the longest prompt and completion are"
            f" {found.longest_tokens}"
        )
    ways = _ways_out(config, shape, gpu_memory_bytes)
    return f"vLLM's GPU of {gpu:.1f} GB, of which it may use {share:.0%}: {why}. What fits: {'; '.join(ways)}"


def _ways_out(config: RunConfig, shape: Shape, gpu_memory_bytes: int) -> list[str]:
    found = []
    for key, values in _candidates(config, shape).items():
        for value in values:
            changed = config.generation.model_copy(update={key: value})
            trial = config.model_copy(update={"generation": changed})
            if server(trial, shape, gpu_memory_bytes).longest_sequences:
                found.append(f"generation.{key}={value}")
                break
    gpus = config.cluster.gpus_per_node
    for split in (n for n in (2, 4, 8) if n > max(gpus, config.generation.vllm_tensor_parallel_size)):
        changed = config.generation.model_copy(update={"vllm_tensor_parallel_size": split})
        trial = config.model_copy(update={"generation": changed})
        if _divides(shape, split) and server(trial, shape, gpu_memory_bytes).longest_sequences:
            found.append(f"nodes of {split} GPUs with generation.vllm_tensor_parallel_size={split}")
            break
    for times in (2, 3, 4, 6, 8):
        if server(config, shape, gpu_memory_bytes * times).longest_sequences:
            found.append(f"GPUs of {gpu_memory_bytes * times / 1e9:.0f} GB")
            break
    return [*found[:4], "a smaller model"]


def _candidates(config: RunConfig, shape: Shape) -> dict[str, list[float | int]]:
    """Values to try of each key, the gentlest first."""
    generation, gpus = config.generation, config.cluster.gpus_per_node
    split, share, length = (
        generation.vllm_tensor_parallel_size,
        generation.vllm_gpu_memory_utilization,
        generation.max_completion_length,
    )
    splits = [n for n in range(split + 1, gpus + 1) if gpus % n == 0 and _divides(shape, n)]
    return {
        "vllm_tensor_parallel_size": [*splits],
        "vllm_gpu_memory_utilization": [x for x in (0.85, 0.9, 0.95) if x > share],
        "max_completion_length": [length * n // 8 for n in (6, 4, 2, 1) if length * n // 8],
    }


def _divides(shape: Shape, split: int) -> bool:
    """Whether so many GPUs can share the heads."""
    return shape.heads % split == 0 and (shape.kv_heads % split == 0 or split % shape.kv_heads == 0)


def item_bytes(config: RunConfig) -> int:
    """Of a weight, a key or a value as vLLM holds it."""
    wanted = config.generation.vllm_dtype
    return 4 if wanted == "float32" or (wanted == "auto" and not on_gpu(config)) else 2


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
