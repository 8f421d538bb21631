"""One training step beside TRL's GRPOTrainer: same model, prompts, sizes and reward, interleaved in one run.

    .venv/bin/python benchmarks/vs_trl.py [--case equal|spread] [--blocks 8] [--steps 3] [--device cuda] [--json]

Each side holds its trainer in a process of its own and runs a block of steps when told to, in turn, so that a
busy machine slows both alike. TRL gets an environment of its own, made on first use. How to read the output:
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _rows import add_device, at_least, positive, row
from _turns import TRL_VERSION, Measured, add_trl, interleaved, trl_environment

SIDES = ("hpcgrpo", "trl")
SCRIPTS = {"hpcgrpo": "_our_side.py", "trl": "_trl_side.py"}


@dataclass(frozen=True)
class Case:
    """The work of one step, the same for both sides."""

    name: str
    target: float  # samples/s over TRL's that the project promises
    max_completion_length: int  # tokens
    mean_completion_length: float  # tokens; equal to the maximum: no completion ever ends by itself
    prompts: int = 4
    generations: int = 8
    prompt_tokens: int = 6
    rows_per_micro_batch: int = 32
    learning_rate: float = 1e-6  # small, so that lengths stay as they are
    threads: int = 2
    device: str = "cpu"
    trl: Mapping[str, Any] = field(default_factory=dict)  # GRPOConfig fields to set otherwise

    @property
    def rows(self) -> int:
        return self.prompts * self.generations


CASES = {
    "equal": Case("equal", 1.0, 64, 64.0),
    "spread": Case("spread", 2.0, 256, 64.0),
}


def main() -> None:
    options = parse_arguments()
    python = {"hpcgrpo": Path(sys.executable), "trl": options.trl_python or trl_environment(options.trl_env)}
    results = []
    for name in options.case or list(CASES):
        case = Case(**{**asdict(CASES[name]), **overrides(options)})
        results.append(run_case(case, python, blocks=options.blocks, steps=options.steps))
        if not options.json:
            print(as_text(results[-1], phases=options.phases), flush=True)
    if options.json:
        print(
            json.dumps({"rows": [r for result in results for r in rows(result)], "cases": results}, indent=1)
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all of them")
    parser.add_argument("--blocks", type=positive, default=8, help="turns each side gets (default 8)")
    parser.add_argument("--steps", type=positive, default=3, help="optimizer steps a turn (default 3)")
    parser.add_argument("--prompt-tokens", type=at_least(6, most=3840), help="tokens of a prompt (default 6)")
    parser.add_argument(
        "--rows-per-micro-batch",
        type=int,
        choices=(1, 2, 4, 8, 16, 32),
        help="completions a pass (default 32: all at once)",
    )
    parser.add_argument("--threads", type=positive, help="OMP_NUM_THREADS of either side (default 2)")
    add_trl(parser)
    add_device(parser)
    parser.add_argument("--phases", action="store_true", help="print where the CPU time of a step goes")
    parser.add_argument("--json", action="store_true", help="print every number as JSON, and nothing else")
    return parser.parse_args()


def overrides(options: argparse.Namespace) -> dict[str, Any]:
    names = ("prompt_tokens", "rows_per_micro_batch", "threads", "trl", "device")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def run_case(case: Case, python: Mapping[str, Path], *, blocks: int, steps: int) -> dict[str, Any]:
    """Time both sides on one case, turn by turn."""
    from _tiny_model import save_inputs, stop_probability_for

    ragged = case.mean_completion_length < case.max_completion_length
    stop = stop_probability_for(case.mean_completion_length, case.max_completion_length) if ragged else 0.0
    scripts = {name: (python[name], SCRIPTS[name]) for name in SIDES}
    with tempfile.TemporaryDirectory(prefix="vs_trl_") as folder:
        save_inputs(Path(folder), prompt_tokens=case.prompt_tokens, stop_probability=stop)
        return summary(
            case, interleaved(asdict(case), scripts, folder, blocks=blocks, steps=steps, warm_up=2)
        )


def rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The whole step for `table.py`; at most, it is as much faster as it computes fewer tokens."""
    case, ratios, name = result["case"], result["ratios"], f"whole step, {result['case']['name']}"
    work = {side: result["sides"][side]["token_passes"] for side in SIDES}

    def one(of: str, key: str, promised: float | None) -> dict[str, Any]:
        value = ratios[key]
        quartiles = (value["quartile_1"], value["quartile_3"]) if "quartile_1" in value else None
        bound = (
            {}
            if of == "peak memory"
            else {"bound": work["trl"] / work["hpcgrpo"], "bound_is": "tokens computed"}
        )
        return row(f"{name}: TRL", value["median"], of=of, promised=promised, quartiles=quartiles, **bound)

    clock = "samples/s" if case["device"] == "cuda" else "CPU-seconds"
    key = "samples_per_second" if case["device"] == "cuda" else "cpu_seconds_per_step"
    return [one(clock, key, case["target"]), one("peak memory", "peak_rss_bytes", 1.0)]


