"""How far devices are used: what the learner computes and decoding reads, over what the devices could.

Counted are the real rows: nothing padded, attention over what each token attends to, a prefix that completions share
once, as the kernel computes it. A multiplication with its addition is two operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpcgrpo import models
from hpcgrpo.config_file import ConfigError
from hpcgrpo.generation.decoded import Decoded
from hpcgrpo.learning.passes import Computed, Passes
from hpcgrpo.planner import hardware, prediction, serving_memory
from hpcgrpo.planner.hardware import Hardware
from hpcgrpo.planner.shapes import Shape
from hpcgrpo.planner.work import attention_flops, linear_parameters
from hpcgrpo.profiler import LEARNING, Profile
from hpcgrpo.sections import RunConfig

if TYPE_CHECKING:
    import torch

    from hpcgrpo.trainer import Trainer

ACTOR, PEER = "actor", "peer"
CHANGES_BYTES = (
    "kv-cache-dtype",
    "quantization",
)  # vLLM's options after which the bytes read are not known here


def forward_flops(shape: Shape, passes: Passes) -> tuple[float, float, float]:
    """Of a forward pass: the layers' matrices, attention, and the output layer for the tokens with log-probs."""
    linear = 2.0 * passes.tokens * linear_parameters(shape)
    return linear, attention_flops(shape, passes.pairs), 2.0 * passes.targets * shape.embedding_parameters


def model_flops(shape: Shape, computed: Computed) -> float:
    """What the mathematics asks for, whatever is computed twice: a backward pass is two forward ones."""
    return sum(forward_flops(shape, computed.forward)) + 3 * sum(forward_flops(shape, computed.trained))


def hardware_flops(shape: Shape, computed: Computed, *, checkpointing: bool) -> float:
    """`model_flops` and what a backward pass computes again: the attention's scores, the logits, and with
    `checkpointing` the layers but for each one's last matrix, whose product nothing needs."""
    linear, attention, head = forward_flops(shape, computed.trained)
    again = attention / 2 + head
    if checkpointing:
        last = 2.0 * computed.trained.tokens * shape.layers * shape.hidden * shape.intermediate
        again += linear - last + attention
    return model_flops(shape, computed) + again


@dataclass(frozen=True)
class Share:
    """What one rank did in a step."""

    computed: Mapping[str, Computed] = field(default_factory=dict)  # by policy
    decoded: Mapping[str, Mapping[str, Decoded]] = field(default_factory=dict)  # by policy and engine
    learn_seconds: float = 0.0
    decode_seconds: float = 0.0


def share(trainer: Trainer, profile: Profile) -> Share:
    """What this rank did since it was last asked; the seconds are those of the step at hand."""
    policies: dict[str, tuple[Any, Any]] = {ACTOR: (trainer.learner, trainer.explorer.generator)}
    if trainer.peer is not None:
        policies[PEER] = (trainer.peer.learner, trainer.peer.generator)
    phases = profile.step.phases
    return Share(
        computed={name: learner.take_computed() for name, (learner, _) in policies.items()},
        decoded={name: sampler.take_decoded() for name, (_, sampler) in policies.items() if sampler},
        learn_seconds=sum(phases.get(name, 0.0) for name in LEARNING),
        decode_seconds=phases.get("generate", 0.0),
    )


