"""Rewards: a table of names, `build` from a specification, and the weighted score of a completion."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, get_args

from hpcgrpo.rewards.accuracy import accuracy
from hpcgrpo.rewards.base import Graded, Reward, RewardFunction, Run, Scope, text_of
from hpcgrpo.rewards.early import Early
from hpcgrpo.rewards.format import closing_tags, cppo_format, format_reward
from hpcgrpo.rewards.gsm8k import cppo_gsm8k
from hpcgrpo.rewards.judge import judge
from hpcgrpo.rewards.overlong import overlong
from hpcgrpo.types import Completion, Prompt, Score, stable_seed

__all__ = [
    "REWARDS",
    "Graded",
    "Grading",
    "Reward",
    "RewardFunction",
    "Rewards",
    "Run",
    "Scope",
    "build",
    "text_of",
]

# name -> builder(run, **options); the keyword-only arguments are the options
REWARDS: dict[str, Callable[..., Reward]] = {
    "accuracy": accuracy,
    "format": format_reward,
    "cppo_gsm8k": cppo_gsm8k,
    "cppo_format": cppo_format,
    "closing_tags": closing_tags,
    "overlong": overlong,
    "judge": judge,
}


@dataclass(frozen=True)
class Rewards:
    """The reward functions of a run with their weights. A context manager; `close` ends grading processes."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    parts: tuple[Reward, ...]

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for reward in self.parts:
            reward.close()

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        """One score a completion: the weighted sum of the parts that apply (0 if none does), with the parts.

        Raises ValueError if a row lacks a column that a function needs, or if a function raises or returns
        anything but one finite number or None a completion.
        """
        with self.grading(prompts) as grading:
            return grading.scores(completions)

    def grading(self, prompts: Sequence[Prompt]) -> Grading:
        """The scoring of one completion of each of these prompts, which may come one by one; a context manager."""
        return Grading(self, prompts)

    def combine(self, row: Sequence[tuple[float | None, str | None]]) -> Score:
        """The score of one completion from what each reward gave it, in their order."""
        parts = {name: value for name, (value, _) in zip(self.names, row, strict=True)}
        outcomes = {name: outcome for name, (_, outcome) in zip(self.names, row, strict=True) if outcome}
        weighted = (w * v for w, v in zip(self.weights, parts.values(), strict=True) if v is not None)
        return Score(reward=float(sum(weighted)), parts=parts, outcomes=outcomes)


class Grading:
    """Scores the completions of one call of the generator, as far as can be while others are still sampled.

    A reward whose `scope` is "completion" is given a completion as it comes, one of "group" the completions of a prompt
    once all have come (equal neighbours in `prompts` are a group), any other one everything at once in `scores`. The
    scores are those of `Rewards.score`.
    """

    def __init__(self, rewards: Rewards, prompts: Sequence[Prompt]) -> None:
        self.rewards, self.prompts = rewards, prompts
        self._names = dict.fromkeys(name for p in prompts for name in p.columns)
        self._came: dict[int, Completion] = {}
        groups = [[*numbers] for _, numbers in groupby(range(len(prompts)), lambda i: id(prompts[i]))]
        self._group_of = {i: group for group in groups for i in group}
        self._early = {
            name: Early(functools.partial(self._call, name, reward))
            for name, reward in zip(rewards.names, rewards.parts, strict=True)
            if reward.scope != "batch"
        }

    def __enter__(self) -> Grading:
        return self

    def __exit__(self, *error: object) -> None:
        for early in self._early.values():
            early.leave()

    def submit(self, i: int, completion: Completion) -> None:
        """The completion of the i-th prompt has come; returns at once."""
        self._add({i: completion})

    def scores(self, completions: Sequence[Completion]) -> list[Score]:
        """One score a completion, in order, with those that were not submitted; otherwise as `Rewards.score`."""
        assert len(self.prompts) == len(completions)
        self._add({i: c for i, c in enumerate(completions) if i not in self._came})
        if not completions:
            return []
        graded = {
            name: self._call(name, reward, [*range(len(completions))])
            for name, reward in zip(self.rewards.names, self.rewards.parts, strict=True)
            if name not in self._early
        }
        graded |= {name: early.collect() for name, early in self._early.items()}
        rows = zip(*(graded[name] for name in self.rewards.names), strict=True)
        return [self.rewards.combine(row) for row in rows]

    def _add(self, completions: Mapping[int, Completion]) -> None:
        if not completions:
            return
        self._came.update(completions)
        groups = {id(self._group_of[i]): self._group_of[i] for i in completions}.values()
        whole = [i for group in groups if all(j in self._came for j in group) for i in group]
        for name, reward in zip(self.rewards.names, self.rewards.parts, strict=True):
            numbers = [*completions] if reward.scope == "completion" else whole
            if name in self._early and numbers:
                self._early[name].add(numbers)

    def _call(
        self, name: str, reward: Reward, numbers: Sequence[int]
    ) -> list[tuple[float | None, str | None]]:
        prompts, completions = [self.prompts[i] for i in numbers], [self._came[i] for i in numbers]
        return _call(name, reward, prompts, _arguments(prompts, completions, self._names))


