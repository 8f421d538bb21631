"""Our implementation or this scale? The papers' orderings on bandits whose right answer is known by hand.

    .venv/bin/python benchmarks/controlled.py                     # all parts, into docs/studies/controlled
    .venv/bin/python benchmarks/controlled.py --parts gains cppo --seeds 8 --output /tmp/controlled

Policies are tables of logits; every step goes through the package's own explore, credit, select, weigh and loss.
How to read the result: docs/studies/controlled/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from _bandit import (
    PLAIN,
    RIGHT,
    BanditRollouts,
    Bandits,
    ascend,
    closed_gradient,
    exact_gradient,
    loss_of,
    questions,
    single_pass_gain,
    start,
)
from _bandit_report import draw, tables
from _distilling import study as distilling_study
from _pruning import curves as pruning_curves
from _pruning import exact_tables, summary
from _rows import at_least, positive

from hpcgrpo.algorithms import build
from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.algorithms.credit import is_uniform

ROOT = Path(__file__).parents[1]
ARMS = 100
TAUS = (0.0, 0.25, 0.5, 0.75, 1.0)
ACCURACIES = (0.05, 0.1, 0.3, 0.5)
COPIES: dict[
    str, tuple[float, bool]
] = {  # log-odds on the arm that the draft shows, and whether it is learnt
    "no copying": (0.0, False),
    "copy bonus 3": (3.0, False),
    "copy bonus learnt from 3": (3.0, True),
}
LEARNING_RATES = (2.0, 8.0)


def grpo(num: int, scale: str = "group") -> dict[str, Any]:
    """GRPO's specification; without importance weights, as sampler and learner are one table."""
    return {
        "name": "grpo",
        "num_generations": num,
        "scale_rewards": scale,
        "importance_sampling_correction": "none",
    }


def igrpo(drafts: int, num: int, scale: str = "group", **options: Any) -> dict[str, Any]:
    """iGRPO's specification over that."""
    return {"name": "igrpo", "drafts": drafts, "base": grpo(num, scale), **options}


def specifications() -> dict[str, dict[str, Any]]:
    """The arms of the comparison: 8 rollouts a question each, but for GRPO 4, which trains what iGRPO does."""
    return {
        "GRPO 8": grpo(8),
        "GRPO 4": grpo(4),
        "iGRPO 4+4": igrpo(4, 4),
        "iGRPO random draft": igrpo(4, 4, draft_choice="random"),
        "iGRPO worst draft": igrpo(4, 4, draft_choice="worst"),
        "iGRPO empty draft": igrpo(4, 4, draft_choice="empty"),
        "both stages": igrpo(4, 4, train_drafts=True),
        "GRPO 8, no std": grpo(8, "none"),
        "iGRPO 4+4, no std": igrpo(4, 4, "none"),
    }


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in options.parts:
        began = time.process_time()
        results[name] = PARTS[name](options)
        results.setdefault("cpu_seconds", {})[name] = round(time.process_time() - began, 1)
        path.write_text(json.dumps(rounded(results), indent=1) + "\n")
        print(f"{name}: {results['cpu_seconds'][name]} CPU-seconds", file=sys.stderr)
    draw(results, options.output / "controlled.png")
    (options.output / "tables.md").write_text(tables(results))
    print(tables(results))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=at_least(2), default=12)
    parser.add_argument(
        "--steps", type=positive, default=60, help="of 2 questions x 8 (CPPO: 16) rollouts each"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "studies" / "controlled")
    return parser.parse_args()


# ---- one step: the package, enumerated and sampled, against the closed form


def policy_of(accuracy: float, tau: float, copy: float, *, arms: int = ARMS) -> Bandits:
    """One policy, a little off the symmetric start, so that no two wrong arms are alike."""
    bandits = start(arms=arms, accuracy=accuracy, tau=torch.tensor([tau], dtype=torch.float64), copy=copy)
    slope = torch.linspace(-0.3, 0.3, arms, dtype=torch.float64)
    with torch.no_grad():
        bandits.parts["plain"][0] += slope
        bandits.parts["draft"][0] -= slope.roll(1)
    return bandits


def one_step(options: argparse.Namespace) -> dict[str, Any]:
    """Largest difference of the expected gradient from the closed form: enumerated, and sampled in standard errors."""
    small = {"GRPO 4": grpo(4), "GRPO 4, no std": grpo(4, "none")}
    small |= {"both stages 2+3": igrpo(2, 3, train_drafts=True)}
    small |= {f"iGRPO 2+3 {c}": igrpo(2, 3, draft_choice=c) for c in ("best", "worst", "empty")}
    small |= {
        f"iGRPO 2+3 {c}, no std": igrpo(2, 3, "none", draft_choice=c) for c in ("best", "worst", "empty")
    }
    found: dict[str, Any] = {"enumerated": {}, "sampled_z": {}}
    for name, spec in small.items():
        bandits = policy_of(0.25, 0.6, 1.3, arms=3)
        got, want = exact_gradient(bandits, build(spec), (1.0, 0.0, 0.0)), by_hand(bandits, spec)
        found["enumerated"][name] = max(float((got[n] - want[n]).abs().max()) for n in want)
    for name, spec in specifications().items():
        bandits = policy_of(0.3, 0.6, 2.0, arms=10)
        found["sampled_z"][name] = sampled_z(bandits, spec, groups=4000)
    return found


