"""The learner's own code run without its numbers, to count the bytes that it holds: `hpcgrpo plan --trace`.

Tensors are fake (shapes without memory) and so is the process group, so that one process on a CPU stands for one rank
of any number, with a model of any size. The closed form in `memory` is held to a table of such counts:

    python -m hpcgrpo.planner.trace --table
"""

from __future__ import annotations

import json
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcgrpo import algorithms
from hpcgrpo.learning import attention, fsdp
from hpcgrpo.learning.packing import pack_row
from hpcgrpo.models import on_gpu
from hpcgrpo.planner import memory, shapes
from hpcgrpo.planner.shapes import Shape
from hpcgrpo.sections import RunConfig
from hpcgrpo.types import MicroBatch, Piece, Row

_fsdp, _c10d, _aten = torch.ops.fsdp, torch.ops.c10d, torch.ops.aten


class Bytes(TorchDispatchMode):
    """Counts the bytes of every storage that is alive, by part, and keeps the parts of the fullest moment."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.mode = active_fake_mode()
        self.vocabulary = shape.vocabulary
        self.alive: dict[str, int] = {}
        self.where, self.running = "", ""
        self.total = self.peak_total = 0
        self.peak: dict[str, int] = {}
        self._known: dict[int, list[Any]] = {}  # id of a storage -> its part, its bytes, a weak reference

    def hold(self, part: str, tensors: Sequence[Any]) -> None:
        """Count these tensors under `part`, whatever they were counted under before."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._count(local.untyped_storage(), part, move=True)

    def reset(self) -> None:
        self.peak_total, self.peak = 0, {}
        self._note()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with the local tensors
        if func is torch.ops.prim.device.default:
            return args[0].fake_device  # asked for thousands of times
        if func is _aten._fused_adamw_.default:
            return None  # in place, but its stand-in for fake tensors makes copies
        if func is _aten._local_scalar_dense.default:
            return 1.0  # a fake tensor has no value; the learner asks for its metrics and whether the norm is finite
        self.running = str(func)
        if func is _aten.add.Tensor and self._sums_gradients(args):
            func = _aten.add_.Tensor
        made = (
            args[0]
            if func is torch.ops._c10d_functional.wait_tensor.default
            else func(*args, **(kwargs or {}))
        )
        if active_fake_mode() is not self.mode:
            return made  # DTensor working out shapes
        if func is _fsdp.split_with_sizes_copy.default:
            self.hold("gathered layers", (kwargs or {}).get("out", ()))
        elif func is _c10d._allgather_base_.default:
            self.hold("collective buffers", args[:2])
        elif func is _c10d._reduce_scatter_base_.default:
            self.hold("gradients", args[:1])
            self.hold("collective buffers", args[1:2])
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                self._count(tensor.untyped_storage(), self._part(tensor))
        return made

    def _sums_gradients(self, args: Any) -> bool:
        """Two gradients of a tied table: autograd adds in place, but not to a fake tensor."""
        sizes = [tuple(x.shape) for x in args if isinstance(x, Tensor)]
        return len(sizes) == 2 and sizes[0] == sizes[1] and sizes[0][:1] == (self.vocabulary,)

    def _part(self, tensor: Tensor) -> str:
        if tensor.ndim >= 2 and self.vocabulary in tensor.shape[:1]:
            return "output gradient"
        return "logits" if tensor.ndim >= 2 and tensor.shape[-1] == self.vocabulary else "activations"

    def _count(self, storage: Any, part: str, move: bool = False) -> None:
        key, size = id(storage), storage.nbytes()
        entry = self._known.get(key)
        if entry is None or entry[2]() is not storage:
            self._known[key] = [part, size, weakref.ref(storage, lambda _: self._drop(key))]
            self._add(part, size)
        elif (move and entry[0] != part) or entry[1] != size:
            self._add(entry[0], -entry[1])
            entry[0], entry[1] = part if move else entry[0], size
            self._add(entry[0], size)

    def _drop(self, key: int) -> None:
        part, size, _ = self._known.pop(key)
        self._add(part, -size)

    def _add(self, part: str, size: int) -> None:
        self.alive[part] = self.alive.get(part, 0) + size
        self.total += size
        self._note()

    def _note(self) -> None:
        if self.total > self.peak_total:
            self.where, self.peak_total, self.peak = (
                self.running,
                self.total,
                {k: v for k, v in self.alive.items() if v},
            )

    @contextmanager
    def counting(self) -> Iterator[None]:
        """FSDP frees gathered layers by resizing their storage, which no dispatch mode sees."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            result = plain(storage, size)
            if id(storage) in self._known:
                self._count(storage, "")
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]


def fake_rows(rows: memory.Rows) -> list[MicroBatch]:
    """Micro-batches of the given lengths; what their tokens are makes no difference."""
    row = Row(0, (0,) * rows.length, (0.0,) * rows.length, 1.0, 1.0)
    piece = Piece((0,) * rows.prefix, (row,) * rows.completions)
    return [(piece,) * rows.groups] * rows.passes


def _faked(mode: FakeTensorMode, value: Any) -> Any:
    """A dataclass with its tensors, and those of dataclasses in it, made fake."""
    found = {f.name: getattr(value, f.name) for f in fields(value)}
    tensors = {name: mode.from_tensor(x) for name, x in found.items() if isinstance(x, Tensor)}
    inner = {"batch": _faked(mode, found["batch"])} if found.get("batch") is not None else {}
    return replace(value, **tensors, **inner)


@contextmanager
def _ranks(count: int) -> Iterator[DeviceMesh]:
    """A process group of so many ranks of which this process is the first; its collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "a trace makes its own process group"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        dist.destroy_process_group()


