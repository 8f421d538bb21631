"""The peak memory of one learner GPU, by part: a closed form of what the learner's own code allocates.

Per token and layer, with H hidden, I intermediate, Q the queries' and K the keys' width, i bytes of the compute type
(2 in bfloat16, 4 in float32): a norm keeps its input in float32 and its output (4H + iH), the layer's matrices keep
their inputs (i (2H + 2Q + 2K + 4I)). The fullest moment is one of: the output layer's backward pass (the float32 sum of
its gradient, 4VH, beside a chunk of logits), the backward pass of a layer (its weights, the next layer's, and the
gradients of the one before on their way to their owners), or the end of the backward pass (the embedding's gradients).
`trace` counts the same by running that code; a committed table of its counts holds this file to 5 %.
"""

from __future__ import annotations

from collections.abc import ItemsView, Mapping
from dataclasses import dataclass

from hpcgrpo.algorithms.base import Algorithm
from hpcgrpo.arithmetic import arithmetic
from hpcgrpo.models import on_gpu
from hpcgrpo.planner.shapes import Shape
from hpcgrpo.sections import RunConfig

GPU_TOKENS, CPU_TOKENS = (
    16384,
    4096,
)  # of a micro-batch where the configuration names none, as `train.setup` has it
OUTSIDE_BYTES = 1_500_000_000  # of CUDA's context and NCCL's buffers, beside the allocator's; an assumption
SLACK = 0.05  # of what comes and goes: the allocator's blocks that fit nothing; an assumption
STATIC = ("weights", "Adam", "gradients", "reference model", "second policy")


@dataclass(frozen=True)
class Stack:
    """How a learner works, as far as its memory goes."""

    name: str
    padded: bool = False  # rows padded to one width, per_device_train_batch_size at a time
    prompt_width: int | None = None  # padded: tokens of a prompt; None: the longest that the run allows
    logits_bytes: int = 4  # of a logit
    logits_copies: int = (
        0  # whole [tokens, vocabulary] arrays alive at once; 0: chunks of logprob_chunk_bytes
    )
    gathers_embedding: bool = (
        True  # the embedding table is whole on every rank while the output layer computes
    )


OURS = Stack("hpcgrpo")
# The set-up that gives the iGRPO paper's 54.93 GB: bfloat16 logits of all completion tokens three times over, and
# prompts padded to about what MATH's take. The figure alone does not identify it.
ORIGINAL = Stack(
    "original",
    padded=True,
    prompt_width=180,
    logits_bytes=2,
    logits_copies=3,
    gathers_embedding=False,
)


@dataclass(frozen=True)
class Rows:
    """What a rank computes in one optimizer step: `passes` micro-batches of so many groups."""

    prefix: int  # tokens of a group's prompt
    completions: int  # of a group
    length: int  # tokens of a completion
    groups: int  # of a micro-batch
    passes: int

    @property
    def tokens(self) -> int:
        """Input tokens of a micro-batch: a completion's last one predicts nothing."""
        return self.groups * (self.prefix + self.completions * (self.length - 1))

    @property
    def targets(self) -> int:
        """Completion tokens of a micro-batch, whose log-probs are taken."""
        return self.groups * self.completions * self.length


@dataclass(frozen=True)
class Machine:
    """What the closed form needs of the run besides model and rows."""

    ranks: int
    item_bytes: int  # of the compute type
    checkpointing: bool
    chunk_bytes: int
    zero3: bool = False


@dataclass(frozen=True)
class Parts:
    """Bytes of the fullest moment of the fullest learner GPU, by part."""

    parts: Mapping[str, int]
    phase: str  # the moment at which they are held
    phases: Mapping[str, int]  # every moment that was looked at, and its bytes

    def items(self) -> ItemsView[str, int]:
        return self.parts.items()

    def __str__(self) -> str:
        sizes = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in self.parts.items())
        return f"{self.peak_gb:.2f} GB in {self.phase} ({sizes})"

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def peak_gb(self) -> float:
        """In GB of 10^9 bytes, as `profiler.peak_memory_gb`."""
        return self.peak_bytes / 1e9

    @property
    def static_bytes(self) -> int:
        """What is held all the time: sharded weights, moments, gradients, further models."""
        return sum(self.parts.get(name, 0) for name in STATIC)

    @property
    def needed_bytes(self) -> int:
        """What a GPU must have: the peak, the allocator's slack, and what stands outside of it."""
        return int(self.peak_bytes + SLACK * (self.peak_bytes - self.static_bytes)) + OUTSIDE_BYTES


