"""CPPO's time: the update phase at each pruning rate, and the whole step beside S = 1 / ((1 - f) + f (1 - P)).

    .venv/bin/python benchmarks/cppo_speed.py [--rounds 7] [--json]

The real training loop, one process, one set of weights (the learning rate is 0), the same questions and seeds;
the rates take turns. How to read the output: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _rows import add_device, at_least, positive, row

from hpcgrpo import batching, tiny
from hpcgrpo.algorithms import build
from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.config import parse
from hpcgrpo.train import assemble, join
from hpcgrpo.trainer import Trainer

RATES = (0.0, 0.5, 0.75, 0.875, 0.9375)
NUM = 16  # completions of a prompt (G)
DIGITS = 12
REWARD = f"{Path(__file__).with_name('_side.py')}:digits"
PHASES = ("explore", "update", "sync")
Times = dict[str, float]


@dataclass(frozen=True)
class Case:
    """One pruning rate, with or without allocation: what a step samples and trains on."""

    rate: float
    allocation: bool
    prompts: int  # a step
    algorithm: Algorithm

    @property
    def key(self) -> str:
        return f"{self.rate}{' allocation' if self.allocation else ''}"


def main() -> None:
    options = parse_arguments()
    os.environ.setdefault(
        "DS_ACCELERATOR", options.device
    )  # else DeepSpeed, where installed, prints to stdout
    with tempfile.TemporaryDirectory() as folder:
        trainer = assembled(Path(folder), options)
        rounds = measure(trainer, options)
    torch.distributed.destroy_process_group()
    summary = summarise(rounds)
    result = {
        "settings": vars(options) | {"model": MODEL},
        "rows": table_rows(summary["by_rate"], "wall" if options.device == "cuda" else "cpu"),
        **summary,
    }
    print(json.dumps(result, indent=1) if options.json else as_text(result))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=positive, default=5, help="turns of every rate (default 5)")
    parser.add_argument("--prompts", type=positive, default=8, help="a step without allocation (default 8)")
    parser.add_argument(
        "--allocated", type=positive, default=2, help="a step at P = 0 with allocation (default 2)"
    )
    parser.add_argument(
        "--completion-tokens",
        type=at_least(1, most=MODEL["max_length"] - DIGITS - 1),
        default=64,
        help="at most (default 64)",
    )
    parser.add_argument(
        "--beta", type=at_least(0.0), default=0.0, help="above 0: a reference forward pass too"
    )
    parser.add_argument("--threads", type=positive, default=1)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print every number as JSON, and nothing else")
    return parser.parse_args()


# ---- the run

MODEL = {"hidden": 128, "layers": 2, "heads": 4, "max_length": 256}


def assembled(folder: Path, options: argparse.Namespace) -> Trainer:
    """The trainer of a run on the chain task, from a random tiny model; evaluation and saving are off."""
    tiny.save(tiny.build_tiny_model(**MODEL), tiny.build_character_tokenizer(), folder / "model")
    config = parse(
        {
            "name": "cppo_speed",
            "model_name_or_path": str(folder / "model"),
            "output_dir": str(folder),
            "device": options.device,
            "algorithm": specification(0.5, options, allocation=True),
            "rewards": {REWARD: 1.0},
            "data": {"preset": "chain", "max_samples": 2048, "options": {"digits": DIGITS}},
            "generation": {
                "temperature": 1.0,
                "max_prompt_length": DIGITS + 1,
                "max_completion_length": options.completion_tokens,
            },
            "train": {
                "train_batch_size": options.prompts * NUM,
                "learning_rate": 1e-6,  # replaced by 0 below
                "lr_scheduler_type": "constant",
                "weight_decay": 0.0,
                "max_steps": 1_000_000,
                "save_steps": 1_000_000,
            },
            "cluster": {"nproc_per_node": 1, "threads_per_rank": options.threads},
            "report_to": [],
        }
    )
    config.folder.mkdir(parents=True, exist_ok=True)
    trainer = assemble(config, *join(config), None).trainer
    trainer.learning_rate = lambda update: 0.0
    return trainer


def specification(rate: float, options: argparse.Namespace, *, allocation: bool) -> dict[str, Any]:
    base = {"name": "grpo", "num_generations": NUM, "beta": options.beta}
    return {"name": "cppo", "pruning_rate": rate, "allocation": allocation, "base": base}


def cases(options: argparse.Namespace) -> list[Case]:
    """Without allocation every rate samples as much; with it every rate trains on as much."""
    found = []
    for allocation in (False, True):
        for rate in RATES:
            algorithm = build(specification(rate, options, allocation=allocation))
            prompts = options.allocated * NUM // algorithm.batch_share if allocation else options.prompts
            found.append(Case(rate, allocation, prompts, algorithm))
    return found


def measure(trainer: Trainer, options: argparse.Namespace) -> dict[str, list[Times]]:
    """A step of each case in turn, `rounds` times over, after one that does not count."""
    trainer.sync()
    every = cases(options)
    rounds: dict[str, list[Times]] = {case.key: [] for case in every}
    step(trainer, every[0])
    for i in range(options.rounds):
        for case in every:
            rounds[case.key].append(step(trainer, case))
        print(f"round {i + 1} of {options.rounds}: {time.process_time():.0f} CPU-seconds", file=sys.stderr)
    return rounds


def step(trainer: Trainer, case: Case) -> Times:
    """One step of the loop, from the run's first question on; wall and CPU seconds by phase, and what it held."""
    trainer.algorithm = trainer.explorer.algorithm = case.algorithm
    trainer.setup = trainer.explorer.setup = replace(trainer.setup, prompts_per_step=case.prompts)
    trainer.progress.position = 0
    times: Times = {}
    groups = timed(times, "explore", lambda: trainer.explore().groups)
    credited = timed(times, "explore", lambda: batching.credit(groups, case.algorithm))
    timed(times, "update", lambda: trainer.learn(credited))
    timed(times, "sync", trainer.sync)
    pieces, totals = batching.weighed(credited, case.algorithm, trainer.setup.max_completion_length, 1)
    for clock in ("cpu", "wall"):
        times[f"step_{clock}"] = sum(times[f"{phase}_{clock}"] for phase in PHASES)
    held = {"sampled": totals.sampled_rows, "trained": totals.rows, "tokens": sum(p.tokens for p in pieces)}
    return times | {name: float(count) for name, count in held.items()}


