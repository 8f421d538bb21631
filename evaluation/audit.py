"""Where two graders disagree over what a run sampled."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.grade import (
    CHUNK_ROWS,
    PROGRESS_EVERY_SECONDS,
    answer_of,
    num_processes,
    record,
    reference,
    shown,
)
from hpcgrpo import config
from hpcgrpo.rewards.answers import extract_answer
from hpcgrpo.rewards.grading import JUDGES, Grader, Outcome
from hpcgrpo.tasks import jsonl

OURS = "hpcgrpo"  # of JUDGES: the grader of training and evaluation
SECOND = "math-verify"  # the one that it is compared with unless said


@dataclass
class Seen:
    """How often a (reference, answer) pair came up in a run, and in which step first and last."""

    count: int = 0
    steps: list[int] = field(default_factory=list)  # first, last

    def add(self, step: int | None) -> None:
        self.count += 1
        if step is not None:
            self.steps = [min([step, *self.steps]), max([step, *self.steps])]


def audit(folder: Path, *, as_json: bool, processes: int | None, limit: int, judge: str = SECOND) -> int:
    """Where this project's grader and `judge` (another key of JUDGES) disagree over the distinct pairs of reference and
    answer in a run's rollouts, or in any JSONL rows with a reference and a text; 0.

    Lists up to `limit` disagreements, the most frequent first, then pairs, agreement and Cohen's kappa (1960) of the
    verdicts, pairs counted once; a time-out or error is no `right`. Raises ValueError where there is nothing to read.
    """
    others = [name for name in JUDGES if name != OURS]
    if judge not in others:
        raise ValueError(f"--judge {judge}: the second grader is one of {', '.join(others)}")
    if limit < 0:
        raise ValueError(f"--limit {limit}: must be at least 0, which lists none")
    seen = _pairs_of(folder)
    pairs = list(seen)
    verdicts = []
    for name in (OURS, judge):
        with Grader(num_processes=num_processes(processes), judge=name) as grader:
            verdicts.append(_graded(pairs, grader, name))
    apart = [i for i, (a, b) in enumerate(zip(*verdicts, strict=True)) if (a == "right") != (b == "right")]
    apart.sort(key=lambda i: (-seen[pairs[i]].count, pairs[i]))
    rows = [_disagreement(pairs[i], seen[pairs[i]], verdicts[0][i], verdicts[1][i], judge) for i in apart]
    summary = _agreement([[v == "right" for v in one] for one in verdicts], seen, len(apart), judge)
    if as_json:
        print(json.dumps({**summary, "disagreements": rows[:limit]}))
    else:
        _print_audit(rows[:limit], summary, judge)
    return 0


def _graded(pairs: list[tuple[str, str]], grader: Grader, name: str) -> list[Outcome]:
    found: list[Outcome] = []
    told = time.monotonic()
    while len(found) < len(pairs):
        found += grader.grade(pairs[len(found) : len(found) + CHUNK_ROWS])
        if time.monotonic() - told >= PROGRESS_EVERY_SECONDS:
            told = time.monotonic()
            print(f"{name}: {len(found)} of {len(pairs)} pairs graded", file=sys.stderr, flush=True)
    return found


def _pairs_of(folder: Path) -> dict[tuple[str, str], Seen]:
    """The pairs of a run's `rollouts/*.jsonl`, else of all JSONL files below a folder, or of one file."""
    if not folder.exists():
        raise ValueError(f"{folder}: there is no such run; give its folder, e.g. logs/igrpo-7b")
    files = [folder] if folder.is_file() else sorted((folder / "rollouts").glob("*.jsonl"))
    files = files or sorted(p for p in folder.rglob("*.jsonl") if p.name != "metrics.jsonl")
    required = _box_required(folder)
    seen: dict[tuple[str, str], Seen] = {}
    rows = 0
    for path in files:
        step = re.search(r"-(\d+)\.jsonl$", path.name)
        with path.open("rb") as lines:
            for number, line in jsonl.lines(lines):
                rows += 1
                try:
                    pair = _pair_of(record(line), required)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
                if pair is not None:
                    seen.setdefault(pair, Seen()).add(int(step.group(1)) if step else None)
    if not seen:
        what = f"{rows} rows in {len(files)} files, none with" if rows else "no rollouts (JSONL rows) with"
        raise ValueError(
            f"{folder}: {what} a reference (answer, gold) and an answered text (completion, prediction); a run keeps "
            "its rollouts with log_completions: true"
        )
    return seen


