"""What one learner rank computes and sends: FLOPs of packed and padded rows, and the machine as it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcgrpo.models import on_gpu
from hpcgrpo.planner.workload import Rows
from hpcgrpo.sections import RunConfig

if TYPE_CHECKING:
    from hpcgrpo.planner.shapes import Shape


@dataclass(frozen=True)
class Padding:
    """A learner that pads every row to one width, in tokens, and rows to a micro-batch."""

    prompt: int
    completion: int
    rows: int
    recomputes_head: bool = False  # whether the logits are computed again in the backward pass


@dataclass(frozen=True)
class Work:
    """What one learner rank does in a phase."""

    flops: float = 0.0
    micro_batches: float = 0.0
    gathered_bytes: float = 0.0  # weights gathered from, and gradients scattered to, the other ranks
    updates: float = 0.0  # optimizer steps
    segments: float = (
        0.0  # prompts and completions x layers whose attention is called for, forward and backward
    )

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.micro_batches + other.micro_batches,
            self.gathered_bytes + other.gathered_bytes,
            self.updates + other.updates,
            self.segments + other.segments,
        )


@dataclass(frozen=True)
class Machine:
    """How a configuration uses the hardware."""

    gpu: bool
    ranks: int
    ranks_per_node: int
    learn_nodes: int
    devices: int  # reserved in all, by which GPU-hours count
    threads: int  # CPU cores of a rank; 1 on a GPU
    item_bytes: int  # of a weight as computed with
    checkpointing: bool


def machine_of(config: RunConfig, threads: int | None = None) -> Machine:
    """How `config` uses the machine: ranks, devices, and the types it computes in."""
    gpu, cluster, train = on_gpu(config), config.cluster, config.train
    devices = cluster.nodes * cluster.gpus_per_node if gpu else cluster.ranks
    bf16 = gpu if train.bf16 is None else train.bf16
    return Machine(
        gpu=gpu,
        ranks=cluster.ranks,
        ranks_per_node=cluster.ranks_per_node,
        learn_nodes=cluster.learn_nodes,
        devices=devices or cluster.ranks,
        threads=1 if gpu else threads or cluster.threads_per_rank or 1,
        item_bytes=2 if bf16 else 4,
        checkpointing=gpu if train.gradient_checkpointing is None else train.gradient_checkpointing,
    )


def linear_parameters(shape: Shape) -> float:
    """Weights of all layers' matrices; the head is apart."""
    return float(shape.layers * shape.linear_parameters)


def attention_flops(shape: Shape, pairs: float) -> float:
    """Scores and values of so many (query, key) pairs, over all layers."""
    return 4.0 * pairs * shape.query_width * shape.layers


def packed_flops(shape: Shape, rows: Rows, *, shared_prefix: bool) -> tuple[float, float]:
    """(layers, head) of a forward pass over rows without padding; a group's prompt once with `shared_prefix`."""
    prompt, completion, count = rows.prompt, rows.completion, rows.count
    prompts = rows.groups if shared_prefix else count
    tokens = prompts * prompt.mean + count * completion.mean
    pairs = prompts * prompt.mean_square / 2
    pairs += count * (prompt.mean * completion.mean + completion.mean_square / 2)
    layers = 2.0 * tokens * linear_parameters(shape) + attention_flops(shape, pairs)
    return layers, 2.0 * count * completion.mean * shape.embedding_parameters


def padded_flops(shape: Shape, rows: Rows, padding: Padding) -> tuple[float, float]:
    """(layers, head) of a forward pass over rows padded to one width; flash attention leaves the padding out."""
    tokens = rows.count * (padding.prompt + padding.completion)
    prompt, completion = rows.prompt, rows.completion
    pairs = prompt.mean_square / 2 + prompt.mean * completion.mean + completion.mean_square / 2
    layers = 2.0 * tokens * linear_parameters(shape) + attention_flops(shape, rows.count * pairs)
    return layers, 2.0 * rows.count * padding.completion * shape.embedding_parameters
