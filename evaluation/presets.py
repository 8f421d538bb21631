"""The papers' protocols, and all that decides what a benchmark's problems are asked with."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from evaluation.benchmarks import BARE, LETTERS, Benchmark, Problem, Protocol
from evaluation.config import EvaluationConfig


@dataclass(frozen=True, slots=True)
class Setting:
    """What a paper does with a benchmark. None: what the benchmark itself has, or the run's own system prompt."""

    protocol: Protocol
    system_prompt: str | None = None  # a name of SYSTEM_PROMPTS
    template: str | None = None
    require_box_or_tag: bool | None = None


@dataclass(frozen=True, slots=True)
class Preset:
    """A paper's evaluation."""

    source: str
    settings: Mapping[str, Setting]  # benchmark -> what it gets
    rule: Setting | None = None  # of all other benchmarks; None: the paper has none, so they are refused


# iGRPO, arXiv 2602.09000, evaluation with NeMo-Skills: temperature 0.6, top-p 0.95, 65,000 tokens; AIME24/25 averaged
# over 64 runs, all others over 8. Not given: top-k (all), and the prompt: the paper prints one alone, Appendix C's.
_IGRPO = Setting(Protocol(8, 0.6, 0.95, 0, 65_000), system_prompt="igrpo")
_IGRPO_AIME = replace(_IGRPO, protocol=replace(_IGRPO.protocol, num_samples=64))

# CPPO, arXiv 2503.22342: greedy for GSM8K and MATH; AMC23 and AIME24 4 samples at temperature 0.6. From the authors'
# code: 1,024 tokens as in training, for AMC and AIME 3,072 and top-p 0.95; the user's message is the bare question.
_CPPO_GSM8K = Setting(Protocol(1, 0.0, 1.0, 0, 1024), system_prompt="cppo_gsm8k", template=BARE)
_CPPO_MATH = replace(_CPPO_GSM8K, system_prompt="cppo_math")
_CPPO_CONTEST = replace(_CPPO_MATH, protocol=Protocol(4, 0.6, 0.95, 0, 3072))

# CoDistill-GRPO, arXiv 2605.08873, read at second hand. 3,072 tokens: a reproduction's split of the context of 4,096.
# 5 samples: its figures are multiples of 1/(5 x problems) and of no smaller number. Temperature and top-p are not
# known: those of the other two papers. The prompt is R1-Zero's, for the Qwen pair; that of Llama's is not printed.
_CODISTILL = Setting(Protocol(5, 0.6, 0.95, 0, 3072), system_prompt="r1", template=BARE)

PRESETS: dict[str, Preset] = {
    "igrpo": Preset("arXiv 2602.09000", {"aime24": _IGRPO_AIME, "aime25": _IGRPO_AIME}, rule=_IGRPO),
    "cppo": Preset(
        "arXiv 2503.22342",
        {
            "gsm8k": _CPPO_GSM8K,
            "math": _CPPO_MATH,
            "math500": _CPPO_MATH,  # the README's MATH figures are multiples of 1/500
            "amc23": _CPPO_CONTEST,
            "aime24": _CPPO_CONTEST,
            "amc_2022_2023": _CPPO_CONTEST,  # these two are not in the paper, but of the same contests
            "aime25": _CPPO_CONTEST,
        },
    ),
    "codistill": Preset(
        "arXiv 2605.08873",
        {
            "minerva": _CODISTILL,
            "math500": _CODISTILL,
            "olympiadbench": _CODISTILL,
            "amc24": _CODISTILL,  # a file of the user's: amc24=FILE.jsonl
        },
    ),
}


# --- protocol and prompt ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides what a benchmark's problems are asked with and how answers are found."""

    protocol: Protocol
    template: str  # of the user's message
    system_prompt: str | None  # a name or the text; None: the run's own, else none; "": none
    require_box_or_tag: bool


def recipe(benchmark: Benchmark, config: EvaluationConfig, preset: str | None = None) -> Recipe:
    """Keys of `config` that are not null, else the preset's, else the benchmark's own.

    `preset` is a name of PRESETS; None is `config.preset`. Raises ValueError for an unknown preset, for a benchmark
    that the preset's paper says nothing of, and for a template without {problem}.
    """
    setting = _setting(benchmark, preset or config.preset)
    template = config.prompt_template if config.prompt_template is not None else setting.template
    required = config.require_box_or_tag
    required = setting.require_box_or_tag if required is None else required
    return Recipe(
        _override(benchmark, setting.protocol, config),
        _checked(benchmark.template if template is None else template),
        config.system_prompt if config.system_prompt is not None else setting.system_prompt,
        benchmark.require_box_or_tag if required is None else required,
    )


def protocol(benchmark: Benchmark, config: EvaluationConfig, preset: str | None = None) -> Protocol:
    """How the benchmark is sampled: see `recipe`."""
    return recipe(benchmark, config, preset).protocol


def prompt(benchmark: Benchmark, problem: Problem, template: str | None = None) -> str:
    """The user's message: the template with the problem, choices below it, in place of {problem}.

    `template` None is the benchmark's. Filled in one pass: braces elsewhere stay. Raises ValueError without {problem}.
    """
    lines = [f"({letter}) {text}" for letter, text in zip(LETTERS, problem.choices, strict=False)]
    text = problem.question + ("\n\n" + "\n".join(lines) if lines else "")
    return _checked(benchmark.template if template is None else template).replace("{problem}", text)


def _checked(template: str) -> str:
    if "{problem}" not in template:
        raise ValueError(f"prompt_template {template!r} lacks {{problem}}, where the question is to stand")
    return template


def _setting(benchmark: Benchmark, preset: str | None) -> Setting:
    if preset is None:
        return Setting(benchmark.protocol)
    if preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"preset: none is called {preset!r}{hint} (known: {', '.join(PRESETS)})")
    chosen = PRESETS[preset]
    setting = chosen.settings.get(benchmark.name, chosen.rule)
    if setting is None:
        raise ValueError(
            f"preset {preset} ({chosen.source}) says nothing of {benchmark.name}: it covers"
            f" {', '.join(chosen.settings)}. Evaluate {benchmark.name} apart, without a preset"
        )
    return setting


def _override(benchmark: Benchmark, base: Protocol, config: EvaluationConfig) -> Protocol:
    names = Protocol.__dataclass_fields__
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    merged = replace(base, **given)
    if merged.temperature > 0 or merged.num_samples == 1:
        return merged
    if "num_samples" in given:
        raise ValueError(
            f"{benchmark.name}: num_samples is {merged.num_samples} at temperature 0, where all completions are alike;"
            " set num_samples to 1, or a temperature above 0"
        )
    return replace(merged, num_samples=1)  # the temperature was set to 0, so one says all
