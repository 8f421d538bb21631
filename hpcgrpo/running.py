"""An assembled run: its steps with evaluation, checkpoints and journal, to its end or until it is told to stop."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch

from hpcgrpo import checkpoint_folder, profiler, rewards, versions
from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.algorithms.igrpo import REFINE_TEMPLATE, template_of
from hpcgrpo.arithmetic import Arithmetic
from hpcgrpo.attempt import Attempt
from hpcgrpo.config import ConfigError
from hpcgrpo.heldout import Answers, evaluate, transfer_warning
from hpcgrpo.journal import FolderInUse, Journal, ProgressLine, write_atomically
from hpcgrpo.learning import checkpoint
from hpcgrpo.learning.fsdp import FsdpLearner, export
from hpcgrpo.metrics import held_out_rows, rollout_rows
from hpcgrpo.sections import RunConfig
from hpcgrpo.trainer import StepRecord, Trainer
from hpcgrpo.types import Prompt, Stopped

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
    first_step: int = 0  # where this start began
    saved_step: int = -1
    step_seconds: list[float] = field(default_factory=list)
    save_seconds: float = 0.0


def steps(run: Run) -> Iterator[StepRecord]:
    """The trainer's steps with evaluation and checkpoints where they are due; collective.

    Asked to stop, it saves what is not saved yet and raises Stopped on all ranks.
    """
    profiler.reset_peak_memory()
    run.first_step = run.trainer.progress.step
    run.saved_step = run.first_step if run.resumed_from else -1
    _note(run)
    try:
        yield from _until_stopped(run)
    except Stopped:
        run.checkpoints.finish()
        if run.saved_step < run.trainer.progress.step:
            save(run, wait=True)
        _note(run)
        raise
    run.checkpoints.finish()
    _note(run)


def _until_stopped(run: Run) -> Iterator[StepRecord]:
    trainer, train = run.trainer, run.config.train
    if run.held_out and run.resumed_from is None:
        trainer.sync()
        found, answers = held_out(run, forms=True)
        yield StepRecord(0, found, None, answers)
    began = time.perf_counter()
    for record in trainer.steps():
        last = record.step == run.counts.max_steps
        metrics, answers = dict(record.metrics), {}
        every = run.config.eval.every_steps if run.config.eval else None
        if run.held_out and (last or (every and record.step % every == 0)):
            with trainer.profile.phase("evaluate"):
                found, answers = held_out(run, forms=last)
                metrics |= found
        if last or record.step % train.save_steps == 0:
            with trainer.profile.phase("save"):
                save(run, wait=last)
        if run.device.type == "cpu":  # on a shared machine the clock tells little
            metrics |= {f"timing_cpu_s/{k}": v for k, v in trainer.profile.step_cpu_seconds.items()}
        phases = trainer.profile.end_step()
        now = time.perf_counter()
        metrics |= {f"timing_s/{name}": seconds for name, seconds in phases.items()}
        metrics |= {"step_time": now - began, "epoch": trainer.progress.position / len(trainer.prompts)}
        working = now - began - phases.get("evaluate", 0.0) - phases.get("save", 0.0)
        metrics["perf/completions_per_second"] = metrics["completions/sampled"] / working
        stop = run.attempt is not None and run.attempt.stop_request() is not None
        said = trainer.ranks.gather((profiler.peak_memory_gb(), stop))
        metrics["perf/peak_memory_gb"] = max(peak for peak, _ in said)
        run.step_seconds = [*run.step_seconds, now - began][-SLOWEST_OF:]
        began = now
        yield StepRecord(record.step, metrics, record.credited, answers)
        _note(run)
        if any(asked for _, asked in said) and not last:
            raise Stopped(agreed=True)


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
        run.trainer,
        run.held_out,
        temperature=settings.temperature,
        template=template if settings.two_pass else None,
        forms=forms and drafted,
    )
    if settings.peer and peer is not None and peer.generator is not None:
        run.trainer.peer_answers = True
        run.trainer.sync_peer()
        theirs = evaluate(
            run.trainer,
            run.held_out,
            temperature=settings.temperature,
            template=None,
            prefix="eval/peer",
            generator=peer.generator,
        )
        run.trainer.peer_answers = False
        found, answers = found | theirs[0], answers | theirs[1]
    return found, answers


def save(run: Run, *, wait: bool) -> None:
    """Start a checkpoint; `wait`, or async_save off, ends it here. A failure is told and the next one tried."""
    progress, train = run.trainer.progress, run.config.train
    progress.elapsed_seconds = run.trainer.profile.elapsed_seconds
    asynchronous = run.device.type == "cuda" if train.async_save is None else train.async_save
    extra = {
        "progress": asdict(progress),
        "phase_seconds": run.trainer.profile.total_seconds,
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
    """The actor in the checkpoint's folder as transformers loads it, a peer that trains in `peer` below it."""
    writes = [
        export(learner, folder / name if name else folder, learner.dtype, run.tokenizer)
        for name, learner in _learners(run.trainer).items()
    ]

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
    too_long = getattr(run.trainer.prompts, "num_too_long", 0)
    if too_long:
        print(
            f"left out {too_long} questions longer than max_prompt_length {config.generation.max_prompt_length}",
            file=run.summary,
            flush=True,
        )
    with ProgressLine(run.counts.max_steps, max(0, resumed), config.name, run.summary) as progress:
        for record in steps(run):
            check_lease(run)
            journal.metrics(record.step, record.metrics)
            if record.step == 0 and (warning := transfer_warning(record.metrics, len(run.held_out))):
                print(f"warning: {warning}", file=run.summary, flush=True)
            if record.held_out:
                journal.rollouts(record.step, held_out_rows(record.held_out), kind="eval")
            if record.credited is not None:
                journal.rollouts(record.step, rollout_rows(record.credited))
                progress.step(record.step, record.metrics)
                write_profile(run, record.metrics)


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
    profile, progress, cluster = run.trainer.profile, run.trainer.progress, run.config.cluster
    elapsed = profile.elapsed_seconds
    devices = cluster.nodes * cluster.gpus_per_node or run.counts.ranks
    summary = {
        "steps": progress.step,
        "elapsed_seconds": elapsed,
        "peak_memory_gb": metrics["perf/peak_memory_gb"],
        "samples_per_second": profiler.samples_per_second(
            progress.updates, run.counts.rows_per_device, run.counts.ranks, elapsed
        ),
        "completions_per_second": progress.num_completions / elapsed,
        "trained_completions_per_second": progress.trained_completions / elapsed,
        "tokens_per_second_per_device": progress.num_tokens / elapsed / devices,
        "device": run.device.type,
        "devices": devices,
        "gpu_hours" if run.device.type == "cuda" else "cpu_rank_hours": profiler.gpu_hours(devices, elapsed),
        "phase_seconds": profile.total_seconds,
    }
    write_atomically(run.config.folder / "profile.json", json.dumps(summary, indent=1) + "\n")
