"""The records of an evaluation: what is known already, what it was made with, and new ones graded as they arrive."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evaluation import files, judging, samples
from evaluation.prepare import Prepared
from evaluation.progress import Progress
from evaluation.samples import Sample
from hpcgrpo.config_file import ConfigError
from hpcgrpo.rewards.grading import Grader
from hpcgrpo.types import Completion, Request, Stopped

SETTINGS = "settings.json"
GRADED_AT_ONCE = 256
QUEUED = 4096  # completions that may wait to be graded before sampling waits


def records(folder: Path, prepared: Prepared) -> dict[tuple[str, int], Sample]:
    """What is known already, of whichever shard, by problem and number; of two the one that this grader graded."""
    wanted = {p.id for p in prepared.problems}
    found: dict[tuple[str, int], Sample] = {}
    for path in _files(folder, prepared):
        for s in samples.read(path):
            key = s.problem, s.sample
            if s.problem not in wanted or s.sample >= prepared.protocol.num_samples:
                continue
            if s.fixed not in ("", prepared.fixed):
                continue
            if key not in found or s.grader == prepared.grader or found[key].grader != prepared.grader:
                found[key] = s
    return found


def regrade(folder: Path, prepared: Prepared, shard: tuple[int, int], grader: Grader) -> int:
    """Grade a shard's records of another version of the grader again, into new records -> how many there were."""
    mine = {p.id: p for p in prepared.share(shard)}
    old = [
        s
        for s in records(folder, prepared).values()
        if s.problem in mine and s.grader != prepared.grader and s.outcome != "unanswered"
    ]
    for start in range(0, len(old), GRADED_AT_ONCE):
        batch = old[start : start + GRADED_AT_ONCE]
        verdicts = judging.judge(
            [mine[s.problem] for s in batch],
            [s.text for s in batch],
            grader,
            require_box_or_tag=prepared.require_box_or_tag,
        )
        again = [
            replace(s, outcome=v.outcome, answer=v.answer, grader=prepared.grader)
            for s, v in zip(batch, verdicts, strict=True)
        ]
        files.append(file_of(folder, prepared, shard), samples.to_lines(again))
    return len(old)


def missing(
    folder: Path, prepared: Prepared, shard: tuple[int, int], *, again: bool
) -> list[tuple[str, int]]:
    """(problem, number) of a shard's samples without a record, problem by problem; with `again` those too that the
    engine could not answer."""
    known = records(folder, prepared)
    if again:
        known = {key: s for key, s in known.items() if s.outcome != "unanswered"}
    numbers = range(prepared.protocol.num_samples)
    return [(p.id, n) for p in prepared.share(shard) for n in numbers if (p.id, n) not in known]


def file_of(folder: Path, prepared: Prepared, shard: tuple[int, int]) -> Path:
    """Where a shard's records go."""
    i, n = shard
    return folder / prepared.benchmark.name / (f"samples-{i}-of-{n}.jsonl" if n > 1 else "samples.jsonl")


def _files(folder: Path, prepared: Prepared) -> list[Path]:
    """The records' files of whichever shard."""
    return sorted((folder / prepared.benchmark.name).glob("samples*.jsonl"))


def read_result(path: Path) -> dict[str, Any] | None:
    """A benchmark's result from its file; None for a file that is missing or none (summary.json)."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    keys = ("model", "settings", "summary", "problems")
    whole = (
        isinstance(found, dict) and "benchmark" in found and all(isinstance(found.get(k), dict) for k in keys)
    )
    return found if whole else None


def keep_settings(folder: Path, prepared: Prepared) -> None:
    """Write the settings beside the records. Raises ConfigError where records of other settings lie there."""
    check_settings(folder, prepared)
    path = folder / prepared.benchmark.name / SETTINGS
    files.write(path, json.dumps(prepared.settings, indent=1) + "\n")


def check_settings(folder: Path, prepared: Prepared) -> None:
    """Raises ConfigError where records of other settings lie in the folder, or of such that nothing tells any more.

    The records themselves tell; of those that carry no hash, of an earlier version, the file beside them does.
    """
    path = folder / prepared.benchmark.name / SETTINGS
    for file in (path, folder / f"{prepared.benchmark.name}.json", *_files(folder, prepared)):
        if file.is_dir():
            raise ConfigError(f"{file}: a folder, where the evaluation keeps a file; move it away")
    hashes = {s.fixed for file in _files(folder, prepared) for s in samples.read(file)}
    before, others = _fixed(path), hashes - {"", prepared.fixed}
    changed = []
    if before is not None and (others or "" in hashes):
        changed = sorted(_differences(before, prepared.settings["fixed"]))
    if others and not changed:
        changed = [f"which, {SETTINGS} does not tell"]
    changed += _other_problems(folder, prepared)
    if changed or ("" in hashes and before is None):
        why = f"other settings ({', '.join(changed)}); set them back"
        unknown = f"unknown settings ({path} is {'damaged' if path.exists() else 'missing'}); put it back"
        raise ConfigError(
            f"{path.parent}: holds results of {why if changed else unknown}, name another folder (--output-dir), or"
            " move these aside (--fresh)"
        )


def _fixed(path: Path) -> Mapping[str, Any] | None:
    """What the settings in a file say that may not change; None where it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    fixed = found.get("fixed") if isinstance(found, dict) else None
    return fixed if isinstance(fixed, dict) else None


