"""A step's metrics under TRL's names, from what was sampled and what the learner summed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from hpcgrpo.batching import Credited, Plan
from hpcgrpo.types import Group, Progress, Rollout, flatten


def rollout_metrics(credited: Credited, progress: Progress) -> dict[str, float]:
    """Rewards, lengths, outcomes and drafts of all ranks' rollouts; adds the step's counts to `progress`."""
    samples = [g for g in credited.groups if g.stage == "sample"]
    rollouts = flatten([g.rollouts for g in samples])
    drafts = flatten([g.drafts for g in samples])  # groups of drafts hold the same ones again
    everything = [*rollouts, *drafts]
    progress.num_tokens += sum(len(r.prompt.token_ids) + len(r.completion.token_ids) for r in everything)
    progress.num_completions += len(everything)
    progress.trained_completions += sum(map(len, credited.kept))
    metrics = {
        "num_tokens": float(progress.num_tokens),
        "completions/sampled": float(len(everything)),
        "completions/kept": float(sum(map(len, credited.kept))),
        "epoch_position": float(progress.position),
    }
    if not rollouts:
        return metrics
    groups = [g.rewards for g in samples]
    uniform = [max(r) == min(r) for r in groups]
    return {
        **metrics,
        "reward": fmean(r.reward for r in rollouts),
        "reward_std": fmean(stdev(r) if len(r) > 1 else 0.0 for r in groups),
        "frac_reward_zero_std": fmean(uniform),
        **_parts(rollouts),
        **_lengths("completions", rollouts),
        **_drafts(credited, drafts),
        **_hints(rollouts),
        **_unscored(rollouts),
    }


def staleness(groups: Sequence[Group], updates: int) -> dict[str, float]:
    """How many optimizer steps the weights that sampled lie behind those that begin to learn from it."""
    behind = [updates - r.completion.weights_version for g in groups for r in g.rollouts]
    if not behind:
        return {"sampling/staleness/max": 0.0}
    return {"sampling/staleness/mean": fmean(behind), "sampling/staleness/max": float(max(behind))}


def _hints(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The share of completions that the peer began."""
    hinted = sum(r.completion.hint_length > 0 for r in rollouts)
    return {"completions/hinted": hinted / len(rollouts)} if hinted else {}


