"""The values that flow through one training step, in the order in which they are made.

`Prompt -> Completion -> Rollout -> Group -> Batch -> (loss, metrics)`

Standard library only; tensors appear in annotations alone. All values are frozen, but for the run's progress.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
Message = Mapping[str, str]  # {"role": "user", "content": "..."}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, rendered and tokenised, ready to be sampled from."""

    position: int  # place in the run's endless order of prompts (epoch * len(data) + index)
    row: int  # index of the row in the data file
    messages: tuple[Message, ...]  # the chat before the template; the last message is the user's
    text: str  # what the chat template made of them
    token_ids: tuple[int, ...]  # [P]
    columns: Mapping[str, Any] = field(default_factory=dict)  # the row; rewards get it by name
    conversational: bool = False  # the row gave messages, so rewards get messages (TRL's rule)
    epoch: int = 0  # the pass over the data that it belongs to


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample: which tokens to continue, with which seed."""

    prompt_token_ids: tuple[int, ...]  # [P]
    seed: int
    question: int | None = None  # the data's row; prompts of one begin alike, and are sampled alike long
    length: int | None = None  # exactly so many tokens, whatever they are; None: until it ends


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy; training leaves the distribution whole."""

    temperature: float
    max_completion_length: int
    top_p: float = 1.0  # the likeliest tokens that have this probability together, after the temperature
    top_k: int = 0  # the likeliest tokens, so many; 0: all


@dataclass(frozen=True, slots=True)
class Completion:
    """What the policy wrote: tokens out, never re-encoded text."""

    token_ids: tuple[int, ...]  # [C], the end-of-sequence token included where one was sampled
    logprobs: tuple[float, ...]  # [C], behavior log-probs at the sampling temperature, in nats
    finish_reason: FinishReason
    text: str  # decoded without special tokens
    seed: int
    weights_version: int = 0  # optimizer steps behind the weights that sampled it
    hint_length: int = 0  # its first tokens that the peer wrote (CoDistill), with the peer's log-probs


Arrived = Callable[[int, Completion], None]  # takes a request's number and its completion, as it comes


class Stopped(Exception):
    """The run was asked to save what it has and to end: a time limit, preemption, a user's signal.

    `agreed`: all ranks know of it already.
    """

    def __init__(self, *, agreed: bool = False) -> None:
        super().__init__("asked to stop")
        self.agreed = agreed


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one completion and how it came about."""

    reward: float  # weighted sum of the parts that apply
    parts: Mapping[str, float | None]  # unweighted value per reward function; None = not applicable
    outcomes: Mapping[str, str] = field(default_factory=dict)  # right | wrong | unparsed | timeout | error


@dataclass(frozen=True, slots=True)
class Rollout:
    """A scored completion."""

    prompt: Prompt  # what it was conditioned on (iGRPO's q' for a refinement)
    completion: Completion
    score: Score
    old: tuple[float, ...] | None = (
        None  # [C] log-probs of the actor before the step, where they are compared
    )
    peer: tuple[float, ...] | None = None  # [C] log-probs of the other policy before the step

    @property
    def reward(self) -> float:
        return self.score.reward


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt: the set over which advantages are formed."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]  # [G]
    drafts: tuple[Rollout, ...] = ()  # [N], iGRPO's stage 1; not trained on as part of this group
    stage: Literal["sample", "draft"] = "sample"  # draft: the drafts of the group before it, trained on too
    rank: int = 0  # the learner rank that asked for it

    @property
    def answered(self) -> bool:
        """Whether the generator could answer all of the group's requests."""
        return not any(r.completion.finish_reason == "abort" for r in (*self.rollouts, *self.drafts))

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(r.reward for r in self.rollouts)


@dataclass(frozen=True, slots=True)
class Row:
    """One completion that is trained on."""

    index: int  # place in the optimizer step's global order
    token_ids: tuple[int, ...]  # [C]
    behavior: tuple[float, ...]  # [C] the generator's log-probs
    advantage: float
    weight: float  # of each of its tokens in the loss
    reward: float = 0.0
    old: tuple[float, ...] = ()  # [C] log-probs before the step, where they are known already
    peer: tuple[float, ...] = ()  # [C] log-probs of the other policy, where they are known already


@dataclass(frozen=True, slots=True)
class Piece:
    """A prefix and completions that continue it: computed together, the prefix once."""

    prefix: tuple[int, ...]  # [P]
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> int:
        return len(self.prefix) + sum(len(r.token_ids) for r in self.rows)


MicroBatch = tuple[Piece, ...]  # what one forward pass takes; () where a rank runs short


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all ranks and micro-batches of one optimizer step: what `weigh` divides by."""

    rows: int  # completions that are trained on
    tokens: int  # their tokens
    sampled_rows: int  # completions before selection
    sampled_tokens: int
    max_completion_length: int  # tokens
    rows_per_device: int  # per_device_train_batch_size, for the device-local mean


@dataclass(frozen=True, slots=True)
class Batch:
    """The completion tokens of one micro-batch, flattened in row order: T tokens of R rows."""

    row: Tensor  # [T] int64, the row a token belongs to
    lengths: Tensor  # [R] int64, tokens per row
    advantages: Tensor  # [T] float32
    weights: Tensor  # [T] float32; the loss is a sum under them
    old: Tensor | None = None  # [T] log-probs before the step; None: equal to the new ones, detached
    behavior: Tensor | None = None  # [T] log-probs of the generator
    reference: Tensor | None = None  # [T] log-probs of the frozen initial model
    peer: Tensor | None = None  # [T] log-probs of the other policy
    rewards: Tensor | None = None  # [T] float32, the reward of a token's row
    progress: float = 0.0  # share of the run's optimizer steps that lie behind, 0 to 1


@dataclass
class Progress:
    """What changes from step to step besides the weights: all that a resume needs."""

    step: int = 0
    position: int = 0  # of the next prompt
    updates: int = 0  # optimizer steps taken
    num_tokens: int = 0  # prompt and completion tokens sampled so far
    num_completions: int = 0
    trained_completions: int = 0
    elapsed_seconds: float = 0.0


def stable_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on the parts alone, the same on every machine and rank."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def flatten(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """The items of all rows, in order."""
    return [item for row in rows for item in row]
