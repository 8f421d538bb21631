"""A run, as its YAML file describes it: the keys, their types, limits and defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hpcgrpo import algorithms
from hpcgrpo.algorithms.base import Algorithm


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class DataConfig(_Section):
    """Where the questions come from. One of `preset`, `path`, `name`, or `preset` with `path`."""

    preset: str | None = None  # gsm8k, math, acereason_math, openr1_math_220k, or a generated task
    path: str | None = None  # a JSONL file or a folder saved by `datasets`
    name: str | None = None  # a data set's name on the hub (offline: in the cache)
    config_name: str | None = None
    split: str = "train"
    prompt_column: str | None = None
    answer_column: str | None = None
    max_samples: int | None = Field(None, ge=1)
    options: dict[str, Any] = {}  # of a generated task: digits, size, ...
    system_prompt: str | None = None  # a name (r1, igrpo, cppo_gsm8k, cppo_math) or the text itself
    chat_template: str | None = None  # a Jinja template or the path of one, for models without
    shuffle: bool = True
    seed: int = 0  # of generated tasks and of the subset that max_samples draws
    skip_unanswered: bool = False  # leave rows without a usable answer out instead of refusing them

    def rows(self) -> dict[str, Any]:
        """The keywords of `tasks.load_rows`."""
        named = self.model_dump(exclude={"options", "system_prompt", "chat_template", "shuffle"})
        return {**named, **self.options}


class GenerationConfig(_Section):
    """How the policy is sampled."""

    backend: Literal["transformers", "vllm"] = "transformers"
    temperature: float = Field(1.0, gt=0)
    top_p: float = 1.0
    top_k: int = 0
    max_prompt_length: int = Field(512, ge=1)  # tokens; longer prompts are left out and counted
    max_completion_length: int = Field(512, ge=1)  # tokens
    max_batch_tokens: int | None = Field(None, ge=1)  # in-process: tokens of key-value cache at once
    vllm_gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    vllm_tensor_parallel_size: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _whole_distribution(self) -> GenerationConfig:
        if self.top_p != 1.0 or self.top_k not in (0, -1):
            raise ValueError(
                f"top_p {self.top_p}, top_k {self.top_k}: training samples from the whole distribution, since the"
                " learner's log-probs are over it; leave top_p at 1.0 and top_k at 0"
            )
        return self


class TrainConfig(_Section):
    """The learner. One step samples `generation_batch_size` completions and trains on them."""

    per_device_train_batch_size: int | None = Field(None, ge=1)  # completions (not prompts) per rank and pass
    gradient_accumulation_steps: int = Field(1, ge=1)
    train_batch_size: int | None = Field(None, ge=1)  # completions per optimizer step over all ranks
    generation_batch_size: int | None = Field(None, ge=1)  # completions per step over all ranks
    steps_per_generation: int | None = Field(None, ge=1)  # the same in passes (TRL)
    num_iterations: int = Field(1, ge=1)  # passes over what a step sampled (mu)
    max_tokens_per_device: int | None = Field(None, ge=1)  # tokens of a packed micro-batch
    learning_rate: float = Field(1e-6, gt=0)
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] = {}
    min_lr_rate: float | None = Field(None, ge=0, le=1)  # of cosine_with_min_lr
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    warmup_steps: int | None = Field(None, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    max_steps: int | None = Field(None, ge=1)  # steps (sample, learn, sync); overrides num_train_epochs
    num_train_epochs: float = Field(1.0, gt=0)
    bf16: bool | None = None  # compute in bfloat16 over float32 masters; None: on a GPU only
    gradient_checkpointing: bool | None = None  # None: on a GPU only
    attn_implementation: Literal["packed", "sdpa", "eager", "flash_attention_2"] = "packed"
    save_steps: int = Field(50, ge=1)
    save_total_limit: int | None = Field(2, ge=1)
    async_save: bool | None = None  # write checkpoints while training goes on; None: on a GPU only
    logprob_chunk_bytes: int = Field(2**26, ge=2**16)  # float32 logits held at once


class EvalConfig(_Section):
    """Held-out questions answered every so often, greedy, alone and after a draft of the policy's own."""

    data: DataConfig
    every_steps: int | None = Field(None, ge=1)  # None: before the first step and after the last only
    num_samples: int = Field(256, ge=1)
    temperature: float = Field(0.0, ge=0)
    two_pass: bool = False
    refine_template: str | None = None  # None: iGRPO's own, else its default


class ClusterConfig(_Section):
    """Where it runs. On one machine: `nproc_per_node` learner ranks under torchrun."""

    nodes: int = Field(1, ge=1)
    vllm_nodes: int = Field(0, ge=0)
    gpus_per_node: int = Field(0, ge=0)
    nproc_per_node: int | None = Field(None, ge=1)  # None: gpus_per_node, or 1
    threads_per_rank: int | None = Field(None, ge=1)  # None: the machine's cores over its ranks
    timeout_min: int | None = Field(None, ge=1)

    @property
    def ranks(self) -> int:
        return max(1, self.nodes - self.vllm_nodes) * (self.nproc_per_node or self.gpus_per_node or 1)


class RunConfig(_Section):
    """Everything that describes a run; what can be computed from it is in `arithmetic`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model_name_or_path: str
    algorithm: dict[str, Any]
    rewards: dict[str, Any]
    data: DataConfig
    generation: GenerationConfig = GenerationConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig | None = None
    cluster: ClusterConfig = ClusterConfig()
    seed: int = 0
    output_dir: str = "logs"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    log_completions: bool = True
    grader_processes: int | None = Field(None, ge=1)  # a rank; None: the machine's cores over its ranks
    trust_remote_code: Literal[False] = False

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.name

    def build_algorithm(self) -> Algorithm:
        return algorithms.build(self.algorithm)
