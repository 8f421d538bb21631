"""Assembly: the only file that knows every part. One learner rank of a run, under torchrun."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hpcgrpo import ahead, rewards
from hpcgrpo.arithmetic import Arithmetic, arithmetic, updates_behind
from hpcgrpo.attempt import Attempt
from hpcgrpo.balance import Cost
from hpcgrpo.checkpoint_folder import MARKER, damaged
from hpcgrpo.config import ConfigError
from hpcgrpo.exploring import Explorer, Setup
from hpcgrpo.generators import build_generator, parity_check
from hpcgrpo.journal import FolderInUse, claim
from hpcgrpo.learning import checkpoint
from hpcgrpo.learning.attention import attention_choice
from hpcgrpo.learning.fsdp import FsdpLearner
from hpcgrpo.learning.schedule import schedule
from hpcgrpo.models import check_one_vocabulary
from hpcgrpo.pretrained import Pretrained
from hpcgrpo.profiler import Profile
from hpcgrpo.running import Run, lead, load_training_state, steps, training_state
from hpcgrpo.sections import RunConfig
from hpcgrpo.tasks import Prompts, Renderer, build_prompts, build_renderer, load_rows
from hpcgrpo.trainer import Peer, Trainer
from hpcgrpo.types import Progress, Prompt, Stopped

GATHER_MINUTES = 60  # how long a rank waits for the slowest one, on gloo
TAKEOVER_SECONDS = 60.0  # for ranks of an earlier start to end


@dataclass(frozen=True)
class GlooRanks:
    """The learner ranks on a gloo group of their own: waits there have a time limit and a message."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def another(self) -> GlooRanks:
        """The same ranks on a group of their own, for another thread; collective."""
        return replace(self, group=dist.new_group(backend="gloo", timeout=timedelta(minutes=GATHER_MINUTES)))

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)

    def gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


def rank_main(
    config: RunConfig, summary: IO[str] = sys.stderr, prepare: Callable[[Run], None] = lambda run: None
) -> None:
    """What every rank runs: train to the end, resuming from the newest complete checkpoint.

    `summary` gets the progress of rank 0; `prepare` may change the run before its first step. Raises ValueError for
    what a user can mend. Told to stop, it saves and returns.
    """
    attempt = Attempt.of_environment()
    lock = take_folder(config, attempt) if int(os.environ.get("RANK", "0")) == 0 else None
    ranks, device = join(config)
    try:
        run = assemble(config, ranks, device, attempt)
    except Stopped:
        return  # before anything was done that could be saved
    run.summary = summary
    prepare(run)
    try:
        if ranks.rank == 0:
            lead(run)
        else:
            for _ in steps(run):
                pass
    except Stopped:
        if ranks.rank == 0:
            print(f"stopped after step {run.trainer.progress.step}, which is saved", file=summary, flush=True)
    except OSError as error:  # of the journal: a full disk, a quota
        raise ConfigError(f"{config.folder} cannot be written ({error}); run again once it can") from None
    finally:
        run.rewards.close()
    ranks.gather("done")  # the first rank to leave ends the others
    dist.destroy_process_group()
    if lock is not None:
        lock.close()


def take_folder(config: RunConfig, attempt: Attempt | None) -> IO[str]:
    """Lock the run's folder; under a launcher, wait for a rank of an earlier start that has yet to end."""
    deadline, told = time.monotonic() + (TAKEOVER_SECONDS if attempt is not None else 0), False
    while True:
        try:
            return claim(config.folder)
        except FolderInUse as error:
            if time.monotonic() >= deadline:
                raise
            if not told:
                print(
                    f"waiting for a rank of an earlier start to end ({error.owner})",
                    file=sys.stderr,
                    flush=True,
                )
            told = True
            time.sleep(1)


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
    os.environ.setdefault(
        "DS_ACCELERATOR", device.type
    )  # transformers imports DeepSpeed where it is installed
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


