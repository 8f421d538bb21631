"""The run's models before any is loaded: their limits, what serves them, and the two tokenizers of two policies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcgrpo import pretrained, served
from hpcgrpo.arithmetic import arithmetic
from hpcgrpo.config import ConfigError
from hpcgrpo.pretrained import Pretrained
from hpcgrpo.sections import RunConfig

# What vLLM's attention on a CPU has kernels for (0.32).
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def find(run: RunConfig, *, offline: bool) -> tuple[Pretrained, Pretrained | None]:
    """The actor's model and the peer's, each within its limits, and both of one vocabulary.

    Raises ConfigError for a model that is not there, or cannot do what the run asks of it.
    """
    actor = pretrained.find(run.model_name_or_path, offline=offline)
    _check(run, actor, "", run.generation.vllm_tensor_parallel_size)
    if run.peer is None:
        return actor, None
    try:
        peer = pretrained.find(run.peer.model_name_or_path, offline=offline)
    except ConfigError as error:
        raise ConfigError(f"peer.{error}") from None
    split = run.peer.vllm_tensor_parallel_size or run.generation.vllm_tensor_parallel_size
    _check(run, peer, "peer.", split if run.peer_samples else None)
    names = (run.model_name_or_path, run.peer.model_name_or_path)
    ours, theirs = (_vocabulary(model) for model in (actor, peer))
    if ours is not None and theirs is not None:
        check_one_vocabulary(ours, theirs, names)
    return actor, peer


def check_one_vocabulary(actor: Mapping[str, int], peer: Mapping[str, int], names: tuple[str, str]) -> None:
    """Raises ConfigError unless every token has the same id in both vocabularies (token -> id)."""
    if actor == peer:
        return
    unlike = sorted({**peer, **actor}.items(), key=lambda item: item[1])
    token = next(t for t, _ in unlike if actor.get(t) != peer.get(t))
    raise ConfigError(
        f"peer.model_name_or_path {names[1]}: its tokenizer is not that of model_name_or_path {names[0]} (token"
        f" {token!r} is {peer.get(token, 'missing')} there and {actor.get(token, 'missing')} here), but both policies"
        " must read the same token ids; take two models of one family"
    )


def unlike(run: RunConfig, actor: Pretrained, peer: Pretrained) -> str | None:
    """What a user should know of two models that differ in their chat template."""
    templates = [_template(model) for model in (actor, peer)]
    if None in templates or templates[0] == templates[1] or run.data.chat_template:
        return None
    return (
        f"peer.model_name_or_path {peer.name}: its chat template is another than that of {actor.name}; it gets the"
        " prompts as the latter's template makes them (data.chat_template sets one for both)"
    )


def describe(model: Pretrained) -> dict[str, Any]:
    """A model as `check --json` has it."""
    names = ("parameters", "heads", "kv_heads", "head_dim", "longest")
    found = {name: getattr(model, name) or None for name in names}
    return {"folder": str(model.folder) if model.folder else None, **found}


def on_gpu(run: RunConfig) -> bool:
    """Whether the run is to use GPUs, as far as its configuration tells."""
    return run.device == "cuda" or (run.device == "auto" and run.cluster.gpus_per_node > 0)


def servers(run: RunConfig) -> dict[str, int] | None:
    """vLLM's servers of the actor: each has `gpus` GPUs (0: it runs on the CPU)."""
    if run.generation.backend != "vllm":
        return None
    gpus = run.cluster.gpus_per_node if on_gpu(run) else 0
    split = run.generation.vllm_tensor_parallel_size
    each = (gpus - run.peer_gpus) // split if gpus else 1
    nodes = run.cluster.vllm_nodes
    return {"count": nodes * each, "nodes": nodes, "per_node": each, "gpus": split if gpus else 0}


def _check(run: RunConfig, model: Pretrained, key: str, split: int | None) -> None:
    """The model's limits against the run's lengths, its heads against the servers' GPUs (None: nothing serves it)."""
    pretrained.check_type(model)
    counts = arithmetic(run, run.build_algorithm(), rows=None)
    if model.longest and counts.max_model_length > model.longest:
        refine = counts.max_refine_prompt_length
        also = f", or iGRPO's max_refine_prompt_length (now {refine})" if refine else ""
        raise ConfigError(
            f"the longest prompt and completion are {counts.max_model_length} tokens (draft included), but"
            f" {key and 'peer '}{model.name} takes {model.longest}; lower generation.max_completion_length or"
            f" max_prompt_length{also}"
        )
    _check_layers(run, model, key, samples=split is not None)
    if run.generation.backend != "vllm" or split is None:
        return
    if model.heads and not _splits(model, split):
        fits = [n for n in range(1, model.heads + 1) if _splits(model, n)]
        fits = [n for n in fits if not run.cluster.gpus_per_node or run.cluster.gpus_per_node % n == 0]
        raise ConfigError(
            f"{key or 'generation.'}vllm_tensor_parallel_size is {split}, which does not divide the model's"
            f" {model.heads} attention heads and {model.kv_heads} key-value heads; use one of"
            f" {', '.join(map(str, fits))} (servers of one GPU each are the fastest where the model fits)"
        )
    if not on_gpu(run) and model.head_dim and model.head_dim not in CPU_HEAD_DIMS:
        raise ConfigError(
            f"{key}model_name_or_path {model.name}: heads of {model.head_dim} dimensions, which vLLM does not"
            f" serve on a CPU (it serves {', '.join(map(str, CPU_HEAD_DIMS))}); use GPUs (cluster.gpus_per_node),"
            " another model, or generation.backend=transformers"
        )


def _check_layers(run: RunConfig, model: Pretrained, key: str, *, samples: bool) -> None:
    """Whether learner and in-process generator know the model's layers, as far as its config.json says."""
    if not model.config:
        return
    config, name = served.of_json(model.config), f"{key}model_name_or_path {model.name}"
    uncached = served.other_layers(config) if samples and run.generation.backend == "transformers" else []
    ways = ["generation.backend: vllm"] if uncached else []
    if run.train.attn_implementation == "packed" and (reasons := served.unserved(config)):
        ways.insert(0, "train.attn_implementation: sdpa")
        raise ConfigError(
            f"{name}: packed rows cannot serve {', '.join(reasons)}; set {' and '.join(ways)}, or take a model with"
            " full causal attention (Qwen2, Qwen3, Llama)"
        )
    if uncached:
        raise ConfigError(
            f"{name}: the in-process generator has no cache for layers of the type {', '.join(uncached)}; set {ways[0]}"
        )


def _splits(model: Pretrained, split: int) -> bool:
    heads, shared = model.heads or split, model.kv_heads or split
    return heads % split == 0 and (shared % split == 0 or split % shared == 0)


def _vocabulary(model: Pretrained) -> dict[str, int] | None:
    """Token -> id with the added tokens; None where the files are not here or only transformers reads them."""
    path = (model.folder or Path("/nonexistent")) / "tokenizer.json"
    if not path.is_file():
        return None
    import tokenizers

    try:
        return dict(tokenizers.Tokenizer.from_file(str(path)).get_vocab())
    except Exception as error:  # the library raises plain Exception for what it cannot read
        raise ConfigError(f"{path}: {error}; copy the model's folder anew") from None


def _template(model: Pretrained) -> Any:
    import json

    folder = model.folder or Path("/nonexistent")
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    return json.loads(path.read_text(encoding="utf-8")).get("chat_template") if path.is_file() else None
