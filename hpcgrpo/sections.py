"""A run, as its YAML file describes it: the keys, their types, limits and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from hpcgrpo import algorithms
from hpcgrpo.algorithms.base import Algorithm


class Section(BaseModel):
    """What every part of a YAML file has in common: unknown keys are refused, and true and false as numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, field: ValidationInfo) -> Any:
        annotation = cls.model_fields[field.field_name or ""].annotation
        kinds = get_args(annotation) or (annotation,)
        if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
            raise ValueError(f"{str(value).lower()} is not a number")
        return value


class DataConfig(Section):
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


class GenerationConfig(Section):
    """How the policy is sampled."""

    backend: Literal["transformers", "vllm"] = "transformers"
    temperature: float = Field(1.0, gt=0)
    top_p: float = 1.0
    top_k: int = 0
    max_prompt_length: int = Field(512, ge=1)  # tokens; longer prompts are left out and counted
    max_completion_length: int = Field(512, ge=1)  # tokens
    max_batch_tokens: int | None = Field(None, ge=1)  # in-process: tokens of key-value cache at once
    vllm_gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    vllm_tensor_parallel_size: int = Field(
        1, ge=1
    )  # GPUs of one engine; a node runs gpus_per_node / this many
    vllm_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # auto: bfloat16, on a CPU float32
    vllm_enforce_eager: bool | None = None  # None: on a CPU only
    vllm_kv_cache_memory_bytes: int | None = Field(None, ge=1)  # in place of the utilization; a CPU: 256 MiB
    vllm_extra_args: tuple[str, ...] = ()  # further arguments of vLLM's server, as on its command line
    vllm_server_timeout: float = Field(900.0, gt=0)  # seconds for an engine to come up
    vllm_request_timeout: float = Field(3600.0, gt=0)  # seconds for one completion
    vllm_max_concurrency: int = Field(256, ge=1)  # requests in flight at once, of one rank
    weight_sync: Literal["process_group", "filesystem"] = "process_group"
    weight_sync_bucket_bytes: int = Field(2**28, ge=1)  # whole tensors that rank 0 holds at once
    weight_sync_timeout: float = Field(600.0, gt=0)  # seconds
    async_steps: int = Field(
        0, ge=0, le=1
    )  # 1: a step's completions are sampled while the one before is learnt
    drafts_ahead: bool = False  # iGRPO: the same for the drafts alone; refinements stay on-policy
    max_staleness: int | None = Field(
        None, ge=0
    )  # optimizer steps that sampling weights may lie behind the learner's; None: as many as async_steps takes
    parity_threshold: float | None = Field(None, gt=0)  # mean |log-prob difference|, nats; None: by dtype
    parity_check: bool = True  # stop before the first update where generator and learner disagree

    @property
    def ahead(self) -> Literal["drafts", "step"] | None:
        """What of the next step is sampled while one is learnt."""
        return "step" if self.async_steps else "drafts" if self.drafts_ahead else None

    @model_validator(mode="after")
    def _whole_distribution(self) -> GenerationConfig:
        if self.top_p != 1.0 or self.top_k not in (0, -1):
            raise ValueError(
                f"top_p {self.top_p}, top_k {self.top_k}: training samples from the whole distribution, since the"
                " learner's log-probs are over it; leave top_p at 1.0 and top_k at 0"
            )
        return self


class TrainConfig(Section):
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
    learner: Literal["fsdp", "deepspeed"] = "fsdp"  # FSDP2, or DeepSpeed ZeRO-3 (extra `deepspeed`)
    save_steps: int = Field(50, ge=1)
    save_total_limit: int | None = Field(2, ge=1)
    async_save: bool | None = None  # write checkpoints while training goes on; None: on a GPU only
    logprob_chunk_bytes: int | None = Field(2**26, ge=2**16)  # float32 logits held at once; None: by memory


class EvalConfig(Section):
    """Held-out questions answered every so often, greedy, alone and after a draft of the policy's own."""

    data: DataConfig
    every_steps: int | None = Field(None, ge=1)  # None: before the first step and after the last only
    num_samples: int = Field(256, ge=1)
    temperature: float = Field(0.0, ge=0)
    two_pass: bool = False
    peer: bool = False  # the other policy's answers too, in one pass; it then needs a generator
    draft_forms: bool | None = (
        None  # first and last also after empty and spoilt drafts; None: of iGRPO, with two_pass
    )
    refine_template: str | None = None  # None: iGRPO's own, else its default


