"""What one step samples and trains on, by stage and policy: counts from the configuration, lengths given or assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.arithmetic import Arithmetic, arithmetic
from hpcgrpo.planner.lengths import SIGMA, Known, Lengths, lognormal, read_lengths
from hpcgrpo.sections import RunConfig

Policy = Literal["actor", "peer"]

ASSUMED_SHARE = 0.5  # mean completion length over the longest, where nothing is known
ASSUMED_PROMPT = 180  # tokens of a mathematics question with its system prompt
SECOND_PROMPT_FORM = 24  # tokens that iGRPO's template adds to question and draft
KNOWN_ROWS = {"gsm8k": 7473, "math": 7500, "openr1_math_220k": 93733, "acereason_math": 49585}


@dataclass(frozen=True)
class Stage:
    """One serial round of sampling: every prompt's completions, by one policy."""

    name: str  # sample | draft | hint
    policy: Policy
    prompts: float
    completions: int  # of each prompt
    prompt: Lengths
    completion: Lengths

    @property
    def count(self) -> float:
        return self.prompts * self.completions

    @property
    def tokens(self) -> float:
        return self.count * self.completion.mean


@dataclass(frozen=True)
class Rows:
    """Completions that a policy computes log-probs of: so many of each group's prompt."""

    policy: Policy
    groups: float
    rows: float  # of each group
    prompt: Lengths
    completion: Lengths

    @property
    def count(self) -> float:
        return self.groups * self.rows


@dataclass(frozen=True)
class Workload:
    """One step of a run, and how many steps it has."""

    stages: tuple[Stage, ...]  # in their order
    trained: tuple[Rows, ...]  # forward and backward, `passes` times
    forward: tuple[Rows, ...]  # further forward passes: old, reference, peer
    compared: tuple[Rows, ...]  # forward passes before credit: both policies over all that is sampled
    passes: int  # over what a step sampled (num_iterations)
    updates: int  # optimizer steps of a step, all passes
    counts: Arithmetic
    max_steps: int | None  # None where the number of questions is not known
    assumptions: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)  # widths of the padded computation, in tokens

    @property
    def sampled(self) -> float:
        """Completions of a step by the actor, drafts included."""
        return sum(s.count for s in self.stages if s.name != "hint")

    @property
    def kept(self) -> float:
        """Completions that the actor trains on, of a step."""
        return sum(r.count for r in self.trained if r.policy == "actor")


def of(config: RunConfig, lengths: Known | str | Path | None = None) -> Workload:
    """One step of `config` as its algorithm samples and trains it.

    `lengths` is a run's folder, a JSONL file of rollouts, a YAML file of means (see `read_lengths`), or what was read;
    None assumes completions of half the longest on average. Raises ConfigError for a file that holds none.
    """
    known = read_lengths(lengths) if isinstance(lengths, str | Path) else lengths or Known()
    algorithm = config.build_algorithm()
    rows = question_count(config)
    counts = arithmetic(config, algorithm, rows)
    known, assumptions = _filled(config, known, counts, algorithm)
    max_steps = counts.max_steps if rows is not None or config.train.max_steps else None
    if max_steps is None:
        assumptions = (*assumptions, "the number of questions is not known here: run hours are of 100 steps")
    trained = tuple(_trained(algorithm, counts, known))
    compared = tuple(_compared(algorithm, counts, known)) if algorithm.compares else ()
    return Workload(
        stages=tuple(_stages(config, algorithm, counts, known)),
        trained=trained,
        forward=tuple(_forward(algorithm, counts, trained)),
        compared=compared,
        passes=config.train.num_iterations,
        updates=counts.updates_per_step,
        counts=counts,
        max_steps=max_steps,
        assumptions=assumptions,
        limits={
            "prompt": counts.max_model_length - config.generation.max_completion_length,
            "completion": config.generation.max_completion_length,
        },
    )


def question_count(config: RunConfig) -> int | None:
    """How many questions the run has, as far as its configuration tells without reading them."""
    data, known = config.data, KNOWN_ROWS.get(config.data.preset or "") if config.data.path is None else None
    if known is not None and data.max_samples is not None:
        return min(known, data.max_samples)
    return data.max_samples or known


# ---- the stages


def _stages(config: RunConfig, algorithm: Algorithm, counts: Arithmetic, known: Known) -> Iterator[Stage]:
    prompts, completion = counts.prompts_per_step, _given(known.completion)
    if algorithm.num_drafts:
        yield Stage(
            "draft", "actor", prompts, algorithm.num_drafts, _given(known.prompt), _given(known.draft)
        )
    share = _hinted_share(config, algorithm)
    if share:
        hint = Lengths((algorithm.hint_tokens,), "algorithm.hint_tokens")
        yield Stage("hint", "peer", prompts * share, algorithm.num_generations, _given(known.prompt), hint)
    yield Stage(
        "sample", "actor", prompts, algorithm.num_generations, _group_prompt(algorithm, known), completion
    )