@contextmanager
def _without_weights(gpu: bool) -> Iterator[None]:
    """Nothing is read or filled in, and attention takes the branch of a GPU where the run has one."""
    names = {"_fill": lambda *_: None, "whole_model": lambda *_: None}
    kept = {name: getattr(fsdp, name) for name in names}, attention._KERNELS
    for name, stand_in in names.items():
        setattr(fsdp, name, stand_in)
    if gpu:
        attention._KERNELS = {"cpu": attention._KERNELS["cuda"]}
    try:
        yield
    finally:
        for name, own in kept[0].items():
            setattr(fsdp, name, own)
        attention._KERNELS = kept[1]


def learner(config: RunConfig, shape: Shape) -> memory.Parts:
    """The peak of one learner GPU in a run, counted: as `memory.learner`, for the actor's update with FSDP2.

    Raises ValueError for a model of which no more than the parameters is known, and for the DeepSpeed learner.
    """
    machine, algorithm = memory.machine_of(config), config.build_algorithm()
    if machine.zero3 or shape.kind != "dense":
        reason = "train.learner is deepspeed" if machine.zero3 else f"{shape.name}: {shape.kind}"
        raise ValueError(f"--trace runs FSDP2 on models of known layers, but {reason}; leave --trace out")
    rows = memory.longest_rows(config, algorithm)
    return count(
        shape,
        rows,
        machine,
        gpu=on_gpu(config),
        loss=algorithm.loss,
        reference="reference" in algorithm.streams,
        packed=config.train.attn_implementation not in ("sdpa", "eager"),
    )


def count(
    shape: Shape,
    rows: memory.Rows,
    machine: memory.Machine,
    *,
    gpu: bool = True,
    loss: Any = None,
    reference: bool = False,
    packed: bool = True,
) -> memory.Parts:
    """One optimizer step of FsdpLearner on `rows`, counted from its second start on (Adam's state is there).

    Of several micro-batches the last stands for all: it finds the gradients of those before it.
    """
    loss = loss or algorithms.build({"name": "grpo", "num_generations": 8}).loss
    inputs = [pack_row(m, torch.device("cpu")) for m in fake_rows(replace(rows, passes=1))]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _ranks(machine.ranks) as mesh, _without_weights(gpu), mode:
        found = _learner(shape, machine, mesh, reference=reference, packed=packed)
        faked = [_faked(mode, x) for x in inputs]
        counted = Bytes(shape)
        with counted.counting():
            _warm_up(found)
            _name_states(found, counted)
            if reference:
                found._logprobs(found.reference, faked)
            if rows.passes > 1:
                _zero_gradients(found)
                counted.hold("gradients", [p.grad for p in found.model.parameters()])
            counted.reset()
            found.update(faked, loss, learning_rate=1e-6)
    peak = {name: size for name, size in counted.peak.items() if size}
    return memory.Parts(peak, counted.where, {counted.where: sum(peak.values())})


def _learner(
    shape: Shape, machine: memory.Machine, mesh: DeviceMesh, *, reference: bool, packed: bool
) -> fsdp.FsdpLearner:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model_config(shape)), encoding="utf-8")
        return fsdp.FsdpLearner(
            folder,
            mesh=mesh,
            device=torch.device("cpu"),
            temperature=0.7,
            bf16=machine.item_bytes == 2,
            gradient_checkpointing=machine.checkpointing,
            attn_implementation="packed" if packed else "sdpa",
            chunk_bytes=machine.chunk_bytes,
            weight_decay=0.0,
            betas=(0.9, 0.999),
            epsilon=1e-8,
            max_grad_norm=1.0,
            with_reference=reference,
        )


