"""A model's folder as a login node sees it: its config.json, and the shapes of its weights by their headers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcgrpo.balance import Cost
from hpcgrpo.config import ConfigError

Shape = tuple[int, ...]
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # others: 1

# Keys of config.json that are read here or by plan. Sizes are whole numbers; some models have one for each layer.
PER_LAYER = ("num_key_value_heads", "head_dim", "intermediate_size", "n_inner")
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
SIZES = (*NEEDED, *PER_LAYER, "n_embd", "n_layer", "n_head", "max_position_embeddings", "n_positions")
SECTIONS = ("text_config", "rope_parameters", "rope_scaling", "quantization_config")
DECODERS = ("llama", "mistral", "qwen2", "qwen3")  # types whose config.json always has what is needed
TYPE_TABLES = ("auto_mappings.py", "configuration_auto.py")  # of transformers: every model_type in quotes


@dataclass(frozen=True)
class Pretrained:
    """What is known of a model without loading it."""

    name: str  # as the configuration has it
    folder: Path | None  # None: a name on the hub that is not in its cache
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json; {} where it isn't there
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # of every tensor; {} where none is there
    weight_bytes: int = 0

    @property
    def parameters(self) -> int:
        """How many numbers the weights hold; 0 where they aren't there."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def heads(self) -> int | None:
        return _number(self.config, "num_attention_heads", "n_head")

    @property
    def kv_heads(self) -> int | None:
        return _number(self.config, "num_key_value_heads") or self.heads

    @property
    def hidden(self) -> int | None:
        return _number(self.config, "hidden_size", "n_embd")

    @property
    def head_dim(self) -> int | None:
        if found := _number(self.config, "head_dim"):
            return found
        return self.hidden // self.heads if self.hidden and self.heads else None

    @property
    def training_cost(self) -> Cost:
        """FLOPs of a forward and a backward pass per token, per (query, key) pair and per predicted token.

        By the sizes in config.json, feed-forward layers being gated: matrices take twice as long backward as forward,
        attention kernels, which compute the scores again, 2.5 times, and the output layer, which is computed again,
        three times. A cost of tokens alone where the sizes aren't known.
        """
        layers = _number(self.config, "num_hidden_layers", "n_layer")
        vocabulary = _number(self.config, "vocab_size")
        if not (layers and vocabulary and self.hidden and self.heads and self.kv_heads and self.head_dim):
            return Cost()
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        chosen = _number(self.config, "num_experts_per_tok") or 1
        expert = _number(self.config, "moe_intermediate_size")
        inner = chosen * expert if expert else _number(self.config, "intermediate_size", "n_inner")
        matrices = self.hidden * (2 * queries + 2 * keys + 3 * (inner or 4 * self.hidden))
        return Cost(
            token=6.0 * layers * matrices,
            pair=14.0 * layers * queries,
            predicted=8.0 * vocabulary * self.hidden,
        )

    @property
    def longest(self) -> int | None:
        """Positions the model takes, in tokens."""
        return _number(self.config, "max_position_embeddings", "n_positions")


def find(name_or_path: str, *, offline: bool) -> Pretrained:
    """A model by its folder, or by its name from the hub's cache.

    Raises ConfigError for a folder that is none or damaged, and for a name that a job which is `offline` would look
    for in vain.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ConfigError(f"model_name_or_path {name_or_path}: the folder holds no config.json")
        return _read(name_or_path, folder)
    if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1:
        raise ConfigError(f"model_name_or_path {name_or_path}: no such folder")
    cached = _from_cache(name_or_path)
    whole = (
        cached is not None
        and any(cached.glob("*.safetensors"))
        and (cached / "tokenizer_config.json").exists()
    )
    if offline and not whole:
        what = "only partly in the hub's cache" if cached else "not in the hub's cache"
        raise ConfigError(
            f"model_name_or_path {name_or_path}: no such folder, and {what} while HF_HUB_OFFLINE is set; load it once"
            f" where there is a network (hf download {name_or_path}), or give a folder"
        )
    return _read(name_or_path, cached) if cached else Pretrained(name_or_path, None)


def _from_cache(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        raise ConfigError(f"model_name_or_path {name}: neither a folder nor a name on the hub") from None
    return Path(found).parent if isinstance(found, str) else None


def _read(name: str, folder: Path) -> Pretrained:
    path = folder / "config.json"
    _check_readable([path, *sorted(folder.glob("*.safetensors"))])
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; copy the model's folder anew") from None
    _check_config(path, config)
    files = sorted(folder.glob("*.safetensors"))
    if not files and "snapshots" in folder.parts:
        return Pretrained(name, folder, config)  # a name of the hub of which only the settings are here
    _check_files(folder, files)
    found = {key: value for file in files for key, value in _tensors(file)}
    shapes = {key: shape for key, (shape, _) in found.items()}
    model = Pretrained(name, folder, config, shapes, sum(size for _, size in found.values()))
    _check_shapes(model)
    return model


def _check_config(path: Path, config: Any) -> None:
    """Whether what is read of a config.json can be what it says: the model's type, its sizes, its sections."""
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: holds no object of keys and values; copy the model's folder anew")
    kind = config.get("model_type")
    if not (isinstance(kind, str) and kind):
        found = f"is {kind!r}" if "model_type" in config else "is missing"
        raise _damaged(path, f"model_type {found}", "the name of an architecture, such as qwen2")
    for key in SECTIONS:
        if not isinstance(config.get(key), dict | None):
            raise _damaged(path, f"{key} is {config[key]!r:.60}", "an object, or null")
    text = config.get("text_config") or {}
    for key, value in ((key, place[key]) for place in (config, text) for key in SIZES if key in place):
        whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not whole and value is not None and not (isinstance(value, list) and key in PER_LAYER):
            raise _damaged(path, f"{key} is {value!r:.60}", "a whole number above 0")
    missing = [key for key in NEEDED if kind in DECODERS and config.get(key) is None and not text]
    if missing:
        raise _damaged(path, f"{missing[0]} is missing", f"a whole number above 0 in a model of type {kind}")