class PeerConfig(Section):
    """The other policy: CoDistill's large one, which trains too, or the frozen teacher of kdrl and opd."""

    model_name_or_path: str
    learning_rate: float | None = Field(None, gt=0)  # of a policy that trains; None: train.learning_rate
    vllm_engines: int = Field(1, ge=1)  # of each serve node, that write its hints; the others are the actor's
    vllm_tensor_parallel_size: int | None = Field(None, ge=1)  # None: generation.vllm_tensor_parallel_size


class ClusterConfig(Section):
    """Where it runs. On one machine: `nproc_per_node` learner ranks under torchrun. Slurm's keys are submitit's."""

    nodes: int = Field(1, ge=1)
    vllm_nodes: int = Field(0, ge=0)  # the first of the nodes; the others learn
    gpus_per_node: int = Field(0, ge=0)
    nproc_per_node: int | None = Field(None, ge=1)  # learner ranks; None: gpus_per_node, or 1
    threads_per_rank: int | None = Field(None, ge=1)  # None: the machine's cores over its ranks
    timeout_min: int | None = Field(None, ge=1)  # the time limit of one Slurm job, not of the run
    slurm_partition: str | None = None
    slurm_account: str | None = None
    slurm_qos: str | None = None
    slurm_constraint: str | None = None
    slurm_gres: str | None = None  # in place of gpus_per_node, e.g. gpu:a100:8
    slurm_exclude: str | None = None
    slurm_nodelist: str | None = None
    slurm_dependency: str | None = None
    slurm_comment: str | None = None
    cpus_per_task: int | None = Field(None, ge=1)  # a node runs one task
    mem_gb: float | None = Field(
        None, gt=0
    )  # of a node; None: the partition's default, 0 with slurm_exclusive
    slurm_exclusive: bool = False
    slurm_setup: tuple[str, ...] = ()  # shell lines before the run: module load, source, export
    slurm_srun_args: tuple[str, ...] = ()  # e.g. --container-image=...
    slurm_additional_parameters: dict[str, Any] = {}  # any other sbatch option, by its long name
    max_requeues: int = Field(20, ge=0)  # starts after the first one: time limits, preemption, failures
    idle_timeout_min: float = Field(30.0, gt=0)  # nothing moved on any node for so long: stacks, then an end
    idle_action: Literal["requeue", "fail"] = "requeue"
    rendezvous_timeout: float = Field(600.0, gt=0)  # seconds for the nodes to find each other
    interface: str | None = None  # network interface between the nodes, e.g. ib0; None: that of the host name

    @property
    def learn_nodes(self) -> int:
        return max(1, self.nodes - self.vllm_nodes)

    @property
    def ranks_per_node(self) -> int:
        return self.nproc_per_node or self.gpus_per_node or 1

    @property
    def ranks(self) -> int:
        return self.learn_nodes * self.ranks_per_node


class RunConfig(Section):
    """Everything that describes a run; what can be computed from it is in `arithmetic`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model_name_or_path: str
    algorithm: dict[str, Any]
    rewards: dict[str, Any]
    data: DataConfig
    generation: GenerationConfig = GenerationConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig | None = None
    peer: PeerConfig | None = None  # model_name_or_path above is the policy that samples
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

    @property
    def peer_gpus(self) -> int:
        """GPUs of a serve node that the peer's engines take; 0 where it samples nothing, or without GPUs."""
        if self.peer is None or not self.cluster.gpus_per_node or not self.peer_samples:
            return 0
        split = self.peer.vllm_tensor_parallel_size or self.generation.vllm_tensor_parallel_size
        return self.peer.vllm_engines * split

    @property
    def peer_samples(self) -> bool:
        """Whether the peer needs a generator: it writes hints, or answers held-out questions."""
        asked = self.eval is not None and self.eval.peer
        return self.peer is not None and (asked or self.build_algorithm().hint_tokens > 0)

    def build_algorithm(self) -> Algorithm:
        """The algorithm, with what it takes over from other sections. Raises ValueError as `algorithms.build` does."""
        return algorithms.build(_with_length(self.algorithm, self.generation.max_completion_length))


def _with_length(spec: Any, length: int) -> Any:
    """codistill's option `max_completion_length`, wherever it stands in a nested specification."""
    if not isinstance(spec, Mapping):
        return spec
    base = {"base": _with_length(spec["base"], length)} if "base" in spec else {}
    own = {"max_completion_length": length} if spec.get("name") == "codistill" else {}
    return {**own, **spec, **base}
