"""An assembled run: its steps with evaluation, checkpoints and journal, to its end or until it is told to stop."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch

from hpcgrpo import ahead, checkpoint_folder, flops, profiler, rewards, versions
from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.algorithms.igrpo import REFINE_TEMPLATE, template_of
from hpcgrpo.arithmetic import Arithmetic
from hpcgrpo.attempt import Attempt
from hpcgrpo.config import ConfigError
from hpcgrpo.exploring import Ready
from hpcgrpo.heldout import Answers, evaluate, transfer_warning
from hpcgrpo.journal import FolderInUse, Journal, ProgressLine, write_atomically
from hpcgrpo.learning import checkpoint
from hpcgrpo.learning.fsdp import FsdpLearner, export
from hpcgrpo.metrics import held_out_rows, rollout_rows
from hpcgrpo.sections import RunConfig
from hpcgrpo.trainer import StepRecord, Trainer
from hpcgrpo.types import Prompt, Stopped

UNSCORED = (
    "every reward gave None for every completion, which counts as 0: nothing is learned from such a step. A reward"
    " gives None where it does not apply; let at least one give a number"
)
SLOWEST_OF = 5  # steps whose slowest stands for the next one


@dataclass
class Run:
    """A run, assembled and resumed: `trainer` is ready to step."""

    config: RunConfig
    algorithm: Algorithm
    counts: Arithmetic
    trainer: Trainer
    checkpoints: checkpoint.Checkpoints
    rewards: rewards.Rewards
    held_out: list[Prompt]
    tokenizer: Any
    device: torch.device
    resumed_from: Path | None
    attempt: Attempt | None = None  # of a job; None: nobody asks to stop, nothing is noted
    summary: IO[str] = sys.stderr  # where the progress goes
    saves: bool = True  # False: a measurement, which leaves no checkpoint
    first_step: int = 0  # where this start began
    saved_step: int = -1
    step_seconds: list[float] = field(default_factory=list)
    save_seconds: float = 0.0
    tokens_before: int = 0  # the step: sampled, prompts included

    def __post_init__(self) -> None:
        dtype = cast(FsdpLearner, self.trainer.learner).dtype
        self.meter = flops.meter(self.config, self.device, ranks=self.counts.ranks, dtype=dtype)

    @property
    def devices(self) -> int:
        """Reserved for the run, those of the serving nodes included; on a CPU its ranks."""
        cluster = self.config.cluster
        return cluster.nodes * cluster.gpus_per_node or self.counts.ranks


def steps(run: Run) -> Iterator[StepRecord]:
    """The trainer's steps with evaluation and checkpoints where they are due; collective.

    Asked to stop, it saves what is not saved yet and raises Stopped on all ranks.
    """
    profiler.reset_peak_memory()
    run.first_step, run.tokens_before = run.trainer.progress.step, run.trainer.progress.num_tokens
    run.saved_step = run.first_step if run.resumed_from else -1
    _note(run)
    try:
        yield from _until_stopped(run)
    except Stopped:
        run.checkpoints.finish()
        if run.saves and run.saved_step < run.trainer.progress.step:
            save(run, wait=True)
        _tell_given_up(run)
        _note(run)
        raise
    run.checkpoints.finish()
    _note(run)


def _tell_given_up(run: Run) -> None:
    """Where a stop broke off what was sampled ahead, the run will not be the undisturbed one bit for bit."""
    trainer = run.trainer
    lost = trainer.setup.ahead and trainer.ready == Ready()
    if lost and trainer.ranks.rank == 0 and 0 < trainer.progress.step < run.counts.max_steps:
        print(
            f"note: what was being sampled for step {trainer.progress.step + 1} is given up; the next start samples it"
            " anew, with the newer weights",
            file=run.summary,
            flush=True,
        )


def _until_stopped(run: Run) -> Iterator[StepRecord]:
    trainer, train = run.trainer, run.config.train
    if run.held_out and run.resumed_from is None:
        trainer.sync()
        with trainer.profile.phase("evaluate"):
            found, answers = held_out(run, forms=True)
        yield StepRecord(0, found, None, answers)
    for record in trainer.steps():
        last = record.step == run.counts.max_steps
        metrics, answers = dict(record.metrics), {}
        share = flops.share(trainer, trainer.profile)
        every = run.config.eval.every_steps if run.config.eval else None
        if run.held_out and (last or (every and record.step % every == 0)):
            with trainer.profile.phase("evaluate"):
                found, answers = held_out(run, forms=last)
                metrics |= found
        if run.saves and (last or record.step % train.save_steps == 0):
            with trainer.profile.phase("save"):
                save(run, wait=last)
        stop = run.attempt is not None and run.attempt.stop_request() is not None
        said = trainer.gather((profiler.peak_memory_gb(), stop, share))
        metrics |= _timed(run, metrics) | _used(run, [share for _, _, share in said])
        metrics["perf/peak_memory_gb"] = max(peak for peak, _, _ in said)
        metrics["epoch"] = trainer.progress.position / len(trainer.explorer.prompts)
        run.step_seconds = [*run.step_seconds, metrics["step_time"]][-SLOWEST_OF:]
        yield StepRecord(record.step, metrics, record.credited, answers)
        _note(run)
        if any(asked for _, asked, _ in said) and not last:
            raise Stopped(agreed=True)


def _timed(run: Run, metrics: Mapping[str, float]) -> dict[str, float]:
    """End the step -> where its time went, and its rates; evaluation and checkpoints are left out of those."""
    profile, progress = run.trainer.profile, run.trainer.progress
    spent, cpu = profile.end_step()
    apart = sum(spent.phases.get(name, 0.0) for name in ("evaluate", "save"))
    working, tokens = spent.seconds - apart, progress.num_tokens - run.tokens_before
    run.tokens_before = progress.num_tokens
    return {
        "step_time": spent.seconds,
        **spent.named("timing_s"),
        # on a shared machine the clock tells little
        **(cpu.named("timing_cpu_s") if run.device.type == "cpu" else {}),
        "perf/completions_per_second": metrics["completions/sampled"] / working,
        "perf/tokens_per_second_per_device": tokens / working / run.devices,
        "perf/samples_per_second": _samples_per_second(run),
    }


def _used(run: Run, shares: Sequence[flops.Share]) -> dict[str, float]:
    """How far the devices were used in a step, which is added to what the run counts."""
    sums = run.meter.sums(shares)
    run.trainer.profile.add(sums)
    return {f"perf/{name}": rate for name, rate in run.meter.rates(sums).items()}


def _samples_per_second(run: Run) -> float:
    counts, progress = run.counts, run.trainer.progress
    elapsed = run.trainer.profile.elapsed_seconds
    return profiler.samples_per_second(progress.updates, counts.rows_per_device, counts.ranks, elapsed)


def held_out(run: Run, *, forms: bool) -> tuple[dict[str, float], Answers]:
    """Held-out metrics and answers at the present weights; `forms`: after other drafts too, where asked for.

    Collective.
    """
    settings, peer = run.config.eval, run.trainer.peer
    assert settings is not None
    own = template_of(run.algorithm.options)
    template = settings.refine_template or own or REFINE_TEMPLATE
    drafted = own is not None if settings.draft_forms is None else settings.draft_forms
    found, answers = evaluate(
        run.trainer.explorer,
        run.held_out,
        temperature=settings.temperature,
        template=template if settings.two_pass else None,
        forms=forms and drafted,
    )
    if settings.peer and peer is not None and peer.generator is not None:
        run.trainer.peer_answers = True
        run.trainer.sync_peer()
        theirs = evaluate(
            run.trainer.explorer,
            run.held_out,
            temperature=settings.temperature,
            template=None,
            prefix="eval/peer",
            generator=peer.generator,
        )
        run.trainer.peer_answers = False
        found, answers = found | theirs[0], answers | theirs[1]
    flops.share(run.trainer, run.trainer.profile)  # is not of the step
    return found, answers


def save(run: Run, *, wait: bool) -> None:
    """Start a checkpoint; `wait`, or async_save off, ends it here. A failure is told and the next one tried."""
    progress, train = run.trainer.progress, run.config.train
    progress.elapsed_seconds = run.trainer.profile.elapsed_seconds
    asynchronous = run.device.type == "cuda" if train.async_save is None else train.async_save
    extra = {
        "progress": asdict(progress),
        "profile": run.trainer.profile.state(),
        "finished": progress.step == run.counts.max_steps,
        "length": [train.max_steps, train.num_train_epochs],  # of the run that it ends
    }
    began = time.perf_counter()
    try:
        run.checkpoints.start(
            progress.step,
            state=training_state(run.trainer),
            extra=extra,
            export=lambda folder: _export(run, folder),
            wait=wait or not asynchronous,
        )
    except OSError as error:
        if wait:
            raise ConfigError(f"{error}; free some space and run again to resume") from None
        if run.trainer.ranks.rank == 0:
            print(f"warning: {error}; the run goes on and tries again at the next save", file=sys.stderr)
        return
    run.saved_step = progress.step
    run.save_seconds = max(run.save_seconds, time.perf_counter() - began)


def _export(run: Run, folder: Path) -> Callable[[], None]:
    """The actor in the checkpoint's folder as transformers loads it, a peer that trains in `peer` below it, and what
    was sampled ahead."""
    writes = [
        export(learner, folder / name if name else folder, learner.dtype, run.tokenizer)
        for name, learner in _learners(run.trainer).items()
    ]
    if run.trainer.ranks.rank == 0:
        writes.append(partial(ahead.save, folder, run.trainer.ready, run.trainer.explorer.setup))

    def write() -> None:
        for each in writes:
            each()

    return write


def _learners(trainer: Trainer) -> dict[str, FsdpLearner]:
    """The policies that train, by where they stand in a checkpoint; the actor at its top."""
    peer = {"peer": trainer.peer.learner} if trainer.peer and trainer.algorithm.peer else {}
    return cast("dict[str, FsdpLearner]", {"": trainer.learner, **peer})


def training_state(trainer: Trainer) -> dict[str, Any]:
    """The sharded state of every policy that trains, as torch.distributed.checkpoint takes it."""
    states = {name: learner.state() for name, learner in _learners(trainer).items()}
    return {**states.pop(""), **states}


def load_training_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Bring every policy that trains to a state made by `training_state`."""
    for name, learner in _learners(trainer).items():
        learner.load_state(state[name] if name else state)