def _unscored(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The share of completions that no reward applies to: all gave None, and the reward counts as 0."""
    unscored = sum(all(value is None for value in r.score.parts.values()) for r in rollouts)
    return {"completions/unscored": unscored / len(rollouts)} if unscored else {}


def _parts(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """rewards/<name>/mean, std over the completions it applies to, and a share per outcome."""
    metrics: dict[str, float] = {}
    for name in rollouts[0].score.parts:
        values = [v for r in rollouts if (v := r.score.parts[name]) is not None]
        if values:
            metrics[f"rewards/{name}/mean"] = fmean(values)
            metrics[f"rewards/{name}/std"] = stdev(values) if len(values) > 1 else 0.0
        outcomes = [o for r in rollouts if (o := r.score.outcomes.get(name))]
        for outcome in sorted(set(outcomes)):
            metrics[f"rewards/{name}/{outcome}"] = outcomes.count(outcome) / len(rollouts)
    return metrics


def _lengths(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [len(r.completion.token_ids) for r in rollouts]
    ended = [len(r.completion.token_ids) for r in rollouts if r.completion.finish_reason == "stop"]
    metrics = {
        f"{prefix}/mean_length": fmean(lengths),
        f"{prefix}/min_length": float(min(lengths)),
        f"{prefix}/max_length": float(max(lengths)),
        f"{prefix}/clipped_ratio": 1 - len(ended) / len(lengths),
    }
    if ended:
        metrics[f"{prefix}/mean_terminated_length"] = fmean(ended)
        metrics[f"{prefix}/min_terminated_length"] = float(min(ended))
        metrics[f"{prefix}/max_terminated_length"] = float(max(ended))
    return metrics


def _drafts(credited: Credited, drafts: Sequence[Rollout]) -> dict[str, float]:
    if not drafts:
        return {}
    best = [max(r.reward for r in g.drafts) for g in credited.groups if g.drafts]
    return {
        "drafts/reward": fmean(r.reward for r in drafts),
        "drafts/best_reward": fmean(best),
        "drafts/mean_length": fmean(len(r.completion.token_ids) for r in drafts),
        "drafts/prompt_length": fmean(
            len(g.prompt.token_ids) for g in credited.groups if g.stage == "sample"
        ),
    }


Update = tuple[
    Sequence[Mapping[str, float]], int, float
]  # every rank's sums, the step's tokens, learning rate


def learning_metrics(updates: Sequence[Update], plans: Sequence[Plan]) -> dict[str, float]:
    """Loss, gradient norm and the loss's own metrics: per token over all ranks, averaged over optimizer steps."""
    if not updates:
        return {"updates": 0.0}
    steps = [_per_token(ranks, tokens) for ranks, tokens, _ in updates]
    names = list(dict.fromkeys(n for s in steps for n in s))
    return {
        **{n: _reduce(n, [s[n] for s in steps if n in s]) / _mean_over(n, steps) for n in names},
        "learning_rate": updates[-1][2],
        "updates": float(len(updates)),
        "batch/micro_batches": float(sum(len(p.micro_batches[0]) for p in plans)),
        "batch/rank_spread": fmean(p.spread() for p in plans),
    }


def _per_token(ranks: Sequence[Mapping[str, float]], tokens: int) -> dict[str, float]:
    whole = {"loss": 1, "grad_norm": len(ranks), "skipped_updates": len(ranks)}  # not sums over tokens
    names = list(dict.fromkeys(n for r in ranks for n in r))
    summed = {n: _reduce(n, [r[n] for r in ranks if n in r]) for n in names}
    return {n: v if _extreme(n) else v / whole.get(n, tokens) for n, v in summed.items()}


def _reduce(name: str, values: Sequence[float]) -> float:
    return {"max": max, "min": min}.get(_extreme(name), sum)(values)


def _mean_over(name: str, steps: Sequence[Mapping[str, float]]) -> int:
    return 1 if _extreme(name) else sum(name in s for s in steps)


def _extreme(name: str) -> str:
    ending = name.rpartition("/")[2]
    return ending if ending in ("min", "max") else ""


def rollout_rows(credited: Credited) -> Iterator[dict[str, Any]]:
    """Everything that was sampled in a step, as it is kept on disk."""
    trained = any(group.stage == "draft" for group in credited.groups)
    for g, group in enumerate(credited.groups):
        for draft in () if trained else group.drafts:
            yield _rollout_row(draft, stage="draft")
        for i, rollout in enumerate(group.rollouts):
            advantage, kept = credited.advantages[g][i], i in credited.kept[g]
            yield _rollout_row(
                rollout, stage=group.stage, advantage=advantage, kept=kept, **_compared(rollout)
            )


def _compared(rollout: Rollout) -> dict[str, Any]:
    """CoDistill's own: how many tokens were a hint, and the mean log-ratio of peer to actor, in nats a token."""
    if rollout.old is None or rollout.peer is None:
        return {}
    ratio = fmean(p - o for p, o in zip(rollout.peer, rollout.old, strict=True))
    return {"hint_length": rollout.completion.hint_length, "peer_log_ratio": round(ratio, 6)}


def held_out_rows(answers: Mapping[str, Sequence[Rollout]]) -> Iterator[dict[str, Any]]:
    """Held-out answers as they are kept on disk; `stage` is eval or eval/two_pass."""
    for stage, rollouts in answers.items():
        for rollout in rollouts:
            yield _rollout_row(rollout, stage=stage)


def _rollout_row(rollout: Rollout, **more: Any) -> dict[str, Any]:
    prompt, completion = rollout.prompt, rollout.completion
    return {
        "position": prompt.position,
        "row": prompt.row,
        **more,
        "reward": rollout.reward,
        "rewards": dict(rollout.score.parts),
        "outcomes": dict(rollout.score.outcomes),
        "answer": prompt.columns.get("answer"),
        "prompt": prompt.text,
        "prompt_length": len(prompt.token_ids),
        "completion": completion.text,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "weights_version": completion.weights_version,
        "token_ids": completion.token_ids,
        "logprobs": [round(x, 6) for x in completion.logprobs],
    }
