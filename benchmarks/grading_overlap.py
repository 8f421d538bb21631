"""A step's sampling and grading, one after the other and at the same time, with a slow grader.

    .venv/bin/python benchmarks/grading_overlap.py [--requests 512] [--milliseconds 20] [--rounds 3] [--json]

The real client asks eight stand-in engines of known speed (`_stand_in_engines.py`) for completions of log-normal
lengths. Each is then graded by a function that takes so many milliseconds, as a sandbox or another model would, and by
`overlong`. Both ways take turns and must come to the same scores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from _rows import at_least, compared, positive, row
from _stand_in_engines import drawn_lengths, learner_client, stand_ins

from hpcgrpo.rewards import REWARDS, Reward, Rewards, Run
from hpcgrpo.types import Prompt, Request, Sampling, Score

GROUP, LONGEST, MEAN, ENGINES, CAPACITY, TOKEN_SECONDS = 8, 4096, 1024.0, 8, 16, 1.5e-3


@dataclass(frozen=True)
class Step:
    """How long one step took: in all, and of that what grading added after the last completion."""

    seconds: float
    after_seconds: float


def rewards(milliseconds: float) -> Rewards:
    """A slow function of each completion, and a fast one."""

    def slow(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        time.sleep(milliseconds / 1000 * len(completion_ids))
        return [float(len(ids) % 2) for ids in completion_ids]

    fast = REWARDS["overlong"](Run(LONGEST, 1))
    return Rewards(("slow", "overlong"), (1.0, 1.0), (Reward(slow, scope="completion"), fast))


def step(client: Any, graded: Rewards, prompts: Sequence[Prompt], *, early: bool) -> tuple[Step, list[Score]]:
    """Sample one completion of each prompt and grade it."""
    requests = [Request(p.token_ids, seed=i, question=p.row) for i, p in enumerate(prompts)]
    began = time.perf_counter()
    with graded.grading(prompts) as grading:
        arrived = grading.submit if early else None
        completions = client.generate(requests, Sampling(1.0, LONGEST), arrived)
        sampled = time.perf_counter()
        scores = grading.scores(completions)
    ended = time.perf_counter()
    return Step(ended - began, ended - sampled), scores


def measure(count: int, milliseconds: float, rounds: int) -> dict[str, list[Step]]:
    """Both ways in turns, on fresh engines each time, so that they answer alike."""
    distinct = [Prompt(q, q, (), "", tuple(range(512)), {}) for q in range(count // GROUP)]
    prompts = [p for p in distinct for _ in range(GROUP)]
    graded = rewards(milliseconds)
    steps: dict[str, list[Step]] = {"after": [], "while": []}
    lengths = drawn_lengths(count // ENGINES, mean=MEAN, longest=LONGEST)
    for _ in range(rounds):
        sums = []
        for name in steps:
            with stand_ins(
                ENGINES, capacity=CAPACITY, token_seconds=TOKEN_SECONDS, lengths=lengths, longest=LONGEST
            ) as urls:
                client = learner_client(urls, lambda ids: "", count)
                one, scores = step(client, graded, prompts, early=name == "while")
            steps[name].append(one)
            sums.append(sorted(s.reward for s in scores))
        assert sums[0] == sums[1], "the scores differ"
    return steps


def rows(steps: dict[str, list[Step]]) -> list[dict[str, Any]]:
    """For `table.py`: at best, grading adds nothing to sampling."""
    whole = {name: [s.seconds for s in some] for name, some in steps.items()}
    alone = statistics.median(s.seconds - s.after_seconds for s in steps["after"])
    return [
        row(
            "grading while sampling: after it",
            **compared(whole["after"], whole["while"]),
            of="seconds of sampling and grading",
            bound=statistics.median(whole["after"]) / alone,
            bound_is="sampling alone",
        )
    ]


def main() -> None:
    """Print the table, or one JSON object with every step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=at_least(GROUP), default=512)
    parser.add_argument("--milliseconds", type=at_least(0.0), default=20.0, help="of grading, a completion")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    steps = measure(options.requests, options.milliseconds, options.rounds)
    if options.json:
        found = {name: [asdict(s) for s in some] for name, some in steps.items()}
        print(json.dumps({"rows": rows(steps), "steps": found}))
        return
    medians = {
        name: [statistics.median(x) for x in zip(*((s.seconds, s.after_seconds) for s in some), strict=True)]
        for name, some in steps.items()
    }
    bound = medians["after"][0] - medians["after"][1]
    print(f"{'graded':8}{'step s':>9}{'after the last s':>18}{'of sampling alone':>19}")
    for name, (whole, after) in medians.items():
        print(f"{name:8}{whole:9.2f}{after:18.2f}{whole / bound:19.3f}")
    print(f"grading while sampling: {medians['after'][0] / medians['while'][0]:.2f} x as fast")


if __name__ == "__main__":
    main()
