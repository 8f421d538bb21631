"""A run, as its YAML file describes it, and every check of it that needs neither torch nor a GPU."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hpcgrpo import rewards
from hpcgrpo.arithmetic import arithmetic
from hpcgrpo.sections import ClusterConfig, GenerationConfig, RunConfig, TrainConfig

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
        _check_nodes(config.cluster, config.generation)
        _check_gpus(config.cluster, config.generation)
        arithmetic(config, algorithm, rows=None)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    return config


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


def _check_nodes(cluster: ClusterConfig, generation: GenerationConfig) -> None:
    """Who serves and who learns."""
    nodes, serving = cluster.nodes, cluster.vllm_nodes
    if serving >= nodes:
        raise ValueError(
            f"cluster.vllm_nodes is {serving} of cluster.nodes {nodes}: at least one node must learn; set"
            f" cluster.nodes={serving + 1}, or fewer vllm_nodes"
        )
    if generation.backend == "vllm" and not serving:
        raise ValueError(
            f"generation.backend is vllm, but cluster.vllm_nodes is 0: a node must serve; set cluster.vllm_nodes=1 and"
            f" cluster.nodes={max(2, nodes)} or more, or generation.backend=transformers"
        )
    if generation.backend != "vllm" and serving:
        raise ValueError(
            f"cluster.vllm_nodes is {serving}, but generation.backend is {generation.backend}: these nodes would idle;"
            " set generation.backend=vllm, or cluster.vllm_nodes=0"
        )


def _check_gpus(cluster: ClusterConfig, generation: GenerationConfig) -> None:
    """How a node's GPUs are shared out, where their number is given."""
    gpus, ranks, split = cluster.gpus_per_node, cluster.nproc_per_node, generation.vllm_tensor_parallel_size
    if gpus and ranks and ranks > gpus:
        raise ValueError(
            f"cluster.nproc_per_node is {ranks}, but a node has gpus_per_node {gpus}: a rank needs a GPU of its own;"
            " leave nproc_per_node out for one rank a GPU"
        )
    if cluster.slurm_gres and re.match(r"(gres/)?gpu\b", cluster.slurm_gres) and not gpus:
        raise ValueError(
            f"cluster.slurm_gres is {cluster.slurm_gres}, but cluster.gpus_per_node is 0: set it to the number of these"
            " GPUs too, since ranks and servers follow from it (sbatch gets slurm_gres alone)"
        )
    if generation.backend != "vllm":
        return
    if not gpus and split > 1:
        raise ValueError(
            f"generation.vllm_tensor_parallel_size is {split}, but cluster.gpus_per_node is 0: a CPU serves whole"
            " models only; set it to 1"
        )
    if gpus and gpus % split:
        fits = ", ".join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)
        raise ValueError(
            f"generation.vllm_tensor_parallel_size is {split}, which does not divide cluster.gpus_per_node {gpus}:"
            f" {gpus % split} GPUs of each node would idle; use one of {fits}"
        )


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
    if error["type"] in ("model_type", "dict_type"):
        return f"{source}: {key}: must be a mapping, such as {{name: ...}} (given: {error['input']!r})"
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
