"""Gradings a second: this project's grader in two processes beside plain math-verify in one, on the same pairs.

    .venv/bin/python benchmarks/grading.py [--pairs 400] [--rounds 5] [--processes 2] [--hostile] [--json]

References are those of `../shared/data` where it is there, else of the tests' fixture; predictions are the reference
itself, the reference set otherwise, and answers to other questions, a third each. No pair comes twice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from _rows import compared, positive, row

from hpcgrpo.rewards.answers import extract_answer
from hpcgrpo.rewards.grading import Grader, precheck

HERE = Path(__file__).resolve()
SHARED, FIXTURES = HERE.parents[2] / "shared", HERE.parents[1] / "tests" / "data"
SETS = ("math_test", "math500", "minerva_math", "olympiadbench", "amc_2022_2023", "aime24", "aime25")
HOSTILE_BATCH, HOSTILE_SHARE = 1024, 0.05
Pair = tuple[str, str]


@dataclass(frozen=True)
class Speed:
    """Of one grader on one round's pairs."""

    seconds: float
    cpu_seconds: float
    right: int
    pairs: int


def main() -> None:
    """Print the table, or one JSON object with every measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=positive, default=400, help="of a round (default 400)")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--processes", type=positive, default=2)
    parser.add_argument(
        "--hostile", action="store_true", help="a batch of 1,024 with and without 5 %% hostile answers"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.hostile:
        found = hostile(options.rounds, options.processes)
        rows = [
            row(
                f"grading, {HOSTILE_SHARE:.0%} hostile: none",
                **compared(found["ordinary"], found["mixed"]),
                of="seconds a batch",
            )
        ]
        print(json.dumps({"rows": rows, **found}) if options.json else _hostile_line(found))
        return
    everything = measure(options.pairs, options.rounds, options.processes)
    if options.json:
        print(
            json.dumps(
                {
                    "rows": [_row(kind, rounds) for kind, rounds in everything.items()],
                    "rounds": {
                        kind: [{k: asdict(s) for k, s in r.items()} for r in rounds]
                        for kind, rounds in everything.items()
                    },
                }
            )
        )
        return
    for kind, rounds in everything.items():
        report(kind, rounds, options.processes)


# ---------------------------------------------------------------------------------------------------- pairs


def references() -> list[str]:
    """Distinct references, in a fixed random order."""
    files = [SHARED / "data" / f"{name}.jsonl" for name in SETS]
    if all(path.exists() for path in files):
        found = [
            str(json.loads(line)["answer"]) for path in files for line in path.read_text().split("\n") if line
        ]
    else:
        found = [
            json.loads(line)["reference"]
            for line in (FIXTURES / "answers.jsonl").read_text().split("\n")
            if line
        ]
    distinct = list(dict.fromkeys(found))
    random.Random(0).shuffle(distinct)
    return distinct


def reformatted(reference: str) -> str:
    r"""The same answer as another author sets it: other spacing, \dfrac for \frac, brackets that don't grow."""
    text = reference.replace(r"\dfrac", r"\frac").replace(r"\frac", r"\dfrac")
    text = text.replace(r"\left", "").replace(r"\right", "")
    return re.sub(r"(?<=\w)([-+=<>])(?=\w)", r" \1 ", text).replace(", ", ",")


def ordinary(found: Sequence[str]) -> Iterator[Pair]:
    """Equal text, reformatted, wrong, in turn; each pair once."""
    for i, gold in enumerate(found):
        yield gold, (gold, reformatted(gold), found[i - 1])[i % 3]


def unsettled(found: Sequence[str]) -> Iterator[Pair]:
    """Pairs that text does not settle: a sum that comes to the reference, where it is a formula, or a wrong answer."""
    for i, gold in enumerate(found):
        formula = not re.search(r"[,;=<>]|\\(?:text|leq?|geq?|in|cup|begin|pm)(?![a-z])|[A-Za-z]{4}", gold)
        for prediction in (f"0 + {gold}" if formula and i % 2 else found[i - 1], found[i - 2], found[i - 3]):
            if precheck(gold, prediction) is None:
                yield gold, prediction
                break


# ------------------------------------------------------------------------------------------------ measuring


