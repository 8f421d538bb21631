"""A model's weights on disk: each rank reads its own shard of every tensor, so that none holds the whole model.

What cannot be read so is left to transformers: on rank 0, which then holds all of it. That is the case where tensors
are named, cut or typed otherwise than in the model, and where one is missing or damaged, which transformers tells.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Weights(Mapping[str, Tensor]):
    """Tensors by their names, as they lie in safetensors files: read when asked for, on the CPU.

    Raises SafetensorError or OSError where a file is not what its index says.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        for file in _files(folder):
            opened = safe_open(file, framework="pt")
            self._files |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """By the file's header alone."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Places `start` to `stop` of the first dimension; nothing else is read."""
        found: Tensor = self._files[name].get_slice(name)[start:stop]
        return found


def _files(folder: Path) -> list[Path]:
    if not (folder / INDEX).is_file():
        return [folder / SINGLE]
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return sorted({folder / name for name in index["weight_map"].values()})


def find_weights(model_name_or_path: str, lm: Any) -> Weights | None:
    """The weights of a causal language model from its folder, or from the hub's cache.

    None where they are not there, or are not one tensor of its shape for each of the model's own.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    folder = _folder(model_name_or_path)
    plain = folder is not None and not getattr(lm.config, "quantization_config", None)
    if not plain or get_model_conversion_mapping(lm, add_legacy=False) or not _computes_buffers(lm):
        return None
    try:
        weights = Weights(folder or Path())
        whole = all(weights.shape(name) == shape for name, shape in _shapes(lm))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError):
        return None
    return weights if whole else None


def _folder(model_name_or_path: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    folder = Path(model_name_or_path).expanduser()
    if folder.is_dir():
        return folder
    try:
        found = [try_to_load_from_cache(model_name_or_path, name) for name in (INDEX, SINGLE)]
    except HFValidationError:
        return None
    return next((Path(path).parent for path in found if isinstance(path, str)), None)


def _shapes(lm: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every parameter and every buffer that is saved, a tied one under the first of its names."""
    for name, parameter in lm.named_parameters():
        yield name, tuple(getattr(parameter, "ds_shape", parameter.shape))
    for name, buffer in _saved_buffers(lm):
        yield name, tuple(buffer.shape)


def _saved_buffers(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in lm.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _rotary(lm: nn.Module) -> list[nn.Module]:
    """The modules with tables that no file holds."""
    return [m for m in lm.modules() if m._non_persistent_buffers_set]


def _computes_buffers(lm: nn.Module) -> bool:
    """Whether these are rotary tables alone, which transformers computes anew for a model that it loads."""
    return all("RotaryEmbedding" in type(m).__name__ and hasattr(m, "original_inv_freq") for m in _rotary(lm))


@torch.no_grad()
def fill_shards(lm: Any, weights: Weights) -> None:
    """Fill this rank's shards, cut in the first dimension, and the buffers; float16 and bfloat16 become float32."""
    for name, parameter in lm.named_parameters():
        if isinstance(parameter, DTensor):
            shard, mesh = parameter.to_local(), parameter.device_mesh
            start = mesh.get_local_rank() * -(-len(parameter) // mesh.size())
            if len(shard):
                shard.copy_(weights.rows(name, start, start + len(shard)))
        else:
            parameter.copy_(weights[name])
    fill_buffers(lm, weights)


@torch.no_grad()
def fill_buffers(lm: Any, weights: Mapping[str, Tensor]) -> None:
    """Fill buffers from the files, and compute those that no file holds as transformers does."""
    for name, buffer in _saved_buffers(lm):
        buffer.copy_(weights[name])
    for module in _rotary(lm):
        lm._init_weights(module)


def whole_model(model_name_or_path: str) -> Any:
    """The model with its weights in float32 on the CPU.

    Raises ValueError for weights that are missing, damaged or of another shape: transformers would fill what is
    missing with random numbers and go on.
    """
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            model_name_or_path, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"model_name_or_path {model_name_or_path}: its weights cannot be loaded ({error}); copy the folder anew"
        ) from None
    if info["missing_keys"]:
        first = sorted(info["missing_keys"])[0]
        raise ValueError(
            f"model_name_or_path {model_name_or_path}: {len(info['missing_keys'])} weights are missing, such as"
            f" {first}; copy the folder anew, or name a model of this architecture"
        )
    return model
