"""Sampling while learning beside the plain loop, and iGRPO beside GRPO at one rollout budget, with a real engine.

    .venv/bin/python benchmarks/overlap.py [--case equal] [--blocks 6] [--steps 2] [--quick] [--json]

One vLLM engine in processes of its own and one learner rank in this one, a thread each, in one real training loop. Its
ways to sample take turns: GRPO with 8 completions of a question and iGRPO with 4 drafts and 4 refinements, each in turn
with learning, with `generation.async_steps: 1`, and iGRPO with `generation.drafts_ahead: true`. How to read the output:
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from _learner_inputs import lengths
from _rows import add_device, compared, positive, row
from _side import children_cpu_seconds
from _tiny_model import build_model, never_sample, questions

from hpcgrpo import ports, running, tiny
from hpcgrpo.algorithms import build
from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.attempt import Attempt
from hpcgrpo.config import parse
from hpcgrpo.exploring import Ready, Stage
from hpcgrpo.generation.forced import ForcedGenerator
from hpcgrpo.launch import serve
from hpcgrpo.profiler import PHASES
from hpcgrpo.running import Run
from hpcgrpo.sections import RunConfig
from hpcgrpo.train import assemble, join
from hpcgrpo.trainer import StepRecord
from hpcgrpo.types import Arrived, Completion, Request, Sampling

ADDRESS = "127.0.0.1"
REWARD = f"{Path(__file__).with_name('_side.py')}:digits"
GRPO: dict[str, Any] = {"name": "grpo", "num_generations": 8}
IGRPO: dict[str, Any] = {"name": "igrpo", "drafts": 4, "base": {"name": "grpo", "num_generations": 4}}
SIZES = {"hidden": 256, "layers": 4, "prompt_tokens": 32, "blocks": 6, "steps": 2}
QUICK = {"hidden": 64, "layers": 2, "prompt_tokens": 16, "blocks": 2, "steps": 2}


@dataclass(frozen=True)
class Case:
    """How much a step samples, and its lengths in tokens: log-normal up to `longest`, or all of them that long."""

    name: str
    mean: float
    longest: int
    prompts: int


CASES = (Case("equal", 32, 32, prompts=16), Case("spread", 24, 96, prompts=32))


@dataclass(frozen=True)
class Way:
    """How a step is made: 8 rollouts of each question."""

    algorithm: Algorithm
    ahead: Stage | None = None  # what of the next step is sampled while this one is learnt


WAYS = {
    "GRPO": Way(build(GRPO)),
    "GRPO, step ahead": Way(build(GRPO), "step"),
    "iGRPO": Way(build(IGRPO)),
    "iGRPO, drafts ahead": Way(build(IGRPO), "drafts"),
    "iGRPO, step ahead": Way(build(IGRPO), "step"),
}
SERIAL = {"GRPO, step ahead": "GRPO", "iGRPO, drafts ahead": "iGRPO", "iGRPO, step ahead": "iGRPO"}
RIVALS = {  # iGRPO beside GRPO: what is promised of the ratio, the paper's being 0.83
    ("iGRPO", "GRPO"): 0.90,
    ("iGRPO, drafts ahead", "GRPO"): 0.95,
    ("iGRPO, step ahead", "GRPO, step ahead"): 0.95,
}
Seconds = dict[str, float]


class Typical(ForcedGenerator):
    """Every call's completions have the quantiles of one distribution as lengths, so that all ways sample alike."""

    def __init__(self, sampler: Any, case: Case) -> None:
        super().__init__(sampler, [case.longest])
        self.case = case

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived | None = None
    ) -> list[Completion]:
        """One completion per request, in their order."""
        sizes = lengths(len(requests), mean=self.case.mean, most=self.case.longest)
        forced = [replace(r, length=n) for r, n in zip(requests, sizes, strict=True)]
        return self.sampler.generate(forced, sampling, arrived)