def _hinted_share(config: RunConfig, algorithm: Algorithm) -> float:
    """The share of the run's steps in which the peer writes hints."""
    if not algorithm.hint_tokens:
        return 0.0
    return min(1.0, algorithm.hint_epochs / max(config.train.num_train_epochs, 1e-9))


def _group_prompt(algorithm: Algorithm, known: Known) -> Lengths:
    return _given(known.second_prompt if algorithm.num_drafts else known.prompt)


def _trained(algorithm: Algorithm, counts: Arithmetic, known: Known) -> Iterator[Rows]:
    """The kept rows of each policy."""
    groups, prompt = counts.prompts_per_step, _group_prompt(algorithm, known)
    share = _kept(algorithm)
    drafts = algorithm.num_drafts if algorithm.options.get("train_drafts") else 0
    rows = float(share)
    if known.kept_share is not None:  # uniform groups that were left out, for one
        rows = min(share, algorithm.num_generations * known.kept_share)
    for policy in _policies(algorithm):
        yield Rows(policy, groups, rows, prompt, _given(known.completion))
        if drafts:
            yield Rows(policy, groups, drafts, _given(known.prompt), _given(known.draft))


def _policies(algorithm: Algorithm) -> tuple[Policy, ...]:
    return ("actor", "peer") if algorithm.peer is not None else ("actor",)


def _kept(algorithm: Algorithm) -> int:
    """Completions of a group that are trained on: G, CPPO's k, PODS', GFPO's and CoDistill's num_train."""
    from hpcgrpo.algorithms.cppo import num_kept

    count, options = algorithm.num_generations, algorithm.options
    drafts = algorithm.num_drafts if options.get("train_drafts") else 0
    if algorithm.batch_share:
        count = algorithm.batch_share - drafts
    pruned = next((o for o in _layers(options) if o.get("name") == "cppo"), None)
    if pruned is not None and not pruned["allocation"]:
        count = num_kept(count, pruned["pruning_rate"])
    return count


def _layers(options: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield options
    if isinstance(options.get("base"), Mapping):
        yield from _layers(options["base"])


def _forward(algorithm: Algorithm, counts: Arithmetic, trained: Sequence[Rows]) -> Iterator[Rows]:
    """Forward passes over the rows to train on: the old policy's where there is more than one optimizer step, the
    reference's, a frozen teacher's."""
    own = [r for r in trained if r.policy == "actor"]
    if counts.updates_per_step > 1 and not algorithm.compares:
        yield from own
    if "reference" in algorithm.streams:
        yield from own
    if "peer" in algorithm.streams and not algorithm.compares:
        yield from (replace(r, policy="peer") for r in own)


def _compared(algorithm: Algorithm, counts: Arithmetic, known: Known) -> Iterator[Rows]:
    for policy in ("actor", "peer"):
        prompt, completion = _group_prompt(algorithm, known), _given(known.completion)
        yield Rows(policy, counts.prompts_per_step, algorithm.num_generations, prompt, completion)


def _given(lengths: Lengths | None) -> Lengths:
    assert lengths is not None, "lengths are filled in before they are used"
    return lengths


def _filled(
    config: RunConfig, known: Known, counts: Arithmetic, algorithm: Algorithm
) -> tuple[Known, tuple[str, ...]]:
    """What is known, with assumptions in the place of what is not, and those in words."""
    said: list[str] = []
    longest, most = config.generation.max_completion_length, config.generation.max_prompt_length
    completion, prompt = known.completion, known.prompt
    if completion is None:
        completion = lognormal(max(1.0, ASSUMED_SHARE * longest), longest, source="assumed")
        said.append(
            f"completions of {completion.mean:,.0f} tokens on average, {longest:,} at most (half the longest,"
            f" log-normal with sigma {SIGMA}); --lengths RUN takes a run's real ones"
        )
    if prompt is None:
        mean = min(ASSUMED_PROMPT, max(1, most // 2))
        prompt = lognormal(mean, most, sigma=0.4, source="assumed")
        said.append(f"prompts of {mean} tokens on average")
    completion, prompt = _cut(completion, longest), _cut(prompt, most)
    draft = _cut(known.draft or completion, longest)
    second = known.second_prompt
    if algorithm.num_drafts and second is None:
        limit = counts.max_refine_prompt_length or most + longest
        second = prompt.plus(draft, SECOND_PROMPT_FORM, limit)
    return Known(prompt, completion, draft, second, known.kept_share), tuple(said)


def _cut(lengths: Lengths, longest: int) -> Lengths:
    return Lengths(tuple(min(v, longest) for v in lengths.values), lengths.source)
