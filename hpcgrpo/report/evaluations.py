"""The benchmarks' results in a run's `eval` folder, and the curve over its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcgrpo.evidence import read_json
from hpcgrpo.report.markup import finite

ROLLING = "rolling.json"
OTHERS = (ROLLING, "summary.json")
MAX_RESULTS = 60
ESTIMATE = ("mean", "low", "high", "standard_error", "t_low", "t_high")


def results(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The numbers of every `eval/<benchmark>.json`; files of another form are named in `notes`."""
    found = []
    for path in _files(folder / "eval"):
        one = _result(read_json(path))
        if one is None:
            notes.append(f"eval/{path.name} is damaged, or no benchmark's result")
        else:
            found.append(one)
    if len(found) > MAX_RESULTS:
        notes.append(f"{len(found) - MAX_RESULTS} further evaluations are left out")
    return found[:MAX_RESULTS]


def _files(folder: Path) -> list[Path]:
    try:
        return [
            p for p in sorted(folder.glob("*.json")) if p.name not in OTHERS and not p.name.startswith(".")
        ]
    except OSError:
        return []


def _result(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the page shows of a result; None where its score is missing."""
    summary = _mapping(values.get("summary"))
    score = _mapping(summary.get("avg@k"))
    if not all(finite(score.get(key)) for key in ("mean", "low", "high")):
        return None
    return {
        "benchmark": str(values.get("benchmark")),
        "title": str(values.get("title") or values.get("benchmark")),
        "model": _in_words(values.get("model")),
        "num_problems": summary.get("num_problems"),
        "num_samples": summary.get("num_samples"),
        "avg@k": {key: score.get(key) for key in (*ESTIMATE, "interval")},
        "pass@k": _largest(summary.get("pass@k")),
        "maj@k": _largest(summary.get("maj@k")),
        "shares": dict(_mapping(summary.get("shares"))),
        "completion_tokens": dict(_mapping(summary.get("completion_tokens"))),
    }


def _in_words(model: Any) -> str:
    """checkpoint-8 of base; a model that is no checkpoint by its name."""
    known = _mapping(model)
    name = str(known.get("name") or model)
    return name if known.get("step") is None else f"checkpoint-{known['step']} of {name}"


def _largest(values: Any) -> dict[str, Any] | None:
    """The estimate of the largest k, with its k."""
    by_k = {int(k): v for k, v in _mapping(values).items() if str(k).isdecimal() and isinstance(v, Mapping)}
    if not by_k:
        return None
    k = max(by_k)
    return {"k": k, **{key: by_k[k].get(key) for key in ESTIMATE}}


def rolling(folder: Path, notes: list[str]) -> dict[str, Any] | None:
    """Step -> how far its evaluation is and its scores; None where no checkpoints are evaluated as they appear."""
    path = folder / "eval" / ROLLING
    if not path.exists():
        return None
    entries = _mapping(read_json(path).get("checkpoints"))
    known = {str(s): e for s, e in entries.items() if str(s).isdecimal() and isinstance(e, Mapping)}
    if not known:
        notes.append(f"eval/{ROLLING} is damaged or holds no checkpoint yet")
    ordered = sorted(known.items(), key=lambda item: int(item[0]))
    return {step: _entry(entry) for step, entry in ordered}


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    scores = {str(k): float(v) for k, v in _mapping(entry.get("scores")).items() if finite(v)}
    return {"state": str(entry.get("state")), "why": str(entry.get("why") or ""), "scores": scores}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