def build(
    spec: Mapping[str, float | Mapping[str, Any]], *, max_completion_length: int, num_processes: int
) -> Rewards:
    """Rewards from `{name: weight}` or `{name: {weight: 1.0, **options}}`.

    A name is one of REWARDS, `module:function` or `path/to/file.py:function` (TRL's signature; its options
    are passed as keyword arguments). Imports the user's module, starts no process. Raises ValueError for
    what is wrong in the specification.
    """
    if not spec:
        raise ValueError(f"rewards: at least one is needed; known: {', '.join(REWARDS)}, or module:function")
    run = Run(max_completion_length=max_completion_length, num_processes=num_processes)
    names, weights, parts = [], [], []
    for key, entry in spec.items():
        options = dict(entry) if isinstance(entry, Mapping) else {"weight": entry}
        weights.append(_weight(key, options.pop("weight", 1.0)))
        parts.append(_user_reward(key, options) if ":" in key else _own_reward(key, options, run))
        short = key.rsplit(":", 1)[-1]
        names.append(key if short in names or (short != key and short in spec) else short)
    return Rewards(tuple(names), tuple(weights), tuple(parts))


def _weight(key: str, weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError(f"rewards: the weight of {key} is {weight!r}; it must be a finite number")
    return float(weight)


def _own_reward(name: str, options: dict[str, Any], run: Run) -> Reward:
    if name not in REWARDS:
        raise ValueError(
            f"rewards: no reward is called {name!r}{_nearest(name, REWARDS)}; known: {', '.join(REWARDS)}; "
            "a function of your own is module:function or path/to/file.py:function"
        )
    parameters = inspect.signature(REWARDS[name]).parameters.values()
    own = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    _check_options(name, options, own)
    _check_values(name, options, own)
    missing = [n for n, p in own.items() if p.default is p.empty and n not in options]
    if missing:
        raise ValueError(f"rewards: {name} needs the options {', '.join(missing)}")
    try:
        return REWARDS[name](run, **options)
    except TypeError as error:
        raise ValueError(f"rewards: the options {options} of {name} do not fit: {error}") from error


def _check_options(name: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for option in options:
        if option not in known:
            raise ValueError(
                f"rewards: {name} has no option {option!r}{_nearest(option, known)}; "
                f"options: {', '.join(['weight', *known])}"
            )


# Kind of an option, as its signature has it -> the rule, does a value keep it?
RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "int": ("a whole number", lambda v: isinstance(v, int) and not isinstance(v, bool)),
    "float": (
        "a finite number",
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v),
    ),
    "str": ("text", lambda v: isinstance(v, str)),
}


def _check_values(name: str, options: Mapping[str, Any], own: Mapping[str, inspect.Parameter]) -> None:
    for option, value in options.items():
        kind, _, optional = str(own[option].annotation).partition(" | ")
        rule, holds = RULES.get(kind, ("", lambda _: True))
        if not holds(value) and not (optional and value is None):
            raise ValueError(
                f"rewards: {name}.{option} is {value!r}; it must be {rule}{optional and ', or null'}"
            )


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


# ------------------------------------------------------------------------------------------ user functions


def _user_reward(key: str, options: dict[str, Any]) -> Reward:
    place, name = key.rsplit(":", 1)
    module = _import(key, place)
    function = getattr(module, name, None)
    if not callable(function):
        public = {n: f for n, f in vars(module).items() if callable(f) and not n.startswith("_")}
        others = _nearest(name, public) or f" (functions there: {', '.join(public) or 'none'})"
        found = "is not callable" if hasattr(module, name) else f"does not exist{others}"
        raise ValueError(f"rewards: {key}: {name!r} {found} in {place}")
    parameters = _parameters(function)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        _check_options(key, options, parameters)
    scope: Any = getattr(function, "scope", "batch")
    if scope not in get_args(Scope):
        raise ValueError(
            f"rewards: {key}: its scope is {scope!r}; it must be one of {', '.join(get_args(Scope))}"
        )
    return Reward(functools.partial(function, **options) if options else function, scope=scope)


