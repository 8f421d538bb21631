"""What can be checked and shown of a run before it starts, on a login node."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcgrpo.algorithms.igrpo import template_of
from hpcgrpo.arithmetic import arithmetic
from hpcgrpo.config import ConfigError
from hpcgrpo.sections import RunConfig
from hpcgrpo.tasks import Row, build_prompts, build_renderer, load_rows


def inputs(run: RunConfig) -> list[Row]:
    """The model's folder, its length limit, the training rows and the held-out rows -> the training rows.

    Raises ValueError naming what is missing or wrong; imports neither torch nor transformers.
    """
    limits = model_config(run.model_name_or_path)
    counts = arithmetic(run, run.build_algorithm(), rows=None)
    longest = limits.get("max_position_embeddings")
    if isinstance(longest, int) and counts.max_model_length > longest:
        raise ConfigError(
            f"the longest prompt and completion are {counts.max_model_length} tokens (draft included), but"
            f" {run.model_name_or_path} takes {longest}; lower generation.max_completion_length or max_prompt_length"
        )
    rows = load_rows(**run.data.rows())
    if run.eval is not None:
        load_rows(**run.eval.data.rows())
    arithmetic(run, run.build_algorithm(), rows=len(rows))
    return rows


def model_config(name_or_path: str) -> Mapping[str, Any]:
    """The model's config.json: from its folder, or from the hub's cache; {} where the hub may still be asked."""
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        path = folder / "config.json"
        if not path.exists():
            raise ConfigError(f"model_name_or_path {name_or_path}: the folder holds no config.json")
        check_weights(folder)
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ConfigError(f"{path}: {error}; copy the model's folder anew") from None
    if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1:
        raise ConfigError(f"model_name_or_path {name_or_path}: no such folder")
    cached = _from_cache(name_or_path)
    if cached is None and os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise ConfigError(
            f"model_name_or_path {name_or_path}: no such folder, and not in the hub's cache while HF_HUB_OFFLINE is"
            " set; load it once where there is a network, or give a folder"
        )
    return json.loads(Path(cached).read_text(encoding="utf-8")) if cached else {}


def check_weights(folder: Path) -> None:
    """Whether a model's folder holds safetensors files whose headers and sizes are whole."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model_name_or_path {folder}: the folder holds no *.safetensors file")
    for file in files:
        try:
            safe_open(file, framework="np")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: damaged ({error}); copy the model's folder anew") from None


def _from_cache(name: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        raise ConfigError(f"model_name_or_path {name}: neither a folder nor a name on the hub") from None
    return found if isinstance(found, str) else None


def check(run: RunConfig) -> dict[str, Any]:
    """Everything `hpcgrpo check` shows: the counts, the data, the first prompt of each stage as rendered."""
    from transformers import AutoTokenizer

    rows = inputs(run)
    tokenizer = AutoTokenizer.from_pretrained(run.model_name_or_path)
    renderer = build_renderer(
        tokenizer, system_prompt=run.data.system_prompt, chat_template=run.data.chat_template
    )
    limit = run.generation.max_prompt_length
    prompts = build_prompts(rows, renderer, seed=run.seed, max_prompt_length=limit, shuffle=run.data.shuffle)
    algorithm = run.build_algorithm()
    counts = arithmetic(run, algorithm, len(prompts))
    first = prompts.take(0, 1)[0]
    rendered = {"sample": first.text}
    template = template_of(algorithm.options)
    if template is not None:
        draft = "<think>reasoning of the draft</think><answer>its answer</answer>"
        rendered = {
            "draft": first.text,
            "refinement": renderer.refine(
                first, draft, template=template, max_length=counts.max_refine_prompt_length
            ).text,
        }
    return {
        "name": run.name,
        "algorithm": dict(algorithm.options),
        "counts": asdict(counts) | {"total_updates": counts.total_updates},
        "questions": len(prompts),
        "questions_too_long": prompts.num_too_long,
        "answer_of_first": str(first.columns.get("answer")),
        "prompts": rendered,
    }


def show(report: Mapping[str, Any]) -> None:
    """Print a report of `check` for people."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table("count", "value", title=f"{report['name']}: what follows from the configuration")
    for name, value in report["counts"].items():
        if value is not None:
            table.add_row(name.replace("_", " "), f"{value:,}")
    table.add_row(
        "questions", f"{report['questions']:,} ({report['questions_too_long']:,} too long, left out)"
    )
    console.print(table)
    for stage, text in report["prompts"].items():
        console.print(
            Panel(Text(text), title=f"first prompt: {stage}", subtitle=f"answer {report['answer_of_first']}")
        )


def show_options(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of options per algorithm."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=140)
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        table = Table(title=f"algorithm: {name}", title_justify="left", show_header=True)
        table.add_column("option", no_wrap=True)
        table.add_column("default", no_wrap=True)
        table.add_column("values", max_width=30)
        table.add_column("what it does")
        for row in rows:
            if row["algorithm"] == name:
                table.add_row(row["option"], row["default"], row["type"], row["doc"])
        console.print(table)