def assemble(config: RunConfig, ranks: GlooRanks, device: torch.device, attempt: Attempt | None) -> Run:
    """Build every part and bring it to the newest complete checkpoint's state."""
    moved = attempt.beat if attempt is not None else lambda: None
    settle = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    profile = Profile(moved=moved, settle=settle)
    algorithm = config.build_algorithm()
    tokenizer, renderer = load_tokenizer(config)
    prompts = training_prompts(config, renderer)
    counts = arithmetic(config, algorithm, len(prompts))
    graders = config.grader_processes or threads_per_rank(config)
    score = rewards.build(
        config.rewards, max_completion_length=config.generation.max_completion_length, num_processes=graders
    )
    learner = build_learner(
        config, config.model_name_or_path, device, profile, with_reference="reference" in algorithm.streams
    )
    explorer = Explorer(
        algorithm=algorithm,
        generator=None,  # type: ignore[arg-type]  # set below: it calls the explorer back
        prompts=prompts,
        grading=score.grading,
        refine=renderer.refine,
        ranks=ranks.another(),
        profile=profile,
        setup=setup(config, counts, device, Pretrained("", None, learner.lm.config.to_dict()).training_cost),
        decode=partial(tokenizer.decode, skip_special_tokens=True),
        urgent=attempt.urgent if attempt is not None else lambda: False,
    )
    trainer = Trainer(
        algorithm=algorithm,
        explorer=explorer,
        learner=learner,
        learning_rate=learning_rate(config, counts),
        ranks=ranks,
        setup=explorer.setup,
        progress=Progress(),
        profile=profile,
    )
    connect(config, trainer, learner, tokenizer, attempt)
    checkpoints = checkpoint.Checkpoints(
        config.folder / "checkpoints", config.train.save_total_limit, ranks.group
    )
    resumed = resume(trainer, checkpoints)
    held_out = held_out_prompts(config, renderer)
    return Run(
        config,
        algorithm,
        counts,
        trainer,
        checkpoints,
        score,
        held_out,
        tokenizer,
        device,
        resumed,
        attempt,
    )


def connect(
    config: RunConfig, trainer: Trainer, learner: FsdpLearner, tokenizer: Any, attempt: Attempt | None
) -> None:
    """What calls the trainer back, or is as large as a learner: the generators, and the other policy."""
    explorer = trainer.explorer
    explorer.push = trainer.sync
    trainer.check_parity = parity_check(config, trainer, learner)
    explorer.generator = build_generator(config, trainer, learner, tokenizer, attempt)
    if trainer.algorithm.needs_peer:
        trainer.peer = build_peer(config, trainer, tokenizer, attempt, learner.device)
        explorer.peer_generator = trainer.peer.generator