def _import(key: str, place: str) -> ModuleType:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            raise ValueError(f"rewards: {key}: there is no file {path}")
        return _import_file(path, _snapshot(path))
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise ValueError(f"rewards: {key}: {place} could not be imported: {error!r}") from error


def _snapshot(path: Path) -> Path:
    """The copy of a user's file that was made when the job was submitted, where this is such a job."""
    code = os.environ.get("HPCGRPO_CODE")
    copy = Path(f"{code}/files{path}") if code else path
    return copy if copy.is_file() else path


def _import_file(path: Path, source: Path) -> ModuleType:
    name = f"{path.stem}_{stable_seed(str(path)):x}"
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature: give it everything
        return {"columns": inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)}


# ------------------------------------------------------------------------------------------------- scoring


def _arguments(
    prompts: Sequence[Prompt], completions: Sequence[Completion], names: Iterable[str]
) -> dict[str, list[Any]]:
    """TRL's keyword arguments: prompts and completions as text or messages, token ids, the rows' columns `names`."""
    return {
        **{name: [p.columns.get(name) for p in prompts] for name in names},
        "prompts": [_prompt(p) for p in prompts],
        "completions": [
            [{"role": "assistant", "content": c.text}] if p.conversational else c.text
            for p, c in zip(prompts, completions, strict=True)
        ],
        "completion_ids": [list(c.token_ids) for c in completions],
    }


def _prompt(prompt: Prompt) -> str | list[dict[str, str]]:
    if prompt.conversational:
        return [dict(m) for m in prompt.messages]
    return prompt.messages[-1]["content"] if prompt.messages else prompt.text


def _call(
    name: str, reward: Reward, prompts: Sequence[Prompt], arguments: Mapping[str, list[Any]]
) -> list[tuple[float | None, str | None]]:
    for column in reward.columns:
        for prompt in prompts:
            if prompt.columns.get(column) is None:
                raise ValueError(
                    f"reward {name}: row {prompt.row} of the data has no {column!r} "
                    f"(it has: {', '.join(prompt.columns) or 'none'}); give it one, or name the right column "
                    "by the reward's option answer_column"
                )
    parameters = _parameters(reward.function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    fixed = getattr(reward.function, "keywords", {})  # options beat columns of the same name
    accepted = {k: v for k, v in arguments.items() if (takes_all or k in parameters) and k not in fixed}
    try:
        values = reward.function(**accepted)
        if inspect.isawaitable(values):
            values = _finish(values)
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever a user's function raises; sys.exit would end the run quietly
        frame = extract_tb(error.__traceback__)[-1]
        if isinstance(error, TypeError) and frame.filename == __file__:  # it was never entered
            raise ValueError(
                f"reward {name} cannot be called: {error}. It is given {', '.join(arguments)} by name, lists with one"
                f" item a completion; write it as def {name.rpartition(':')[2]}(prompts, completions, **columns)"
            ) from None
        copies = f"{os.environ.get('HPCGRPO_CODE')}/files"  # of a job: name the user's own file
        where = f"{frame.filename.removeprefix(copies)}, line {frame.lineno}"
        raise ValueError(f"reward {name} raised {type(error).__name__}: {error} ({where})") from error
    return _checked(name, values, len(prompts))


def _finish(awaitable: Any) -> Any:
    import asyncio  # here, since it is slow to import and few need it

    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())


def _checked(name: str, values: Any, count: int) -> list[tuple[float | None, str | None]]:
    rule = f"it must return a list of {count} numbers or None, one a completion"
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise ValueError(f"reward {name} returned {_shown(values)}; {rule}")
    if len(values) != count:
        raise ValueError(f"reward {name} returned {len(values)} values for {count} completions; {rule}")
    checked = []
    for i, item in enumerate(values):
        value, outcome = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
        checked.append((_number(name, i, value, rule), outcome))
    return checked


def _number(name: str, position: int, value: Any, rule: str) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"reward {name} returned {_shown(value)} for completion {position}; {rule}")
    return number


def _shown(value: Any) -> str:
    return f"{value!r:.100} ({type(value).__name__})"
