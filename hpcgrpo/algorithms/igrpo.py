"""iGRPO (arXiv 2602.09000) as a wrapper: drafts first, then any base on draft-conditioned prompts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hpcgrpo.algorithms.base import Algorithm, Rollouts
from hpcgrpo.algorithms.schema import check_types, layers, refuse, require
from hpcgrpo.types import Completion, Group, Prompt, Rollout, stable_seed

DraftChoice = Literal["best", "random", "worst", "empty"]
TieBreak = Literal["first", "random", "shortest"]
REFINE_TEMPLATE = "{question}\n\nPrevious draft:\n{draft}"

# With train_drafts a prompt has a second group of another size, of which these would train a part too.
PART_OF_A_GROUP = (
    "with train_drafts its drafts would be cut down as well; leave train_drafts off, or cut nothing"
)
REFUSED_WITH_DRAFTS = dict.fromkeys(("cppo", "pods", "gfpo", "codistill"), PART_OF_A_GROUP)

Refine = Callable[[Prompt, Completion, Rollouts], Prompt]


def igrpo(
    *,
    base: Algorithm,
    drafts: int = 4,
    draft_choice: DraftChoice = "best",
    tie_break: TieBreak = "first",
    refine_template: str = REFINE_TEMPLATE,
    max_refine_prompt_length: int | None = None,
    keep_reasoning: bool = True,
    train_drafts: bool = False,
) -> Algorithm:
    """Draw drafts of each prompt, place one after the question, train `base` on that (Algorithm 1).

    Options:
        base: the algorithm that trains on the draft-conditioned prompts
        drafts: drafts of each prompt (N); they are graded, and trained on with train_drafts alone
        draft_choice: which draft enters the prompt; empty: none, though N are drawn (equal budget)
        tie_break: which of equally graded drafts, for best and worst
        refine_template: the second user turn; {question} and {draft} are filled in
        max_refine_prompt_length: tokens of the second prompt, cut in the draft; null: the trainer's default
        keep_reasoning: whether the draft keeps its <think> part
        train_drafts: train on the drafts as a group of their own too; not in the paper

    The drafts are chosen by the reward that trains. Only the refinements form groups: `select`, `credit` and
    the loss never see a draft, and every log-prob is conditioned on the second prompt. `Group.prompt` is that
    prompt; `Group.drafts` carry the first one. With `train_drafts` each such group is followed by one of the
    drafts on the first prompt, and a prompt takes up N completions more of train_batch_size. Raises ValueError
    for a value that is not allowed and for a base that is itself iGRPO.
    """
    options = dict(locals())
    check_types(igrpo, options)
    require(drafts >= 1, "drafts", drafts, "iGRPO needs a draft; without any it is its base, so use that")
    _check_template(refine_template)
    length = max_refine_prompt_length
    require(length is None or length >= 1, "max_refine_prompt_length", length, "1 or more tokens, or null")
    require(base.num_drafts == 0, "base", base.name, "iGRPO of iGRPO has no meaning; wrap its base once")
    if train_drafts:
        require(drafts >= 2, "drafts", drafts, "with train_drafts they form a group, which needs at least 2")
        refuse(base.name, base.options, REFUSED_WITH_DRAFTS)

    def refine(prompt: Prompt, draft: Completion, rollouts: Rollouts) -> Prompt:
        return rollouts.refine(
            prompt, draft, template=refine_template, max_length=length, keep_reasoning=keep_reasoning
        )

    def explore(prompts: Sequence[Prompt], rollouts: Rollouts) -> list[Group]:
        drafted = _Drafted(rollouts, drafts, draft_choice, tie_break, refine)
        groups = base.explore(drafted.start(prompts), drafted)
        refined = [replace(group, drafts=drafted.drafts[group.prompt.position]) for group in groups]
        return [each for group in refined for each in _stages(group)] if train_drafts else refined

    return replace(
        base,
        name="igrpo",
        explore=explore,
        num_drafts=drafts,
        batch_share=base.batch_share + drafts * train_drafts,
        options={"name": "igrpo", **options, "base": dict(base.options)},
    )


def choose_draft(drafts: Sequence[Rollout], choice: DraftChoice, tie_break: TieBreak) -> Completion:
    """The draft that goes into the second prompt: a function of the drafts and their seeds alone."""
    return CHOICES[choice](drafts, tie_break).completion


def _stages(refined: Group) -> tuple[Group, Group]:
    """A group of refinements, and that of its drafts on the first prompt."""
    return refined, Group(refined.drafts[0].prompt, refined.drafts, stage="draft")


@dataclass(frozen=True)
class _Drafted:
    """The Rollouts that the base sees: the same samples, but every prompt carries a draft by now."""

    rollouts: Rollouts
    num: int
    choice: DraftChoice
    tie_break: TieBreak
    refined: Refine
    drafts: dict[int, tuple[Rollout, ...]] = field(default_factory=dict)  # by Prompt.position

    def start(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        sampled = self.rollouts(prompts, self.num, stage="draft")
        return [self._with_draft(prompt, rows) for prompt, rows in zip(prompts, sampled, strict=True)]

    def _with_draft(self, prompt: Prompt, drafts: tuple[Rollout, ...]) -> Prompt:
        self.drafts[prompt.position] = drafts
        refined = self.refined(prompt, choose_draft(drafts, self.choice, self.tie_break), self.rollouts)
        assert refined.position == prompt.position, "a refined prompt keeps its place in the run's order"
        return refined

    def __call__(
        self, prompts: Sequence[Prompt], num: int, stage: str = "sample", *, hint_tokens: int = 0
    ) -> list[tuple[Rollout, ...]]:
        return self.rollouts(prompts, num, stage, hint_tokens=hint_tokens)

    def refine(
        self,
        prompt: Prompt,
        draft: Completion,
        *,
        template: str,
        max_length: int | None,
        keep_reasoning: bool,
    ) -> Prompt:
        return self.rollouts.refine(
            prompt, draft, template=template, max_length=max_length, keep_reasoning=keep_reasoning
        )

    def more(self) -> list[Prompt]:
        return self.start(self.rollouts.more())

    def total(self, count: int) -> int:
        return self.rollouts.total(count)


# ---- the choice of the draft


def _best(drafts: Sequence[Rollout], tie_break: TieBreak) -> Rollout:
    top = max(draft.reward for draft in drafts)
    return TIE_BREAKS[tie_break]([draft for draft in drafts if draft.reward == top])


def _worst(drafts: Sequence[Rollout], tie_break: TieBreak) -> Rollout:
    bottom = min(draft.reward for draft in drafts)
    return TIE_BREAKS[tie_break]([draft for draft in drafts if draft.reward == bottom])


def _any(drafts: Sequence[Rollout], tie_break: TieBreak) -> Rollout:
    seeds = [draft.completion.seed for draft in drafts]
    return random.Random(stable_seed("draft", *seeds)).choice(drafts)


def _empty(drafts: Sequence[Rollout], tie_break: TieBreak) -> Rollout:
    nothing = replace(drafts[0].completion, token_ids=(), logprobs=(), text="", finish_reason="stop")
    return replace(drafts[0], completion=nothing)


CHOICES: dict[str, Callable[[Sequence[Rollout], TieBreak], Rollout]] = {
    "best": _best,
    "random": _any,
    "worst": _worst,
    "empty": _empty,
}
TIE_BREAKS: dict[str, Callable[[Sequence[Rollout]], Rollout]] = {
    "first": lambda tied: tied[0],
    "random": lambda tied: _any(tied, "random"),
    "shortest": lambda tied: min(tied, key=lambda draft: len(draft.completion.token_ids)),
}


def _check_template(template: str) -> None:
    both = all(part in template for part in ("{question}", "{draft}"))
    rule = "it must contain {question} and {draft}; all other text is taken as it is"
    require(both, "refine_template", template, rule)


def template_of(options: Mapping[str, Any]) -> str | None:
    """The refinement template of the iGRPO layer in a resolved algorithm; None where there is no such layer."""
    return next((str(x["refine_template"]) for x in layers(options) if "refine_template" in x), None)