def _warm_up(found: fsdp.FsdpLearner) -> None:
    """An optimizer step on zeros: makes Adam's state, and lets DTensor work out the shapes of clipping beforehand."""
    _zero_gradients(found)
    found._clip()
    found.optimizer.step()
    found.optimizer.zero_grad(set_to_none=True)


def _zero_gradients(found: fsdp.FsdpLearner) -> None:
    for parameter in found.model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def _name_states(found: fsdp.FsdpLearner, counted: Bytes) -> None:
    if found.reference is not None:
        counted.hold("reference model", list(found.reference.parameters()))
    counted.hold("weights", list(found.model.parameters()))
    counted.hold("Adam", [x for state in found.optimizer.state.values() for x in state.values()])


def model_config(shape: Shape) -> dict[str, Any]:
    """A config.json of the shape, as transformers reads it."""
    kind = "qwen3" if shape.qk_norm else "qwen2" if shape.attention_bias else "llama"
    return {
        "model_type": kind,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 2**17,
    }


def entries() -> list[dict[str, Any]]:
    """What the committed table holds: models, ranks, lengths, passes, checkpointing and types."""
    gpu = {"item_bytes": 2, "chunk_bytes": 2**26}

    def entry(
        name: str, ranks: int, rows: tuple[int, ...], *, kept: bool = True, **more: Any
    ) -> dict[str, Any]:
        return {"model": name, "ranks": ranks, "rows": rows, "checkpointing": kept, **gpu, **more}

    seven, fourteen = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "nvidia/OpenMath-Nemotron-14B"
    small, llama, eight = (
        "Qwen/Qwen2.5-1.5B-Instruct",
        "meta-llama/Llama-3.2-1B-Instruct",
        "meta-llama/Llama-3.1-8B-Instruct",
    )
    tiny = "HuggingFaceTB/SmolLM2-135M-Instruct"
    return [
        entry(seven, 8, (1024, 4, 3840, 1, 4)),
        entry(seven, 8, (1024, 1, 4096, 1, 1)),
        entry(fourteen, 32, (1024, 4, 3840, 1, 4)),
        entry(small, 1, (512, 8, 1024, 1, 2)),
        entry(small, 4, (512, 8, 1024, 2, 2)),
        entry(small, 4, (512, 2, 1024, 1, 2), kept=False),
        entry(llama, 4, (1024, 4, 3072, 1, 2)),
        entry(llama, 8, (1024, 2, 1024, 1, 1), kept=False),
        entry(llama, 2, (128, 4, 128, 1, 2)),
        entry(eight, 8, (1024, 4, 3072, 1, 2)),
        entry(eight, 64, (512, 1, 1024, 1, 2), reference=True),
        entry(tiny, 2, (256, 8, 512, 1, 2)),
        entry(tiny, 8, (256, 8, 2048, 1, 2)),
        entry(tiny, 2, (256, 8, 512, 1, 2), kept=False, item_bytes=4),
        entry(tiny, 1, (256, 4, 256, 1, 1), item_bytes=4),
    ]


def table(path: Path, wanted: Sequence[Mapping[str, Any]]) -> None:
    """Count every entry and write the table; a line of progress each."""
    found = []
    for entry in wanted:
        shape = shapes.known(entry["model"])
        assert shape is not None, entry["model"]
        machine = memory.Machine(
            entry["ranks"], entry["item_bytes"], entry["checkpointing"], entry["chunk_bytes"]
        )
        rows = memory.Rows(*entry["rows"])
        reference = entry.get("reference", False)
        parts = count(shape, rows, machine, gpu=entry["item_bytes"] == 2, reference=reference)
        closed = memory.policy(shape, rows, machine, reference=reference)
        off = closed.peak_bytes / parts.peak_bytes - 1
        print(
            f"{entry['model']} {entry['ranks']} {entry['rows']} {parts.peak_gb:.3f} GB, closed form {off:+.1%}"
        )
        found.append({**entry, "peak_bytes": parts.peak_bytes, "parts": dict(parts.parts)})
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """`--table`: count all entries anew, into data/traced.json."""
    if sys.argv[1:] != ["--table"]:
        raise SystemExit("usage: python -m hpcgrpo.planner.trace --table")
    table(Path(__file__).parents[1] / "data" / "traced.json", entries())


if __name__ == "__main__":
    main()