def timed(times: Times, phase: str, call: Callable[[], Any]) -> Any:
    wall, cpu = time.perf_counter(), time.process_time()
    value = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for clock, spent in (("cpu", time.process_time() - cpu), ("wall", time.perf_counter() - wall)):
        times[f"{phase}_{clock}"] = times.get(f"{phase}_{clock}", 0.0) + spent
    return value


# ---- what it says


def summarise(rounds: Mapping[str, Sequence[Times]]) -> dict[str, Any]:
    """Ratios to P = 0 of the same round and kind, medians over the rounds."""
    rows = {}
    for key, turns in rounds.items():
        rate, allocation = float(key.split()[0]), key.endswith("allocation")
        base = rounds["0.0 allocation" if allocation else "0.0"]
        rows[key] = compare(rate, base, turns)
    return {"by_rate": rows, "fixed": fixed_cost([t for turns in rounds.values() for t in turns])}


def table_rows(by_rate: Mapping[str, Any], clock: str, rate: float = 0.875) -> list[dict[str, Any]]:
    """The whole step at one rate, for `table.py`: promised is nine tenths of the bound."""
    found = by_rate[str(rate)][clock]
    return [
        row(
            f"CPPO at P = {rate}, whole step: P = 0",
            found["speed_up"],
            of="CPU-seconds a completion" if clock == "cpu" else "wall time",
            bound=found["bound"],
            bound_is="S = 1/((1-f) + f(1-P))",
            promised=0.9 * found["bound"],
        )
    ]


