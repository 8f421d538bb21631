"""What is evaluated: a model's folder, a checkpoint, a run's newest checkpoint, or a name on the hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgrpo import checkpoint_folder, config, pretrained, tokenizer
from hpcgrpo.config_file import ConfigError
from hpcgrpo.launch.local import CONFIG_FILE
from hpcgrpo.sections import RunConfig

EDGE_BYTES = 2**16  # of each end of a weights file, that its fingerprint reads


@dataclass(frozen=True)
class Source:
    """A model that may be there yet or not (a run that has only been submitted)."""

    text: str  # as the user named it
    name: str  # for tables and default folders
    model: str | None  # a folder or a name on the hub; None: no checkpoint yet
    step: int | None = None  # of a checkpoint
    run: RunConfig | None = None  # of which it is a checkpoint

    @property
    def folder(self) -> Path:
        """Where its results go unless said."""
        return self.run.folder / "eval" if self.run is not None else Path("logs") / "eval" / self.name


def find(text: str, *, checkpoint: str | None = None) -> Source:
    """A run's folder or YAML file (its newest complete checkpoint, or that of step `checkpoint`), a checkpoint's or
    model's folder, or a name on the hub. Raises ConfigError for what is none of these."""
    path = Path(text).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return _of_run(text, config.load(path), checkpoint)
    if (path / CONFIG_FILE).is_file() and not (path / "config.json").exists():
        return _of_run(text, _moved(config.load(path / CONFIG_FILE), path), checkpoint)
    if checkpoint is not None:
        raise ConfigError(f"--checkpoint {checkpoint}: {text} is no run; name the run's folder")
    if path.is_dir() and (path / "config.json").exists():
        return _of_folder(text, path)
    if path.is_dir():
        raise ConfigError(
            f"{text}: neither a run ({CONFIG_FILE}) nor a model (config.json) is in this folder; give a run's folder,"
            " a checkpoint or a model"
        )
    if path.exists() or path.is_absolute() or text.startswith(("./", "../", "logs/")):
        raise ConfigError(
            f"{text}: no such run or model; give a folder, a run's YAML file or a name on the hub"
        )
    return Source(text, text.rstrip("/").rpartition("/")[2], text)


def of_run(run: RunConfig) -> Source:
    """A run by its configuration, which may not have been started yet."""
    return _of_run(str(run.folder), run, None)


def _moved(run: RunConfig, folder: Path) -> RunConfig:
    """The run as it lies there, wherever it was made."""
    return run.model_copy(update={"output_dir": str(folder.parent), "name": folder.resolve().name})


def _of_run(text: str, run: RunConfig, checkpoint: str | None) -> Source:
    whole = checkpoint_folder.complete(run.folder / "checkpoints")
    if checkpoint is None:
        found = next(iter(whole), None)
        if found is None:
            return Source(text, run.name, None, None, run)
    else:
        number = checkpoint.rpartition("-")[2]
        found = next((p for p in whole if str(checkpoint_folder.step_of(p)) == number), None)
        if found is None:
            steps = ", ".join(str(checkpoint_folder.step_of(p)) for p in reversed(whole)) or "none"
            raise ConfigError(
                f"--checkpoint {checkpoint}: {run.folder} has no such checkpoint (complete: {steps})"
            )
    return Source(text, run.name, str(found), checkpoint_folder.step_of(found), run)


def _of_folder(text: str, path: Path) -> Source:
    place = path.resolve()
    kept = place.parent if place.name == "model" and place.parent.parent.name == "eval" else None
    step = checkpoint_folder.step_of(kept or place)
    home = place.parent.parent if kept is None else kept.parent.parent
    if (
        kept is not None and (home / CONFIG_FILE).is_file()
    ):  # of a checkpoint that training may have removed since
        run = _moved(config.load(home / CONFIG_FILE), home)
        return Source(text, run.name, str(path), step, run)
    if place.parent.name != "checkpoints" or not (home / CONFIG_FILE).is_file():
        return Source(text, place.name, str(path))
    if not checkpoint_folder.is_complete(place):
        raise ConfigError(f"{text}: this checkpoint is not complete; take another one of {place.parent}")
    run = _moved(config.load(home / CONFIG_FILE), home)
    return Source(text, run.name, str(path), step, run)


def fingerprint(model: pretrained.Pretrained) -> str | None:
    """Of the weights: names, sizes and both ends of every file; None for what is not on this disk."""
    if model.folder is None:
        return None
    digest = hashlib.sha256()
    for file in sorted(model.folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        for edge in _edges(file):
            digest.update(edge)
    return digest.hexdigest()[:16]


def _edges(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        yield opened.read(EDGE_BYTES)
        opened.seek(max(0, file.stat().st_size - EDGE_BYTES))
        yield opened.read(EDGE_BYTES)


def read_tokenizer(model: pretrained.Pretrained) -> Any:
    """The model's tokenizer, without transformers where that reads it alike."""
    found = tokenizer.read(model.folder, name=model.name) if model.folder is not None else None
    if found is not None:
        return found
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.name)
    except OSError as error:
        raise ConfigError(
            f"{model.name}: neither a folder here nor a model that the hub gave ({' '.join(str(error).split())[:200]})"
        ) from None


def end_ids(model: pretrained.Pretrained, reader: Any) -> list[int]:
    """What ends a completion: the generation configuration's ids, else the model's, else the tokenizer's."""
    for file in ("generation_config.json", "config.json"):
        path = (model.folder or Path("/nonexistent")) / file
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if found is not None:
                return [found] if isinstance(found, int) else list(found)
    named = reader.special_tokens_map.get("eos_token")
    ends = _ids_of(reader, [named]) if named else []
    if not ends:
        raise ConfigError(
            f"{model.name}: nothing says what ends a completion; set eos_token_id in its generation_config.json"
        )
    return ends


def _ids_of(reader: Any, tokens: Sequence[str]) -> list[int]:
    return [ids[0] for ids in reader(tokens, add_special_tokens=False)["input_ids"] if len(ids) == 1]
