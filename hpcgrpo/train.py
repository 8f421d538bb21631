"""Assembly: the only file that knows every part. One learner rank of a run, under torchrun."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hpcgrpo import profiler, rewards
from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.algorithms.igrpo import REFINE_TEMPLATE, template_of
from hpcgrpo.arithmetic import Arithmetic, arithmetic
from hpcgrpo.config import ConfigError
from hpcgrpo.generation.transformers import TransformersGenerator
from hpcgrpo.heldout import evaluate
from hpcgrpo.journal import Journal, ProgressLine, claim, write_atomically
from hpcgrpo.learning import checkpoint
from hpcgrpo.learning.fsdp import FsdpLearner, export
from hpcgrpo.learning.schedule import schedule
from hpcgrpo.metrics import rollout_rows
from hpcgrpo.profiler import Profile
from hpcgrpo.sections import RunConfig
from hpcgrpo.tasks import Prompts, Renderer, build_prompts, build_renderer, load_rows
from hpcgrpo.trainer import Progress, Setup, StepRecord, Trainer
from hpcgrpo.types import Prompt

GATHER_MINUTES = 60  # how long a rank waits for the slowest one, on gloo


@dataclass(frozen=True)
class GlooRanks:
    """The learner ranks on a gloo group of their own: waits there have a time limit and a message."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


@dataclass(frozen=True)
class Run:
    """A run, assembled and resumed: `trainer` is ready to step."""

    config: RunConfig
    algorithm: Algorithm
    counts: Arithmetic
    trainer: Trainer
    learner: FsdpLearner
    checkpoints: checkpoint.Checkpoints
    rewards: rewards.Rewards
    held_out: list[Prompt]
    tokenizer: Any
    device: torch.device
    resumed_from: Path | None


def rank_main(config: RunConfig) -> None:
    """What every rank runs: train to the end, resuming from the newest complete checkpoint.

    Raises ValueError for what a user can mend.
    """
    lock = claim(config.folder) if int(os.environ.get("RANK", "0")) == 0 else None
    ranks, device = join(config)
    run = assemble(config, ranks, device)
    try:
        if ranks.rank == 0:
            lead(run)
        else:
            for _ in steps(run):
                pass
    except OSError as error:  # of the journal: a full disk, a quota
        raise ConfigError(f"{config.folder} cannot be written ({error}); run again once it can") from None
    finally:
        run.rewards.close()
    dist.destroy_process_group()
    if lock is not None:
        lock.close()


def join(config: RunConfig) -> tuple[GlooRanks, torch.device]:
    """Join the other ranks (alone outside torchrun) and choose the device."""
    local, size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise ConfigError("device: cuda, but torch sees no GPU here; set device: cpu or auto")
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(threads_per_rank(config))
    for name, value in (
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
    ):
        os.environ.setdefault(name, value)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    store = dist.HashStore() if size == 1 else None
    dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=size)
    group = dist.new_group(backend="gloo", timeout=timedelta(minutes=GATHER_MINUTES))
    return GlooRanks(dist.get_rank(), size, group), device


def threads_per_rank(config: RunConfig) -> int:
    """CPU threads of one rank: as configured, else the machine's cores over its ranks."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return config.cluster.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // local)


def assemble(config: RunConfig, ranks: GlooRanks, device: torch.device) -> Run:
    """Build every part and bring it to the newest complete checkpoint's state."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar: the training's own
    logging.set_verbosity_error()
    profile = Profile()
    algorithm = config.build_algorithm()
    tokenizer = AutoTokenizer.from_pretrained(config.model_name_or_path)
    renderer = build_renderer(
        tokenizer, system_prompt=config.data.system_prompt, chat_template=config.data.chat_template
    )
    prompts = training_prompts(config, renderer)
    counts = arithmetic(config, algorithm, len(prompts))
    graders = config.grader_processes or threads_per_rank(config)
    score = rewards.build(
        config.rewards, max_completion_length=config.generation.max_completion_length, num_processes=graders
    )
    learner = build_learner(config, algorithm, device)
    trainer = Trainer(
        algorithm=algorithm,
        generator=build_generator(config, learner, tokenizer, device),
        learner=learner,
        prompts=prompts,
        score=score.score,
        refine=renderer.refine,
        learning_rate=learning_rate(config, counts),
        ranks=ranks,
        setup=setup(config, counts),
        progress=Progress(),
        profile=profile,
    )
    checkpoints = checkpoint.Checkpoints(
        config.folder / "checkpoints", config.train.save_total_limit, ranks.group
    )
    resumed = resume(trainer, learner, checkpoints)
    held_out = held_out_prompts(config, renderer)
    return Run(
        config, algorithm, counts, trainer, learner, checkpoints, score, held_out, tokenizer, device, resumed
    )


