"""Lengths of prompts and completions in tokens: from a mean, from a file, from a run's own rollouts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from hpcgrpo.config_file import ConfigError

SIGMA = 0.6  # of the logarithm of a completion's length, where only its mean is known
SAMPLES = 512  # lengths that stand for a distribution


@dataclass(frozen=True)
class Lengths:
    """Tokens of one kind of sequence: values that stand for the distribution in equal parts, ascending."""

    values: tuple[int, ...]
    source: str  # how they are known

    @cached_property
    def mean(self) -> float:
        return fmean(self.values)

    @cached_property
    def mean_square(self) -> float:
        return fmean(v * v for v in self.values)

    @cached_property
    def alike(self) -> float:
        """How likely two sequences are of one length."""
        return sum((n / len(self.values)) ** 2 for n in Counter(self.values).values())

    @property
    def longest(self) -> int:
        return self.values[-1]

    def sample(self, count: int) -> list[int]:
        """`count` lengths spread evenly over the distribution, ascending."""
        return [
            self.values[min(len(self.values) - 1, int((i + 0.5) / count * len(self.values)))]
            for i in range(count)
        ]

    def plus(self, other: Lengths, extra: int, limit: int) -> Lengths:
        """Lengths of a sequence made of this one, the other and `extra` tokens, cut at `limit`; independent, so the
        longer of one do not meet the longer of the other."""
        base = round(self.mean) + extra
        return Lengths(tuple(min(limit, base + v) for v in other.values), f"{self.source} + {other.source}")


@dataclass(frozen=True)
class Known:
    """Lengths and shares as a run or a file gives them; None: not known."""

    prompt: Lengths | None = None
    completion: Lengths | None = None
    draft: Lengths | None = None
    second_prompt: Lengths | None = None
    kept_share: float | None = None  # of the sampled completions, drafts aside, those that were trained on


def lognormal(mean: float, longest: int, *, sigma: float = SIGMA, source: str = "given") -> Lengths:
    """A log-normal cut at `longest` (what is longer ends there), its mean after the cut being `mean`.

    Raises ValueError for a mean that is not above 0 and at most `longest`.
    """
    if not 0 < mean <= longest:
        raise ValueError(
            f"a mean length of {mean:g} tokens with {longest} as the longest: the mean must be above 0 and at most the"
            " longest; give another, or raise generation.max_completion_length"
        )
    scores = [NormalDist().inv_cdf((i + 0.5) / SAMPLES) for i in range(SAMPLES)]

    def cut(mu: float) -> list[float]:
        return [min(float(longest), math.exp(min(mu + sigma * z, 50.0))) for z in scores]

    low, high = math.log(mean) - 10 * sigma, math.log(longest) + 10 * sigma
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fmean(cut(middle)) < mean else (low, middle)
    return Lengths(tuple(max(1, round(v)) for v in cut(high)), source)


def read_lengths(path: str | Path) -> Known:
    """Lengths from a run's folder, a JSONL file of rollouts, or a YAML file of `completion`, `prompt`, `draft`, each
    {mean, longest, sigma} in tokens.

    Raises ConfigError where there is no such file, or nothing in it that tells a length.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return _from_run(path)
    if not path.is_file():
        raise ConfigError(
            f"--lengths {path}: no such run or file; give a run's folder (logs/NAME), a JSONL file of rollouts or a"
            " YAML file such as 'completion: {mean: 900, longest: 4096}'"
        )
    if path.suffix in (".yaml", ".yml"):
        return _from_yaml(path)
    return _from_rows(list(_rows(path)), str(path))


def _from_run(folder: Path) -> Known:
    files = sorted((folder / "rollouts").glob("step-*.jsonl"))
    if not files:
        raise ConfigError(
            f"--lengths {folder}: the run's folder holds no rollouts/step-*.jsonl (log_completions was off, or no step"
            " was finished); take another run, or a YAML file of means"
        )
    return _from_rows([row for file in files[-20:] for row in _rows(file)], str(folder))


def _from_rows(rows: Sequence[Mapping[str, Any]], source: str) -> Known:
    """Where there are drafts, theirs is the question's prompt and the samples' is the second one."""

    def lengths(stage: str, of: Callable[[Mapping[str, Any]], int]) -> Lengths | None:
        found = sorted(of(row) for row in rows if str(row.get("stage", "sample")) == stage)
        return Lengths(_thinned(found), source) if found and found[-1] else None

    completion, draft = lengths("sample", _length), lengths("draft", _length)
    if completion is None:
        raise ConfigError(
            f"{source}: no row of it has token_ids (or a number `length`), so it tells no lengths; give a run's"
            " rollouts/step-*.jsonl"
        )
    asked = lengths("sample", _prompt_length)
    kept = [bool(row["kept"]) for row in rows if row.get("stage", "sample") == "sample" and "kept" in row]
    share = fmean(kept) if kept else None
    if draft is None:
        return Known(asked, completion, None, None, share)
    return Known(lengths("draft", _prompt_length), completion, draft, asked, share)


def _prompt_length(row: Mapping[str, Any]) -> int:
    return int(row.get("prompt_length") or 0)


def _length(row: Mapping[str, Any]) -> int:
    ids = row.get("token_ids")
    return len(ids) if isinstance(ids, list) else int(row.get("length") or 0)


def _thinned(values: list[int]) -> tuple[int, ...]:
    """At most SAMPLES of the sorted values, evenly spread, the longest among them."""
    if len(values) <= SAMPLES:
        return tuple(values)
    picked = [values[int((i + 0.5) / SAMPLES * len(values))] for i in range(SAMPLES - 1)]
    return (*picked, values[-1])


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            raise ConfigError(f"{path}, line {number}: is no JSON object; give a run's rollouts") from None
        if isinstance(row, dict):
            yield row


def _from_yaml(path: Path) -> Known:
    from yaml import YAMLError, safe_load

    try:
        values = safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or set(values) - {"completion", "prompt", "draft"}:
            raise ValueError("its keys must be completion, prompt and draft")
        found = {
            key: lognormal(
                float(v["mean"]), int(v["longest"]), sigma=float(v.get("sigma", SIGMA)), source=str(path)
            )
            for key, v in values.items()
        }
    except (YAMLError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path}: {' '.join(str(error).split())}; write lines such as 'completion: {{mean: 900, longest: 4096}}'"
        ) from None
    return Known(found.get("prompt"), found.get("completion"), found.get("draft"))
