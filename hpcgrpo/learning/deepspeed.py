"""The DeepSpeed ZeRO-3 learner: the FSDP2 learner's twin, with the same rows, losses, weights and checkpoints.

What is sharded is ours to see as well: float32 masters and Adam's moments stand in the training state as one flat
DTensor for each parameter, views of ZeRO's own memory. So torch.distributed.checkpoint saves, loads and reshards
them as it does FSDP2's, and DeepSpeed's own checkpoint format, tied to one number of ranks, is not needed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hpcgrpo.algorithms.base import Loss
from hpcgrpo.learning.attention import check_model
from hpcgrpo.learning.fsdp import PolicyModel, extreme, prepare_rows, take_computed
from hpcgrpo.learning.packing import Packed, pack_row, with_streams
from hpcgrpo.learning.passes import Computed, Timed, untimed
from hpcgrpo.learning.weights import Weights, fill_buffers, find_weights, whole_model
from hpcgrpo.types import MicroBatch

MOMENTS = ("exp_avg", "exp_avg_sq")
PERSISTENT_ELEMENTS = 100_000  # smaller parameters (norms, biases) stay whole on every rank
BUCKET_ELEMENTS = 2**26  # gradients reduced together
GROUP_ELEMENTS = (
    2**27
)  # of a rank's masters that one optimizer call takes; bounds the copy of their gradients


class DeepSpeedLearner:
    """One policy in training. Every method is collective over the learner ranks."""

    def __init__(
        self,
        model_name_or_path: str,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        temperature: float,
        bf16: bool,
        gradient_checkpointing: bool,
        attn_implementation: str,
        chunk_bytes: int | None,
        weight_decay: float,
        betas: tuple[float, float],
        epsilon: float,
        max_grad_norm: float,
        with_reference: bool,
        trained: bool = True,  # as FsdpLearner has it; a frozen teacher is one of those
        timed: Timed = untimed,
    ) -> None:
        """As FsdpLearner. Raises ValueError where DeepSpeed is not installed as well; the process group must exist,
        and `mesh` be all of it."""
        self.device, self.world, self.timed = device, mesh.size(), timed
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self._library = library(device)
        thrifty = device.type == "cuda" and not gradient_checkpointing  # a CPU keeps torch's own linear layer
        settings = _settings(bf16=bf16, max_grad_norm=max_grad_norm, memory_efficient_linear=thrifty)

        def policy(*, learns: bool) -> PolicyModel:
            lm = _partitioned(
                self._library,
                settings,
                model_name_or_path,
                device=device,
                dtype=self.dtype,
                attn_implementation=attn_implementation,
                gradient_checkpointing=learns and gradient_checkpointing,
            )
            packed = attn_implementation == "packed"
            return PolicyModel(lm, temperature=temperature, chunk_bytes=chunk_bytes, packed_attention=packed)

        assert trained, "a frozen teacher is an FsdpLearner"
        model = policy(learns=True).train()
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.0, betas=betas, eps=epsilon, weight_decay=weight_decay, fused=True
        )
        self.model = self._wrapped(model, settings, self.optimizer)
        self.reference = None
        if with_reference:
            self.reference = self._wrapped(policy(learns=False).eval().requires_grad_(False), settings)
        self._begin_moments()
        self._masters = self._sharded(mesh)
        self._moments = {key: self._sharded(mesh, key) for key in MOMENTS}
        if bf16:
            self._fill_masters(_values(model_name_or_path, self.lm))

    def _wrapped(self, model: PolicyModel, settings: dict[str, Any], adam: Any = None) -> Any:
        wrapped, *_ = self._library.initialize(
            model=model, optimizer=adam, config=settings, dist_init_required=False
        )
        head: Any = model.lm.get_output_embeddings()  # type: ignore[operator]
        for parameter in head.parameters():  # the policy's forward reads them, not the head's own
            self._library.zero.register_external_parameter(model, parameter)
        return wrapped

    @property
    def lm(self) -> Any:
        return self.model.module.lm

    def prepare(
        self, micro_batches: Sequence[MicroBatch], *, old: bool, reference: bool, progress: float = 0.0
    ) -> list[Packed]:
        """Pack the rows of one optimizer step and add the log-prob streams that its loss needs."""
        return prepare_rows(
            [with_streams(pack_row(m, self.device), progress=progress) for m in micro_batches],
            old=partial(self._logprobs, self.model) if old else None,
            reference=partial(self._logprobs, self.reference) if reference else None,
            timed=self.timed,
        )

    def take_computed(self) -> Computed:
        """As FsdpLearner."""
        return take_computed(*(each.module for each in (self.model, self.reference) if each is not None))

    @torch.no_grad()
    def _logprobs(self, model: Any, rows: Sequence[Packed]) -> list[Tensor]:
        return [model(row)[0] for row in rows]

    def logprobs_at(self, rows: Sequence[Packed], temperature: float) -> list[Tensor]:
        """Log-probs [N] of each row's completion tokens at a temperature other than that of training."""
        policy = self.model.module
        trained_at, policy.temperature = policy.temperature, temperature
        try:
            return self._logprobs(self.model, rows)
        finally:
            policy.temperature = trained_at

    def update(self, rows: Sequence[Packed], loss: Loss, *, learning_rate: float) -> dict[str, float]:
        """One optimizer step over packed rows -> this rank's sums of the metrics, and `grad_norm`.

        Gradients are sums under the token weights: the ranks' mean that ZeRO takes is undone by the world size.
        A step whose gradient norm is not finite is left out by ZeRO and counted in `skipped_updates`.
        """
        sums: dict[str, list[Tensor]] = {}
        with self.timed("forward_backward"):
            for i, row in enumerate(rows):
                self.model.set_gradient_accumulation_boundary(i == len(rows) - 1)
                logprobs, entropy = self.model(row)
                if row.batch is None:
                    total = logprobs.sum() * 0
                else:
                    total, metrics = loss(logprobs, row.batch)
                    for name, value in {**metrics, "loss": total.detach(), "entropy": entropy.sum()}.items():
                        sums.setdefault(name, []).append(value.detach())
                self.model.backward(total * self.world, scale_wrt_gas=False)
        with self.timed("optimizer"):
            for group in self.model.optimizer.param_groups:
                group["lr"] = learning_rate
            self.model.step()
        return {
            **{name: extreme(name)(torch.stack(values)).item() for name, values in sums.items()},
            "grad_norm": float(self.model.get_global_grad_norm()),
            "skipped_updates": float(not self.model.was_step_applied()),
        }

    @torch.no_grad()
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole in float32, by its transformers name, one at a time: all ranks must iterate to the
        end."""
        for name, parameter in self.lm.named_parameters():
            yield name, self._masters[name].full_tensor().view(parameter.ds_shape)

    def state(self) -> dict[str, Any]:
        """The sharded training state, as torch.distributed.checkpoint takes it: the learner's own memory."""
        return {"model": self._masters, "optimizer": {**self._moments, "step": self._steps()[0]}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`: what `state()` gave, with a checkpoint read into its tensors."""
        assert all(state["model"][name] is shard for name, shard in self._masters.items())
        for step in self._steps():
            step.copy_(state["optimizer"]["step"])
        self._spread_masters()

    def _begin_moments(self) -> None:
        """Adam's state as its first step would make it, so that it can be loaded before."""
        for flat in self.model.optimizer.fp32_partitioned_groups_flat:
            zeros = {key: torch.zeros_like(flat, requires_grad=False) for key in MOMENTS}
            self.optimizer.state[flat] = {"step": torch.zeros((), device=flat.device), **zeros}

    def _steps(self) -> list[Tensor]:
        return [state["step"] for state in self.optimizer.state.values()]

    def _sharded(self, mesh: DeviceMesh, moment: str | None = None) -> dict[str, DTensor]:
        """Views of every parameter's masters, or of a moment: flat, and without ZeRO's padding of the last share."""
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        found = {}
        for name, parameter in self.lm.named_parameters():
            if moment is None:
                mine = safe_get_local_fp32_param(parameter)
            else:
                mine = safe_get_local_optimizer_state(parameter, moment)
            size = parameter.ds_numel
            mine = mine.detach()[: max(0, size - dist.get_rank() * len(mine))]
            # the same memory with an offset of 0: torch cannot copy a DTensor whose part has another
            mine = torch.from_dlpack(mine) if len(mine) else torch.empty_like(mine)
            found[name] = DTensor.from_local(
                mine, mesh, [Shard(0)], run_check=False, shape=torch.Size([size]), stride=(1,)
            )
        return found

    @torch.no_grad()
    def _fill_masters(self, state: Mapping[str, Tensor]) -> None:
        """Masters from the model's own values, not from what half precision left of them."""
        for name, shard in self._masters.items():
            values = torch.empty(shard.shape, device=self.device)
            if name in state:
                values.copy_(state[name].flatten())
            dist.broadcast(values, src=0)
            mine = shard.to_local()
            start = min(len(values), dist.get_rank() * -(-len(values) // self.world))
            mine.copy_(values[start : start + len(mine)])
        self._spread_masters()

    @torch.no_grad()
    def _spread_masters(self) -> None:
        """Bring what the model computes with to the masters, as ZeRO does at the end of its step."""
        zero = self.model.optimizer
        zero._partition_all_parameters()
        for i in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(i)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def library(device: torch.device) -> Any:
    """DeepSpeed, for the kind of `device`. Raises ValueError where it is not installed or serves another kind."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", "0")
    warnings.filterwarnings("ignore", r".torch\.distributed\.\w+. is deprecated", FutureWarning)
    try:
        import deepspeed
    except ImportError as error:
        raise ValueError(
            f"train.learner: deepspeed, but DeepSpeed cannot be imported ({error}); install it with"
            " pip install 'hpcgrpo[deepspeed]', or leave train.learner at fsdp"
        ) from None
    found = deepspeed.get_accelerator().device_name()
    if found != device.type:
        raise ValueError(
            f"DeepSpeed computes on {found} here, the run on {device.type}; set DS_ACCELERATOR={device.type} in"
            " the environment"
        )
    # shared-memory collectives of its inference: minutes of compiling, into the home folder
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _settings(*, bf16: bool, max_grad_norm: float, memory_efficient_linear: bool) -> dict[str, Any]:
    """DeepSpeed's configuration. Gradients are summed over rows and ranks in float32."""
    return {
        "train_micro_batch_size_per_gpu": 1,  # what a row holds is decided elsewhere
        "gradient_accumulation_steps": 1,  # and how many make a step
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": bf16},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "sub_group_size": GROUP_ELEMENTS,
            "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
            "memory_efficient_linear": memory_efficient_linear,
        },
    }


def _partitioned(
    library: Any,
    settings: dict[str, Any],
    model_name_or_path: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attn_implementation: str,
    gradient_checkpointing: bool,
) -> Any:
    """The language model, partitioned parameter by parameter as it is built, then filled from rank 0."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(model_name_or_path)
    if attn_implementation == "packed":
        check_model(config)
    # Init's own argument dtype is of no use: without float16, as on a CPU, it always means bfloat16
    with library.zero.Init(config_dict_or_path=settings), no_init_weights():
        lm = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    lm.tie_weights()
    if gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    _fill(library, lm, _values(model_name_or_path, lm), device)
    return lm


def _values(model_name_or_path: str, lm: Any) -> Mapping[str, Tensor]:
    """On rank 0 every tensor by its name, read when it is asked for where that can be; elsewhere nothing."""
    if dist.get_rank() != 0:
        return {}
    weights = find_weights(model_name_or_path, lm)
    if weights is not None:
        return weights
    whole = whole_model(model_name_or_path)
    return {**dict(whole.named_buffers()), **whole.state_dict()}


@torch.no_grad()
def _fill(library: Any, lm: Any, state: Mapping[str, Tensor], device: torch.device) -> None:
    """Weights one by one; buffers (rotary tables) in float32, since they are not partitioned."""
    for name, parameter in lm.named_parameters():
        with library.zero.GatheredParameters([parameter], modifier_rank=0):
            if name in state:
                parameter.copy_(state[name])
    for buffer in lm.buffers():
        buffer.data = buffer.to(device, torch.float32 if buffer.is_floating_point() else buffer.dtype)
    if isinstance(state, Weights):
        fill_buffers(lm, state)
    for name, buffer in lm.named_buffers():
        if name in state:
            buffer.copy_(state[name])
        dist.broadcast(buffer, src=0)
