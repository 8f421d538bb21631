"""What is to be measured and how: the keys of an evaluation's YAML file, and of `key=value` on the command line."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from hpcgrpo.config_file import ConfigError, expand
from hpcgrpo.sections import ClusterConfig, Section

TEXTS = ("system_prompt", "prompt_template", "chat_template")  # keys whose value is never read as YAML
PATHS = ("benchmarks", "data_dir", "chat_template")  # keys in which environment variables are expanded


class EvaluationConfig(Section):
    """An evaluation. A sampling key that is null is the preset's, or without a preset the benchmark's own."""

    benchmarks: tuple[str, ...] = Field(min_length=1)  # names, or NAME=FILE.jsonl of your own
    preset: str | None = None  # a paper's protocol: igrpo, cppo, codistill
    data_dir: str | None = None  # where the benchmarks' JSONL files lie; null: names of the hub
    max_problems: int | None = Field(None, ge=1)  # a random subset, by seed
    num_samples: int | None = Field(None, ge=1)  # completions of each problem
    temperature: float | None = Field(None, ge=0)  # 0 is greedy
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)  # 0: all
    max_completion_length: int | None = Field(None, ge=1)  # tokens
    seed: int = 0
    system_prompt: str | None = None  # a name or the text; null: the run's own, else none
    prompt_template: str | None = None  # text with {problem}; null: the benchmark's
    chat_template: str | None = None  # a Jinja template or its file, for models without
    require_box_or_tag: bool | None = (
        None  # false: else the last number of the text; null: the benchmark's rule
    )
    backend: Literal["vllm", "transformers"] = "vllm"  # transformers: in this process
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # auto: bfloat16, on a CPU float32
    max_batch_tokens: int | None = Field(None, ge=1)  # in-process: tokens of key-value cache at once
    engines: int | None = Field(None, ge=1)  # null: the GPUs over vllm_tensor_parallel_size, on a CPU 1
    vllm_tensor_parallel_size: int = Field(1, ge=1)
    vllm_gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    vllm_kv_cache_memory_bytes: int | None = Field(None, ge=1)
    vllm_enforce_eager: bool | None = None  # null: on a CPU only
    vllm_extra_args: tuple[str, ...] = ()
    vllm_server_timeout: float = Field(900.0, gt=0)  # seconds for an engine to come up
    vllm_request_timeout: float = Field(14400.0, gt=0)  # seconds for one completion
    vllm_max_concurrency: int = Field(256, ge=1)  # requests in flight at once
    grader_processes: int | None = Field(None, ge=1)  # null: the machine's cores, at most 8
    shards: dict[str, int] = Field({})  # benchmark -> elements of the Slurm array that share its problems
    cluster: ClusterConfig = ClusterConfig()  # of one element of the array: one node


def load(path: str | Path | None, overrides: Sequence[str] = (), **given: Any) -> EvaluationConfig:
    """A YAML file, `key=value` on top, then `given` (those that are not None). Raises ConfigError."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    source = str(path or "evaluation")
    wrong = [item for item in overrides if "=" not in item]
    if wrong:
        raise ConfigError(f"{wrong[0]!r}: overrides have the form key=value, e.g. num_samples=8")
    texts = {key: text for key, _, text in (item.partition("=") for item in overrides) if key in TEXTS}
    plain = [item for item in overrides if item.partition("=")[0] not in TEXTS]
    try:
        merged = OmegaConf.load(path) if path else OmegaConf.create({})
        if not OmegaConf.is_dict(merged):
            raise ValueError("holds no mapping of keys to values; start from configs/eval/igrpo.yaml")
        values: Any = OmegaConf.to_container(
            OmegaConf.merge(merged, OmegaConf.from_dotlist(plain)), resolve=True
        )
    except OSError as error:  # of omegaconf's own too, for a file that holds one number
        raise ConfigError(f"{source}: cannot be read: {error.strerror or error}") from None
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())}") from None
    return parse({**values, **texts, **{k: v for k, v in given.items() if v is not None}}, source=source)


def parse(values: Mapping[str, Any], *, source: str = "evaluation") -> EvaluationConfig:
    """An EvaluationConfig from plain values. Raises ConfigError naming the key."""
    named = values.get("benchmarks")
    if isinstance(named, str):
        values = {**values, "benchmarks": [name.strip() for name in named.split(",") if name.strip()]}
    try:
        in_paths = {k: expand(v) if k in PATHS else v for k, v in values.items()}  # a prompt may hold $x$
        return EvaluationConfig.model_validate(in_paths)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(source, e) for e in error.errors())) from None


def _explain(source: str, error: Any) -> str:
    keys = [str(p) for p in error["loc"]]
    key = ".".join(keys)
    if error["type"] == "extra_forbidden":
        section = ClusterConfig if keys[0] == "cluster" else EvaluationConfig
        near = difflib.get_close_matches(keys[-1], section.model_fields, 1, 0.6)
        hint = f"; did you mean {near[0]}?" if near else f"; known keys: {', '.join(section.model_fields)}"
        return f"{source}: {key}: unknown key{hint}"
    if error["type"] == "missing":
        return f"{source}: {key}: required, but missing, e.g. benchmarks=gsm8k,math500"
    return f"{source}: {key}: {error['msg'].removeprefix('Value error, ')} (given: {error['input']!r})"
