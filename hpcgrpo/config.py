"""A run, as its YAML file describes it, and every check of it that needs neither torch nor a GPU."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hpcgrpo import algorithms, rewards
from hpcgrpo.algorithms.base import Algorithm

Spec = Mapping[str, Any]

# Names of other systems -> where the same thing stands here.
ALIASES = {
    "num_generations": "algorithm.num_generations (inside base: of a wrapper)",
    "beta": "algorithm.beta",
    "epsilon": "algorithm.epsilon",
    "epsilon_high": "algorithm.epsilon_high",
    "clip_ratio_low": "algorithm.epsilon",
    "clip_ratio_high": "algorithm.epsilon_high",
    "kl_loss_coef": "algorithm.beta",
    "loss_type": "algorithm.loss_agg",
    "reward_funcs": "rewards",
    "reward_weights": "rewards (a mapping of names to weights)",
    "output_dir": "output_dir and name at the top level (the run's folder is output_dir/name)",
    "run_name": "name",
    "use_vllm": "generation.backend: vllm",
    "max_response_length": "generation.max_completion_length",
    "max_completion_length": "generation.max_completion_length",
    "max_prompt_length": "generation.max_prompt_length",
    "temperature": "generation.temperature",
    "ppo_max_token_len_per_gpu": "train.max_tokens_per_device",
    "max_tokens_per_gpu": "train.max_tokens_per_device",
    "ppo_epochs": "train.num_iterations",
    "rollout_batch_size": "train.generation_batch_size",
    "learning_rate": "train.learning_rate",
    "max_steps": "train.max_steps",
    "seed": "seed at the top level",
    "dataset_name": "data.name",
    "dataset_path": "data.path",
    "eval_steps": "eval.every_steps",
}


class ConfigError(ValueError):
    """A configuration a user can mend: names the key, the value, the rule and the way out."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class DataConfig(_Section):
    """Where the questions come from. One of `preset`, `path`, `name`, or `preset` with `path`."""

    preset: str | None = None  # gsm8k, math, acereason_math, openr1_math_220k, or a generated task
    path: str | None = None  # a JSONL file or a folder saved by `datasets`
    name: str | None = None  # a data set's name on the hub (offline: in the cache)
    config_name: str | None = None
    split: str = "train"
    prompt_column: str | None = None
    answer_column: str | None = None
    max_samples: int | None = Field(None, ge=1)
    options: dict[str, Any] = {}  # of a generated task: digits, size, ...
    system_prompt: str | None = None  # a name (r1, igrpo, cppo_gsm8k, cppo_math) or the text itself
    chat_template: str | None = None  # a Jinja template or the path of one, for models without
    shuffle: bool = True
    seed: int = 0  # of generated tasks and of the subset that max_samples draws
    skip_unanswered: bool = False  # leave rows without a usable answer out instead of refusing them

    def rows(self) -> dict[str, Any]:
        """The keywords of `tasks.load_rows`."""
        named = self.model_dump(exclude={"options", "system_prompt", "chat_template", "shuffle"})
        return {**named, **self.options}


class GenerationConfig(_Section):
    """How the policy is sampled."""

    backend: Literal["transformers", "vllm"] = "transformers"
    temperature: float = Field(1.0, gt=0)
    top_p: float = 1.0
    top_k: int = 0
    max_prompt_length: int = Field(512, ge=1)  # tokens; longer prompts are left out and counted
    max_completion_length: int = Field(512, ge=1)  # tokens
    max_batch_tokens: int | None = Field(None, ge=1)  # in-process: tokens of key-value cache at once
    vllm_gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    vllm_tensor_parallel_size: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _whole_distribution(self) -> GenerationConfig:
        if self.top_p != 1.0 or self.top_k not in (0, -1):
            raise ValueError(
                f"top_p {self.top_p}, top_k {self.top_k}: training samples from the whole distribution, since the"
                " learner's log-probs are over it; leave top_p at 1.0 and top_k at 0"
            )
        return self