def summary(case: Case, measured: Measured) -> dict[str, Any]:
    """Medians over all steps of a side, and the ratios with their quartiles over the turns."""
    turns, memory = measured.turns, measured.memory
    sides = {
        name: side_summary(case, name, [s for t in turns for s in t[name]], memory[name]) for name in SIDES
    }
    return {
        "case": asdict(case) | {"rows": case.rows},
        "sides": sides,
        "ratios": {
            "samples_per_second": ratio(turns, lambda s: s["wall_seconds"]),
            "cpu_seconds_per_step": ratio(turns, lambda s: s["cpu_seconds"]),
            "cpu_seconds_per_token": ratio(turns, lambda s: s["cpu_seconds"] / sum(s["lengths"])),
            "peak_rss_bytes": {"median": sides["trl"]["peak_rss_bytes"] / sides["hpcgrpo"]["peak_rss_bytes"]},
        },
        "lengths_agree": lengths_agree(sides),
        "about": measured.about,
    }


def token_passes(case: Case, lengths: Sequence[int], *, padded: bool) -> int:
    """Forward passes of one token that a step takes: sampling one, training three (backward counts as two)."""
    if padded:
        return len(lengths) * (max(lengths) + 3 * (case.prompt_tokens + max(lengths)))
    return 4 * sum(lengths) + 3 * case.prompts * case.prompt_tokens


def side_summary(
    case: Case, name: str, steps: Sequence[Mapping[str, Any]], memory: Mapping[str, Any]
) -> dict[str, Any]:
    wall = statistics.median(s["wall_seconds"] for s in steps)
    lengths = [n for s in steps for n in s["lengths"]]
    assert len(lengths) == case.rows * len(steps), (len(lengths), case.rows, len(steps))
    return {
        "token_passes": statistics.fmean(
            token_passes(case, s["lengths"], padded=name == "trl") for s in steps
        ),
        "samples_per_second": case.rows / wall,
        "wall_seconds_per_step": wall,
        "cpu_seconds_per_step": statistics.median(s["cpu_seconds"] for s in steps),
        "mean_length": statistics.fmean(lengths),
        "mean_length_error": statistics.pstdev(lengths) / len(lengths) ** 0.5,
        "mean_longest": statistics.fmean(max(s["lengths"]) for s in steps),
        "phases": phase_summary(steps),
        "steps": len(steps),
        "wall_seconds": [round(s["wall_seconds"], 4) for s in steps],
        "cpu_seconds": [round(s["cpu_seconds"], 4) for s in steps],
        **memory,
    }


