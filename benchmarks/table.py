"""Every benchmark's ratios in one table: `make bench`, or

    .venv/bin/python benchmarks/table.py [--quick] [--only learner_step] [--device cuda] [--json]

It runs the scripts one after the other with `--json` and collects their rows; a script that is not there, or cannot run
here, is told in a line and leaves the others alone. How to read the table: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _rows import add_device, lines

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Script:
    """A benchmark that the table collects."""

    name: str
    about: str
    quick: tuple[str, ...] = ()  # arguments of the quick form
    on_gpu: bool = False  # whether it takes --device
    needs: str | None = None  # a package that it cannot do without
    limit_seconds: int = 3600


BALANCE = ("--ranks", "4", "--groups", "8", "--prompts", "512", "--completions", "128", "--steps", "1")
BALANCE += ("--measure", "4", "--measured-completions", "32", "--repeats", "1")
SCRIPTS = (
    Script("learner_step", "learner step: packed, shared prompts, TRL", ("--quick", "--blocks", "2"), True),
    Script("vs_trl", "whole step beside TRL", ("--case", "spread", "--blocks", "2", "--steps", "2"), True),
    Script("balance", "even work over ranks", BALANCE),
    Script("overlap", "sampling while learning", ("--quick",), True, needs="vllm"),
    Script("generation", "sampling in process", ("--rounds", "3"), True),
    Script("cppo_speed", "pruned completions", ("--rounds", "2", "--prompts", "4"), True),
    Script("logprobs", "log-probs without the logits", ("--timed-tokens", "256", "--repeats", "1"), True),
    Script("weight_sync", "weights to an engine", ("--layers", "2", "--repeats", "2"), True, needs="vllm"),
    Script("client_saturation", "the client of eight engines", ("--waves", "1")),
    Script("grading_overlap", "grading while sampling", ("--requests", "64", "--rounds", "1")),
    Script("grading", "answers a second", ("--pairs", "60", "--rounds", "2")),
    Script("checkpoint", "saving", ("--layers", "2", "--turns", "2"), True),
    Script("startup", "what a run costs before its first step", ("--repeats", "1")),
)  # fmt: skip


def main() -> int:
    options = parse_arguments()
    found: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for script in SCRIPTS:
        if options.only and script.name not in options.only:
            continue
        began = time.monotonic()
        print(f"{script.name}: {script.about}", end=" ", file=sys.stderr, flush=True)
        rows, reason = collect(script, quick=options.quick, device=options.device)
        print(reason or f"({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
        found += [row | {"script": script.name} for row in rows]
        if reason:
            missing[script.name] = reason
    if options.json:
        print(json.dumps({"rows": found, "missing": missing, "machine": machine()}, indent=1))
    else:
        print(as_text(found, missing))
    return 1 if options.only and missing else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="small and few: whether all of it runs, in minutes"
    )
    names = [script.name for script in SCRIPTS]
    parser.add_argument("--only", action="append", choices=names, help="one script (may be repeated)")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, and nothing else")
    return parser.parse_args()


def collect(script: Script, *, quick: bool, device: str) -> tuple[list[dict[str, Any]], str]:
    """A script's rows, and why there are none."""
    path = HERE / f"{script.name}.py"
    if not path.exists():
        return [], "not written yet"
    if script.needs and importlib.util.find_spec(script.needs) is None:
        return [], f"needs {script.needs}, which is not installed here"
    command = [sys.executable, str(path), "--json", *(script.quick if quick else ())]
    if script.on_gpu:
        command += ["--device", device]
    return run(command, script.limit_seconds)


def run(command: Sequence[str], limit_seconds: float) -> tuple[list[dict[str, Any]], str]:
    """The rows that a command prints as JSON, and what went wrong in a line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        return [], f"took longer than {limit_seconds:.0f} s"
    try:
        rows = json.loads(done.stdout[done.stdout.index("{") :])["rows"]
    except (ValueError, KeyError, TypeError):
        rows = []
    last = (done.stderr.strip() or done.stdout.strip() or "nothing printed").splitlines()[-1]
    if done.returncode or not rows:
        return rows, f"exit code {done.returncode}: {last}" if done.returncode else "printed no rows"
    return rows, ""


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(x, 1) for x in os.getloadavg()],
        "torch": torch.__version__,
        "gpus": names,
    }


def as_text(found: Sequence[dict[str, Any]], missing: dict[str, str]) -> str:
    about = machine()
    head = f"{about['cores']} cores, load {about['load'][0]}, torch {about['torch']}" + "".join(
        f", {name}" for name in about["gpus"]
    )
    notes = [f"no rows of {name}: {reason}" for name, reason in missing.items()]
    return "\n".join([head, *lines(found), *notes])


if __name__ == "__main__":
    raise SystemExit(main())
