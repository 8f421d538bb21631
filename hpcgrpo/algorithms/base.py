"""An algorithm is a value of five functions; a wrapper maps an algorithm to an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hpcgrpo.types import Batch, Completion, Group, Prompt, Rollout, Totals

if TYPE_CHECKING:
    from torch import Tensor


class Rollouts(Protocol):
    """What `explore` may ask of the trainer.

    Each rank explores its own prompts; `total` and `more` are collective: every rank calls them equally often.
    """

    def __call__(
        self, prompts: Sequence[Prompt], num: int, stage: str = "sample", *, hint_tokens: int = 0
    ) -> list[tuple[Rollout, ...]]:
        """Sample and grade `num` completions of each prompt. `stage` enters the sampling seeds.

        The peer writes the first `hint_tokens` tokens of each, the actor goes on from there.
        """
        ...

    def refine(
        self,
        prompt: Prompt,
        draft: Completion,
        *,
        template: str,
        max_length: int | None,
        keep_reasoning: bool,
    ) -> Prompt:
        """The prompt with a draft placed after its question (iGRPO's q')."""
        ...

    def more(self) -> list[Prompt]:
        """This rank's share of the next prompts in the run's order, as many over all ranks as the step began with."""
        ...

    def total(self, count: int) -> int:
        """Sum of `count` over all ranks."""
        ...


Explore = Callable[[Sequence[Prompt], Rollouts], list[Group]]
Credit = Callable[[Sequence[Group]], list[tuple[float, ...]]]  # [groups][G] advantages
Select = Callable[[Sequence[Group], Sequence[Sequence[float]]], list[tuple[int, ...]]]  # kept indices a group
Weigh = Callable[[Sequence[int], Totals], list[float]]  # weight of each token of a row, a row
Metrics = dict[str, "Tensor"]  # sums over tokens; names that end in /min or /max are extremes
Loss = Callable[
    ["Tensor", Batch], tuple["Tensor", Metrics]
]  # new log-probs [T] -> weighted sum (to minimise)


@dataclass(frozen=True)
class Algorithm:
    """One policy's training rule, and with `peer` that of a second policy on the same groups.

    `explore`, `credit` and `select` see whole groups, `weigh` all kept rows of an optimizer step in the global
    order (the same on every rank), `loss` one micro-batch. None of them does I/O.
    """

    name: str
    explore: Explore
    credit: Credit
    select: Select
    weigh: Weigh
    loss: Loss
    num_generations: int  # G, completions a group
    num_drafts: int = 0  # N, further completions a prompt; trained on where batch_share counts them
    batch_share: int = 0  # completions of train_batch_size that one prompt takes up
    streams: frozenset[str] = frozenset()  # further log-probs the loss needs: reference, peer
    compares: bool = (
        False  # `credit` needs every rollout's log-probs under both policies (Rollout.old, .peer)
    )
    peer: Algorithm | None = (
        None  # how the other policy trains on the groups; None: it is frozen, or there is none
    )
    peer_after: bool = False  # the peer's ratio divides by the actor after its update, not at sampling time
    hint_tokens: int = 0  # tokens that the peer writes first, in the first `hint_epochs` passes over the data
    hint_epochs: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # the resolved specification, for config.yaml

    @property
    def needs_peer(self) -> bool:
        """Whether there must be a second model: a policy that trains too, or a frozen teacher."""
        return self.peer is not None or self.compares or "peer" in self.streams or self.hint_tokens > 0
