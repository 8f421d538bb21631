"""The FSDP2 learner: sharded float32 masters, bf16 compute on a GPU, packed micro-batches, one AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hpcgrpo.algorithms.base import Loss
from hpcgrpo.checkpoint_folder import open_to_readers
from hpcgrpo.learning.attention import check_model
from hpcgrpo.learning.logprobs import token_logprobs
from hpcgrpo.learning.packing import Packed, pack_row, with_streams
from hpcgrpo.learning.passes import Computed, Timed, untimed
from hpcgrpo.learning.weights import fill_shards, find_weights, whole_model
from hpcgrpo.types import MicroBatch


class PolicyModel(nn.Module):
    """A causal language model whose forward gives the log-probs of chosen tokens instead of logits."""

    def __init__(
        self, lm: nn.Module, *, temperature: float, chunk_bytes: int | None, packed_attention: bool
    ) -> None:
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.chunk_bytes = chunk_bytes
        self.packed_attention = packed_attention
        self.computed = Computed()

    def forward(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """-> log-probs [N] float32 at the sampling temperature, entropies [N] float32 (detached), both in nats."""
        self.computed.add(packed, trained=torch.is_grad_enabled())
        layout = {"layout": packed.layout} if self.packed_attention else {}
        backbone: Any = self.lm.base_model
        hidden = backbone(
            input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, **layout
        ).last_hidden_state
        head: Any = self.lm.get_output_embeddings()  # type: ignore[operator]
        return token_logprobs(
            hidden[0, packed.source],
            head.weight,
            packed.targets,
            bias=head.bias,
            temperature=self.temperature,
            chunk_bytes=self.chunk_bytes,
        )


class FsdpLearner:
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
        trained: bool = True,
        timed: Timed = untimed,
    ) -> None:
        """`with_reference` loads a second, frozen copy of the initial weights; not `trained` is a frozen teacher,
        without an optimizer. `timed` gets the parts old, reference, peer, forward_backward and optimizer. Raises
        ValueError for models that `attn_implementation` cannot serve."""
        self.timed = timed
        self.device, self.max_grad_norm, self.world = device, max_grad_norm, mesh.size()
        self.dtype = torch.bfloat16 if bf16 else torch.float32

        def policy(trained: bool) -> PolicyModel:
            return sharded_policy(
                model_name_or_path,
                mesh=mesh,
                device=device,
                dtype=self.dtype,
                temperature=temperature,
                chunk_bytes=chunk_bytes,
                attn_implementation=attn_implementation,
                gradient_checkpointing=trained and gradient_checkpointing,
            )

        self.model = policy(trained).train(trained).requires_grad_(trained)
        self.reference = policy(False).eval().requires_grad_(False) if with_reference else None
        if trained:
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(),
                lr=0.0,
                betas=betas,
                eps=epsilon,
                weight_decay=weight_decay,
                fused=True,
            )

    @property
    def lm(self) -> Any:
        return self.model.lm

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

    def logprobs_of(self, micro_batches: Sequence[MicroBatch]) -> dict[int, tuple[float, ...]]:
        """Log-probs of every row's tokens at the present weights, by `Row.index`."""
        packed = [pack_row(m, self.device) for m in micro_batches]
        return by_row(micro_batches, self._logprobs(self.model, packed))

    def as_peer(self, rows: Sequence[Packed]) -> list[Packed]:
        """Another learner's rows with this policy's log-probs as their `peer` stream."""
        with self.timed("peer"):
            return [
                with_streams(r, peer=x) for r, x in zip(rows, self._logprobs(self.model, rows), strict=True)
            ]

    def take_computed(self) -> Computed:
        """What this policy's models, the reference's too, computed since this was last asked."""
        return take_computed(self.model, self.reference)

    @torch.no_grad()
    def _logprobs(self, model: PolicyModel | None, rows: Sequence[Packed]) -> list[Tensor]:
        assert isinstance(model, FSDPModule)
        found = [model(row)[0] for row in rows]
        model.reshard()  # the root's own weights wait for a backward pass otherwise
        return found

    def logprobs_at(self, rows: Sequence[Packed], temperature: float) -> list[Tensor]:
        """Log-probs [N] of each row's completion tokens at a temperature other than that of training."""
        trained_at, self.model.temperature = self.model.temperature, temperature
        try:
            return self._logprobs(self.model, rows)
        finally:
            self.model.temperature = trained_at

    def update(self, rows: Sequence[Packed], loss: Loss, *, learning_rate: float) -> dict[str, float]:
        """One optimizer step over packed rows -> this rank's sums of the metrics, and `grad_norm`.

        Gradients are sums under the token weights: the ranks' mean that FSDP takes is undone by the world size.
        A step whose gradient norm is not finite is left out and counted in `skipped_updates`.
        """
        sums: dict[str, list[Tensor]] = {}
        with self.timed("forward_backward"):
            for row in rows:
                logprobs, entropy = self.model(row)
                if row.batch is None:
                    total = logprobs.sum() * 0
                else:
                    total, metrics = loss(logprobs, row.batch)
                    for name, value in {**metrics, "loss": total.detach(), "entropy": entropy.sum()}.items():
                        sums.setdefault(name, []).append(value.detach())
                (total * self.world).backward()
        with self.timed("optimizer"):
            norm = self._clip()
            finite = bool(torch.isfinite(norm))
            if finite:
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return {
            **{name: extreme(name)(torch.stack(values)).item() for name, values in sums.items()},
            "grad_norm": norm.item(),
            "skipped_updates": float(not finite),
        }

    def _clip(self) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @torch.no_grad()
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, by its transformers name, one at a time: all ranks must iterate to the end."""
        for name, parameter in self.lm.named_parameters():
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()

    def state(self) -> dict[str, Any]:
        """The sharded training state, as torch.distributed.checkpoint takes it."""
        begun = bool(self.optimizer.state)
        model, optimizer = get_state_dict(self.model, self.optimizer)
        if not begun:  # torch made the moments by a step with zero gradients, which Adam has counted
            for kept in self.optimizer.state.values():
                kept["step"].zero_()
        return {"model": model, "optimizer": optimizer}

    def load_state(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


Scorer = Callable[[Sequence[Packed]], list[Tensor]]  # rows -> log-probs [N] of each


def prepare_rows(
    rows: list[Packed], *, old: Scorer | None, reference: Scorer | None, timed: Timed = untimed
) -> list[Packed]:
    """Rows with the log-prob streams that a loss needs, each from its model; None: a stream that is not needed."""
    for stream, score in (("old", old), ("reference", reference)):
        if score is not None:
            with timed(stream):
                rows = [with_streams(r, **{stream: x}) for r, x in zip(rows, score(rows), strict=True)]
    return rows


def take_computed(*models: PolicyModel | None) -> Computed:
    """What the models computed since this was last asked; None stands for one that is not there."""
    total = Computed()
    for model in models:
        if model is not None:
            total, model.computed = total + model.computed, Computed()
    return total


def by_row(micro_batches: Sequence[MicroBatch], logprobs: Sequence[Tensor]) -> dict[int, tuple[float, ...]]:
    """Log-probs of packed micro-batches ([N] each) -> those of each row, by `Row.index`."""
    found: dict[int, tuple[float, ...]] = {}
    for micro_batch, values in zip(micro_batches, logprobs, strict=True):
        rows = [row for piece in micro_batch for row in piece.rows]
        parts = values.split([len(row.token_ids) for row in rows]) if rows else ()
        found |= {row.index: tuple(part.tolist()) for row, part in zip(rows, parts, strict=True)}
    return found


def extreme(name: str) -> Callable[[Tensor], Tensor]:
    """How a metric is reduced: the maximum or minimum by its name's ending, else the sum."""
    return {"max": torch.max, "min": torch.min}.get(name.rpartition("/")[2], torch.sum)