@dataclass(frozen=True)
class Meter:
    """What turns counts into operations, bytes and shares of a device's rates."""

    shapes: Mapping[str, Shape]  # by policy; empty where only a model's size is known
    hardware: Hardware | None  # of every device; None where its rates are not known
    checkpointing: bool
    bf16: bool  # whether the learner computes in the type that the hardware's rate is of
    learners: int  # devices
    samplers: int
    item_bytes: int | None  # of a weight, a key and a value as they are decoded with; None: not known

    def sums(self, shares: Sequence[Share]) -> dict[str, float]:
        """All ranks' shares of a step as numbers that can be added over steps; the slowest rank's seconds."""
        found = {
            "learn_seconds": max(s.learn_seconds for s in shares),
            "decode_seconds": max(s.decode_seconds for s in shares),
        }
        if not self.shapes:
            return found
        ours = [(self.shapes[name], c) for s in shares for name, c in s.computed.items()]
        found["model_flops"] = sum(model_flops(shape, c) for shape, c in ours)
        found["hardware_flops"] = sum(
            hardware_flops(shape, c, checkpointing=self.checkpointing) for shape, c in ours
        )
        if self.item_bytes is not None:
            found["decoded_bytes"] = sum(
                decoded_bytes(self.shapes[name], each, self.item_bytes)
                for name, servers in servers_of(shares).items()
                for each in servers.values()
            )
        return found

    def rates(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Per second and device, and as shares of its peak rates where these are known, of `sums` of some steps."""
        found: dict[str, float] = {}
        learned, decoded = (sums.get(f"{what}_seconds", 0.0) for what in ("learn", "decode"))
        peak = self.hardware if self.bf16 else None
        if learned and sums.get("model_flops"):
            each = {k: sums[f"{k}_flops"] / (learned * self.learners) for k in ("model", "hardware")}
            found["learner_flops_per_second"] = each["model"]
            if peak is not None:
                found["mfu"] = each["model"] / peak.bf16_flops_per_second
                found["hfu"] = each["hardware"] / peak.bf16_flops_per_second
        if decoded and sums.get("decoded_bytes"):
            read = sums["decoded_bytes"] / (decoded * self.samplers)
            found["decode_bytes_per_second"] = read
            if self.hardware is not None:
                found["mbu"] = read / self.hardware.memory_bytes_per_second
        return found


def decoded_bytes(shape: Shape, decoded: Decoded, item_bytes: int) -> float:
    """What decoding reads: all weights at each step, but for an embedding table of which a step reads rows alone, and
    the keys and values."""
    weights = shape.parameters - (0 if shape.tied else shape.embedding_parameters)
    return float(decoded.steps * weights * item_bytes + decoded.pairs * shape.kv_bytes_per_token(item_bytes))


def servers_of(shares: Sequence[Share]) -> dict[str, dict[str, Decoded]]:
    """What each engine decoded, by policy: one that several ranks ask serves them at once."""
    found: dict[str, dict[str, Decoded]] = {}
    for rank, each in enumerate(shares):
        for policy, servers in each.decoded.items():
            for name, decoded in servers.items():
                own = found.setdefault(policy, {})
                key = name or f"rank {rank}"  # without a name it is the rank's own
                own[key] = own.get(key, Decoded()).beside(decoded)
    return found


def meter(config: RunConfig, device: torch.device, *, ranks: int, dtype: torch.dtype) -> Meter:
    """The meter of a run whose learner computes in `dtype` on `device`."""
    train, gpu = config.train, device.type == "cuda"
    name = ""
    if gpu:
        import torch

        name = torch.cuda.get_device_name(device)
    vllm = models.servers(config)
    samplers = ranks
    if vllm is not None:
        samplers = vllm["count"] * max(1, vllm["gpus"]) + config.cluster.vllm_nodes * config.peer_gpus
    return Meter(
        shapes=_shapes(config),
        hardware=hardware.by_device_name(name),
        checkpointing=gpu if train.gradient_checkpointing is None else train.gradient_checkpointing,
        bf16=dtype.itemsize == 2,
        learners=ranks,
        samplers=samplers,
        item_bytes=_item_bytes(config, dtype),
    )


def _item_bytes(config: RunConfig, dtype: torch.dtype) -> int | None:
    if config.generation.backend != "vllm":
        return dtype.itemsize
    changed = any(option in said for said in config.generation.vllm_extra_args for option in CHANGES_BYTES)
    return None if changed else serving_memory.item_bytes(config)


def _shapes(config: RunConfig) -> dict[str, Shape]:
    """Of all policies; none where a model's layers are not known."""
    names = {ACTOR: config.model_name_or_path}
    if config.peer is not None:
        names[PEER] = config.peer.model_name_or_path
    try:
        found = {policy: prediction.shape_of(name) for policy, name in names.items()}
    except (ValueError, ConfigError):
        return {}
    return found if all(shape.kind == "dense" for shape in found.values()) else {}