def compare(rate: float, base: Sequence[Times], turns: Sequence[Times]) -> dict[str, Any]:
    """One rate beside P = 0. Times are taken per sampled completion, so that allocation changes nothing in them."""

    def ratio(name: str) -> float:
        pairs = zip(base, turns, strict=True)
        return statistics.median(t[name] / t["sampled"] / (b[name] / b["sampled"]) for b, t in pairs)

    def share(clock: str) -> float:
        return statistics.median(b[f"update_{clock}"] / b[f"step_{clock}"] for b in base)

    tokens = ratio("tokens")
    row: dict[str, Any] = {"kept": 1 - rate, "tokens": tokens, "trained": turns[0]["trained"]}
    for clock in ("cpu", "wall"):
        f = share(clock)
        row[clock] = {
            "update_ratio": ratio(f"update_{clock}"),
            "update_seconds": statistics.median(t[f"update_{clock}"] for t in turns),
            "explore_ratio": ratio(f"explore_{clock}"),
            "update_share": f,
            "speed_up": 1 / ratio(f"step_{clock}"),
            "bound": 1 / ((1 - f) + f * (1 - rate)),
            "bound_of_tokens": 1 / ((1 - f) + f * tokens),
            "completions_per_second": statistics.median(t["sampled"] / t[f"step_{clock}"] for t in turns),
        }
    return row


def fixed_cost(turns: Sequence[Times]) -> dict[str, float]:
    """update CPU seconds = fixed + per_token x tokens, by Theil and Sen's medians over all steps."""
    points = sorted({(t["tokens"], t["update_cpu"]) for t in turns})
    slopes = [(d - b) / (c - a) for a, b in points for c, d in points if c > a]
    per_token = statistics.median(slopes)
    return {
        "seconds": statistics.median(y - per_token * x for x, y in points),
        "seconds_per_1000_tokens": 1000 * per_token,
    }


def as_text(result: Mapping[str, Any]) -> str:
    lines = []
    for kind in ("without allocation", "with allocation"):
        lines.append(f"{kind}: medians, beside P = 0; CPU seconds (wall in parentheses)")
        lines.append(
            f"{'P':>7}{'k/G':>8}{'tokens':>8}{'update':>16}{'explore':>9}{'speed-up':>16}"
            f"{'bound':>8}{'of tokens':>11}{'completions/s':>15}"
        )
        for key, found in result["by_rate"].items():
            if key.endswith("allocation") == (kind == "with allocation"):
                lines.append(line(float(key.split()[0]), found))
    f = {clock: result["by_rate"]["0.0"][clock]["update_share"] for clock in ("cpu", "wall")}
    fixed = result["fixed"]
    lines.append(
        f"update share at P = 0: f = {f['cpu']:.3f} ({f['wall']:.3f}); an update costs {fixed['seconds'] * 1e3:.0f} ms"
        f" and {fixed['seconds_per_1000_tokens'] * 1e3:.1f} ms per 1,000 tokens (CPU)"
    )
    return "\n".join(lines)


def line(rate: float, row: Mapping[str, Any]) -> str:
    cpu, wall = row["cpu"], row["wall"]
    return (
        f"{rate:>7}{row['kept']:>8.4f}{row['tokens']:>8.3f}{cpu['update_ratio']:>8.3f} ({wall['update_ratio']:.3f})"
        f"{cpu['explore_ratio']:>9.3f}{cpu['speed_up']:>8.2f} ({wall['speed_up']:.2f}) {cpu['bound']:>8.2f}"
        f"{cpu['bound_of_tokens']:>11.2f}{cpu['completions_per_second']:>15.0f}"
    )


if __name__ == "__main__":
    main()
