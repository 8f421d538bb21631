"""What measuring costs: the same steps with the profiler and without, taking turns, as a ratio of their CPU-seconds.

    python benchmarks/profiler_overhead.py [--pairs 40] [--completion 64]

Promised: under 1 % of a step. The ratio scatters with the machine's other work, so the profiler's own calls are
counted and timed apart as well: how many a step makes, times what each takes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from _rows import at_least, positive

from hpcgrpo import flops, profiler, running, tiny
from hpcgrpo.config import parse
from hpcgrpo.learning.packing import Packed
from hpcgrpo.learning.passes import Computed, untimed
from hpcgrpo.profiler import Profile
from hpcgrpo.running import Run
from hpcgrpo.train import assemble, join

MOST = 1.01  # with over without
WARM_UP = 4  # steps


def settings(folder: Path, completion: int, steps: int) -> dict[str, Any]:
    return {
        "name": "overhead",
        "model_name_or_path": str(folder / "model"),
        "output_dir": str(folder),
        "device": "cpu",
        "algorithm": {
            "name": "igrpo",
            "drafts": 4,
            "refine_template": "{question}#{draft}#{question}",
            "base": {"name": "grpo", "num_generations": 4, "beta": 0.01},
        },
        "rewards": {"accuracy": 1.0},
        "data": {"preset": "chain", "max_samples": 64},
        "generation": {"max_completion_length": completion, "max_prompt_length": 64},
        "train": {"train_batch_size": 32, "max_steps": steps, "save_steps": 10**6, "learning_rate": 1e-6},
        "report_to": [],
        "log_completions": False,
    }


@contextmanager
def unmeasured(run: Run) -> Iterator[None]:
    """Steps without the profiler: no clock is read, nothing is counted, no memory looked up."""
    profile = run.trainer.profile
    learner: Any = run.trainer.learner
    models = [m for m in (learner.model, learner.reference) if m is not None]
    quiet: dict[str, Any] = {"phase": lambda name: nullcontext(), "_count": lambda: None}
    kept = running._timed, running._used, flops.share, profiler.peak_memory_gb, learner.timed
    counted = [model.computed for model in models]
    running._timed = lambda run, metrics: {"step_time": 1.0}
    running._used = lambda run, shares: {}
    flops.share, profiler.peak_memory_gb = lambda trainer, profile: flops.Share(), lambda: 0.0
    learner.timed = untimed
    for model in models:
        model.computed = Uncounted()
    vars(profile).update(quiet)
    try:
        yield
    finally:
        for name in quiet:
            vars(profile).pop(name)
        for model, before in zip(models, counted, strict=True):
            model.computed = before
        running._timed, running._used, flops.share, profiler.peak_memory_gb, learner.timed = kept
        profile.end_step()


class Uncounted:
    def add(self, packed: Packed, *, trained: bool) -> None:
        """Leave the row uncounted."""


def measured(run: Run, pairs: int) -> tuple[list[float], list[float]]:
    """CPU-seconds of steps with and without, a pair of neighbours each, the order turned round every other time."""
    steps = running.steps(run)
    for _ in range(WARM_UP):
        next(steps)
    found: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs):
        for on in (True, False) if pair % 2 else (False, True):
            with nullcontext() if on else unmeasured(run):
                began = time.process_time()
                next(steps)
                found[on].append(time.process_time() - began)
    return found[True], found[False]


def own_seconds(run: Run) -> tuple[float, int]:
    """What the profiler's own calls of a step take -> seconds, looks at the clock."""
    profile, looks, spent = run.trainer.profile, [0], [0.0]
    real: Callable[[], None] = profile._count

    def count() -> None:
        looks[0] += 1
        real()

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                spent[0] += time.perf_counter() - began

        return wrapped

    steps = running.steps(run)
    kept = running._timed, running._used, flops.share, profiler.peak_memory_gb, Computed.add
    vars(profile)["_count"] = count
    running._timed, running._used, flops.share, profiler.peak_memory_gb = map(timed, kept[:4])
    Computed.add = timed(kept[4])  # type: ignore[method-assign]
    next(steps)
    running._timed, running._used, flops.share, profiler.peak_memory_gb, add = kept
    Computed.add = add  # type: ignore[method-assign]
    vars(profile).pop("_count")
    blank = Profile(moved=profile.moved)
    began = time.perf_counter()
    for _ in range(1000):
        with blank.phase("update/forward_backward"):
            pass
    return spent[0] + looks[0] * (time.perf_counter() - began) / 2000, looks[0]


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--pairs", type=at_least(2), default=40, help="steps with and without (default 40)")
    asked.add_argument("--completion", type=positive, default=64, help="tokens at most (default 64)")
    options = asked.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny.save(tiny.build_tiny_model(seed=0), tiny.build_character_tokenizer(), folder / "model")
        steps = WARM_UP + 2 * options.pairs + 2
        config = parse(settings(folder, options.completion, steps))
        config.folder.mkdir(parents=True)
        run = assemble(config, *join(config), None)
        on, off = measured(run, options.pairs)
        seconds, looks = own_seconds(run)
        run.rewards.close()
        torch.distributed.destroy_process_group()
    ratios = sorted(a / b for a, b in zip(on, off, strict=True))
    quarters = quantiles(ratios, n=4)
    said = {
        "step_cpu_seconds": median(off),
        "ratio": median(on) / median(off),
        "pair_ratio": median(ratios),
        "pair_ratio_quartiles": [quarters[0], quarters[2]],
        "own_calls_share": seconds / median(off),
        "clock_looks_a_step": looks,
        "pairs": options.pairs,
    }
    print(json.dumps(said, indent=1))
    return 0 if said["own_calls_share"] < MOST - 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