def training_prompts(config: RunConfig, renderer: Renderer) -> Prompts:
    """The run's questions in their order, over-long ones left out."""
    return build_prompts(
        load_rows(**config.data.rows()),
        renderer,
        seed=config.seed,
        max_prompt_length=config.generation.max_prompt_length,
        shuffle=config.data.shuffle,
    )


def held_out_prompts(config: RunConfig, renderer: Renderer) -> list[Prompt]:
    """The first `eval.num_samples` held-out questions, in the file's order; none without `eval`."""
    if config.eval is None:
        return []
    rows = load_rows(**config.eval.data.rows())[: config.eval.num_samples]
    limit = config.generation.max_prompt_length
    chosen = build_prompts(rows, renderer, max_prompt_length=limit, shuffle=False)
    return chosen.take(0, len(chosen))


def build_learner(config: RunConfig, algorithm: Algorithm, device: torch.device) -> FsdpLearner:
    """The learner, with what the configuration leaves to the device decided."""
    train, gpu = config.train, device.type == "cuda"
    return FsdpLearner(
        config.model_name_or_path,
        mesh=init_device_mesh(device.type, (dist.get_world_size(),)),
        device=device,
        temperature=config.generation.temperature,
        bf16=gpu if train.bf16 is None else train.bf16,
        gradient_checkpointing=gpu if train.gradient_checkpointing is None else train.gradient_checkpointing,
        attn_implementation=train.attn_implementation,
        chunk_bytes=train.logprob_chunk_bytes,
        weight_decay=train.weight_decay,
        betas=(train.adam_beta1, train.adam_beta2),
        epsilon=train.adam_epsilon,
        max_grad_norm=train.max_grad_norm,
        with_reference="reference" in algorithm.streams,
    )


def build_generator(
    config: RunConfig, learner: FsdpLearner, tokenizer: Any, device: torch.device
) -> TransformersGenerator:
    """The in-process generator: a whole copy of the model on every rank, filled by the first sync."""
    from transformers import AutoModelForCausalLM

    if config.generation.backend != "transformers":
        raise ConfigError("generation.backend: vllm needs a server, which this version does not start yet")
    model = AutoModelForCausalLM.from_pretrained(config.model_name_or_path, dtype=learner.dtype).to(device)
    ends = model.generation_config.eos_token_id if model.generation_config else None
    ends = ends if ends is not None else tokenizer.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    if not all(0 <= end < model.config.vocab_size for end in ends):
        raise ConfigError(
            f"model_name_or_path {config.model_name_or_path}: end-of-sequence ids {ends}, but a vocabulary of"
            f" {model.config.vocab_size}; set eos_token_id in generation_config.json"
        )
    return TransformersGenerator(
        model,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        eos_token_ids=ends,
        max_batch_tokens=config.generation.max_batch_tokens,
    )


def learning_rate(config: RunConfig, counts: Arithmetic) -> Any:
    """The learning rate as a function of the optimizer steps taken."""
    train, total = config.train, counts.total_updates
    warmup = train.warmup_steps if train.warmup_steps is not None else round(total * train.warmup_ratio)
    factor = schedule(
        train.lr_scheduler_type,
        total=total,
        warmup=warmup,
        min_lr_rate=train.min_lr_rate,
        kwargs=train.lr_scheduler_kwargs,
    )
    return lambda update: train.learning_rate * factor(update)


def setup(config: RunConfig, counts: Arithmetic) -> Setup:
    """What the loop needs of configuration and counts."""
    length = counts.max_model_length
    default_budget = max(length, 16384 if config.device != "cpu" and torch.cuda.is_available() else 4096)
    return Setup(
        seed=config.seed,
        prompts_per_step=counts.prompts_per_step,
        batches_per_step=counts.generation_batch_size // counts.train_batch_size,
        num_iterations=config.train.num_iterations,
        max_steps=counts.max_steps,
        token_budget=config.train.max_tokens_per_device or default_budget,
        rows_per_device=counts.rows_per_device,
        max_completion_length=config.generation.max_completion_length,
        max_refine_prompt_length=counts.max_refine_prompt_length or length,
        temperature=config.generation.temperature,
        shared_prefix=config.train.attn_implementation == "packed",
    )


