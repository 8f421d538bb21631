"""Tasks whose rows are generated, with verifiable answers and held-out questions that never meet the others."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from typing import Any

from hpcgrpo.tasks.row import Row
from hpcgrpo.types import stable_seed

HELD_OUT_SHARE = 8  # one question in so many belongs to the split "test"
MAX_FRUITLESS_DRAWS = 2000  # in a row; then the task is taken to be exhausted
GENERATED_SIZE = 4096  # rows, unless max_samples or size says otherwise

Draw = Callable[[random.Random], dict[str, str]]


def chain(*, digits: int = 8) -> Draw:
    """Running sums modulo 10 of a row of digits: `1234` -> `36=0`; the answer is the last sum."""
    if digits < 3:
        raise ValueError(f"options.digits is {digits}; chain needs at least 3, for a sum to reason about")

    def draw(rng: random.Random) -> dict[str, str]:
        numbers = [rng.randrange(10) for _ in range(digits)]
        sums = [sum(numbers[: i + 1]) % 10 for i in range(1, digits)]
        text = "".join(map(str, sums))
        return {
            "prompt": "".join(map(str, numbers)),
            "answer": text[-1],
            "solution": f"{text[:-1]}={text[-1]}",
        }

    return draw


ADDITION_NAMES = (
    "Ana", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Kira", "Leo",
    "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tara", "Victor",
)  # fmt: skip
ADDITION_OBJECTS = (
    "apples", "books", "buttons", "cards", "coins", "cookies", "crayons", "eggs", "flowers", "keys",
    "lemons", "marbles", "pears", "pencils", "plums", "shells", "stamps", "stickers", "stones", "toys",
)  # fmt: skip
ADDITION_TEMPLATES = (
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "There are {a} {things} in one box and {b} {things} in another box. How many {things} are there in all?",
    "{name} found {a} {things} on Monday and {b} {things} on Tuesday. How many {things} did {name} find?",
    "{name} has {a} {things}. {friend} has {b} {things}. How many {things} do they have together?",
    "{name} bought {a} {things} in the morning and {b} in the evening. How many {things} did {name} buy?",
    "A shelf holds {a} {things}. {name} puts {b} more {things} on it. How many {things} are on the shelf?",
)


def addition(*, largest: int = 9) -> Draw:
    """Word problems that add two numbers from 1 to `largest`; the answer is an integer."""
    if largest < 1:
        raise ValueError(f"options.largest is {largest}; addition needs at least 1")

    def draw(rng: random.Random) -> dict[str, str]:
        name, friend = rng.sample(ADDITION_NAMES, 2)
        a, b = rng.randint(1, largest), rng.randint(1, largest)
        question = rng.choice(ADDITION_TEMPLATES).format(
            name=name, friend=friend, things=rng.choice(ADDITION_OBJECTS), a=a, b=b
        )
        return {"prompt": question, "answer": str(a + b), "solution": f"{a} + {b} = {a + b}"}

    return draw


GENERATED: dict[str, Callable[..., Draw]] = {"chain": chain, "addition": addition}


def generate(name: str, *, split: str, seed: int, size: int | None, options: Mapping[str, Any]) -> list[Row]:
    """Distinct rows; which split a question belongs to depends on its text alone, so splits never meet."""
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}; the generated task {name!r} has 'train' and 'test'")
    accepted = [*inspect.signature(GENERATED[name]).parameters, "size"]
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ValueError(
            f"task {name!r} has no option {', '.join(map(repr, unknown))} (options: {', '.join(accepted)})"
        )
    for option, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"options.{option} is {value!r}; the task {name!r} takes a whole number")
    chosen = dict(options)
    own_size = chosen.pop("size", GENERATED_SIZE)
    count = own_size if size is None else size
    draw, rng = GENERATED[name](**chosen), random.Random(stable_seed(name, split, seed))
    found: dict[str, dict[str, str]] = {}
    fruitless = 0
    while len(found) < count and fruitless < MAX_FRUITLESS_DRAWS:
        record = draw(rng)
        new = record["prompt"] not in found and _is_held_out(name, record["prompt"]) == (split == "test")
        fruitless = 0 if new else fruitless + 1
        if new:
            found[record["prompt"]] = record
    if len(found) < count:
        raise ValueError(
            f"task {name!r} gave {len(found)} different questions for split {split!r} where {count} are asked"
            " for; ask for fewer (max_samples or the option size) or for larger questions"
        )
    return [
        Row(i, ({"role": "user", "content": question},), record)
        for i, (question, record) in enumerate(found.items())
    ]


def _is_held_out(task: str, question: str) -> bool:
    return stable_seed("split", task, question) % HELD_OUT_SHARE == 0
