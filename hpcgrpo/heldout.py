"""Held-out questions, answered in one pass and in two, and graded by the training's own rewards."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from hpcgrpo.trainer import Trainer
from hpcgrpo.types import Prompt, Rollout, Sampling

Answers = dict[str, list[Rollout]]  # "eval" and, with a second pass, "eval/two_pass"


def evaluate(
    trainer: Trainer, prompts: Sequence[Prompt], *, temperature: float, template: str | None
) -> tuple[dict[str, float], Answers]:
    """eval/<reward name> and eval/reward over all prompts; eval/two_pass/... too where a `template` is given.

    The second pass sees the first pass's answer as its draft, whatever its reward (nothing is selected).
    Collective; prompts are shared over the ranks and every rank gets the metrics and all answers.
    """
    sampling = Sampling(temperature, trainer.setup.max_completion_length)
    mine = prompts[trainer.ranks.rank :: trainer.ranks.size]
    first = [r[0] for r in trainer.rollouts(mine, 1, "eval", sampling)]
    answers = {"eval": _everyone(trainer, first)}
    if template is not None:
        limit = trainer.setup.max_refine_prompt_length
        second = [
            trainer.refine(r.prompt, r.completion.token_ids, template=template, max_length=limit)
            for r in first
        ]
        again = [r[0] for r in trainer.rollouts(second, 1, "eval-two-pass", sampling)]
        answers["eval/two_pass"] = _everyone(trainer, again)
    metrics = {k: v for prefix, rollouts in answers.items() for k, v in _means(prefix, rollouts).items()}
    return metrics, answers


def _everyone(trainer: Trainer, mine: Sequence[Rollout]) -> list[Rollout]:
    rollouts = [r for share in trainer.exchange(list(mine)) for r in share]
    return sorted(rollouts, key=lambda r: r.prompt.position)


def _means(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    parts = [{"reward": r.reward, **r.score.parts} for r in rollouts]
    means = {}
    for name in dict.fromkeys(n for p in parts for n in p):
        values = [v for p in parts if (v := p.get(name)) is not None]
        if values:
            means[f"{prefix}/{name}"] = fmean(values)
    return means