def lead(run: Run) -> None:
    """Rank 0: the same steps, written down and shown. Raises Stopped as `steps` does."""
    config = run.config
    resumed = run.trainer.progress.step if run.resumed_from else -1
    check_lease(run)
    versions.note(config.folder, max(0, resumed))
    journal = Journal(
        config.folder, resumed, config.report_to, config.model_dump(mode="json"), config.log_completions
    )
    if run.resumed_from is not None:
        print(
            f"resuming {config.name} after step {resumed} from {run.resumed_from}",
            file=run.summary,
            flush=True,
        )
    for path in checkpoint_folder.damaged(config.folder / "checkpoints"):
        print(f"warning: {path} is damaged or incomplete; passed over", file=run.summary, flush=True)
    too_long = getattr(run.trainer.explorer.prompts, "num_too_long", 0)
    if too_long:
        print(
            f"left out {too_long} questions longer than max_prompt_length {config.generation.max_prompt_length}",
            file=run.summary,
            flush=True,
        )
    profile = run.trainer.profile
    profile.held_before_seconds = held_before_seconds(run)
    told_unscored = False
    with ProgressLine(run.counts.max_steps, max(0, resumed), config.name, run.summary) as progress:
        for record in steps(run):
            check_lease(run)
            with profile.phase("journal"):
                journal.metrics(record.step, record.metrics)
                if record.held_out:
                    journal.rollouts(record.step, held_out_rows(record.held_out), kind="eval")
                if record.credited is not None:
                    journal.rollouts(record.step, rollout_rows(record.credited))
                    write_profile(run, record.metrics)
            if record.step == 0 and (warning := transfer_warning(record.metrics, len(run.held_out))):
                print(f"warning: {warning}", file=run.summary, flush=True)
            if record.metrics.get("completions/unscored") == 1.0 and not told_unscored:
                told_unscored = True
                print(f"warning: step {record.step}: {UNSCORED}", file=run.summary, flush=True)
            if record.credited is not None:
                progress.step(record.step, record.metrics)