def phase_summary(steps: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Median wall and CPU seconds a step of each phase, and of what lies outside them."""
    phases = {}
    for name in dict.fromkeys(name for s in steps for name in s["phases"]):
        pairs = [s["phases"].get(name, (0.0, 0.0)) for s in steps]
        phases[name] = seconds([p[0] for p in pairs], [p[1] for p in pairs])
    rest = [[s[key] - sum(p[i] for p in s["phases"].values()) for s in steps] for i, key in enumerate(CLOCKS)]
    return phases | {"rest": seconds(*rest)}


CLOCKS = ("wall_seconds", "cpu_seconds")


def seconds(wall: Sequence[float], cpu: Sequence[float]) -> dict[str, float]:
    return {"wall_seconds": statistics.median(wall), "cpu_seconds": statistics.median(cpu)}


def ratio(turns: Sequence[Any], cost: Callable[[Any], float]) -> dict[str, float]:
    """TRL's cost over ours: of the medians over all steps, and the quartiles over the turns' own medians."""
    costs = {name: [[cost(s) for s in turn[name]] for turn in turns] for name in SIDES}
    overall = {name: statistics.median(c for turn in costs[name] for c in turn) for name in SIDES}
    median = statistics.median
    pairs = [median(b) / median(a) for a, b in zip(costs["hpcgrpo"], costs["trl"], strict=True)]
    low, _, high = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else pairs * 3
    return {"median": overall["trl"] / overall["hpcgrpo"], "quartile_1": low, "quartile_3": high}


def lengths_agree(sides: Mapping[str, Mapping[str, Any]]) -> bool:
    """Mean lengths within 5 %, or three standard errors where that many completions cannot tell."""
    ours, theirs = (sides[name] for name in SIDES)
    apart = abs(ours["mean_length"] - theirs["mean_length"])
    error = (ours["mean_length_error"] ** 2 + theirs["mean_length_error"] ** 2) ** 0.5
    return apart <= max(0.05 * theirs["mean_length"], 3 * error)


ROWS: tuple[tuple[str, str, float, str], ...] = (
    ("samples/s", "samples_per_second", 1, ".2f"),
    ("CPU-seconds per step", "cpu_seconds_per_step", 1, ".3f"),
    ("peak memory (MB)", "peak_rss_bytes", 1e-6, ".0f"),
    ("  of its child processes", "children_peak_rss_bytes", 1e-6, ".0f"),
    ("mean length (tokens)", "mean_length", 1, ".1f"),
    ("  its standard error", "mean_length_error", 1, ".1f"),
    ("mean longest of a step", "mean_longest", 1, ".1f"),
)


def as_text(result: Mapping[str, Any], *, phases: bool) -> str:
    case, sides, ratios = result["case"], result["sides"], result["ratios"]
    lines = [
        f"\n{case['name']}: {case['prompts']} prompts x {case['generations']} completions, "
        f"{case['prompt_tokens']} + at most {case['max_completion_length']} tokens, "
        f"mean {case['mean_completion_length']:.0f}; {sides['trl']['steps']} steps a side, interleaved, "
        f"{case['threads']} threads",
        f"{'':26}{'hpcgrpo':>12}{'TRL ' + TRL_VERSION:>12}   better by (quartiles)",
    ]
    for title, key, scale, form in ROWS:
        values = "".join(f"{sides[name][key] * scale:>12{form}}" for name in SIDES)
        lines.append(f"{title:26}{values}   {quartiles(ratios.get(key))}".rstrip())
    lines.append(f"{'CPU-seconds per token':26}{'':24}   {quartiles(ratios['cpu_seconds_per_token'])}")
    if not result["lengths_agree"]:
        lines.append("NOT COMPARABLE: the mean lengths of the two sides differ by more than chance")
    reached = ratios["samples_per_second"]["median"]
    verdict = "reached" if reached >= case["target"] else "missed"
    lines.append(f"promised: samples/s at least {case['target']:.2f} x TRL's: {verdict} ({reached:.2f})")
    if phases:
        lines += [phase_text(name, sides[name]["phases"]) for name in SIDES]
    lines += [f"settings of {name}: {json.dumps(result['about'][name])}" for name in SIDES]
    return "\n".join(lines)


def quartiles(value: Mapping[str, float] | None) -> str:
    if value is None:
        return ""
    spread = f" ({value['quartile_1']:.2f}-{value['quartile_3']:.2f})" if "quartile_1" in value else ""
    return f"{value['median']:.2f} x{spread}"


def phase_text(name: str, phases: Mapping[str, Mapping[str, float]]) -> str:
    parts = (f"{phase} {spent['cpu_seconds']:.3f}" for phase, spent in phases.items())
    return f"CPU-seconds per step, {name}: " + ", ".join(parts)


if __name__ == "__main__":
    main()