def by_hand(bandits: Bandits, spec: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The closed form for a specification of GRPO or iGRPO."""
    base = spec.get("base", spec)
    return closed_gradient(
        bandits,
        drafts=spec.get("drafts", 0),
        num=base["num_generations"],
        choice=spec.get("draft_choice", "best"),
        std_eps=1e-4 if base["scale_rewards"] == "group" else None,
        train_drafts=spec.get("train_drafts", False),
    )


def sampled_z(bandits: Bandits, spec: Mapping[str, Any], *, groups: int, seed: int = 0) -> float:
    """Largest |mean gradient - closed form| over logits of a part, in standard errors, over sampled groups."""
    want, worst = by_hand(bandits, spec), 0.0
    for name, got in sampled_gradients(bandits, spec, groups=groups, seed=seed).items():
        error = (got.std(0) / math.sqrt(groups)).clamp(min=1e-12)
        worst = max(worst, float(((got.mean(0) - want[name]).abs() / error).max()))
    return worst


def sampled_gradients(
    bandits: Bandits, spec: Mapping[str, Any], *, groups: int, seed: int
) -> dict[str, torch.Tensor]:
    """By part, [groups, K]: the ascent direction of a step of one question, sampled `groups` times."""
    algorithm, arms = build(spec), bandits.parts["plain"].shape[1]
    copies = Bandits(
        bandits.tau.repeat(groups),
        bandits.copy.detach().repeat(groups),
        {n: p.detach().repeat(groups, 1).requires_grad_() for n, p in bandits.parts.items()},
    )
    rollouts = BanditRollouts(copies, reward_of_right(arms), torch.Generator().manual_seed(seed))
    loss = loss_of(copies, algorithm, algorithm.explore(questions(groups, 1), rollouts)) * groups
    gradients = torch.autograd.grad(-loss, list(copies.parts.values()), allow_unused=True)
    return {n: g for n, g in zip(copies.parts, gradients, strict=True) if g is not None}


def reward_of_right(arms: int = ARMS) -> list[float]:
    return [1.0] + [0.0] * (arms - 1)


# ---- where the ordering must appear: the first step, by hand


def gains(options: argparse.Namespace) -> dict[str, Any]:
    """First-step single-pass gain of iGRPO over that of GRPO with as many rollouts, at tau 1.

    It is proportional to tau (only the shared part moves the plain form), so the ordering appears where tau
    exceeds 1 / ratio. `by`: over start, copy bonus and number of arms; `splits`: the largest ratio of each N + G.
    """
    accuracies = (0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
    copies = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
    found: dict[str, Any] = {"accuracies": accuracies, "copies": copies, "by": {}, "splits": {}, "noise": {}}
    for label, eps in (("std", 1e-4), ("no std", None)):
        for arms in (10, 100, 1000):
            for choice in ("best", "random", "worst", "empty")[: 4 if arms == ARMS else 1]:
                found["by"][f"{choice}, {label}, {arms} arms"] = [
                    [ratio(p, c, arms=arms, choice=choice, std_eps=eps) for p in accuracies] for c in copies
                ]
        for drafts in (1, 2, 3, 4, 5, 6):
            found["splits"][f"{drafts}+{8 - drafts}, {label}"] = max(
                (ratio(p, c, std_eps=eps, drafts=drafts), p, c) for p in accuracies for c in copies
            )
    for name in ("GRPO 8", "GRPO 4", "iGRPO 4+4", "iGRPO empty draft", "both stages"):
        found["noise"][name] = [noise(p, 3.0, specifications()[name]) for p in ACCURACIES]
    return found


def ratio(
    accuracy: float,
    copy: float,
    *,
    arms: int = ARMS,
    choice: str = "best",
    std_eps: float | None,
    drafts: int = 4,
) -> float:
    """iGRPO's gain over GRPO's, 8 rollouts each, at full transfer."""
    bandits = start(arms=arms, accuracy=accuracy, tau=torch.ones(1, dtype=torch.float64), copy=copy)
    over = closed_gradient(bandits, drafts=drafts, num=8 - drafts, choice=choice, std_eps=std_eps)
    under = closed_gradient(bandits, drafts=0, num=8, std_eps=std_eps)
    return single_pass_gain(bandits, over) / single_pass_gain(bandits, under)


def noise(accuracy: float, copy: float, spec: Mapping[str, Any], *, groups: int = 4000) -> float:
    """Standard deviation over mean of one question's single-pass gain, at full transfer, over sampled groups."""
    one = start(arms=ARMS, accuracy=accuracy, tau=torch.ones(1, dtype=torch.float64), copy=copy)
    gradient = sampled_gradients(one, spec, groups=groups, seed=1)["shared"]
    pi = one.probabilities(PLAIN)[0]
    values = gradient @ (pi[RIGHT] * (torch.eye(ARMS, dtype=torch.float64)[RIGHT] - pi))
    return float(values.std() / values.mean())


# ---- learning


def learning(options: argparse.Namespace) -> dict[str, Any]:
    """Single-pass and two-pass success of every arm, over tau, start accuracy and copying."""
    return {
        label: {
            str(accuracy): {
                name: learn(build(spec), accuracy, copy, learns, options)
                for name, spec in specifications().items()
            }
            for accuracy in ACCURACIES
        }
        for label, (copy, learns) in COPIES.items()
    }


def learn(
    algorithm: Algorithm, accuracy: float, copy: float, learns: bool, options: argparse.Namespace
) -> dict[str, Any]:
    """By tau: mean over the run and end of both success rates at the best of the learning rates."""
    shape = (len(TAUS), len(LEARNING_RATES), options.seeds)
    tau = torch.tensor(TAUS, dtype=torch.float64).view(-1, 1, 1).expand(shape).reshape(-1)
    rate = torch.tensor(LEARNING_RATES, dtype=torch.float64).view(1, -1, 1).expand(shape).reshape(-1)
    bandits = start(arms=ARMS, accuracy=accuracy, tau=tau, copy=copy, learn_copy=learns)
    rollouts = BanditRollouts(bandits, reward_of_right(), torch.Generator().manual_seed(0))
    one, two, mixed = [], [], torch.zeros(len(tau))
    for _ in range(options.steps):
        groups = ascend(bandits, algorithm, rollouts, prompts_per_step=2, learning_rate=rate)
        lively = [g.prompt.row for g in groups if not is_uniform(g.rewards)]
        mixed += torch.bincount(torch.tensor(lively, dtype=torch.int64), minlength=len(tau)) / (
            len(groups) / len(tau)
        )
        first, second = bandits.accuracies()
        one.append(first)
        two.append(second)
    return {
        str(t): outcome(
            torch.stack(one).view(-1, *shape)[:, i],
            torch.stack(two).view(-1, *shape)[:, i],
            (mixed / options.steps).view(shape)[i],
        )
        for i, t in enumerate(TAUS)
    }


def outcome(one: torch.Tensor, two: torch.Tensor, mixed: torch.Tensor) -> dict[str, Any]:
    """[steps, learning rates, seeds] -> summaries at the learning rate with the largest mean of the run."""
    best = int(one.mean((0, 2)).argmax())
    best_two = int(two.mean((0, 2)).argmax())
    return {
        "learning_rate": LEARNING_RATES[best],
        "one_pass": summary(one[:, best].mean(0)),
        "one_pass_end": summary(one[-1, best]),
        "one_pass_by_learning_rate": [summary(one[:, i].mean(0)) for i in range(len(LEARNING_RATES))],
        "two_pass": summary(two[:, best_two].mean(0)),
        "two_pass_end": summary(two[-1, best_two]),
        "groups_with_spread": summary(mixed[best]),
    }


def predicted(options: argparse.Namespace) -> dict[str, Any]:
    """Learning where the first step promises iGRPO most (full transfer, few right, some copying): is it ahead?

    Single-pass success after 2, 5, 10, 20 and all steps, paired by step only; one learning rate, 4 x the seeds.
    """
    seeds, rate = 4 * options.seeds, 1.0
    names = ("GRPO 8", "iGRPO 4+4", "both stages", "GRPO 8, no std", "iGRPO 4+4, no std")
    marks = [m for m in (2, 5, 10, 20, options.steps) if m <= options.steps]
    found: dict[str, Any] = {"steps": marks, "accuracy": 0.05, "copy": 3.0, "learning_rate": rate}
    for name in names:
        tau = torch.ones(seeds, dtype=torch.float64)
        bandits = start(arms=ARMS, accuracy=found["accuracy"], tau=tau, copy=found["copy"])
        rollouts = BanditRollouts(bandits, reward_of_right(), torch.Generator().manual_seed(0))
        reached = []
        for step in range(1, options.steps + 1):
            ascend(
                bandits, build(specifications()[name]), rollouts, prompts_per_step=2, learning_rate=tau * rate
            )
            if step in marks:
                reached.append(summary(bandits.accuracies()[0]))
        found[name] = reached
    return found


# ---- CPPO


def pruning(options: argparse.Namespace) -> dict[str, Any]:
    """Bias and variance of the pruned gradient, and learning, by rate and metric."""
    return {"exact": exact_tables(), "learning": pruning_curves(seeds=options.seeds, steps=options.steps)}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "one_step": one_step,
    "gains": gains,
    "learning": learning,
    "predicted": predicted,
    "cppo": pruning,
    "codistill": lambda options: distilling_study(seeds=options.seeds, steps=options.steps),
}


# ---- what is written


def rounded(value: Any) -> Any:
    """Floats to six significant digits."""
    if isinstance(value, Mapping):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