class TrainConfig(_Section):
    """The learner. One step samples `generation_batch_size` completions and trains on them."""

    per_device_train_batch_size: int | None = Field(None, ge=1)  # completions (not prompts) per rank and pass
    gradient_accumulation_steps: int = Field(1, ge=1)
    train_batch_size: int | None = Field(None, ge=1)  # completions per optimizer step over all ranks
    generation_batch_size: int | None = Field(None, ge=1)  # completions per step over all ranks
    steps_per_generation: int | None = Field(None, ge=1)  # the same in passes (TRL)
    num_iterations: int = Field(1, ge=1)  # passes over what a step sampled (mu)
    max_tokens_per_device: int | None = Field(None, ge=1)  # tokens of a packed micro-batch
    learning_rate: float = Field(1e-6, gt=0)
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] = {}
    min_lr_rate: float | None = Field(None, ge=0, le=1)  # of cosine_with_min_lr
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    warmup_steps: int | None = Field(None, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    max_steps: int | None = Field(None, ge=1)  # steps (sample, learn, sync); overrides num_train_epochs
    num_train_epochs: float = Field(1.0, gt=0)
    bf16: bool | None = None  # compute in bfloat16 over float32 masters; None: on a GPU only
    gradient_checkpointing: bool | None = None  # None: on a GPU only
    attn_implementation: Literal["packed", "sdpa", "eager", "flash_attention_2"] = "packed"
    save_steps: int = Field(50, ge=1)
    save_total_limit: int | None = Field(2, ge=1)
    async_save: bool | None = None  # write checkpoints while training goes on; None: on a GPU only
    logprob_chunk_bytes: int = Field(2**26, ge=2**16)  # float32 logits held at once


class EvalConfig(_Section):
    """Held-out questions answered every so often, greedy, alone and after a draft of the policy's own."""

    data: DataConfig
    every_steps: int | None = Field(None, ge=1)  # None: before the first step and after the last only
    num_samples: int = Field(256, ge=1)
    temperature: float = Field(0.0, ge=0)
    two_pass: bool = False
    refine_template: str | None = None  # None: iGRPO's own, else its default


class ClusterConfig(_Section):
    """Where it runs. On one machine: `nproc_per_node` learner ranks under torchrun."""

    nodes: int = Field(1, ge=1)
    vllm_nodes: int = Field(0, ge=0)
    gpus_per_node: int = Field(0, ge=0)
    nproc_per_node: int | None = Field(None, ge=1)  # None: gpus_per_node, or 1
    threads_per_rank: int | None = Field(None, ge=1)  # None: the machine's cores over its ranks
    timeout_min: int | None = Field(None, ge=1)

    @property
    def ranks(self) -> int:
        return max(1, self.nodes - self.vllm_nodes) * (self.nproc_per_node or self.gpus_per_node or 1)


class RunConfig(_Section):
    """Everything that describes a run; what can be computed from it is in `arithmetic`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model_name_or_path: str
    algorithm: dict[str, Any]
    rewards: dict[str, Any]
    data: DataConfig
    generation: GenerationConfig = GenerationConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig | None = None
    cluster: ClusterConfig = ClusterConfig()
    seed: int = 0
    output_dir: str = "logs"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    log_completions: bool = True
    grader_processes: int | None = Field(None, ge=1)  # a rank; None: the machine's cores over its ranks
    trust_remote_code: Literal[False] = False

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.name

    def build_algorithm(self) -> Algorithm:
        return algorithms.build(self.algorithm)


@dataclass(frozen=True)
class Arithmetic:
    """What follows from a configuration: counts per step and per run."""

    ranks: int
    rows_per_device: int  # per_device_train_batch_size
    train_batch_size: int  # completions trained per optimizer step, all ranks
    generation_batch_size: int  # completions trained per step, all ranks
    prompts_per_step: int
    completions_per_step: int  # sampled, drafts included
    updates_per_step: int  # optimizer steps per step
    steps_per_epoch: int
    max_steps: int
    max_model_length: int  # tokens, the longest prompt and completion together
    max_refine_prompt_length: int | None

    @property
    def total_updates(self) -> int:
        return self.max_steps * self.updates_per_step


def load(path: str | Path | None, overrides: Sequence[str] = (), *, text: str | None = None) -> RunConfig:
    """Read a YAML file and apply `key.sub=value` overrides; environment variables are expanded.

    Raises ConfigError for anything a user can mend, with the file and key.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    source = str(path) if path is not None else "configuration"
    if text is None:
        text = _read(Path(str(path)))
    try:
        tree = OmegaConf.create(text)
        if not OmegaConf.is_dict(tree):
            raise ConfigError(
                f"{source}: holds no mapping of keys to values; start from configs/quickstart.yaml"
            )
        for item in _checked(overrides):
            key = item.partition("=")[0]
            value = OmegaConf.select(OmegaConf.from_dotlist([item]), key)
            OmegaConf.update(tree, key, value, merge=False, force_add=True)  # a mapping replaces, never mixes
        values = OmegaConf.to_container(tree, resolve=True)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())}") from None
    return parse(values, source=source)


