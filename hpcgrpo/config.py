"""A run, as its YAML file describes it, and every check of it that needs neither torch nor a GPU."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcgrpo import rewards
from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.algorithms.schema import layers
from hpcgrpo.arithmetic import arithmetic, updates_behind
from hpcgrpo.config_file import ConfigError, expand, override, read, read_tree, section_of, without_resets
from hpcgrpo.sections import ClusterConfig, GenerationConfig, RunConfig, TrainConfig

__all__ = ["ConfigError", "load", "parse", "read_tree", "to_yaml"]

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
    "async_level": "generation.async_steps (0 or 1)",
    "max_async_level": "generation.async_steps (0 or 1)",
    "extends": "a key of files alone, at their top level",
}


def load(path: str | Path | None, overrides: Sequence[str] = (), *, text: str | None = None) -> RunConfig:
    """Read a YAML file with what it `extends`, and apply `key.sub=value` overrides; environment variables are expanded.

    `text` is read in the file's place. Raises ConfigError for anything a user can mend, with the file and key.
    """
    tree = override(read(path, text), overrides)
    if "axes" in tree.values and "model_name_or_path" not in tree.values:
        raise ConfigError(f"{path}: describes a study (it has axes), not a run: use hpcgrpo study")
    return _checked(tree.values, tree.source)


def to_yaml(config: RunConfig) -> str:
    """A resolved configuration as YAML that loads to the same run."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(config.model_dump(mode="json"))


def parse(values: Any, *, source: str = "configuration") -> RunConfig:
    """A RunConfig from plain values; algorithm and rewards are built once to check them."""
    return _checked(values, lambda keys: source)


def _checked(values: Any, where: Callable[[Sequence[str]], str]) -> RunConfig:
    """`where` names the file that has a key."""
    try:
        config = RunConfig.model_validate(expand(without_resets(values)))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(where, e) for e in error.errors())) from None
    try:
        algorithm = config.build_algorithm()
    except ValueError as error:
        raise ConfigError(f"{where(['algorithm'])}: algorithm: {error}") from None
    try:
        rewards.build(
            config.rewards, max_completion_length=config.generation.max_completion_length, num_processes=1
        )
    except ValueError as error:
        raise ConfigError(f"{where(['rewards'])}: rewards: {str(error).removeprefix('rewards: ')}") from None
    try:
        _check_schedule(config.train)
        _check_nodes(config.cluster, config.generation)
        _check_gpus(config.cluster, config.generation)
        _check_peer(config, algorithm)
        _check_peer_gpus(config)
        _check_ahead(config.generation, algorithm, arithmetic(config, algorithm, rows=None).updates_per_step)
    except ValueError as error:
        raise ConfigError(f"{where([])}: {error}") from None
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


def _check_ahead(generation: GenerationConfig, algorithm: Algorithm, updates: int) -> None:
    """Whether what is sampled ahead can be, and its weights are corrected for."""
    behind, most = updates_behind(generation, algorithm, updates), generation.max_staleness
    option = (
        "async_steps: 1" if generation.async_steps else "drafts_ahead: true with the algorithm's train_drafts"
    )
    if generation.async_steps and generation.drafts_ahead:
        raise ValueError("generation: async_steps samples the drafts ahead as well; leave drafts_ahead out")
    if generation.drafts_ahead and not algorithm.num_drafts:
        raise ValueError(
            f"generation.drafts_ahead: true, but algorithm {algorithm.name} has no drafts; leave it out, or set"
            " generation.async_steps: 1"
        )
    if most is not None and most < behind:
        raise ValueError(
            f"generation.max_staleness: {most}, but with {option} the sampling weights are {behind} optimizer"
            f" steps old; set max_staleness: {behind} or leave it out"
        )
    corrections = [x.get("importance_sampling_correction", "none") for x in layers(algorithm.options)]
    if behind and set(corrections) == {"none"}:
        raise ValueError(
            f"generation.{option} trains on completions of older weights, which importance weights must correct; set"
            " the algorithm's importance_sampling_correction (token_truncate is its default), or leave the option out"
        )


