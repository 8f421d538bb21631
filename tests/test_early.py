"""Grading while others are still sampled: what is called with what and when, and that scores stay as they were."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from hpcgrpo.rewards import Rewards, build
from hpcgrpo.rewards.early import Early
from hpcgrpo.types import Completion, Prompt

SECONDS = 120  # for what must happen at once

USER = """
import threading
CALLS, GO, CALLED = [], threading.Event(), threading.Event()
def note(kind, completions):
    CALLS.append((kind, list(completions)))
    return [float(len(c)) for c in completions]
def each(completions, **_): return note("each", completions)
each.scope = "completion"
def whole(completions, **_):
    shortest = min(map(len, completions))
    return [n - shortest for n in note("whole", completions)]
whole.scope = "group"
def plain(completions, **_): return note("plain", completions)
def waits(completions, **_):
    values = note("waits", completions)
    CALLED.set()
    assert GO.wait(120)
    return values
waits.scope = "completion"
def fails(completions, **_): raise OSError("the sandbox is gone")
fails.scope = "completion"
def odd(completions, **_): return note("odd", completions)
odd.scope = "prompt"
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rewards]:
    (tmp_path / "early_of_mine.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "early_of_mine", raising=False)
    return lambda *names: build(
        {f"early_of_mine:{name}": 1.0 for name in names}, max_completion_length=9, num_processes=1
    )


def module() -> ModuleType:
    return sys.modules["early_of_mine"]


def calls(kind: str) -> list[list[str]]:
    return [texts for name, texts in module().CALLS if name == kind]


def made(texts: Sequence[str], group: int) -> tuple[list[Prompt], list[Completion]]:
    prompts = [Prompt(q, q, (), "q", (1,), {"answer": "4"}) for q in range(len(texts) // group)]
    completions = [Completion((5,) * len(t), (0.0,) * len(t), "stop", t, seed=0) for t in texts]
    return [p for p in prompts for _ in range(group)], completions


def test_groups_come_whole_and_the_batch_at_once_in_any_order_of_arrival(
    user: Callable[..., Rewards],
) -> None:
    prompts, completions = made(["a", "bbb", "cc", "dd", "e", "ffff"], group=2)
    rewards = user("each", "whole", "plain")
    with rewards.grading(prompts) as grading:
        for i in (3, 0, 4, 2, 5, 1):
            grading.submit(i, completions[i])
        scores = grading.scores(completions)
    assert [s.parts for s in scores] == [
        {"each": 1, "whole": 0, "plain": 1}, {"each": 3, "whole": 2, "plain": 3},
        {"each": 2, "whole": 0, "plain": 2}, {"each": 2, "whole": 0, "plain": 2},
        {"each": 1, "whole": 0, "plain": 1}, {"each": 4, "whole": 3, "plain": 4},
    ]  # fmt: skip
    assert calls("plain") == [["a", "bbb", "cc", "dd", "e", "ffff"]]
    assert sorted(t for texts in calls("each") for t in texts) == sorted(c.text for c in completions)
    for texts in calls("whole"):  # a call may hold several groups, each of them whole
        assert {"a", "bbb"} <= {*texts} or not {"a", "bbb"} & {*texts}
        assert {"e", "ffff"} <= {*texts} or not {"e", "ffff"} & {*texts}


def test_scoring_all_at_once_is_one_call_of_each(user: Callable[..., Rewards]) -> None:
    prompts, completions = made(["a", "bbb", "cc", "dd"], group=2)
    user("each", "plain").score(prompts, completions)
    assert calls("each") == calls("plain") == [["a", "bbb", "cc", "dd"]]


def test_what_comes_while_a_call_goes_on_is_the_next_call(user: Callable[..., Rewards]) -> None:
    """The first is graded before the others exist, which is what saves the time."""
    prompts, completions = made(["a", "bb", "ccc"], group=1)
    with user("waits").grading(prompts) as grading:
        grading.submit(0, completions[0])
        assert module().CALLED.wait(SECONDS)
        grading.submit(2, completions[2])
        grading.submit(1, completions[1])
        module().GO.set()
        scores = grading.scores(completions)
    assert [s.reward for s in scores] == [1, 2, 3] and calls("waits") == [["a"], ["bb", "ccc"]]


def test_what_was_not_submitted_is_graded_in_the_end(user: Callable[..., Rewards]) -> None:
    prompts, completions = made(["a", "bb", "ccc", "d"], group=2)
    with user("each", "whole").grading(prompts) as grading:
        grading.submit(2, completions[2])
        scores = grading.scores(completions)
    assert [s.parts["each"] for s in scores] == [1, 2, 3, 1]
    assert [s.parts["whole"] for s in scores] == [0, 1, 2, 0]


def test_an_error_is_raised_where_the_scores_are_asked_for(user: Callable[..., Rewards]) -> None:
    prompts, completions = made(["a", "bb"], group=1)
    with (
        user("fails").grading(prompts) as grading,
        pytest.raises(ValueError, match=r"reward fails raised OSError: the sandbox is gone .*mine\.py, line"),
    ):
        grading.submit(0, completions[0])
        grading.submit(1, completions[1])
        grading.scores(completions)


def test_a_scope_must_be_known(user: Callable[..., Rewards]) -> None:
    with pytest.raises(
        ValueError, match=r"odd: its scope is 'prompt'; it must be one of completion, group, batch"
    ):
        user("odd")


def test_no_thread_is_left_when_sampling_broke_off(user: Callable[..., Rewards]) -> None:
    prompts, completions = made(["a", "bb"], group=1)
    with pytest.raises(RuntimeError, match="broke off"), user("each").grading(prompts) as grading:
        grading.submit(0, completions[0])
        raise RuntimeError("broke off")
    ours = [t for t in threading.enumerate() if t.name == "early grading"]
    for thread in ours:
        thread.join(SECONDS)
    assert not any(t.is_alive() for t in ours)


def test_the_graders_scores_are_the_same_early_or_late() -> None:
    """The built-in rewards over answers that need the parser, in random order, beside one call for all."""
    texts = [
        rf"<think>x</think><answer>\boxed{{{a}}}</answer>" for a in ("4", "2+2", r"\frac{8}{2}", "5", "x")
    ] * 3
    spec = {"accuracy": 1.0, "format": 0.5, "overlong": 1.0, "cppo_gsm8k": 1.0, "closing_tags": 1.0}
    prompts, completions = made(texts, group=3)
    completions = [
        Completion((5,) * (1 + i), (0.0,) * (1 + i), "stop", c.text, seed=0)
        for i, c in enumerate(completions)
    ]
    with build(spec, max_completion_length=10, num_processes=1) as rewards:
        late = rewards.score(prompts, completions)
        order = random.Random(1).sample(range(len(texts)), len(texts))
        with rewards.grading(prompts) as grading:
            for i in order:
                grading.submit(i, completions[i])
            early = grading.scores(completions)
    assert early == late
    assert [s.outcomes["accuracy"] for s in early] == ["right", "right", "right", "wrong", "wrong"] * 3


def test_values_come_in_the_order_of_their_numbers() -> None:
    early: Early[int] = Early(lambda numbers: [10 * i for i in numbers])
    for i in (2, 0, 1):
        early.add([i])
    assert early.collect() == [0, 10, 20]
    nothing: Early[int] = Early(lambda numbers: [1 / 0 for _ in numbers])
    assert nothing.collect() == []
