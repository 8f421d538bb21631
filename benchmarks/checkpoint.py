"""What saving costs the training loop: at once, in the background, and as one `torch.save`, beside the disk's own rate.

    .venv/bin/python benchmarks/checkpoint.py [--layers 8] [--turns 5] [--folder DIR] [--device cuda] [--json]

A real run of one rank saves its checkpoints (sharded state, exported model, marker) between optimizer steps. Of a save
in the background the loop stands still while it starts, and after some steps for what is left of it; what it takes
from the steps shows in CPU-seconds.
How to read the output: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from _learner_inputs import save as save_inputs
from _learner_side import assembled, configured, groups
from _rows import add_device, compared, lines, positive, row
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from hpcgrpo import batching, running
from hpcgrpo.running import Run

CASE = {
    "side": "checkpoint",
    "prompt_tokens": 32,
    "mean_completion_length": 32.0,
    "max_completion_length": 32,
    "prompts": 1,
    "generations": 4,
    "hidden": 512,
    "vocabulary": 512,
    "threads": 1,
}


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="checkpoint_", dir=options.folder) as folder:
        found = measure(options, Path(folder))
    print(json.dumps(found, indent=1) if options.json else as_text(found))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=positive, default=8, help="2.9 M parameters each (default 8)")
    parser.add_argument("--turns", type=positive, default=5, help="of every way to save (default 5)")
    parser.add_argument(
        "--folder", type=existing, help="where to write (default: the folder for temporary files)"
    )
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print every number as JSON, and nothing else")
    return parser.parse_args()


def existing(text: str) -> Path:
    """The `type` of an argument that is a folder to write to."""
    if not (Path(text).is_dir() and os.access(text, os.W_OK)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder that can be written to; make it first")
    return Path(text)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Every way in turn, after one round that does not count."""
    case = CASE | {"layers": options.layers, "device": options.device, "folder": str(folder)}
    save_inputs(folder, case)
    run = assembled(configured(case, async_save=True, save_total_limit=1))
    credited = batching.credit(groups(folder), run.trainer.algorithm)

    def steps(count: int) -> None:
        for _ in range(count):
            run.trainer.learn(credited)
        synchronize(run)

    steps(1)
    saved = one_save(run, wait=True)
    size = sum(p.stat().st_size for p in run.checkpoints.folder.rglob("*") if p.is_file())
    count = max(2, round(3 * saved / seconds_of(lambda: steps(1))))  # steps that take longer than a save
    ways: dict[str, Callable[[], float]] = {
        "steps": lambda: seconds_of(lambda: steps(count)),
        "at_once": lambda: one_save(run, wait=True),
        "background": lambda: in_background(run, lambda: steps(count)),
        "torch_save": lambda: torch_save(run, folder / "whole.pt"),
        "disk": lambda: written(folder / "plain", size),
        "copy": lambda: copied(run),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.turns + 1):
        for name, way in ways.items():
            began, seconds = time.process_time(), way()
            times[name] += [seconds] if turn else []
            cpu[name] += [time.process_time() - began] if turn else []
    run.rewards.close()
    torch.distributed.destroy_process_group()
    cpu["background"] = [b - a for a, b in zip(cpu["steps"], cpu["background"], strict=True)]
    return {
        "bytes": size,
        "parameters": sum(p.numel() for p in run.trainer.learner.model.parameters()),
        "steps_per_save": count,
        "seconds": times,
        "cpu_seconds": cpu,
        "rows": rows(times, cpu),
    }


def seconds_of(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def synchronize(run: Run) -> None:
    if run.device.type == "cuda":
        torch.cuda.synchronize()


def one_save(run: Run, *, wait: bool) -> float:
    """Seconds until the loop may go on."""
    run.trainer.progress.step += 1
    return seconds_of(lambda: running.save(run, wait=wait))


def in_background(run: Run, steps: Callable[[], None]) -> float:
    """Seconds that the loop stands still: starting a save and, some steps later, waiting for what is left of it."""
    started = one_save(run, wait=False)
    steps()
    return started + seconds_of(run.checkpoints.finish)


def torch_save(run: Run, path: Path) -> float:
    """Seconds of gathering the training state and writing it as one file that is on the disk."""

    def act() -> None:
        whole = tree_map(
            lambda x: x.full_tensor() if isinstance(x, DTensor) else x, run.trainer.learner.state()
        )
        with path.with_suffix(".new").open("wb") as file:
            torch.save(whole, file)
            file.flush()
            os.fsync(file.fileno())
        path.with_suffix(".new").replace(path)

    return seconds_of(act)


def written(path: Path, size: int) -> float:
    """Seconds of writing so many bytes to a new file, having them on the disk, and removing the one before.

    In this order, as checkpoints do it: a file in the place of a removed one takes the pages that it left.
    """
    block = memoryview(os.urandom(2**24))

    def act() -> None:
        with path.with_suffix(".new").open("wb", buffering=0) as file:
            for start in range(0, size, len(block)):
                file.write(block[: size - start])
            os.fsync(file.fileno())
        path.with_suffix(".new").replace(path)

    return seconds_of(act)


def copied(run: Run) -> float:
    """Seconds of copying the training state into other memory of the host: what no save can do without."""
    state = run.trainer.learner.state()

    def act() -> None:
        tree_map(lambda x: x.detach().to("cpu", copy=True) if isinstance(x, torch.Tensor) else x, state)

    return seconds_of(act)


def rows(times: Mapping[str, Sequence[float]], cpu: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    at_once, background, still = times["at_once"], times["background"], "seconds the loop stands still"
    median = statistics.median
    return [
        row(
            "checkpoint at once: the disk alone",
            **compared(times["disk"], at_once),
            of=still,
            bound=1.0,
            bound_is="as many bytes written plainly",
        ),
        row(
            "checkpoint at once: torch.save",
            **compared(times["torch_save"], at_once),
            of=still,
        ),
        row(
            "checkpoint in the background: at once",
            **compared(at_once, background),
            of=still,
            bound=median(at_once) / median(times["copy"]),
            bound_is="the state copied in memory",
        ),
    ]


def as_text(found: Mapping[str, Any]) -> str:
    text = [
        f"{found['parameters'] / 1e6:.1f} M parameters, {found['bytes'] / 1e6:.0f} MB a checkpoint; "
        f"{found['steps_per_save']} steps beside a save in the background"
    ]
    text += [
        f"{name.replace('_', ' '):12}{statistics.median(values):>8.3f} s ({min(values):.3f}-{max(values):.3f})"
        f"{statistics.median(found['cpu_seconds'][name]):>8.3f} CPU-s"
        for name, values in found["seconds"].items()
    ]
    return "\n".join(text + lines(found["rows"]))


if __name__ == "__main__":
    main()