def measure(pairs: int, rounds: int, processes: int) -> dict[str, list[dict[str, Speed]]]:
    """Both graders in turn on the same pairs of each round, first one then the other."""
    found = references()
    plain = plain_math_verify()
    measured: dict[str, list[dict[str, Speed]]] = {}
    for kind, source in (("ordinary", ordinary), ("not settled by text", unsettled)):
        all_pairs = list(dict.fromkeys(source(found)))
        size = min(pairs, len(all_pairs) // rounds)
        measured[kind] = [
            _round(all_pairs[i * size : (i + 1) * size], plain, processes, turned=i % 2 == 1)
            for i in range(rounds)
        ]
    return measured


def _round(
    batch: list[Pair], plain: Callable[[str, str], bool], processes: int, *, turned: bool
) -> dict[str, Speed]:
    turns: dict[str, Callable[[], Speed]] = {
        "hpcgrpo": lambda: _ours(batch, processes),
        "math-verify": lambda: _theirs(batch, plain),
    }
    return {name: turns[name]() for name in (reversed(turns) if turned else turns)}


def _theirs(batch: list[Pair], plain: Callable[[str, str], bool]) -> Speed:
    began, cpu = time.perf_counter(), time.process_time()
    right = sum(plain(*pair) for pair in batch)
    return Speed(time.perf_counter() - began, time.process_time() - cpu, right, len(batch))


def _ours(batch: list[Pair], processes: int) -> Speed:
    """Of a pool that runs already; the CPU time of processes that were replaced meanwhile is missing."""
    with Grader(num_processes=processes) as grader:
        grader.grade([(f"x+{i}", f"{i}+x") for i in range(1, 2 * processes + 1)])
        started = {pid: _cpu_seconds(pid) for pid in grader.pids()}
        began, cpu = time.perf_counter(), time.process_time()
        right = sum(outcome == "right" for outcome in grader.grade(batch))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        cpu += sum(_cpu_seconds(pid) - started.get(pid, 0.0) for pid in grader.pids())
    return Speed(seconds, cpu, right, len(batch))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def plain_math_verify() -> Callable[[str, str], bool]:
    """math-verify as a reward function calls it: both sides boxed, in this process, without its alarms."""
    import logging

    from math_verify import parse, verify

    logging.disable(logging.WARNING)

    def judge(gold: str, prediction: str) -> bool:
        sides = [parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (gold, prediction)]
        return bool(verify(*sides, timeout_seconds=None))

    judge("x+1", "1+x")
    return judge


def hostile(rounds: int, processes: int) -> dict[str, list[float]]:
    """Seconds of a batch of 1,024 ordinary pairs, and of the same one with 5 % of its answers hostile, in turn."""
    path = SHARED / "grader" / "hostile.jsonl"
    path = path if path.exists() else FIXTURES / "hostile.jsonl"
    texts = [_hostile_text(json.loads(line)) for line in path.read_text().split("\n") if line]
    found = references()
    pairs = [pair for _, pair in zip(range(HOSTILE_BATCH), _cycled(found), strict=False)]
    chosen = random.Random(0).sample(range(HOSTILE_BATCH), round(HOSTILE_SHARE * HOSTILE_BATCH))
    mixed = list(pairs)
    for n, i in enumerate(chosen):
        mixed[i] = ("7", extract_answer(texts[n % len(texts)]) or "")
    seconds: dict[str, list[float]] = {"ordinary": [], "mixed": []}
    with Grader(num_processes=processes) as grader:
        grader.grade([("x+1", "1+x"), ("x+2", "2+x")])
        for i in range(rounds):
            for name in ("mixed", "ordinary") if i % 2 else ("ordinary", "mixed"):
                began = time.perf_counter()
                grader.grade(pairs if name == "ordinary" else mixed)
                seconds[name].append(time.perf_counter() - began)
    return seconds


def _cycled(found: Sequence[str]) -> Iterator[Pair]:
    turn = 0
    while True:
        yield from (
            (gold, found[i - 1 - turn]) if i % 3 else (gold, reformatted(gold))
            for i, gold in enumerate(found)
        )
        turn += 1


def _hostile_text(row: dict[str, str | int]) -> str:
    text = row.get("prediction") or row.get("completion")
    return str(text) if text else "\\boxed{" + str(row["unit"]) * int(row["times"]) + "}"


# ------------------------------------------------------------------------------------------------- printing


def _row(kind: str, rounds: list[dict[str, Speed]]) -> dict[str, object]:
    """For `table.py`, in CPU-seconds, as the processes share the machine with others."""
    plain, ours = ([r[name].cpu_seconds for r in rounds] for name in ("math-verify", "hpcgrpo"))
    return row(
        f"grading, {kind} pairs: math-verify",
        **compared(plain, ours),
        of="CPU-seconds",
    )


def report(kind: str, rounds: list[dict[str, Speed]], processes: int) -> None:
    """Medians over the rounds, and the quartiles of the ratio."""
    ratios = [r["math-verify"].seconds / r["hpcgrpo"].seconds for r in rounds]
    cpu = statistics.median(
        r["math-verify"].cpu_seconds / max(r["hpcgrpo"].cpu_seconds, 1e-3) for r in rounds
    )
    low, middle, high = (
        statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    )
    print(f"{kind}: {sum(r['hpcgrpo'].pairs for r in rounds)} pairs in {len(rounds)} rounds")
    for name, where in (("hpcgrpo", f"{processes} processes"), ("math-verify", "1 process")):
        rate = statistics.median(r[name].pairs / r[name].seconds for r in rounds)
        each = statistics.median(r[name].cpu_seconds / r[name].pairs for r in rounds)
        right = sum(r[name].right for r in rounds)
        print(
            f"  {name:12} {where:12} {rate:8.0f} gradings/s  {1e3 * each:7.2f} CPU-ms each  {right:5d} right"
        )
    print(f"  better by {middle:.2f} ({low:.2f}-{high:.2f}); in CPU-seconds by {cpu:.2f}")


def _hostile_line(seconds: dict[str, list[float]]) -> str:
    ratios = [b / a for a, b in zip(seconds["ordinary"], seconds["mixed"], strict=True)]
    return (
        f"batch of {HOSTILE_BATCH}: {statistics.median(seconds['ordinary']):.2f} s ordinary, "
        f"{statistics.median(seconds['mixed']):.2f} s with {HOSTILE_SHARE:.0%} hostile; "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
