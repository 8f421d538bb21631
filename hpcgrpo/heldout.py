"""Held-out questions, answered in one pass and after drafts, and graded by the training's own rewards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean

from hpcgrpo.exploring import Explorer, Generator
from hpcgrpo.types import Prompt, Rollout, Sampling, stable_seed

Answers = dict[str, list[Rollout]]  # by the metrics' prefix: eval, eval/two_pass, eval/empty_draft, ...
MOVES = 0.8  # of the single pass's reward that the policy should reach after an empty or a spoilt draft


def evaluate(
    explorer: Explorer,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    template: str | None,
    forms: bool = False,
    prefix: str = "eval",
    generator: Generator | None = None,
) -> tuple[dict[str, float], Answers]:
    """<prefix>/<reward name> and <prefix>/reward over all prompts; <prefix>/two_pass/... too with a `template`.

    The second pass sees the first pass's answer as its draft, whatever its reward (nothing is selected); with `forms`
    also an empty draft and a spoilt one. `generator` None is the actor's. Collective; prompts are shared over the
    ranks and every rank gets the metrics and all answers.
    """
    sampling = Sampling(temperature, explorer.setup.max_completion_length)
    mine = prompts[explorer.ranks.rank :: explorer.ranks.size]

    def answered(asked: Sequence[Prompt], stage: str) -> list[Rollout]:
        return [r[0] for r in explorer.rollouts(asked, 1, stage, sampling, generator=generator)]

    first = answered(mine, "eval")
    answers = {prefix: _everyone(explorer, first)}
    passes = {"two_pass": _own, **({"empty_draft": _empty, "spoilt_draft": _spoilt} if forms else {})}
    for name, draft in passes.items() if template is not None else ():
        limit = explorer.setup.max_refine_prompt_length
        asked = [explorer.refine(r.prompt, draft(r), template=template, max_length=limit) for r in first]
        again = answered(asked, f"eval-{name.replace('_', '-')}")
        answers[f"{prefix}/{name}"] = _everyone(explorer, again)
    metrics = {k: v for name, rollouts in answers.items() for k, v in _means(name, rollouts).items()}
    return metrics, answers


def transfer_warning(metrics: Mapping[str, float], questions: int) -> str | None:
    """Where skill does not move between the question alone and the question with a draft: what to expect, what to do.

    `metrics` are those of an evaluation with `forms`. None where it moves, where the policy can nothing yet, or where
    the difference is within two standard errors.
    """
    single = metrics.get("eval/reward", 0.0)
    for form, does in (
        ("empty_draft", "what it learns after a draft will hardly show in one pass"),
        ("spoilt_draft", "it copies its draft, so good drafts leave little to learn"),
    ):
        after = metrics.get(f"eval/{form}/reward")
        if after is None or single <= 0:
            continue
        error = (max(single * (1 - single), after * (1 - after), 0.0) * 2 / questions) ** 0.5
        if after < MOVES * single and single - after > 2 * error:
            return (
                f"held-out reward is {single:.3f} from the question alone, but {after:.3f} after {_kind(form)} draft:"
                f" skill does not move between the two forms of the prompt, {does}. Start from a model that knows both"
                " forms, change refine_template, or train both stages (igrpo's option train_drafts: true)"
            )
    return None


def spoilt(text: str, seed: int) -> str:
    """The text with a slip at one digit that is carried on: every digit from there is off by as much."""
    digits = [m.start() for m in re.finditer(r"\d", text)]
    if not digits:
        return text[: len(text) // 2]
    start, slip = digits[seed % len(digits)], 1 + seed // len(digits) % 9
    return text[:start] + re.sub(r"\d", lambda m: str((int(m[0]) + slip) % 10), text[start:])


def _own(rollout: Rollout) -> Sequence[int] | str:
    return rollout.completion.token_ids


def _empty(rollout: Rollout) -> Sequence[int] | str:
    return ""


def _spoilt(rollout: Rollout) -> Sequence[int] | str:
    return spoilt(rollout.completion.text, stable_seed("spoilt", rollout.prompt.row))


def _kind(form: str) -> str:
    return {"empty_draft": "an empty", "spoilt_draft": "a spoilt"}[form]


def _everyone(explorer: Explorer, mine: Sequence[Rollout]) -> list[Rollout]:
    rollouts = [r for share in explorer.exchange(list(mine)) for r in share]
    return sorted(rollouts, key=lambda r: r.prompt.position)


def _means(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    parts = [{"reward": r.reward, **r.score.parts} for r in rollouts]
    means = {}
    for name in dict.fromkeys(n for p in parts for n in p):
        values = [v for p in parts if (v := p.get(name)) is not None]
        if values:
            means[f"{prefix}/{name}"] = fmean(values)
    return means
