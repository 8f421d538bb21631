"""The learner's step on given completions: hpcgrpo packed and with shared prompts, the best padded code, and TRL.

    .venv/bin/python benchmarks/learner_step.py [--case spread-512] [--blocks 5] [--device cuda] [--json]

Same model, completions, rewards, loss and optimizer; each side in a process of its own, in turn. Losses and gradient
norms must agree. Beside each ratio stands what the FLOPs of both sides say. How to read it: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import _flops
from _rows import add_device, compared, lines, positive, row
from _turns import TRL_VERSION, Measured, add_trl, interleaved, trl_environment

SCRIPTS = {
    "packed": "_learner_side.py",
    "shared": "_learner_side.py",
    "padded": "_padded_side.py",
    "trl": "_trl_learner_side.py",
}
TITLES = {"packed": "packed alone", "shared": "shared prompts", "padded": "best padded code", "trl": "TRL"}
PAIRS = (("packed", "trl"), ("shared", "trl"), ("packed", "padded"), ("shared", "padded"))
AGREE = 1e-4  # losses (sums of terms of size 1), and gradient norms relative, in float32
AGREE_BF16 = 2e-2


@dataclass(frozen=True)
class Case:
    """One step: `prompts` x `generations` completions of log-normal lengths, or all of one length."""

    name: str
    prompt_tokens: int
    promised: Mapping[str, float]  # side -> least ratio to TRL
    mean_completion_length: float = 128.0
    max_completion_length: int = 512
    prompts: int = 4
    generations: int = 8
    rows_per_micro_batch: int = 8  # of TRL, its default; hpcgrpo counts tokens, the padded code groups
    token_budget: int | None = None  # of hpcgrpo's micro-batches; None: its default
    hidden: int = 256
    layers: int = 4
    vocabulary: int = 512
    threads: int = 2
    device: str = "cpu"
    trl: Mapping[str, Any] = field(default_factory=dict)  # GRPOConfig fields to set otherwise

    @property
    def rows(self) -> int:
        return self.prompts * self.generations

    @property
    def sizes(self) -> _flops.Sizes:
        """Of `_tiny_model.build_model`: heads of 32, two of them for keys, an MLP of three times the width."""
        linear = self.hidden * (2 * self.hidden + 2 * 64 + 3 * 3 * self.hidden)
        return _flops.Sizes(self.hidden, self.layers, self.layers * linear, self.vocabulary)


CASES = {
    # a group with its prompt, or it would be cut and the prompt computed twice
    "equal": Case("equal", 128, {"shared": 1.15}, mean_completion_length=512.0, token_budget=128 + 8 * 512),
    "spread-128": Case("spread-128", 128, {"packed": 2.5, "shared": 5.0}),
    "spread-512": Case("spread-512", 512, {"shared": 5.0}),
    "spread-2048": Case("spread-2048", 2048, {"shared": 8.0}, prompts=2),
    "wide": Case("wide", 512, {}, prompts=1, hidden=512, vocabulary=32_000),
}
QUICK = ("spread-128",)


def main() -> None:
    options = parse_arguments()
    python = dict.fromkeys(options.sides, Path(sys.executable))
    if "trl" in python:
        python["trl"] = options.trl_python or trl_environment(options.trl_env)
    results = []
    for name in options.case or list(QUICK if options.quick else CASES):
        changes = {key: getattr(options, key) for key in ("prompts", "threads", "device", "trl")}
        case = Case(**{**asdict(CASES[name]), **{k: v for k, v in changes.items() if v is not None}})
        results.append(run_case(case, python, blocks=options.blocks))
        if not options.json:
            print(as_text(results[-1]), flush=True)
    if options.json:
        print(
            json.dumps(
                {"rows": [r for result in results for r in result["rows"]], "cases": results}, indent=1
            )
        )
    if not all(result["agree"] for result in results):
        raise SystemExit("the sides did not compute the same step: see the differences above")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all of them")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument(
        "--sides", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS), help="default: all"
    )
    parser.add_argument(
        "--blocks", type=positive, default=5, help="turns of one step each side gets (default 5)"
    )
    parser.add_argument("--prompts", type=positive, help="of a step, 8 completions each (default 4, 2 or 1)")
    parser.add_argument("--threads", type=positive, help="OMP_NUM_THREADS of each side (default 2)")
    add_trl(parser)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print every number as JSON, and nothing else")
    return parser.parse_args()


def run_case(case: Case, python: Mapping[str, Path], *, blocks: int) -> dict[str, Any]:
    """The sides of `python` on one case, turn by turn."""
    from _learner_inputs import save

    scripts = {name: (python[name], script) for name, script in SCRIPTS.items() if name in python}
    with tempfile.TemporaryDirectory(prefix="learner_step_") as folder:
        groups = save(Path(folder), asdict(case))
        measured = interleaved(asdict(case), scripts, folder, blocks=blocks, steps=1, warm_up=1)
    counts = {
        "packed": _flops.packed(case.prompt_tokens, groups),
        "shared": _flops.shared(case.prompt_tokens, groups),
        "padded": _flops.padded(case.prompt_tokens, groups),
        "trl": _flops.trl(case.prompt_tokens, groups, gpu=case.device == "cuda"),
    }
    sides = {name: side_summary(case, measured, name, counts[name]) for name in scripts}
    apart = differences(sides)
    return {
        "case": asdict(case),
        "lengths": groups,
        "sides": sides,
        "rows": rows(case, measured, sides),
        "differences": apart,
        "agree": max(apart.values()) <= (AGREE if case.device == "cpu" else AGREE_BF16),
        "about": measured.about,
    }


def cost(case: Case, step: Mapping[str, Any], clock: str | None = None) -> float:
    """Seconds of a step without TRL's preparation: CPU-seconds on a CPU, wall time on a GPU."""
    clock = clock or ("wall_seconds" if case.device == "cuda" else "cpu_seconds")
    prepared = step["phases"].get("prepare", (0.0, 0.0))[clock == "cpu_seconds"]
    return float(step[clock] - prepared)