def resume(trainer: Trainer, learner: FsdpLearner, checkpoints: checkpoint.Checkpoints) -> Path | None:
    """Bring learner and progress to the newest complete checkpoint, if there is one."""
    path = trainer.ranks.gather(checkpoints.latest())[0]
    if path is None:
        return None
    state, extra = checkpoint.load(path, learner.state())
    learner.load_state(state)
    trainer.progress = Progress(**extra["progress"])
    trainer.profile.elapsed_before_seconds = trainer.progress.elapsed_seconds
    trainer.profile.total_seconds = extra["phase_seconds"]
    return Path(path)


def steps(run: Run) -> Iterator[StepRecord]:
    """The trainer's steps with evaluation and checkpoints where they are due; collective."""
    trainer, train = run.trainer, run.config.train
    profiler.reset_peak_memory()
    if run.held_out and run.resumed_from is None:
        trainer.sync()
        yield StepRecord(0, held_out(run), None)
    began = time.perf_counter()
    for record in trainer.steps():
        last = record.step == run.counts.max_steps
        metrics = dict(record.metrics)
        every = run.config.eval.every_steps if run.config.eval else None
        if run.held_out and (last or (every and record.step % every == 0)):
            with trainer.profile.phase("evaluate"):
                metrics |= held_out(run)
        if last or record.step % train.save_steps == 0:
            with trainer.profile.phase("save"):
                save(run, wait=last)
        phases = trainer.profile.end_step()
        now = time.perf_counter()
        metrics |= {f"timing_s/{name}": seconds for name, seconds in phases.items()}
        metrics |= {"step_time": now - began, "epoch": trainer.progress.position / len(trainer.prompts)}
        working = now - began - phases.get("evaluate", 0.0) - phases.get("save", 0.0)
        metrics["perf/completions_per_second"] = metrics["completions/sampled"] / working
        metrics["perf/peak_memory_gb"] = max(trainer.ranks.gather(profiler.peak_memory_gb()))
        began = now
        yield StepRecord(record.step, metrics, record.credited)
    run.checkpoints.finish()


def held_out(run: Run) -> dict[str, float]:
    """Held-out metrics at the present weights; collective."""
    settings = run.config.eval
    assert settings is not None
    template = settings.refine_template or template_of(run.algorithm.options) or REFINE_TEMPLATE
    return evaluate(
        run.trainer,
        run.held_out,
        temperature=settings.temperature,
        template=template if settings.two_pass else None,
    )


def save(run: Run, *, wait: bool) -> None:
    """Start a checkpoint; `wait`, or async_save off, ends it here. A failure is told and the next one tried."""
    progress, train = run.trainer.progress, run.config.train
    progress.elapsed_seconds = run.trainer.profile.elapsed_seconds
    asynchronous = run.device.type == "cuda" if train.async_save is None else train.async_save
    extra = {
        "progress": asdict(progress),
        "phase_seconds": run.trainer.profile.total_seconds,
        "finished": progress.step == run.counts.max_steps,
    }
    try:
        run.checkpoints.start(
            progress.step,
            state=run.learner.state(),
            extra=extra,
            export=lambda folder: export(run.learner, folder, run.learner.dtype, run.tokenizer),
            wait=wait or not asynchronous,
        )
    except OSError as error:
        if wait:
            raise ConfigError(f"{error}; free some space and run again to resume") from None
        if run.trainer.ranks.rank == 0:
            print(f"warning: {error}; the run goes on and tries again at the next save", file=sys.stderr)


def lead(run: Run) -> None:
    """Rank 0: the same steps, written down and shown."""
    config = run.config
    resumed = run.trainer.progress.step if run.resumed_from else -1
    journal = Journal(
        config.folder, resumed, config.report_to, config.model_dump(mode="json"), config.log_completions
    )
    if run.resumed_from is not None:
        print(f"resuming {config.name} after step {resumed} from {run.resumed_from}", flush=True)
    too_long = getattr(run.trainer.prompts, "num_too_long", 0)
    if too_long:
        print(
            f"left out {too_long} questions longer than max_prompt_length {config.generation.max_prompt_length}",
            flush=True,
        )
    with ProgressLine(run.counts.max_steps, max(0, resumed), config.name) as progress:
        for record in steps(run):
            journal.metrics(record.step, record.metrics)
            if record.credited is not None:
                journal.rollouts(record.step, rollout_rows(record.credited))
                progress.step(record.step, record.metrics)
                write_profile(run, record.metrics)


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