def main() -> None:
    options = parse_arguments()
    if options.device == "cuda":
        os.environ["LOCAL_RANK"] = "1"  # the engine takes the first GPU
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options)
    rows = [r for name, steps in found.items() for r in table_rows(name, steps)]
    if options.json:
        print(json.dumps({"rows": rows, "settings": vars(options), "steps": found}))
    else:
        print("\n".join(line for name, steps in found.items() for line in as_text(name, steps)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = [case.name for case in CASES]
    parser.add_argument("--case", action="append", choices=names, help="default: both")
    parser.add_argument("--blocks", type=positive, help=f"turns of every way (default {SIZES['blocks']})")
    parser.add_argument("--steps", type=positive, help="measured steps a turn (default 2)")
    parser.add_argument(
        "--prompts", type=positive, help="of a step, 8 completions each (default 16, spread 32)"
    )
    for name in ("hidden", "layers", "prompt_tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, help=f"default {SIZES[name]}")
    parser.add_argument("--quick", action="store_true", help="small and few: whether it runs")
    add_device(parser, gpus=2)
    parser.add_argument("--json", action="store_true", help="every measurement as JSON, and nothing else")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    sizes = (QUICK | {"prompts": 2}) if given["quick"] else (SIZES | {"prompts": None})
    return argparse.Namespace(**{"case": names, **sizes, **given})


def cases(options: argparse.Namespace) -> list[Case]:
    """Those asked for, with as many prompts as asked for."""
    chosen = [case for case in CASES if case.name in options.case]
    return [replace(case, prompts=options.prompts or case.prompts) for case in chosen]


# ---- the run


def settings(folder: Path, options: argparse.Namespace) -> RunConfig:
    """A run of one rank and one engine, as wide as its widest case; evaluation and saving are off."""
    most = cases(options)
    return parse(
        {
            "name": "overlap",
            "model_name_or_path": str(folder / "model"),
            "output_dir": str(folder),
            "device": options.device,
            "algorithm": IGRPO,
            "rewards": {REWARD: 1.0},
            "data": {"path": str(folder / "prompts.jsonl")},
            "generation": {
                "backend": "vllm",
                "temperature": 1.0,
                "max_prompt_length": options.prompt_tokens + 1,
                "max_completion_length": max(case.longest for case in most),
                "vllm_max_concurrency": max(8 * case.prompts for case in most),
            },
            "train": {
                "train_batch_size": 4 * most[0].prompts,
                "learning_rate": 1e-9,  # every step is the same
                "lr_scheduler_type": "constant",
                "max_steps": 1_000_000,
            },
            "cluster": {"nodes": 2, "vllm_nodes": 1, "nproc_per_node": 1, "threads_per_rank": 1},
            "report_to": [],
        }
    )


def save_inputs(folder: Path, options: argparse.Namespace) -> None:
    """A random model that samples single characters alone, so that a draft is as long in a prompt, and questions."""
    tokenizer = tiny.build_character_tokenizer()
    model = build_model(hidden=options.hidden, layers=options.layers, vocabulary=tiny.VOCABULARY_SIZE)
    never_sample(model, [i for i in range(tiny.VOCABULARY_SIZE) if len(tokenizer.decode([i])) != 1])
    tiny.save(model, tokenizer, folder / "model")
    rows = questions(prompt_tokens=options.prompt_tokens)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


@contextmanager
def served(config: RunConfig) -> Iterator[Attempt]:
    """One engine as a job starts it -> the attempt whose ranks find it."""
    attempt = Attempt(config.folder / "slurm" / "overlap.0", 0)
    attempt.folder.mkdir(parents=True)
    secret_file = attempt.folder.parent / "secret"
    secret_file.touch(mode=0o600)
    secret_file.write_text(secrets.token_hex(16))
    (held,) = ports.take(1, str(os.getpid()), ADDRESS)
    engines = serve.Engines(
        serve.plan(config),
        address=ADDRESS,
        ports=[held.port],
        secret_file=secret_file,
        log_folder=attempt.folder,
        timeout_seconds=config.generation.vllm_server_timeout,
    )
    engines.start()
    try:
        while not engines.ready:
            engines.poll()
            time.sleep(0.5)
        attempt.note("server", {"engines": engines.describe()})
        os.environ["HPCGRPO_ADDRESS"] = ADDRESS
        yield attempt
    finally:
        engines.stop()
        held.close()


def measure(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, list[Seconds]]]:
    """The measured steps of each case and way."""
    save_inputs(folder, options)
    config = settings(folder, options)
    found: dict[str, dict[str, list[Seconds]]] = {}
    with served(config) as attempt:
        run = assemble(config, *join(config), attempt)
        run.saves = False
        sampler: Any = run.trainer.explorer.generator
        steps = running.steps(run)
        for case in cases(options):
            run.trainer.explorer.generator = Typical(sampler, case)
            found[case.name] = in_turns(run, steps, case, options)
        run.rewards.close()
        torch.distributed.destroy_process_group()
    return found


def in_turns(
    run: Run, steps: Iterator[StepRecord], case: Case, options: argparse.Namespace
) -> dict[str, list[Seconds]]:
    """`blocks` turns of each way on the same questions; who goes first changes, so that a drift favours none."""
    found: dict[str, list[Seconds]] = {name: [] for name in WAYS}
    run.trainer.setup = replace(run.trainer.setup, prompts_per_step=case.prompts)
    for turn in range(options.blocks):
        first = turn % len(WAYS)
        for name in [*WAYS][first:] + [*WAYS][:first]:
            run.trainer.progress.position = turn * (options.steps + 1) * case.prompts
            found[name] += block(run, steps, WAYS[name], options.steps)
        print(f"{case.name}: turn {turn + 1} of {options.blocks}", file=sys.stderr, flush=True)
    return found


def block(run: Run, steps: Iterator[StepRecord], way: Way, count: int) -> list[Seconds]:
    """So many steps of one way; one that samples ahead begins with a step that has nothing yet and is not counted."""
    trainer = run.trainer
    trainer.algorithm = trainer.explorer.algorithm = way.algorithm
    trainer.setup = trainer.explorer.setup = replace(trainer.setup, ahead=way.ahead)
    trainer.ready = Ready()
    if way.ahead:
        next(steps)
    made = []
    for _ in range(count):
        began = children_cpu_seconds()
        metrics = next(steps).metrics
        made.append(seconds(metrics) | {"engine_cpu": children_cpu_seconds() - began})
    return made


def seconds(metrics: Mapping[str, float]) -> Seconds:
    """Where a step's time went. Sampling, learning and sync add up to the step where nothing is sampled ahead."""

    def sums(prefix: str, *phases: str) -> float:
        return sum(metrics.get(f"{prefix}/{phase}", 0.0) for phase in phases)

    def whole(prefix: str) -> float:
        return sums(prefix, *PHASES)

    sampling, sync = sums("timing_s", "generate", "grade", "exchange"), metrics["timing_s/sync"]
    waiting = metrics.get("timing_s/wait", 0.0)
    return {
        "step": metrics["step_time"],
        "sampling": sampling,
        "drafts": metrics.get("timing_s/generate/stage_1", 0.0),
        "learning": metrics["step_time"] - sampling - sync - waiting,
        "waiting": waiting,
        "sync": sync,
        "ahead": whole("timing_ahead_s"),
        "client_cpu": sums("timing_cpu_s", "generate", "grade", "exchange"),  # of the learner's process
        "learner_cpu": whole("timing_cpu_s"),
        "sampled": metrics["completions/sampled"],
    }


# ---- what it says


def median(steps: Sequence[Seconds], name: str) -> float:
    return statistics.median(step[name] for step in steps)


def bound(steps: Mapping[str, Sequence[Seconds]], name: str) -> float:
    """How many times as fast as in turn a way can be: what the other side does then costs nothing."""
    serial = steps[SERIAL[name]]
    whole, drafts, sampling = (median(serial, key) for key in ("step", "drafts", "sampling"))
    learning = median(serial, "learning") + median(serial, "sync")
    if WAYS[name].ahead == "drafts":
        return whole / (sampling - drafts + max(drafts, learning))
    return whole / max(sampling, learning)


def table_rows(case: str, steps: Mapping[str, Sequence[Seconds]]) -> list[dict[str, Any]]:
    """Each way beside the same in turn, and iGRPO beside GRPO."""

    def ratio(name: str, rival: str) -> dict[str, Any]:
        return compared([s["step"] for s in steps[rival]], [s["step"] for s in steps[name]])

    behind = {"step": "max(sampling, learning + sync)", "drafts": "stage 2 + max(stage 1, learning + sync)"}
    ahead = [
        row(
            f"{case}, {name}: in turn",
            of="seconds of a step",
            bound=bound(steps, name),
            bound_is=f"in turn / {behind[WAYS[name].ahead or '']}",
            **ratio(name, serial),
        )
        for name, serial in SERIAL.items()
    ]
    rivals = [
        row(f"{case}, {name}: {rival}", of="seconds of a step", promised=least, **ratio(name, rival))
        for (name, rival), least in RIVALS.items()
    ]
    return ahead + rivals


COLUMNS = ("step", "sampling", "learning", "waiting", "sync", "ahead", "learner_cpu", "engine_cpu")


def as_text(case: str, steps: Mapping[str, Sequence[Seconds]]) -> Iterator[str]:
    """The table of one case."""
    count = len(steps["GRPO"])
    yield f"{case}: medians of {count} steps of {steps['GRPO'][0]['sampled']:.0f} completions, seconds"
    yield f"{'':22}" + "".join(f"{name.replace('_', ' '):>13}" for name in COLUMNS)
    for name, some in steps.items():
        yield f"{name:22}" + "".join(f"{median(some, column):13.3f}" for column in COLUMNS)
    for found in table_rows(case, steps):
        low, high = found["quartiles"]
        said = f"{found['name']:58}{found['ratio']:6.2f} ({low:.2f} - {high:.2f})"
        if found["bound"]:
            said += f", bound {found['bound']:.2f}, reached {found['fraction']:.0%}"
        if found["promised"]:
            said += f", promised {found['promised']:.2f}"
        yield said
    yield ""


if __name__ == "__main__":
    main()