def sharded_policy(
    model_name_or_path: str,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    dtype: torch.dtype,
    temperature: float,
    chunk_bytes: int | None,
    attn_implementation: str,
    gradient_checkpointing: bool,
) -> PolicyModel:
    """Built on the meta device, sharded by layer, then filled: by each rank with its own shards where it can."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_name_or_path)
    packed = attn_implementation == "packed"
    if packed:
        check_model(config)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attn_implementation
        )
    if gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    model = PolicyModel(lm, temperature=temperature, chunk_bytes=chunk_bytes, packed_attention=packed)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in _layers(lm):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model.to_empty(device=device)
    _fill(model, model_name_or_path)
    return model


def _layers(lm: Any) -> list[nn.Module]:
    names = set(lm._no_split_modules or ())
    return [m for m in lm.modules() if type(m).__name__ in names]


def _fill(model: PolicyModel, model_name_or_path: str) -> None:
    """From the files, or where not every rank can, from rank 0, which then loads the whole model."""
    lm: Any = model.lm
    weights = find_weights(model_name_or_path, lm)
    able = torch.tensor(float(weights is not None), device=next(lm.parameters()).device)
    dist.all_reduce(able, op=dist.ReduceOp.MIN)
    if weights is not None and able:
        fill_shards(lm, weights)
    else:
        _broadcast(model, whole_model(model_name_or_path) if dist.get_rank() == 0 else None)


def _broadcast(model: PolicyModel, whole: Any) -> None:
    """Weights by DCP's broadcast; buffers that no state dict holds (rotary tables) one by one."""
    state = {f"lm.{name}": tensor for name, tensor in whole.state_dict().items()} if whole is not None else {}
    set_model_state_dict(
        model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    )
    model.lm.tie_weights()  # type: ignore[operator]
    theirs = dict(whole.named_buffers()) if whole is not None else {}
    for name, buffer in model.lm.named_buffers():
        if name in theirs:
            buffer.copy_(theirs[name])
        dist.broadcast(buffer, src=0)


def export(learner: FsdpLearner, folder: Path, dtype: torch.dtype, tokenizer: Any) -> Callable[[], None]:
    """Gather the whole model on rank 0 -> a function that writes it there as transformers and vLLM load it.

    Collective; the function does nothing on other ranks and may run in a thread while training goes on.
    """
    rank = dist.get_rank()
    whole = {}
    for name, tensor in learner.full_parameters():
        if rank == 0:
            whole[name] = tensor.detach().to("cpu", dtype, copy=True)

    def write() -> None:
        if rank == 0:
            _write_model(learner.lm, whole, folder, dtype)
            tokenizer.save_pretrained(folder)

    return write


def _write_model(lm: Any, whole: dict[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    import json

    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    plan = split_torch_state_dict_into_shards(whole, filename_pattern="model{suffix}.safetensors")
    for file, names in plan.filename_to_tensors.items():
        save_file({n: whole[n].contiguous() for n in names}, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config = type(lm.config).from_dict(lm.config.to_dict())
    config.dtype = dtype
    config.architectures = [type(lm).__name__]
    config.save_pretrained(folder)
    open_to_readers(folder)
    if lm.generation_config is not None:
        lm.generation_config.save_pretrained(folder)