def learner(
    config: RunConfig,
    shape: Shape,
    *,
    stack: Stack = OURS,
    peer: Shape | None = None,
    rows: Rows | None = None,
) -> Parts:
    """The peak of the fullest learner GPU in a run; with `peer`, the larger of the two policies' updates.

    `rows` are what a rank computes (None: the longest that the configuration allows, which is an upper bound).
    Raises ValueError for a model of which no more than the parameters is known, and as `arithmetic` does.
    """
    for each in (shape, peer):
        if each is not None and each.kind != "dense":
            raise ValueError(
                f"{each.name}: {each.kind}, so its memory cannot be planned; measure it with hpcgrpo profile"
            )
    machine, algorithm = machine_of(config), config.build_algorithm()
    rows = rows or longest_rows(config, algorithm, stack)
    found = [_policy(shape, rows, machine, stack, extra=_extra(algorithm, machine, shape, peer))]
    if peer is not None and algorithm.peer is not None:
        found.append(
            _policy(peer, rows, machine, stack, extra=_extra(algorithm.peer, machine, peer, shape, True))
        )
    return max(found, key=lambda p: p.peak_bytes)


def machine_of(config: RunConfig) -> Machine:
    """Ranks and types of a configuration; what it leaves open is decided as the learner does."""
    train, gpu = config.train, on_gpu(config)
    return Machine(
        ranks=config.cluster.ranks,
        item_bytes=2 if (gpu if train.bf16 is None else train.bf16) else 4,
        checkpointing=gpu if train.gradient_checkpointing is None else train.gradient_checkpointing,
        chunk_bytes=train.logprob_chunk_bytes or (0 if gpu else 2**26),
        zero3=train.learner == "deepspeed",
    )