def load_tokenizer(config: RunConfig) -> tuple[Any, Renderer]:
    """The model's tokenizer, and what renders questions with it."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar: the training's own
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(config.model_name_or_path)
    data = config.data
    return tokenizer, build_renderer(
        tokenizer, system_prompt=data.system_prompt, chat_template=data.chat_template
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


def build_learner(
    config: RunConfig,
    model_name_or_path: str,
    device: torch.device,
    profile: Profile,
    *,
    with_reference: bool,
    trained: bool = True,
) -> FsdpLearner:
    """A policy's learner, with what the configuration leaves to the device decided.

    One that is not trained is a frozen FSDP2 model, whatever `train.learner` is.
    """
    train, gpu = config.train, device.type == "cuda"
    attention, note = attention_choice(train.attn_implementation, device.type)
    if note and dist.get_rank() == 0:
        print(f"note: {note}", file=sys.stderr)
    return learner_class(train.learner if trained else "fsdp")(
        model_name_or_path,
        mesh=init_device_mesh(device.type, (dist.get_world_size(),)),
        device=device,
        temperature=config.generation.temperature,
        bf16=gpu if train.bf16 is None else train.bf16,
        gradient_checkpointing=gpu if train.gradient_checkpointing is None else train.gradient_checkpointing,
        attn_implementation=attention,
        chunk_bytes=train.logprob_chunk_bytes,
        weight_decay=train.weight_decay,
        betas=(train.adam_beta1, train.adam_beta2),
        epsilon=train.adam_epsilon,
        max_grad_norm=train.max_grad_norm,
        with_reference=with_reference,
        trained=trained,
        timed=profile.part,
    )


def build_peer(
    config: RunConfig, trainer: Trainer, tokenizer: Any, attempt: Attempt | None, device: torch.device
) -> Peer:
    """The other policy: a learner of its own with a generator where it writes hints, or a frozen teacher."""
    assert config.peer is not None  # checked where the configuration is read
    from transformers import AutoTokenizer

    model, rule = config.peer.model_name_or_path, trainer.algorithm.peer
    theirs = AutoTokenizer.from_pretrained(model).get_vocab()
    check_one_vocabulary(tokenizer.get_vocab(), theirs, (config.model_name_or_path, model))
    learner = build_learner(
        config,
        model,
        device,
        trainer.profile,
        with_reference=rule is not None and "reference" in rule.streams,
        trained=rule is not None,
    )
    generator = None
    if config.peer_samples:
        generator = build_generator(config, trainer, learner, tokenizer, attempt, policy="peer")
    factor = (config.peer.learning_rate or config.train.learning_rate) / config.train.learning_rate
    return Peer(learner, lambda update: factor * trainer.learning_rate(update), generator)


def learner_class(name: str) -> type[FsdpLearner]:
    """FsdpLearner or its twin on DeepSpeed, which is imported only where it is asked for."""
    if name == "fsdp":
        return FsdpLearner
    from hpcgrpo.learning.deepspeed import DeepSpeedLearner

    return cast("type[FsdpLearner]", DeepSpeedLearner)


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


def setup(config: RunConfig, counts: Arithmetic, device: torch.device, cost: Cost) -> Setup:
    """What the loop needs of configuration and counts; `cost` is that of the policy that samples."""
    length, generation = counts.max_model_length, config.generation
    behind = updates_behind(generation, config.build_algorithm(), counts.updates_per_step)
    default_budget = max(length, 16384 if device.type == "cuda" else 4096)
    return Setup(
        seed=config.seed,
        prompts_per_step=counts.prompts_per_step,
        batches_per_step=counts.generation_batch_size // counts.train_batch_size,
        num_iterations=config.train.num_iterations,
        max_steps=counts.max_steps,
        token_budget=config.train.max_tokens_per_device or default_budget,
        rows_per_device=counts.rows_per_device,
        max_completion_length=generation.max_completion_length,
        max_refine_prompt_length=counts.max_refine_prompt_length or length,
        temperature=generation.temperature,
        shared_prefix=attention_choice(config.train.attn_implementation, device.type)[0] == "packed",
        cost=cost,
        ahead=generation.ahead,
        spare_staleness=max(0, (generation.max_staleness or 0) - behind),
    )


def resume(trainer: Trainer, checkpoints: checkpoint.Checkpoints) -> Path | None:
    """Bring policies and progress to the newest complete checkpoint, if there is one.

    Raises ConfigError where there are checkpoints and none of them is whole.
    """
    path, broken = trainer.ranks.gather((checkpoints.latest(), damaged(checkpoints.folder)))[0]
    if path is None and broken:
        names = ", ".join(p.name for p in broken)
        raise ConfigError(
            f"{checkpoints.folder}: none of its checkpoints is whole ({names}): files that {MARKER} lists are missing"
            " or have another size; put them back, or begin anew with --fresh"
        )
    if path is None:
        return None
    state, extra = checkpoint.load(path, training_state(trainer))
    load_training_state(trainer, state)
    trainer.progress = Progress(**extra["progress"])
    trainer.profile.load_state(extra.get("profile", extra), elapsed_seconds=trainer.progress.elapsed_seconds)
    trainer.ready = ahead.load(Path(path), trainer.explorer)
    return Path(path)
