"""Sampling one step ahead: a thread beside the learner, and what it sampled, kept with a checkpoint."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from hpcgrpo.exploring import Explored, Explorer, Prompts, Ready, Setup
from hpcgrpo.types import Completion, Group, Prompt, Rollout, Score

FILE = "ahead.json"  # in a checkpoint's folder
T = TypeVar("T")


class Ahead(Generic[T]):
    """Work in a thread of its own. Where it needs weights pushed, it waits until the main thread asks for its result:
    a push is collective over the ranks' main threads."""

    def __init__(self, work: Callable[[Callable[[], None]], T]) -> None:
        """Starts `work(push)` at once; calling `push` returns once the main thread has pushed."""
        self._said: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._pushed = threading.Semaphore(0)
        threading.Thread(target=self._run, args=(work,), name="ahead", daemon=True).start()

    def _run(self, work: Callable[[Callable[[], None]], T]) -> None:
        try:
            self._said.put(("done", work(self._ask)))
        except BaseException as error:  # raised again where the result is asked for
            self._said.put(("failed", error))

    def _ask(self) -> None:
        self._said.put(("push", None))
        self._pushed.acquire()

    def result(self, push: Callable[[], None]) -> T:
        """Wait for the work's result, pushing weights as often as it asks. Raises what the work raised."""
        while True:
            kind, value = self._said.get()
            if kind == "failed":
                raise value
            if kind == "done":
                return value
            push()
            self._pushed.release()


def packed(groups: Sequence[Group]) -> dict[str, Any]:
    """Groups as JSON holds them, every float exact; `unpacked` gives them back.

    A prompt is kept by its place in the run's order and what a draft changed of it.
    """
    index: dict[int, int] = {}
    prompts: list[Prompt] = []

    def number(prompt: Prompt) -> int:
        if id(prompt) not in index:
            index[id(prompt)] = len(prompts)
            prompts.append(prompt)
        return index[id(prompt)]

    rows = [
        {
            "prompt": number(g.prompt),
            "stage": g.stage,
            "rank": g.rank,
            "rollouts": [_row(r, number) for r in g.rollouts],
            "drafts": [_row(r, number) for r in g.drafts],
        }
        for g in groups
    ]
    kept = ("position", "messages", "text", "token_ids")
    return {"groups": rows, "prompts": [{name: getattr(p, name) for name in kept} for p in prompts]}


def _row(rollout: Rollout, number: Callable[[Prompt], int]) -> dict[str, Any]:
    assert rollout.old is None and rollout.peer is None, (
        "log-probs of the learners are found when it is trained on"
    )
    return {
        "prompt": number(rollout.prompt),
        "completion": asdict(rollout.completion),
        "score": {
            "reward": rollout.score.reward,
            "parts": dict(rollout.score.parts),
            "outcomes": dict(rollout.score.outcomes),
        },
    }


def unpacked(kept: Mapping[str, Any], order: Prompts) -> list[Group]:
    """The groups of `packed`, their prompts completed from the run's order."""
    prompts = [_prompt(p, order) for p in kept["prompts"]]

    def rollouts(rows: Iterable[Mapping[str, Any]]) -> tuple[Rollout, ...]:
        return tuple(
            Rollout(prompts[r["prompt"]], _completion(r["completion"]), Score(**r["score"])) for r in rows
        )

    return [
        Group(
            prompts[g["prompt"]],
            rollouts(g["rollouts"]),
            rollouts(g["drafts"]),
            stage=g["stage"],
            rank=g["rank"],
        )
        for g in kept["groups"]
    ]


def _prompt(kept: Mapping[str, Any], order: Prompts) -> Prompt:
    base = order.take(kept["position"], 1)[0]
    return replace(
        base,
        messages=tuple(kept["messages"]),
        text=kept["text"],
        token_ids=tuple(kept["token_ids"]),
    )


def _completion(kept: Mapping[str, Any]) -> Completion:
    sequences = {name: tuple(kept[name]) for name in ("token_ids", "logprobs")}
    return Completion(**{**kept, **sequences})


def save(folder: Path, ready: Ready, setup: Setup) -> None:
    """Write what is there of the next step into a checkpoint's folder, if there is anything."""
    explored, drafts = ready.explored, ready.drafts
    if explored is None and not drafts:
        return
    groups = explored.groups if explored else [_of_drafts(drafts[at]) for at in sorted(drafts)]
    counts = {f.name: getattr(explored, f.name) for f in fields(explored)[1:]} if explored else {}
    kept = {
        "stage": "step" if explored else "drafts",
        "prompts_per_step": setup.prompts_per_step,
        **counts,
        **packed(groups),
    }
    (folder / FILE).write_text(json.dumps(kept), encoding="utf-8")


def load(folder: Path, explorer: Explorer) -> Ready:
    """What a checkpoint has of the next step. Nothing, where the run now samples ahead otherwise or not at all.

    Raises ValueError for a file that is damaged.
    """
    path = folder / FILE
    try:
        return _ready(json.loads(path.read_text(encoding="utf-8")), explorer)
    except FileNotFoundError:
        return Ready()
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); put it back, or remove the folder {folder} to go on"
            " from the checkpoint before it"
        ) from None


def _ready(kept: Mapping[str, Any], explorer: Explorer) -> Ready:
    setup = explorer.setup
    if (kept["stage"], kept["prompts_per_step"]) != (setup.ahead, setup.prompts_per_step):
        return Ready()
    groups = unpacked(kept, explorer.prompts)
    if kept["stage"] == "drafts":
        return Ready(drafts={g.prompt.position: g.rollouts for g in groups})
    counts = {f.name: kept[f.name] for f in fields(Explored)[1:]}
    return Ready(Explored(tuple(groups), **counts))


def _of_drafts(rollouts: tuple[Rollout, ...]) -> Group:
    return Group(rollouts[0].prompt, rollouts, stage="draft")
