"""A step's work, counted once, and what it takes at any efficiencies: a roofline by phase."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hpcgrpo.planner import decoding
from hpcgrpo.planner.decoding import Rates, Request, Spell
from hpcgrpo.planner.hardware import Hardware
from hpcgrpo.planner.work import (
    Machine,
    Padding,
    Work,
    attention_flops,
    linear_parameters,
    packed_flops,
    padded_flops,
)
from hpcgrpo.planner.workload import Rows, Stage, Workload
from hpcgrpo.sections import RunConfig

if TYPE_CHECKING:
    from hpcgrpo.planner.shapes import Shape

MAX_SEQUENCES = 256  # that a vLLM server runs at once, where vllm_extra_args says nothing
KV_SHARE = 0.9  # of the memory a server may use beyond the weights, where nothing more exact is known
TENSOR_PARALLEL_SECONDS = 20e-6  # latency of one all-reduce inside a machine, two a layer
STATE_BYTES = 12  # of a parameter in a checkpoint: float32 weights and two moments
STEPS_WHERE_UNKNOWN = 100


@dataclass(frozen=True)
class Server:
    """The engines that sample for one policy."""

    count: int
    split: int  # GPUs of each
    max_sequences: int
    kv_tokens: float | None  # of one engine's cache; None: no limit


@dataclass(frozen=True)
class Plan:
    """A step's work, counted once; `phases` turns it into seconds at given efficiencies."""

    config: RunConfig
    workload: Workload
    shapes: Mapping[str, Shape | None]
    hardware: Hardware
    machine: Machine
    kv_tokens: float | None
    padding: Padding | None
    prefills: int | None

    def check(self) -> None:
        for shape in self.shapes.values():
            if shape is not None and shape.kind != "dense":
                raise ValueError(
                    f"{shape.name}: {shape.kind}, so only its parameters are known and its time cannot be planned; take"
                    " a dense model of the same size for an estimate (model_name_or_path=...)"
                )
        policies = {s.policy for s in self.workload.stages} | {
            r.policy for r in (*self.workload.trained, *self.workload.forward)
        }
        if "peer" in policies and self.shapes["peer"] is None:
            raise ValueError(
                "the run has a peer, whose model is not known; give peer.model_name_or_path a known name"
            )

    def shape(self, policy: str) -> Shape:
        found = self.shapes[policy]
        assert found is not None, "check() has looked"
        return found

    # ---- seconds

    def phases(self, e: Mapping[str, float]) -> dict[str, float]:
        found = {
            "generate": sum(self.stage_seconds(s, e) for s in self.workload.stages),
            "grade": self.graded * e["grade_seconds"],
            "compare": self.learner_seconds(self.work["compare"], e),
            "logprobs": self.learner_seconds(self.work["logprobs"], e),
            "update": self.learner_seconds(self.work["update"], e),
            "peer_update": self.learner_seconds(self.work["peer_update"], e),
            "sync": e["sync_seconds"] + self.synced_bytes / (self.sync_rate * e["network"]),
            "other": e["step_seconds"],
        }
        return {name: seconds for name, seconds in found.items() if seconds > 0}

    def drafts_seconds(self, e: Mapping[str, float]) -> float:
        """Of these, sampling and grading iGRPO's drafts."""
        drafts = [s for s in self.workload.stages if s.name == "draft"]
        graded = self.graded * sum(s.count for s in drafts) / self.workload.sampled
        return sum(self.stage_seconds(s, e) for s in drafts) + graded * e["grade_seconds"]

    def stage_seconds(self, stage: Stage, e: Mapping[str, float]) -> float:
        """One serial round: prompts read in, completions decoded by the fullest engine, answers handed over."""
        server, shape = self.server(stage.policy), self.shape(stage.policy)
        rates = self.rates(shape, server, e)
        reading = self.prefill_flops(stage, server) / rates.flops_per_second
        if self.config.generation.backend == "transformers":  # prompts of one length are a pass
            kinds = min(len(set(stage.prompt.values)), stage.prompts / server.count)
            reading += kinds * rates.step_seconds
        handed = stage.count / server.count * e["request_seconds"]
        return reading + handed + decoding.total_seconds(self.spells[_key(stage)], rates)

    def rates(self, shape: Shape, server: Server, e: Mapping[str, float]) -> Rates:
        hardware, cores = self.hardware, server.split * self.machine.threads
        latency = TENSOR_PARALLEL_SECONDS * 2 * shape.layers if server.split > 1 else 0.0
        return Rates(
            weight_bytes=self.machine.item_bytes * shape.parameters,
            kv_bytes=shape.kv_bytes_per_token(self.machine.item_bytes),
            flops=2.0 * (linear_parameters(shape) + shape.embedding_parameters),
            flops_per_context_token=attention_flops(shape, 1.0),
            bytes_per_second=hardware.memory_bytes_per_second * cores * e["decode_bandwidth"],
            flops_per_second=hardware.bf16_flops_per_second * cores * e["generation_flops"],
            step_seconds=e["decode_step_seconds"] + shape.layers * e["decode_layer_seconds"] + latency,
        )

    def learner_seconds(self, work: Work, e: Mapping[str, float]) -> float:
        """Arithmetic beside the collectives, whichever is longer, and what each pass and each update costs anyway."""
        computing = work.flops / (
            self.hardware.bf16_flops_per_second * self.machine.threads * e["learner_flops"]
        )
        sending = work.gathered_bytes / (self.link_rate * e["network"])
        fixed = work.micro_batches * e["learner_pass_seconds"] + work.updates * e["update_seconds"]
        return max(computing, sending) + fixed + work.segments * e["segment_seconds"]

    def other_seconds(self, e: Mapping[str, float]) -> float:
        """Start, held-out evaluations, and checkpoints where they are not written beside the training."""
        train, steps = self.config.train, self.workload.max_steps or STEPS_WHERE_UNKNOWN
        saves = math.ceil(steps / train.save_steps)
        asynchronous = self.machine.gpu if train.async_save is None else train.async_save
        written = STATE_BYTES * self.trained_parameters / self.hardware.storage_bytes_per_second
        saving = written * (1 if asynchronous else saves)
        return e["start_seconds"] + saving + self.evaluations(steps) * self.evaluation_seconds(e)

    def evaluations(self, steps: int) -> int:
        settings = self.config.eval
        if settings is None:
            return 0
        return 2 + ((steps - 1) // settings.every_steps if settings.every_steps else 0)

    def evaluation_seconds(self, e: Mapping[str, float]) -> float:
        settings = self.config.eval
        if settings is None:
            return 0.0
        stage = self.workload.stages[0]
        one = Stage("eval", "actor", settings.num_samples, 1, stage.prompt, stage.completion)
        server = self.server("actor")
        spells = list(self.stage_spells(one))
        passes = 2 if settings.two_pass else 1
        return passes * decoding.total_seconds(spells, self.rates(self.shape("actor"), server, e))

    # ---- work

    @cached_property
    def graded(self) -> float:
        """Completions that one grading process has to grade."""
        processes = self.config.grader_processes or (self._grader_default if self.machine.gpu else 1)
        return self.workload.sampled / self.machine.ranks / processes

    @property
    def _grader_default(self) -> int:
        return max(1, (self.config.cluster.cpus_per_task or 64) // self.machine.ranks_per_node)

    @cached_property
    def work(self) -> dict[str, Work]:
        load = self.workload
        passes, updates = load.passes, float(load.updates)
        found = {
            "compare": self._sum(load.compared, backward=False),
            "logprobs": self._sum(load.forward, backward=False),
            "update": self._sum([r for r in load.trained if r.policy == "actor"] * passes, backward=True),
            "peer_update": self._sum([r for r in load.trained if r.policy == "peer"] * passes, backward=True),
        }
        found["update"] += Work(updates=updates)
        if found["peer_update"].flops:
            found["peer_update"] += Work(updates=updates)
        return found

    def _sum(self, rows: Sequence[Rows], *, backward: bool) -> Work:
        total = Work()
        for each in rows:
            total += self.learner_work(each, backward=backward)
        return total

    def learner_work(self, rows: Rows, *, backward: bool) -> Work:
        """One pass of one rank over its share of `rows`: forward, and with `backward` twice that and what is computed
        again (the layers under checkpointing; the head's chunks always, as their logits are not kept)."""
        shape, machine, padding = self.shape(rows.policy), self.machine, self.padding
        layers, head = padded_flops(shape, rows, padding) if padding else self.packed_flops(shape, rows)
        again = padding is None or padding.recomputes_head
        times = (3.0 + machine.checkpointing, 3.0 + again) if backward else (1.0, 1.0)
        micro = self.micro_batches(rows)
        gathers = (2 if backward else 1) * self.machine.item_bytes + (4 if backward else 0)
        alone = machine.ranks == 1
        return Work(
            flops=(times[0] * layers + times[1] * head) / machine.ranks,
            micro_batches=micro,
            gathered_bytes=0.0 if alone else micro * gathers * shape.parameters * (1 - 1 / machine.ranks),
            segments=self.segments(rows) * shape.layers * (1.0 if backward else 1 / 3),
        )

    def segments(self, rows: Rows) -> float:
        """Calls of a packed layer's attention, of one rank: each prompt and completion on itself, neighbours of one
        length together; each group's completions on their prompt, and the merging, about as much again."""
        if self.padding is not None or not self.shared_prefix:
            return 0.0
        groups, count = rows.groups / self.machine.ranks, rows.count / self.machine.ranks
        runs = [
            1 + (n - 1) * (1 - each.alike) for n, each in ((groups, rows.prompt), (count, rows.completion))
        ]
        return sum(runs) + 2 * groups

    @property
    def shared_prefix(self) -> bool:
        """Whether a group's prompt is computed once; flash_attention_2 falls back to that without a GPU."""
        asked = self.config.train.attn_implementation
        return asked == "packed" or (asked == "flash_attention_2" and not self.machine.gpu)

    def packed_flops(self, shape: Shape, rows: Rows) -> tuple[float, float]:
        return packed_flops(shape, rows, shared_prefix=self.shared_prefix)

    def micro_batches(self, rows: Rows) -> float:
        """Passes of one rank: packed rows by the token budget, else a row (or the padded micro-batch) each."""
        ranks = self.machine.ranks
        if self.padding is not None:
            return math.ceil(rows.count / ranks / self.padding.rows)
        if not self.shared_prefix:
            return math.ceil(rows.count / ranks)
        budget = self.config.train.max_tokens_per_device or max(
            self.workload.counts.max_model_length, 16384 if self.machine.gpu else 4096
        )
        tokens = rows.groups * (rows.prompt.mean + rows.rows * rows.completion.mean) / ranks
        parts = self.workload.counts.generation_batch_size // self.workload.counts.train_batch_size
        return parts * math.ceil(tokens / parts / budget)

    @cached_property
    def link_rate(self) -> float:
        """Bytes a second at which one rank takes part in a ring over all: the slower of links and network."""
        if self.machine.learn_nodes == 1:
            return self.hardware.link_bytes_per_second
        # Of what a ring moves, a node's devices together receive all but their own share from outside, once.
        nodes, each = self.machine.learn_nodes, self.machine.ranks_per_node
        outside = self.hardware.network_bytes_per_second * each / (1 - 1 / nodes)
        return min(self.hardware.link_bytes_per_second, outside)

    @cached_property
    def synced_bytes(self) -> float:
        """Weights that are pushed to the engines after a step, the peer's in the share of steps that has hints."""
        item = self.machine.item_bytes
        hints = [s for s in self.workload.stages if s.policy == "peer"]
        share = hints[0].prompts / self.workload.counts.prompts_per_step if hints else 0.0
        return item * (
            self.shape("actor").parameters + (share * self.shape("peer").parameters if share else 0.0)
        )

    @cached_property
    def sync_rate(self) -> float:
        generation, hardware = self.config.generation, self.hardware
        if generation.backend == "transformers":
            return hardware.link_bytes_per_second
        if generation.weight_sync == "filesystem":
            return hardware.storage_bytes_per_second / 2  # written, then read
        return hardware.network_bytes_per_second

    @cached_property
    def trained_parameters(self) -> float:
        policies = {rows.policy for rows in self.workload.trained}
        return float(sum(self.shape(policy).parameters for policy in policies))

    # ---- engines

    def server(self, policy: str) -> Server:
        cluster, generation = self.config.cluster, self.config.generation
        if generation.backend == "transformers":
            return Server(self.machine.ranks, 1, 2**30, None)
        split = generation.vllm_tensor_parallel_size
        if policy == "peer" and self.config.peer is not None:
            split = self.config.peer.vllm_tensor_parallel_size or split
            each = self.config.peer.vllm_engines
        else:
            each = (cluster.gpus_per_node - self.config.peer_gpus) // split if self.machine.gpu else 1
        count = max(1, cluster.vllm_nodes * each)
        lanes = self.machine.ranks * generation.vllm_max_concurrency / count
        sequences = max(1, min(_max_sequences(generation.vllm_extra_args), int(lanes)))
        return Server(count, split if self.machine.gpu else 1, sequences, self._cache_tokens(policy, split))

    def _cache_tokens(self, policy: str, split: int) -> float | None:
        generation, shape = self.config.generation, self.shape(policy)
        if self.kv_tokens is not None and policy == "actor":
            return self.kv_tokens
        each = shape.kv_bytes_per_token(self.machine.item_bytes)
        if generation.vllm_kv_cache_memory_bytes:
            return generation.vllm_kv_cache_memory_bytes * split / each
        if not self.machine.gpu:
            return 2**28 / each  # vLLM's default here
        usable = generation.vllm_gpu_memory_utilization * self.hardware.memory_bytes * split
        return max(0.0, KV_SHARE * (usable - self.machine.item_bytes * shape.parameters)) / each

    def prefill_flops(self, stage: Stage, server: Server) -> float:
        """Of one engine; the head is computed for a prompt's last token alone."""
        shape = self.shape(stage.policy)
        times = self.prefills or min(stage.completions, server.count)
        if self.config.generation.backend == "transformers":
            times = 1
        prompt = stage.prompt
        one = prompt.mean * 2.0 * linear_parameters(shape) + attention_flops(shape, prompt.mean_square / 2)
        return stage.prompts * times * (one + 2.0 * shape.embedding_parameters) / server.count

    @cached_property
    def spells(self) -> dict[str, list[Spell]]:
        return {_key(stage): list(self.stage_spells(stage)) for stage in self.workload.stages}

    def stage_spells(self, stage: Stage) -> Iterator[Spell]:
        """The decoding steps of the fullest engine, which has the longest completion of all."""
        server = self.server(stage.policy)
        count = math.ceil(stage.count / server.count)
        lengths = stage.completion.sample(count)
        lengths[-1:] = stage.completion.sample(max(1, math.ceil(stage.count)))[-1:]
        requests = [Request(round(stage.prompt.mean), max(1, length - 1)) for length in lengths]
        if self.config.generation.backend == "vllm":
            limits = {"max_sequences": server.max_sequences, "max_tokens": server.kv_tokens}
            yield from decoding.spells(decoding.shuffled(requests), **limits)  # type: ignore[arg-type]
            return
        room, most = self.config.generation.max_completion_length, self.config.generation.max_batch_tokens
        for batch in decoding.batches(decoding.shuffled(requests), room=room, max_tokens=most):
            yield from decoding.spells(batch, max_sequences=len(batch), max_tokens=None)

    def notes(self) -> Iterator[str]:
        generation = self.config.generation
        if generation.ahead and generation.backend == "transformers":
            yield (
                "generation.backend transformers samples on the learners' own devices, so nothing is gained by sampling"
                " ahead"
            )
        for stage in self.workload.stages:
            server = self.server(stage.policy)
            count, peak = (
                stage.count / server.count,
                max((s.running for s in self.spells[_key(stage)]), default=0),
            )
            if generation.backend == "vllm" and peak < math.ceil(count):
                yield (
                    f"{stage.name}: {count:,.0f} completions an engine, of which {peak:,} run at once at most (its"
                    " cache, max-num-seqs or vllm_max_concurrency)"
                )


def _key(stage: Stage) -> str:
    return f"{stage.policy}/{stage.name}"


def _max_sequences(arguments: Sequence[str]) -> int:
    for i, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--max-num-seqs":
            text = value or (arguments[i + 1] if i + 1 < len(arguments) else "")
            return int(text) if text.isdigit() and int(text) else MAX_SEQUENCES
    return MAX_SEQUENCES