def _box_required(folder: Path) -> bool:
    """The run's own rule for finding answers: that of its accuracy reward."""
    path = folder / "config.yaml"
    rule = config.load(path).rewards.get("accuracy") if path.is_file() else None
    return bool(rule.get("require_box_or_tag", True)) if isinstance(rule, dict) else True


def _pair_of(row: dict[str, Any], required: bool) -> tuple[str, str] | None:
    """`required`: a completion without box and tag holds no answer, else its last number is one."""
    for gold_key, text_key in (("answer", "completion"), ("gold", "prediction"), ("gold", "text")):
        gold, text = row.get(gold_key), row.get(text_key)
        if gold is not None and isinstance(text, str):
            own = text_key == "completion"
            answer = extract_answer(text, require_box_or_tag=required) if own else answer_of(text)
            return None if answer is None else (reference(gold, gold_key), answer)
    return None


def _disagreement(
    pair: tuple[str, str], seen: Seen, ours: Outcome, theirs: Outcome, judge: str
) -> dict[str, Any]:
    gold, answer = pair
    return {
        "gold": gold,
        "answer": answer,
        OURS: ours,
        judge: theirs,
        "count": seen.count,
        "steps": seen.steps,
    }


def _agreement(
    right: list[list[bool]], seen: dict[tuple[str, str], Seen], apart: int, judge: str
) -> dict[str, Any]:
    pairs = len(right[0])
    return {
        "pairs": pairs,
        "rollouts": sum(s.count for s in seen.values()),
        "agreement": 1 - apart / pairs,
        "kappa": kappa(*right),
        "right": {OURS: sum(right[0]), judge: sum(right[1])},
        "disagreements_in_all": apart,
    }


def kappa(first: list[bool], second: list[bool]) -> float | None:
    """Cohen's kappa of two lists of verdicts: agreement beyond chance; None where both always say the same one."""
    count = len(first)
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / count
    shares = sum(first) / count, sum(second) / count
    expected = shares[0] * shares[1] + (1 - shares[0]) * (1 - shares[1])
    return None if expected == 1 else (observed - expected) / (1 - expected)


def _print_audit(rows: list[dict[str, Any]], summary: dict[str, Any], judge: str) -> None:
    if rows:
        print(f"{'times':>7}  {'steps':>13}  {OURS:8}  {judge:11}  {'reference':30}  answer")
    for row in rows:
        steps = "-".join(map(str, dict.fromkeys(row["steps"])))
        print(
            f"{row['count']:7d}  {steps:>13}  {row[OURS]:8}  {row[judge]:11}  "
            f"{shown(row['gold'], 30):30}  {shown(row['answer'], 50)}".rstrip()
        )
    hidden = summary["disagreements_in_all"] - len(rows)
    if hidden:
        print(f"... and {hidden} more; --limit {summary['disagreements_in_all']} shows all")
    beyond = "no kappa (one verdict alone)" if summary["kappa"] is None else f"kappa {summary['kappa']:.3f}"
    print(
        f"{summary['pairs']} distinct pairs of {summary['rollouts']} rollouts: {summary['agreement']:.1%} agreement, "
        f"{beyond}; of the distinct pairs {summary['right'][OURS]} are right by {OURS}, {summary['right'][judge]} by"
        f" {judge}"
    )
