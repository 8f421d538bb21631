"""Groups of a run's rollouts worth looking at: the best, the worst, and those without a difference to learn from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hpcgrpo.report.markup import finite

HIGHEST = "the highest mean reward of a group that teaches something"
LOWEST = "the lowest mean reward of a group that teaches something"
MAX_CHARACTERS = 4000  # of a text that is kept
MAX_LINE_BYTES = 2**24  # of a rollout in the file
MAX_ROLLOUTS = 20_000  # of a file that are read
MAX_OF_GROUP = 32  # rollouts of one stage that are listed

Row = dict[str, Any]


def of_run(folder: Path, notes: list[str], *, characters: int = MAX_CHARACTERS) -> list[dict[str, Any]]:
    """Examples of the first and the last step whose rollouts were kept: {step, groups, examples}."""
    try:
        files = sorted((folder / "rollouts").glob("step-*.jsonl"))
    except OSError:
        files = []
    if not files:
        notes.append("no rollouts were kept (log_completions), so none are shown")
    found = [_of_step(path, notes, characters) for path in dict.fromkeys([*files[:1], *files[-1:]])]
    return [step for step in found if step is not None]


def _of_step(path: Path, notes: list[str], characters: int) -> dict[str, Any] | None:
    broken: list[int] = []
    groups: dict[Any, list[Row]] = {}
    try:
        for row in _rows(path, broken, characters):
            groups.setdefault((row["position"], row["row"]), []).append(row)
    except OSError as error:
        notes.append(f"rollouts/{path.name} cannot be read ({error.strerror})")
        return None
    if broken:
        notes.append(
            f"{len(broken)} lines of rollouts/{path.name} are cut off, damaged or too long: left out"
        )
    examples = [_example(kind, rows) for kind, rows in _chosen(list(groups.values()))]
    number = path.stem.rpartition("-")[2]
    step = int(number) if number.isdecimal() else None
    return {"step": step, "file": path.name, "groups": len(groups), "examples": examples}


def _rows(path: Path, broken: list[int], characters: int) -> Iterator[Row]:
    with path.open("rb") as file:
        for number in range(MAX_ROLLOUTS):
            line = file.readline(MAX_LINE_BYTES)
            if not line:
                return
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
            row = _row(line, characters)
            if row is None:
                broken.append(number)
            else:
                yield row


def _row(line: bytes, characters: int) -> Row | None:
    """A rollout, its texts shortened; None where the line holds none."""
    try:
        values = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not isinstance(values.get("completion"), str):
        return None
    return {
        "position": _whole(values.get("position")),
        "row": _whole(values.get("row")),
        "stage": "draft" if values.get("stage") == "draft" else "sample",
        "reward": _number(values.get("reward")),
        "rewards": _numbers(values.get("rewards")),
        "outcomes": {str(k): str(v) for k, v in _mapping(values.get("outcomes")).items()},
        "advantage": _number(values.get("advantage")),
        "kept": values.get("kept") if isinstance(values.get("kept"), bool) else None,
        "finish_reason": str(values.get("finish_reason")),
        "tokens": len(values["token_ids"]) if isinstance(values.get("token_ids"), list) else None,
        "answer": None if values.get("answer") is None else shortened(str(values["answer"]), characters),
        "prompt": shortened(str(values.get("prompt") or ""), characters),
        "completion": shortened(values["completion"], characters),
        "shown_later": False,
        "whole": (str(values.get("prompt") or ""), values["completion"]),
    }


def shortened(value: str, characters: int) -> str:
    """Beginning and end of a text that is longer."""
    if len(value) <= characters:
        return value
    half = characters // 2
    return f"{value[:half]}\n[… {len(value) - 2 * half:,} characters left out …]\n{value[-half:]}"


def _chosen(groups: Sequence[list[Row]]) -> Iterator[tuple[str, list[Row]]]:
    """(what it is an example of, the group) by the mean reward of what was trained on."""
    scored = [(fmean(r), max(r) > min(r), rows) for rows in groups if (r := _rewards(rows))]
    apart = [(mean, rows) for mean, spread, rows in scored if spread]
    level = [(mean, rows) for mean, spread, rows in scored if not spread]
    if apart:
        best, worst = max(apart, key=lambda g: g[0]), min(apart, key=lambda g: g[0])
        yield HIGHEST, best[1]
        if worst[1] is not best[1]:
            yield LOWEST, worst[1]
    if level:
        high, low = max(level, key=lambda g: g[0]), min(level, key=lambda g: g[0])
        yield "zero variance: all alike, so no advantage", high[1]
        if low[0] < high[0]:
            yield "zero variance at the low end: all alike, so no advantage", low[1]


def _rewards(rows: Sequence[Row]) -> list[float]:
    return [r["reward"] for r in rows if r["stage"] == "sample" and r["reward"] is not None]


def _example(kind: str, rows: Sequence[Row]) -> dict[str, Any]:
    """A group as it is shown; the draft that the second stage saw is marked."""
    drafts = [r for r in rows if r["stage"] == "draft"]
    samples = [r for r in rows if r["stage"] == "sample"]
    if drafts and samples:
        _mark(drafts, samples[0]["whole"][0])
    plain = [[{k: v for k, v in r.items() if k != "whole"} for r in part] for part in (drafts, samples)]
    first = (drafts or samples)[0]
    return {
        "kind": kind,
        "position": first["position"],
        "row": first["row"],
        "question": first["prompt"],
        "answer": first["answer"],
        "second_prompt": samples[0]["prompt"] if drafts and samples else None,
        "num_drafts": len(drafts),
        "num_samples": len(samples),
        "drafts": plain[0][:MAX_OF_GROUP],
        "samples": plain[1][:MAX_OF_GROUP],
    }


def _mark(drafts: Sequence[Row], prompt: str) -> None:
    """The best draft whose text stands in the second prompt, the first of equals."""
    inside = [d for d in drafts if d["whole"][1].strip() and d["whole"][1].strip() in prompt]
    best = max(inside, key=lambda d: -1e300 if d["reward"] is None else d["reward"], default=None)
    if best is not None:
        best["shown_later"] = True


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _numbers(value: Any) -> dict[str, float | None]:
    return {str(k): _number(v) for k, v in _mapping(value).items()}


def _number(value: Any) -> float | None:
    return float(value) if finite(value) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