def _other_problems(folder: Path, prepared: Prepared) -> list[str]:
    """Answered before as something else under the same id."""
    known = {s.problem: s.asked for s in records(folder, prepared).values() if s.asked}
    others = sorted(name for name, asked in known.items() if asked != prepared.asked[name])
    many = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return [f"the question or the answer of {', '.join(others[:3])}{many}"] if others else []


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in sorted({*a, *b}):
        x, y = a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            yield from _differences(x, y, f"{prefix}{key}.")
        elif x != y:
            yield f"{prefix}{key}: {x} before, {y} now"


@dataclass
class Recorder:
    """Grades completions as they arrive, in a thread of its own, and appends their records to a file."""

    prepared: Prepared
    todo: Sequence[tuple[str, int]]
    asked: Sequence[Request]
    file: Path
    grader: Grader
    progress: Progress
    stopping: Callable[[], bool]
    waiting: queue.Queue[tuple[int, Completion] | None] = field(
        default_factory=lambda: queue.Queue(maxsize=QUEUED)
    )
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.by_id = {p.id: p for p in self.prepared.problems}
        self.thread = threading.Thread(target=self._run, name="grading", daemon=True)

    def __enter__(self) -> Recorder:
        self.thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """All that arrived is graded and kept, whatever ended the sampling."""
        self.waiting.put(None)
        self.thread.join()
        if self.error is not None:
            raise self.error from None

    def arrived(self, number: int, completion: Completion) -> None:
        """For a sampler to call. Raises what went wrong in grading, and Stopped where it is time to stop."""
        if self.error is not None:
            raise self.error
        if completion.finish_reason != "abort" or not self.stopping():
            self.waiting.put((number, completion))
        if self.stopping():
            raise Stopped

    def _run(self) -> None:
        try:
            while (batch := self._next()) is not None:
                graded = self._grade(batch)
                files.append(self.file, samples.to_lines(graded))
                self.progress.add(len(graded), sum(s.right for s in graded))
        except BaseException as error:
            self.error = error
            while self.waiting.get() is not None:  # so that nobody waits for room
                pass

    def _next(self) -> list[tuple[int, Completion]] | None:
        """What waits now, at least one; None at the end."""
        first = self.waiting.get()
        if first is None:
            return None
        batch = [first]
        while len(batch) < GRADED_AT_ONCE:
            try:
                item = self.waiting.get_nowait()
            except queue.Empty:
                break
            if item is None:
                self.waiting.put(None)
                break
            batch.append(item)
        return batch

    def _grade(self, batch: Sequence[tuple[int, Completion]]) -> list[Sample]:
        verdicts = judging.judge(
            [self.by_id[self.todo[number][0]] for number, _ in batch],
            [completion.text for _, completion in batch],
            self.grader,
            require_box_or_tag=self.prepared.require_box_or_tag,
        )
        return [
            Sample(
                *self.todo[number],
                seed=self.asked[number].seed,
                outcome="unanswered" if completion.finish_reason == "abort" else verdict.outcome,
                answer=verdict.answer,
                finish_reason=completion.finish_reason,
                num_tokens=len(completion.token_ids),
                text=completion.text,
                asked=self.prepared.asked[self.todo[number][0]],
                grader=self.prepared.grader,
                fixed=self.prepared.fixed,
            )
            for (number, completion), verdict in zip(batch, verdicts, strict=True)
        ]