def side_summary(case: Case, measured: Measured, name: str, count: _flops.Count) -> dict[str, Any]:
    steps = [step for turn in measured.turns for step in turn[name]]
    flops, cpu, wall = (
        count.flops(case.sizes),
        *(
            statistics.median(cost(case, s, clock) for s in steps)
            for clock in ("cpu_seconds", "wall_seconds")
        ),
    )
    return {
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "samples_per_second": case.rows / wall,
        "gflops": flops / 1e9,
        "gflops_per_second": flops / 1e9 / (wall if case.device == "cuda" else cpu),
        "tokens": count.tokens,
        "loss": steps[0]["loss"],
        "grad_norm": steps[0]["grad_norm"],
        "every_cost": [cost(case, s) for s in steps],
        **measured.memory[name],
    }


def differences(sides: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Of losses, and of gradient norms relative, from those of the last side (TRL, where it takes part)."""
    last = sides[next(reversed(sides))]
    losses = {f"{name} loss": abs(side["loss"] - last["loss"]) for name, side in sides.items()}
    norms = {
        f"{name} grad_norm": abs(side["grad_norm"] / last["grad_norm"] - 1) for name, side in sides.items()
    }
    return losses | norms


def rows(case: Case, measured: Measured, sides: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    of = "wall time" if case.device == "cuda" else "CPU-seconds"
    for ours, theirs in (pair for pair in PAIRS if sides.keys() >= {*pair}):
        costs = [[cost(case, turn[name][0]) for turn in measured.turns] for name in (theirs, ours)]
        found.append(
            row(
                f"learner step, {case.name}: {TITLES[ours]} / {TITLES[theirs]}",
                **compared(*costs),
                of=of,
                bound=sides[theirs]["gflops"] / sides[ours]["gflops"],
                bound_is="FLOPs of both",
                promised=case.promised.get(ours) if theirs == "trl" else None,
            )
        )
    for ours in ("packed", "shared") if "trl" in sides else ():
        memory = [sides[name]["peak_above_base_bytes"] for name in ("trl", ours)]
        name = f"learner memory, {case.name}: {TITLES[ours]} / TRL"
        found.append(row(name, memory[0] / memory[1], of="peak bytes of a step", promised=1.0))
    return found


def as_text(result: Mapping[str, Any]) -> str:
    case, sides = result["case"], result["sides"]
    sizes = [c for group in result["lengths"] for c in group]
    trl = f", TRL {TRL_VERSION}" if "trl" in sides else ""
    text = [
        f"\n{case['name']}: {case['prompts']} x {case['generations']} completions after {case['prompt_tokens']} "
        f"tokens, {min(sizes)} to {max(sizes)} tokens, mean {statistics.fmean(sizes):.0f}; hidden {case['hidden']}, "
        f"vocabulary {case['vocabulary']}, {case['threads']} threads{trl}",
        f"{'':18}{'CPU-s':>9}{'samples/s':>11}{'tokens':>9}{'GFLOP':>9}{'GFLOP/s':>9}"
        f"{'MB a step':>11}{'MB in all':>11}{'loss':>14}{'grad norm':>12}",
    ]
    for name, side in sides.items():
        text.append(
            f"{TITLES[name]:18}{side['cpu_seconds']:>9.3f}{side['samples_per_second']:>11.2f}{side['tokens']:>9}"
            f"{side['gflops']:>9.1f}{side['gflops_per_second']:>9.1f}"
            f"{side['peak_above_base_bytes'] / 1e6:>11.0f}{side['peak_rss_bytes'] / 1e6:>11.0f}"
            f"{side['loss']:>14.8f}{side['grad_norm']:>12.6f}"
        )
    apart = max(result["differences"].values())
    verdict = "they agree" if result["agree"] else "NOT THE SAME STEP"
    text.append(
        f"largest difference of loss and (relative) gradient norm from the last side's: {apart:.1e}, {verdict}"
    )
    return "\n".join(text + lines(result["rows"]))


if __name__ == "__main__":
    main()