def _damaged(path: Path, found: str, rule: str) -> ConfigError:
    return ConfigError(f"{path}: {found}; it must be {rule}: copy the model's folder anew")


def check_type(model: Pretrained) -> None:
    """Raises ConfigError for a model whose type the installed transformers does not know, by its tables as text.

    To import them would import torch.
    """
    kind = model.config.get("model_type")
    spec = importlib.util.find_spec("transformers")
    tables = [
        table.read_text(encoding="utf-8")
        for place in (spec.submodule_search_locations or () if spec else ())
        for table in (Path(place, "models", "auto", name) for name in TYPE_TABLES)
        if table.is_file()
    ]
    if kind is not None and tables and not any(f'"{kind}"' in table for table in tables):
        raise ConfigError(
            f"{(model.folder or Path(model.name)) / 'config.json'}: model_type is {kind!r}, which transformers"
            f" {importlib.metadata.version('transformers')} does not know; correct it, or take another model"
        )


def _check_readable(files: list[Path]) -> None:
    """Raises ConfigError for a file that is there and closed to this user, which is no damage."""
    for file in files:
        try:
            file.open("rb").close()
        except PermissionError:
            raise ConfigError(
                f"{file}: this user may not read it (mode {stat.S_IMODE(file.stat().st_mode):o}, of user"
                f" {file.stat().st_uid}); have its owner run chmod a+r on it, or name another model"
            ) from None


def _check_files(folder: Path, files: list[Path]) -> None:
    if not files:
        raise ConfigError(f"model_name_or_path {folder}: the folder holds no *.safetensors file")
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: {error!r}; copy the model's folder anew") from None
    missing = sorted(named - {file.name for file in files})
    if missing:
        raise ConfigError(
            f"model_name_or_path {folder}: {len(missing)} files of its index are missing, such as {missing[0]}; copy"
            " the model's folder anew"
        )


def _tensors(file: Path) -> Iterator[tuple[str, tuple[Shape, int]]]:
    """(name, (shape, bytes)) by the header alone; its library has compared it with the file's size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            for key in opened.keys():  # noqa: SIM118 - no mapping
                part = opened.get_slice(key)
                shape = tuple(part.get_shape())
                yield key, (shape, math.prod(shape) * ITEM_BYTES.get(part.get_dtype(), 1))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: damaged ({error}); copy the model's folder anew") from None


def _check_shapes(model: Pretrained) -> None:
    """Weights against config.json: vocabulary, width, heads and the number of layers."""
    if "quantization_config" in model.config:
        return
    vocabulary, layers = (
        _number(model.config, "vocab_size"),
        _number(model.config, "num_hidden_layers", "n_layer"),
    )
    table = (vocabulary, model.hidden)
    expected = {"embed_tokens.weight": table, "lm_head.weight": table, "wte.weight": table}
    if model.head_dim and model.heads and model.kv_heads:
        expected["q_proj.weight"] = (model.heads * model.head_dim, model.hidden)
        expected["k_proj.weight"] = (model.kv_heads * model.head_dim, model.hidden)
    for name, shape in model.shapes.items():
        wanted = next((w for end, w in expected.items() if name.endswith(end)), None)
        if wanted and None not in wanted and wanted != shape and not _extra_outputs(name, shape, wanted):
            raise ConfigError(
                f"model_name_or_path {model.name}: {name} is {_by(shape)}, but by config.json it is {_by(wanted)};"
                " config.json and weights are of different models: copy the model's folder anew"
            )
    found = {int(m[1]) for name in model.shapes if (m := re.search(r"(?:^|\.)(?:layers|h)\.(\d+)\.", name))}
    if layers and found and found != set(range(layers)):
        raise ConfigError(
            f"model_name_or_path {model.name}: weights of {len(found)} layers, but config.json says {layers}; copy the"
            " model's folder anew"
        )


def _extra_outputs(name: str, shape: Shape, wanted: tuple[int | None, ...]) -> bool:
    """A query projection that also makes a gate (Qwen3-Next and its kin) is a multiple as tall."""
    return name.endswith("q_proj.weight") and shape[1:] == wanted[1:] and shape[0] == 2 * (wanted[0] or 0)


def _by(shape: tuple[int | None, ...]) -> str:
    return " x ".join(map(str, shape))


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    nested = config.get("text_config")
    for place in (config, nested if isinstance(nested, Mapping) else {}):
        for name in names:
            if isinstance(place.get(name), int) and place[name] > 0:
                return int(place[name])
    return None


def hub_offline(setup: tuple[str, ...] = ()) -> bool:
    """Whether the hub is out of bounds: by HF_HUB_OFFLINE here, or set in the job's own lines."""
    on = r"(?:1|true|yes|on)\b"
    here = os.environ.get("HF_HUB_OFFLINE", "")
    return bool(re.match(on, here, re.I)) or any(
        re.search(rf"\bHF_HUB_OFFLINE=[\"']?{on}", line, re.I) for line in setup
    )
