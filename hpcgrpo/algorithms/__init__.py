"""The algorithms by name: `build` makes one of a nested mapping, `describe` lists every option."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.algorithms.codistill import codistill
from hpcgrpo.algorithms.cppo import cppo
from hpcgrpo.algorithms.distill import kdrl, learns_from_one, opd
from hpcgrpo.algorithms.downsample import gfpo, pods
from hpcgrpo.algorithms.grpo import bnpo, dapo, dr_grpo, gmpo, grpo, gspo
from hpcgrpo.algorithms.igrpo import igrpo
from hpcgrpo.algorithms.schema import (
    Builder,
    check_types,
    layers,
    nearest,
    option_types,
    parameters,
    require,
    type_text,
)

__all__ = ["ALGORITHMS", "Algorithm", "OptionRow", "build", "describe"]

ALGORITHMS: dict[str, Builder] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "gmpo": gmpo,
    "bnpo": bnpo,
    "igrpo": igrpo,
    "cppo": cppo,
    "pods": pods,
    "gfpo": gfpo,
    "kdrl": kdrl,
    "opd": opd,
    "codistill": codistill,
}
DEFAULT_BASE = {"name": "grpo"}

# Other systems' names (TRL, verl, OpenRLHF, NeMo-RL, open-instruct, prime-rl, slime, CPPO's code) for our options.
ALIASES = {
    "clip_ratio": "epsilon",
    "clip_ratio_low": "epsilon",
    "clip_ratio_high": "epsilon_high",
    "ratio_clip_max": "epsilon_high",
    "eps_clip": "epsilon",
    "eps_clip_high": "epsilon_high",
    "clip_ratio_c": "delta",
    "kl_loss_coef": "beta",
    "kl_coef": "beta",
    "kl_loss_type": "kl_estimator",
    "n": "num_generations",
    "rollout.n": "num_generations",
    "n_samples_per_prompt": "num_generations",
    "num_generations_per_prompt": "num_generations",
    "num_samples_per_prompt_rollout": "num_generations",
    "group_size": "num_generations",
    "loss_type": "loss_agg",
    "loss_agg_mode": "loss_agg",
    "norm_adv_by_std_in_grpo": "scale_rewards",
    "filter_groups": "zero_variance",
    "dynamic_sampling": "zero_variance",
    "dynamic_filtering": "zero_variance",
    "overlong_filtering": "mask_truncated_completions",
    "max_num_gen_batches": "max_generation_batches",
    "vllm_importance_sampling_correction": "importance_sampling_correction",
    "vllm_importance_sampling_mode": "importance_sampling_correction",
    "vllm_importance_sampling_cap": "importance_sampling_cap",
    "vllm_importance_sampling_clip_max": "importance_sampling_cap",
    "num_drafts": "drafts",
    "n_drafts": "drafts",
    "pruning": "pruning_rate",
    "metric": "prune_metric",
    "scope": "prune_scope",
    "num_remains_in_group": "num_train",
    "opd_kl_coef": "kd_coef",
    "alpha": "kd_alpha",
    "hint_length": "hint_tokens",
}
# What some of our algorithms call by another of our names.
ALSO = {"num_generations": "num_rollouts", "kl_estimator": "kd_estimator", "prune_metric": "metric"}
LOSS_AGG_NAMES = {
    "grpo": "seq_mean_token_mean",
    "dapo": "token_mean",
    "bnpo": "token_mean_local",
    "dr_grpo": "const_len",
    "token-mean": "token_mean",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-sum-norm": "const_len",
}
# Options that belong to another section of the run's YAML.
ELSEWHERE = {
    "temperature": "generation",
    "max_prompt_length": "generation",
    "max_completion_length": "generation",
    "learning_rate": "train",
    "num_iterations": "train",
    "per_device_train_batch_size": "train",
    "reward_weights": "rewards",
}


class OptionRow(NamedTuple):
    """One option of one algorithm, as text."""

    algorithm: str
    option: str
    type: str
    default: str  # "required" where there is none
    doc: str


def build(spec: Mapping[str, Any], *, where: str = "") -> Algorithm:
    """The algorithm of a nested specification: {"name": "igrpo", "drafts": 4, "base": {"name": "grpo", ...}}.

    A wrapper without `base` wraps grpo. `build(algorithm.options)` gives the same algorithm again. `where`
    is the key path that messages begin with, such as "policies.small.". Raises ValueError for an unknown
    algorithm or option (with the nearest name, or ours for another system's), a wrong type, or a value that
    its rule does not allow.
    """
    algorithm = _built(spec, where)
    for depth, layer in enumerate(layers(algorithm.options)):
        place, num = where + "base." * depth, layer.get("num_generations", 2)
        rule = "a group needs at least 2 completions to compare; one is enough for opd with advantage_coef 0 alone"
        require(num >= 2 or learns_from_one(algorithm), f"{place}num_generations", num, rule)
    return algorithm


def _built(spec: Mapping[str, Any], where: str) -> Algorithm:
    """The algorithm of a specification, whatever stands around it."""
    builder, name = _builder(spec, where), spec.get("name")
    given = {key: value for key, value in spec.items() if key != "name"}
    known = option_types(builder)
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"{where}{key}: {_unknown_option(str(name), str(key), value)}")
    if "base" in known:
        given["base"] = _built(given.get("base", DEFAULT_BASE), f"{where}base.")
    missing = [key for key, p in parameters(builder).items() if p.default is p.empty and key not in given]
    if missing:
        raise ValueError(f"{where}{missing[0]} is missing: {name} needs it ({_docs(builder)[missing[0]]})")
    try:
        check_types(builder, given)
        algorithm: Algorithm = builder(**given)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None
    return algorithm


def describe() -> list[OptionRow]:
    """Every option of every algorithm, from the signatures and docstrings."""
    return [
        OptionRow(name, key, type_text(annotation), _default(builder, key), _docs(builder).get(key, ""))
        for name, builder in ALGORITHMS.items()
        for key, annotation in option_types(builder).items()
    ]


def _builder(spec: Mapping[str, Any], where: str) -> Builder:
    if not isinstance(spec, Mapping):
        place = where.rstrip(".") or "algorithm"
        raise ValueError(f"{place}={spec!r} must be a mapping with a name, such as {{name: grpo}}")
    name = spec.get("name")
    if not isinstance(name, str) or name not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        hint = nearest(str(name).lower(), ALGORITHMS)
        raise ValueError(f"{where}name={name!r} is not an algorithm{hint}; known are {known}")
    return ALGORITHMS[name]


def _unknown_option(algorithm: str, key: str, value: Any) -> str:
    """Why `algorithm` has no option `key`, and what to write instead."""
    ours, options = ALIASES.get(key, key), option_types(ALGORITHMS[algorithm])
    ours = ours if ours in options or ALSO.get(ours) not in options else ALSO[ours]
    if key in ELSEWHERE:
        return f"this belongs under {ELSEWHERE[key]}:, not under the algorithm"
    if ours in options:
        return f"our name for this is {ours}{_translated(ours, value)}"
    owners = [name for name, builder in ALGORITHMS.items() if ours in option_types(builder)]
    if owners and "base" in options:
        return f"{algorithm} has no option {ours}; it is one of {', '.join(owners)}: write it under base:"
    if owners:
        return f"{algorithm} has no option {ours}; it is one of {', '.join(owners)}"
    return f"{algorithm} has no such option{nearest(key, options)}; it has {', '.join(options)}"


def _translated(ours: str, value: Any) -> str:
    if ours == "loss_agg" and str(value) in LOSS_AGG_NAMES:
        return f", and for {value!r} write {ours}: {LOSS_AGG_NAMES[str(value)]}"
    return ""


def _default(builder: Builder, key: str) -> str:
    default = parameters(builder)[key].default
    if default is inspect.Parameter.empty:
        return "grpo" if key == "base" else "required"
    return "null" if default is None else repr(default) if _quoted(default) else str(default)


def _quoted(default: Any) -> bool:
    return isinstance(default, str) and not default.isidentifier()


def _docs(builder: Builder) -> dict[str, str]:
    """The 'option: text' lines of a builder's docstring; those it shares with grpo are written there."""
    own = dict(re.findall(r"^ {8}(\w+): (.+)$", builder.__doc__ or "", flags=re.MULTILINE))
    return own if builder is grpo else {**_docs(grpo), **own}