def longest_rows(config: RunConfig, algorithm: Algorithm, stack: Stack = OURS) -> Rows:
    """The fullest micro-batches that the configuration allows: every prompt and completion at its limit."""
    counts = arithmetic(config, algorithm, rows=None)
    longest, length = counts.max_model_length, config.generation.max_completion_length
    prompt = longest - length
    if stack.padded:
        width = stack.prompt_width or prompt
        return Rows(width, 1, length, counts.rows_per_device, config.train.gradient_accumulation_steps)
    kept = algorithm.batch_share or algorithm.num_generations
    each = -(-counts.train_batch_size // counts.ranks)
    # flash_attention_2 falls back to packed rows where its package is missing, and those are the larger ones
    if config.train.attn_implementation in ("sdpa", "eager"):
        return Rows(prompt, 1, length, 1, each)
    budget = token_budget(config)
    share = each * length + -(-each // kept) * prompt
    return packed_rows(
        prompt=prompt, length=length, kept=kept, tokens=max(longest, min(budget, share)), share=share
    )


def packed_rows(*, prompt: int, length: int, kept: int, tokens: int, share: int) -> Rows:
    """Groups of at most `kept` completions that fill a micro-batch of `tokens`, of a rank's `share` in tokens."""
    groups = max(1, -(-tokens // (prompt + kept * length)))
    room = max(1, tokens // groups - prompt)
    completions = min(kept, max(1, -(-room // length)))
    return Rows(prompt, completions, min(length, room // completions), groups, max(1, -(-share // tokens)))


def policy(
    shape: Shape, rows: Rows, machine: Machine, *, stack: Stack = OURS, reference: bool = False
) -> Parts:
    """The fullest moment of one policy's update, with its reference model where it has one."""
    extra = _reference(shape, machine) if reference else {}
    return _policy(shape, rows, machine, stack, extra=extra)


def _reference(shape: Shape, machine: Machine) -> dict[str, int]:
    return {"reference model": 4 * shape.parameters // machine.ranks}


def _extra(
    algorithm: Algorithm, machine: Machine, shape: Shape, other: Shape | None, is_peer: bool = False
) -> dict[str, int]:
    """The models beside the one that is updated, as the ranks share them: a pass of log-probs leaves none gathered."""
    extra: dict[str, int] = {}
    if "reference" in algorithm.streams:
        extra |= _reference(shape, machine)
    if other is not None:
        trains = is_peer or algorithm.peer is not None
        extra["second policy"] = (12 if trains else 4) * other.parameters // machine.ranks
    return extra


Moment = dict[str, float]  # part -> bytes


def _policy(shape: Shape, rows: Rows, machine: Machine, stack: Stack, *, extra: Mapping[str, int]) -> Parts:
    """The fullest moment of one policy's update."""
    if stack.padded:
        moments = _padded(shape, rows, machine, stack)
    elif machine.zero3:
        moments = _zero3(shape, rows, machine)
    else:
        moments = _fsdp(shape, rows, machine)
    totals = {name: int(sum(parts.values())) + sum(extra.values()) for name, parts in moments.items()}
    phase = max(totals, key=totals.__getitem__)
    parts = {name: int(size) for name, size in moments[phase].items() if size >= 1}
    return Parts({**parts, **extra}, phase, totals)


def _fsdp(shape: Shape, rows: Rows, machine: Machine) -> dict[str, Moment]:
    """FSDP2: float32 masters sharded, layers gathered one by one, the root (embedding, output layer) throughout."""
    item, ranks = machine.item_bytes, machine.ranks
    root, table, layer = item * shape.root_parameters, shape.embedding_parameters, shape.layer_parameters
    together = ranks > 1
    held = 4 * shape.parameters / ranks if rows.passes > 1 else 0.0  # gradients of earlier micro-batches

    def moment(activations: float, gradients: float = held, **parts: float) -> Moment:
        named = {name.replace("_", " "): size for name, size in parts.items()}
        return {**_states(shape, ranks), "gradients": gradients, "activations": activations, **named}

    head, chunk = _head_activations(shape, rows, machine), _chunk_logits(shape, rows, machine)
    sums = (4 + (2 if item == 2 else 0)) * table  # the float32 sum, and a bfloat16 product or copy beside it
    moments = {
        "log-probs": moment(
            head - rows.targets * shape.hidden * item,
            gathered_layers=root,
            collective_buffers=item * layer * together,
            logits=chunk * (10 if item == 2 else 8),
        ),
        "output layer backward": moment(
            head,
            gathered_layers=root,
            collective_buffers=item * layer * together,
            logits=chunk * (6 if item == 2 else 4),
            output_gradient=sums,
        ),
    }
    for index in range(shape.layers - 1, -1, -1):
        above = shape.layers - 1 - index
        moments[f"layer {index} backward"] = moment(
            _layer_activations(shape, rows, machine, index) + item * shape.hidden * shape.intermediate,
            held or above * 4 * layer / ranks,
            gathered_layers=root + item * layer,
            collective_buffers=item * layer * (together and index > 0) + 4 * layer * (above > 0),
            output_gradient=item * table,
        )
    # the gradients of the embedding and of the output layer; a tied table's are then added in place
    new = held or 4 * shape.layers * layer / ranks
    moments["embedding backward"] = moment(
        0,
        new,
        collective_buffers=4 * layer,
        gathered_layers=root,
        output_gradient=2 * item * table,
    )
    moments["gradient exchange"] = moment(
        0, new, collective_buffers=4 * shape.root_parameters, output_gradient=item * shape.root_parameters
    )
    moments["sync"] = moment(0, 0.0, gathered_layers=8 * table)
    return moments


def _states(shape: Shape, ranks: int) -> Moment:
    return {"weights": 4 * shape.parameters / ranks, "Adam": 8 * shape.parameters / ranks}


def _stored(shape: Shape, item: int) -> int:
    """Bytes of one token that a layer keeps for its backward pass; 4 more a head for attention's normaliser."""
    inputs = item * (2 * shape.hidden + 2 * shape.query_width + 2 * shape.kv_width + 4 * shape.intermediate)
    qk_norms = (4 + item) * (shape.query_width + shape.kv_width) if shape.qk_norm else 0
    return 2 * (4 + item) * shape.hidden + inputs + qk_norms + 4 * shape.heads


def _kept(shape: Shape, machine: Machine, layers: int) -> int:
    """Bytes of one token that so many layers hold between their passes: their input, or everything."""
    each = machine.item_bytes * shape.hidden if machine.checkpointing else _stored(shape, machine.item_bytes)
    return layers * each + 2 * machine.item_bytes * shape.head_dim  # and the rotary tables


def _head_activations(shape: Shape, rows: Rows, machine: Machine) -> float:
    """While the output layer computes: all layers', the last norm's, and the chosen hidden states with gradients."""
    item = machine.item_bytes
    norm = (4 + item) * shape.hidden
    chosen = 2 * item * rows.targets * shape.hidden
    return rows.tokens * (_kept(shape, machine, shape.layers) + norm) + chosen


def _layer_activations(shape: Shape, rows: Rows, machine: Machine, index: int) -> float:
    """While a layer's feed-forward part computes its gradients: what is kept up to it, and three more of its width."""
    item = machine.item_bytes
    gradients = 2 * item * shape.intermediate + item * shape.hidden
    own = 0
    if machine.checkpointing:  # computed again; in float32 the first norm's input is the kept one
        own = _stored(shape, item) - (4 * shape.hidden if item == 4 else 0)
    return rows.tokens * (_kept(shape, machine, index + 1) + own + gradients)


def _chunk_logits(shape: Shape, rows: Rows, machine: Machine) -> int:
    """Logits of a chunk of tokens, as `token_logprobs` cuts them."""
    size = machine.chunk_bytes or max(2**26, 2 * shape.embedding_parameters)  # the most that is chosen
    return min(max(1, size // (shape.vocabulary * 4)), rows.targets) * shape.vocabulary


def _zero3(shape: Shape, rows: Rows, machine: Machine) -> dict[str, Moment]:
    """DeepSpeed ZeRO-3 as `learning.deepspeed` sets it up; compared with two CPU ranks of 40 M parameters alone.

    Half-precision shards beside the masters, gradients summed in float32 and always held, up to 10^9 parameters whole
    at once, reductions in buckets of 2^26 numbers.
    """
    item, ranks, table = machine.item_bytes, machine.ranks, shape.embedding_parameters
    whole = item * min(shape.parameters, max(10**9, 2 * shape.layer_parameters))
    base = {
        **_states(shape, ranks),
        "compute weights": item * shape.parameters / ranks if item == 2 else 0.0,
        "gradients": 4 * shape.parameters / ranks,
        "gathered layers": float(whole) if ranks > 1 or item == 2 else 0.0,
        "collective buffers": 2.0 * 4 * 2**26,
    }
    logits, sums = (
        _chunk_logits(shape, rows, machine) * (6 if item == 2 else 4),
        (6 if item == 2 else 4) * table,
    )
    last = shape.layers - 1
    return {
        "output layer backward": {
            **base,
            "activations": _head_activations(shape, rows, machine),
            "logits": float(logits),
            "output gradient": float(sums),
        },
        f"layer {last} backward": {
            **base,
            "activations": _layer_activations(shape, rows, machine, last),
            "output gradient": float(item * table),
        },
        "optimizer": {
            **base,
            "gathered layers": 0.0,
            "optimizer's copy": 4 * min(2.0**27, shape.parameters / ranks),
        },
    }


def _padded(shape: Shape, rows: Rows, machine: Machine, stack: Stack) -> dict[str, Moment]:
    """Padded rows and whole logits: the closed form that agreed with 32 tracked points within 6.2 %."""
    item, tokens, hidden = machine.item_bytes, rows.groups * (rows.prefix + rows.length), shape.hidden
    table, layer = shape.embedding_parameters, shape.layer_parameters
    gathered = item * table * (2 if stack.gathers_embedding and not shape.tied else 1)
    base = {**_states(shape, machine.ranks), "gradients": 4 * shape.parameters / machine.ranks}
    kept = tokens * shape.layers * (hidden * item if machine.checkpointing else _stored(shape, item))
    logits = stack.logits_copies * stack.logits_bytes * rows.targets * shape.vocabulary
    width = 7 * shape.intermediate + 10 * hidden
    return {
        "output layer backward": {
            **base,
            "gathered layers": gathered + item * layer,
            "activations": float(kept + 4 * item * tokens * hidden),
            "logits": float(logits),
        },
        f"layer {shape.layers - 1} backward": {
            **base,
            "gathered layers": gathered + 2.0 * item * layer,
            "collective buffers": 4.0 * layer,
            "output gradient": float(item * table),
            "activations": float(kept + tokens * item * width),
        },
    }


def token_budget(config: RunConfig) -> int:
    """Tokens of a packed micro-batch, which the longest sequence may exceed; as `train.setup` has it."""
    longest = arithmetic(config, config.build_algorithm(), rows=None).max_model_length
    return config.train.max_tokens_per_device or max(longest, GPU_TOKENS if on_gpu(config) else CPU_TOKENS)