def _check_peer(config: RunConfig, algorithm: Algorithm) -> None:
    """Whether there is a second policy where the algorithm has one, and none where it has not."""
    if algorithm.needs_peer and config.peer is None:
        what = "trains two policies" if algorithm.peer else "learns from a teacher"
        raise ValueError(
            f"peer: missing, but algorithm {algorithm.name} {what}; set peer.model_name_or_path to the other one"
            " (model_name_or_path at the top is the one that samples)"
        )
    if config.peer is not None and not algorithm.needs_peer:
        raise ValueError(
            f"peer: {config.peer.model_name_or_path}, but algorithm {algorithm.name} has no second policy; leave peer"
            " out, or use codistill, kdrl or opd"
        )
    if config.peer is None and config.eval is not None and config.eval.peer:
        raise ValueError(
            f"eval.peer: true, but algorithm {algorithm.name} has no second policy; leave it out"
        )
    if config.peer is not None and config.peer.learning_rate is not None and algorithm.peer is None:
        raise ValueError(
            f"peer.learning_rate: {config.peer.learning_rate}, but the teacher of {algorithm.name} does not train;"
            " leave it out"
        )
    if algorithm.peer is not None and config.train.learner != "fsdp":
        raise ValueError(
            f"train.learner: {config.train.learner} trains one policy; for algorithm {algorithm.name} use fsdp"
        )
    longest = config.generation.max_completion_length
    if algorithm.hint_tokens >= longest:
        raise ValueError(
            f"algorithm.hint_tokens {algorithm.hint_tokens}: the actor would write nothing of a completion of"
            f" generation.max_completion_length {longest} tokens; lower hint_tokens"
        )


def _check_peer_gpus(config: RunConfig) -> None:
    """How a serve node's GPUs are shared out between the engines of two policies."""
    gpus, theirs, split = (
        config.cluster.gpus_per_node,
        config.peer_gpus,
        config.generation.vllm_tensor_parallel_size,
    )
    if config.generation.backend != "vllm" or not theirs:
        return
    left = gpus - theirs
    if left < split or left % split:
        raise ValueError(
            f"peer.vllm_engines: the peer's engines take {theirs} of a serve node's {gpus} GPUs, which leaves {left}"
            f" for the actor's engines of {split} (generation.vllm_tensor_parallel_size); lower peer.vllm_engines or"
            " peer.vllm_tensor_parallel_size so that these fit"
        )


def _explain(where: Callable[[Sequence[str]], str], error: Any) -> str:
    keys = [str(p) for p in error["loc"]]
    key, source = ".".join(keys), where(keys)
    if error["type"] == "extra_forbidden":
        return f"{source}: {key}: unknown key{_hint(keys)}"
    if error["type"] == "missing":
        return f"{source}: {key}: required, but missing"
    if error["type"] in ("model_type", "dict_type"):
        like = "model_name_or_path" if key == "peer" else "name"
        return f"{source}: {key}: must be a mapping, such as {{{like}: ...}} (given: {error['input']!r})"
    if error["type"] in ("tuple_type", "list_type"):
        return f"{source}: {key}: must be a list, such as [a, b] (given: {error['input']!r})"
    message = error["msg"].removeprefix("Value error, ")
    given = error.get("input")
    shown = (
        "" if isinstance(given, (Mapping, list)) or error["type"] == "value_error" else f" (given: {given!r})"
    )
    return f"{source}: {key}: {message}{shown}"


def _hint(where: Sequence[str]) -> str:
    section: Any = RunConfig
    for part in where[:-1]:
        section = section_of(section, part)
    names = list(section.model_fields) if section else []
    if where[-1] in ALIASES:
        return f"; here it is {ALIASES[where[-1]]}"
    near = _near(where[-1], names)
    if near:
        return near
    homes = [
        f"{n}.{where[-1]}" for n in RunConfig.model_fields if where[-1] in _fields(section_of(RunConfig, n))
    ]
    if homes:
        return f"; did you mean {homes[0]}?"
    return f"; known keys here: {', '.join(names)}"


def _near(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""


def _fields(section: Any) -> Mapping[str, Any]:
    return section.model_fields if section else {}