def to_yaml(config: RunConfig) -> str:
    """A resolved configuration as YAML that loads to the same run."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(config.model_dump(mode="json"))


def parse(values: Any, *, source: str = "configuration") -> RunConfig:
    """A RunConfig from plain values; algorithm and rewards are built once to check them."""
    try:
        config = RunConfig.model_validate(_expand(values))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(source, e, values) for e in error.errors())) from None
    try:
        algorithm = config.build_algorithm()
    except ValueError as error:
        raise ConfigError(f"{source}: algorithm: {error}") from None
    try:
        rewards.build(
            config.rewards, max_completion_length=config.generation.max_completion_length, num_processes=1
        )
    except ValueError as error:
        raise ConfigError(f"{source}: rewards: {error}") from None
    try:
        _check_schedule(config.train)
        arithmetic(config, algorithm, rows=None)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    return config


def arithmetic(config: RunConfig, algorithm: Algorithm, rows: int | None) -> Arithmetic:
    """The counts that follow; `rows` is the number of usable questions (None: not known yet).

    Raises ValueError for batches that do not divide, naming the nearest ones that do.
    """
    train, ranks, share = (
        config.train,
        config.cluster.ranks,
        algorithm.batch_share or algorithm.num_generations,
    )
    batch, rows_per_device = _train_batch(train, ranks)
    generation = train.generation_batch_size or batch
    if train.steps_per_generation:
        if train.generation_batch_size:
            raise ValueError(
                "train: generation_batch_size and steps_per_generation say the same thing; keep one"
            )
        generation = rows_per_device * ranks * train.steps_per_generation
    _divides("train.generation_batch_size", generation, batch, "train_batch_size")
    _divides("the batch of completions per optimizer step", batch, share, _share_text(algorithm, share))
    prompts = generation // share
    updates = generation // batch * train.num_iterations
    epoch = prompts if rows is None else rows
    if prompts > epoch:
        raise ValueError(
            f"data: {rows} questions, but one step takes {prompts}; give more data or a smaller"
            f" train.train_batch_size (at most {epoch * share})"
        )
    max_steps = train.max_steps or max(1, math.floor(epoch // prompts * train.num_train_epochs))
    refine = _refine_length(config)
    prompt = max(config.generation.max_prompt_length, refine or 0)
    return Arithmetic(
        ranks=ranks,
        rows_per_device=rows_per_device,
        train_batch_size=batch,
        generation_batch_size=generation,
        prompts_per_step=prompts,
        completions_per_step=prompts * (algorithm.num_generations + algorithm.num_drafts),
        updates_per_step=updates,
        steps_per_epoch=epoch // prompts,
        max_steps=max_steps,
        max_model_length=prompt + config.generation.max_completion_length,
        max_refine_prompt_length=refine,
    )


def _train_batch(train: TrainConfig, ranks: int) -> tuple[int, int]:
    """Completions per optimizer step over all ranks, and per rank and pass."""
    passes = ranks * train.gradient_accumulation_steps
    if train.train_batch_size is None:
        rows = train.per_device_train_batch_size or 8
        return rows * passes, rows
    rows = train.per_device_train_batch_size or -(-train.train_batch_size // passes)
    if train.per_device_train_batch_size and rows * passes != train.train_batch_size:
        raise ValueError(
            f"train.train_batch_size {train.train_batch_size} is not per_device_train_batch_size {rows} x"
            f" {ranks} ranks x gradient_accumulation_steps {train.gradient_accumulation_steps} = {rows * passes};"
            " leave one of them out"
        )
    return train.train_batch_size, rows


def _divides(what: str, value: int, by: int, why: str) -> None:
    if value % by:
        near = sorted({max(1, value // by) * by, (value // by + 1) * by})
        raise ValueError(
            f"{what} is {value}, which is no multiple of {by} ({why}); the nearest that are: "
            + " and ".join(map(str, near))
        )


def _share_text(algorithm: Algorithm, share: int) -> str:
    if share == algorithm.num_generations:
        return f"num_generations {share}"
    return f"completions kept of each prompt's {algorithm.num_generations}"


def _refine_length(config: RunConfig) -> int | None:
    """iGRPO's limit for the second prompt in tokens: its option, or question + draft + 64 for the template."""
    spec: Any = config.algorithm
    while isinstance(spec, Mapping):
        if spec.get("name") == "igrpo":
            generation = config.generation
            room = generation.max_prompt_length + generation.max_completion_length + 64
            return spec.get("max_refine_prompt_length") or room
        spec = spec.get("base")
    return None


SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "warmup_stable_decay",
)


def _check_schedule(train: TrainConfig) -> None:
    if train.lr_scheduler_type not in SCHEDULES:
        raise ValueError(
            f"train.lr_scheduler_type: unknown schedule {train.lr_scheduler_type!r}"
            f"{_near(train.lr_scheduler_type, SCHEDULES)}; one of {', '.join(SCHEDULES)}"
        )
    if train.min_lr_rate is not None and train.lr_scheduler_type != "cosine_with_min_lr":
        raise ValueError(
            f"train.min_lr_rate belongs to lr_scheduler_type cosine_with_min_lr, not {train.lr_scheduler_type}"
        )
    if train.warmup_ratio and train.warmup_steps:
        raise ValueError("train: warmup_ratio and warmup_steps say the same thing; keep one")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: no such configuration file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _checked(overrides: Sequence[str]) -> list[str]:
    for item in overrides:
        if not re.match(r"^[A-Za-z_][\w.\-:]*=", item):
            raise ConfigError(f"override {item!r}: write it as key.sub=value, for example train.max_steps=10")
    return list(overrides)


def _expand(value: Any) -> Any:
    """$NAME and ${NAME} in strings, from the environment; an unset one is an error."""
    if isinstance(value, Mapping):
        return {k: _expand(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_expand(v) for v in value]
    if isinstance(value, str) and "$" in value:
        expanded = os.path.expandvars(value)
        unset = re.search(r"\$\{?([A-Z][A-Z0-9_]*)\}?", expanded)
        if unset and unset[1] not in os.environ:
            raise ConfigError(f"{value!r}: the environment variable {unset[1]} is not set")
        return expanded
    return value


def _explain(source: str, error: Any, values: Any) -> str:
    where = [str(p) for p in error["loc"]]
    key = ".".join(where)
    if error["type"] == "extra_forbidden":
        return f"{source}: {key}: unknown key{_hint(where)}"
    if error["type"] == "missing":
        return f"{source}: {key}: required, but missing"
    message = error["msg"].removeprefix("Value error, ")
    given = error.get("input")
    shown = (
        "" if isinstance(given, (Mapping, list)) or error["type"] == "value_error" else f" (given: {given!r})"
    )
    return f"{source}: {key}: {message}{shown}"


def _hint(where: Sequence[str]) -> str:
    section: Any = RunConfig
    for part in where[:-1]:
        section = _section(section, part)
    names = list(section.model_fields) if section else []
    if where[-1] in ALIASES:
        return f"; here it is {ALIASES[where[-1]]}"
    near = _near(where[-1], names)
    if near:
        return near
    homes = [
        f"{n}.{where[-1]}" for n in RunConfig.model_fields if where[-1] in _fields(_section(RunConfig, n))
    ]
    if homes:
        return f"; did you mean {homes[0]}?"
    return f"; known keys here: {', '.join(names)}"


def _near(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""


def _section(parent: Any, name: str) -> Any:
    found = parent.model_fields.get(name) if parent else None
    kinds = [found.annotation, *getattr(found.annotation, "__args__", ())] if found else []
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _fields(section: Any) -> Mapping[str, Any]:
    return section.model_fields if section else {}