def held_before_seconds(run: Run) -> float:
    """How long devices were held before this start's clock began: by earlier starts, and by what came before in a job.

    An earlier start told last with its last step.
    """
    try:
        told = json.loads((run.config.folder / "profile.json").read_text(encoding="utf-8"))
        earlier = float(told.get("held_seconds", told["elapsed_seconds"]))
    except (OSError, ValueError, KeyError):
        earlier = 0.0
    leased = run.attempt.leased_at() if run.attempt is not None else None
    profile = run.trainer.profile
    since = time.time() - leased if leased is not None else 0.0
    return earlier + max(0.0, since - (profile.clock() - profile.started))


def check_lease(run: Run) -> None:
    """Raises FolderInUse where a later start of the run has taken over: this one must write nothing more."""
    if run.attempt is not None and not run.attempt.holds_lease():
        raise FolderInUse(f"{run.config.folder}: a later start of the run has taken over; this one ends")


def _note(run: Run) -> None:
    """What the launcher needs to know to stop in time, from rank 0."""
    if run.attempt is not None and run.trainer.ranks.rank == 0:
        run.attempt.note(
            "status",
            {
                "step": run.trainer.progress.step,
                "max_steps": run.counts.max_steps,
                "first_step": run.first_step,
                "step_seconds": max(run.step_seconds, default=0.0),
                "save_seconds": run.save_seconds,
                "time": time.time(),
            },
        )


def write_profile(run: Run, metrics: Mapping[str, float]) -> None:
    """profile.json: Appendix D's quantities, and the seconds by phase, over all attempts."""
    profile, progress, devices = run.trainer.profile, run.trainer.progress, run.devices
    spent, elapsed, held = profile.total, profile.elapsed_seconds, profile.held_seconds
    summary = {
        "steps": progress.step,
        "elapsed_seconds": elapsed,
        "held_seconds": held,
        "peak_memory_gb": metrics["perf/peak_memory_gb"],
        "samples_per_second": _samples_per_second(run),
        "completions_per_second": progress.num_completions / elapsed,
        "trained_completions_per_second": progress.trained_completions / elapsed,
        "tokens_per_second_per_device": progress.num_tokens / elapsed / devices,
        **run.meter.rates(profile.counts),
        "device": run.device.type,
        "devices": devices,
        "gpu_hours" if run.device.type == "cuda" else "cpu_rank_hours": profiler.gpu_hours(devices, held),
        "phase_seconds": spent.phases,
        "part_seconds": spent.parts,
    }
    write_atomically(run.config.folder / "profile.json", json.dumps(summary, indent=1) + "\n")
