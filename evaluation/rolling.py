"""Every checkpoint of a run, evaluated as it appears: kept alive while the training prunes, queued, remembered.

`<run>/eval/rolling.json` says of each checkpoint how far it is, and holds the curve of scores over steps. The model of
one that is being evaluated stands in `<run>/eval/checkpoint-<step>/model`, whole or not at all.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.claims import sole
from evaluation.scripts import STOPPED
from evaluation.task import Task
from hpcgrpo.checkpoint_folder import MARKER, is_complete, step_of
from hpcgrpo.config import ConfigError
from hpcgrpo.journal import write_atomically
from hpcgrpo.launch import queue
from hpcgrpo.launch import submit as launched
from hpcgrpo.launch.follow import say

RECORD = "rolling.json"
MODEL = "model"
NO_LINKS = {
    errno.EXDEV,
    errno.EPERM,
    errno.EACCES,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.EMLINK,
    errno.ENOSYS,
}

Tell = Callable[[str], None]
Entries = dict[str, dict[str, Any]]  # step -> state and what belongs to it
# kept: to be queued. submitted: queued. done | incomplete: merged. passed: not wanted. skipped: could not be kept.
OPEN = ("kept", "submitted")


def folder_of(run_folder: Path, step: int) -> Path:
    """Where the results of a checkpoint go."""
    return run_folder / "eval" / f"checkpoint-{step}"


def watch(
    run_folder: Path,
    *,
    tasks_for: Callable[[Path, int], Sequence[Task]],
    submit: Callable[[Sequence[Task]], Sequence[str] | int],
    alive: Callable[[], bool],
    poll_seconds: float,
    every: int = 1,
    tell: Tell = say,
) -> int:
    """Evaluate every `every`-th complete checkpoint and the last one, until the training is over -> exit code.

    `tasks_for` takes the folder of a kept model and its step. `submit` queues tasks and returns the ids of their jobs,
    or evaluates them here and returns the exit code. `alive`: whether the training goes on. 0 when all are queued (or
    evaluated), 1 where a checkpoint was lost, was not evaluated or never came, 75 when told to stop. A second start
    repeats nothing. Raises FolderInUse where another one watches, and what `submit` raises but for a silent Slurm and
    full queues, which are asked again.
    """
    assert every >= 1
    stop = threading.Event()
    watched = _Watched(run_folder, tasks_for, submit, every, poll_seconds, tell)
    with sole(run_folder / "eval", say=tell), _signals(stop):
        told = ""
        while True:
            goes_on = _alive(alive)
            _keep_new(watched)
            if not goes_on:
                _want_last(watched)
            code, refused = _submitted(watched, stop)
            if code is not None:
                return code
            if refused and refused != told:
                tell(f"{refused}; asking again")
            told = refused
            if not goes_on and not refused:
                return _verdict(watched)
            if stop.wait(poll_seconds):
                return STOPPED


@dataclass(frozen=True)
class _Watched:
    run_folder: Path
    tasks_for: Callable[[Path, int], Sequence[Task]]
    submit: Callable[[Sequence[Task]], Sequence[str] | int]
    every: int
    poll_seconds: float
    tell: Tell


def training_lives(run_folder: Path) -> bool:
    """Whether a job of the run is queued or running, or a process of this machine trains it. Raises Unreachable."""
    return launched.find_live(run_folder) is not None or _locked(run_folder / ".lock")


def _alive(alive: Callable[[], bool]) -> bool:
    """A training of which nobody can tell counts as alive."""
    try:
        return alive()
    except queue.Unreachable:
        return True


def _verdict(watched: _Watched) -> int:
    folder = watched.run_folder
    entries = _read(folder)
    if not entries:
        watched.tell(
            f"{folder}: the training is over and left no complete checkpoint; hpcgrpo doctor {folder} says why"
        )
    lacking = {s: e for s, e in entries.items() if e["state"] in ("skipped", "incomplete")}
    for step, entry in lacking.items():
        watched.tell(f"checkpoint {step} {entry['state']}: {entry.get('why') or entry.get('missing')}")
    return 0 if entries and not lacking else 1


# ---- queueing


def _submitted(watched: _Watched, stop: threading.Event) -> tuple[int | None, str]:
    """All that is kept -> an exit code where it is time to stop, and why Slurm takes no more for now.

    Raises any other error: what is kept stays, for the next start.
    """
    try:
        return _submit_kept(watched, stop), ""
    except ConfigError as error:
        if isinstance(error, queue.Unreachable) or re.search(r"(?i)limit", str(error)):
            return None, str(error)
        raise


def _submit_kept(watched: _Watched, stop: threading.Event) -> int | None:
    """Queue or evaluate what is kept, the oldest first -> an exit code where it is time to stop."""
    while not stop.is_set():
        entries = _read(watched.run_folder)
        step = min((int(s) for s, e in entries.items() if e["state"] == "kept"), default=None)
        if step is None:
            return None
        folder = folder_of(watched.run_folder, step)
        if (
            folder / "jobs" / "slurm" / "submitted.json"
        ).exists():  # by an earlier start that could not note it
            _update(watched.run_folder, step, state="submitted")
            continue
        with _keeping_meanwhile(watched):
            answer = watched.submit(watched.tasks_for(folder / MODEL, step))
        if answer in (STOPPED, 128 + signal.SIGINT):
            return int(answer)
        _enter(watched, step, answer)
    return STOPPED


def _enter(watched: _Watched, step: int, answer: Sequence[str] | int) -> None:
    if not isinstance(answer, int):
        watched.tell(f"checkpoint {step}: evaluated by job {', '.join(answer)}")
        _update(watched.run_folder, step, state="submitted", jobs=list(answer))
    elif answer:
        _update(watched.run_folder, step, state="incomplete", why=f"exit code {answer}")
    else:
        _update(watched.run_folder, step, state="done")
        shutil.rmtree(folder_of(watched.run_folder, step) / MODEL, ignore_errors=True)


def _by_step(item: tuple[str, Any]) -> int:
    return int(item[0])


def note(folder: Path, scores: Mapping[str, float], missing: Mapping[str, str]) -> bool:
    """Enter what the evaluation in `folder` came to into its run's curve; for who merges it.

    The kept model goes where nothing is `missing` (benchmark -> why). False where `folder` is no checkpoint's that
    was kept, and then nothing is done.
    """
    run_folder, step = folder.absolute().parent.parent, step_of(folder)
    if folder.absolute() != folder_of(run_folder, step) or str(step) not in _read(run_folder):
        return False
    state = "incomplete" if missing else "done"
    _update(run_folder, step, state=state, scores=dict(scores), missing=dict(missing), why="")
    if not missing:
        shutil.rmtree(folder / MODEL, ignore_errors=True)
    return True


# ---- keeping


def _keep_new(watched: _Watched) -> None:
    """Enter checkpoints that are new; keep those that are wanted."""
    known = _read(watched.run_folder)
    for path in sorted((watched.run_folder / "checkpoints").glob("checkpoint-*"), key=step_of):
        step = step_of(path)
        if step < 0 or str(step) in known or not is_complete(path):
            continue
        wanted = (len(known) + 1) % watched.every == 0
        entry = _kept(watched, path) if wanted else {"state": "passed"}
        if entry is not None:
            known[str(step)] = entry
            _update(watched.run_folder, step, **entry)


def _kept(watched: _Watched, checkpoint: Path) -> dict[str, Any] | None:
    """The entry of a checkpoint that was to be kept; None for one that changes just now."""
    step = step_of(checkpoint)
    target = folder_of(watched.run_folder, step) / MODEL
    try:
        keep(checkpoint, target)
        return {"state": "kept"}
    except FileNotFoundError:
        if checkpoint.exists():
            return None
        why = "the training removed it before it could be kept; raise train.save_total_limit"
    except OSError as error:
        why = f"{target} cannot be written ({error.strerror or error})"
    watched.tell(f"checkpoint {step} is not evaluated: {why}")
    return {"state": "skipped", "why": why}


def keep(checkpoint: Path, target: Path) -> None:
    """The model's files of a checkpoint under another name, by hard links, copied where links are refused.

    `target` is whole or not there; one that is there is left. Raises OSError, FileNotFoundError where the checkpoint
    goes away meanwhile.
    """
    if target.exists():
        return
    draft = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        for name in json.loads((checkpoint / MARKER).read_text(encoding="utf-8")):
            if "state" not in Path(name).parts[:-1] and name != "trainer_state.json":
                (draft / name).parent.mkdir(parents=True, exist_ok=True)
                _link(checkpoint / name, draft / name)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _link(source: Path, place: Path) -> None:
    try:
        os.link(source, place)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copyfile(source, place)


def _want_last(watched: _Watched) -> None:
    """The final checkpoint is evaluated whatever `every` says; nobody removes it."""
    entries = _read(watched.run_folder)
    last = max(map(int, entries), default=None)
    if last is None or entries[str(last)]["state"] != "passed":
        return
    entry = _kept(watched, watched.run_folder / "checkpoints" / f"checkpoint-{last}")
    if entry is not None:
        _update(watched.run_folder, last, **entry)


@contextmanager
def _keeping_meanwhile(watched: _Watched) -> Iterator[None]:
    """An evaluation in this process may last longer than the training lets a checkpoint stand."""
    over = threading.Event()

    def keep_on() -> None:
        while not over.wait(watched.poll_seconds):
            _keep_new(watched)

    thread = threading.Thread(target=keep_on, name="keeping", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# ---- the record


def _read(run_folder: Path) -> Entries:
    """Raises ConfigError for a damaged file: to begin anew would evaluate everything again."""
    path = run_folder / "eval" / RECORD
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["checkpoints"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: damaged ({error!r}); delete it to evaluate every checkpoint anew"
        ) from None


def _update(run_folder: Path, step: int, **values: Any) -> None:
    """Change the entry of a checkpoint. Merges of several checkpoints and the one who watches may do so at once."""
    place = run_folder / "eval"
    place.mkdir(parents=True, exist_ok=True)
    with (place / f".{RECORD}.lock").open("a") as lock:
        with suppress(OSError):  # a file system without locks: the file itself is replaced whole
            fcntl.flock(lock, fcntl.LOCK_EX)
        entries = _read(run_folder)
        entry = entries.setdefault(str(step), {})
        over = entry.get("state") not in (None, *OPEN, "passed")
        if over and values.get("state") in OPEN:
            values.pop("state")  # its merge was faster
        entry.update(values)
        ordered = dict(sorted(entries.items(), key=_by_step))
        curve = {step: e["scores"] for step, e in ordered.items() if e.get("scores")}
        write_atomically(
            place / RECORD, json.dumps({"checkpoints": ordered, "curve": curve}, indent=1) + "\n"
        )


def submitted(run_folder: Path) -> list[Path]:
    """The folders of the checkpoints, the evaluation of which is queued and not yet merged."""
    entries = sorted(_read(run_folder).items(), key=_by_step)
    return [folder_of(run_folder, int(step)) for step, entry in entries if entry["state"] == "submitted"]


def curve(run_folder: Path) -> dict[int, dict[str, float]]:
    """Step -> benchmark -> score, of the checkpoints that are merged."""
    return {int(s): dict(e["scores"]) for s, e in _read(run_folder).items() if e.get("scores")}


def table(run_folder: Path) -> str:
    """The curve as text, a line a checkpoint; in percent, and where there is no score how far the checkpoint is."""
    entries = _read(run_folder)
    names = sorted({name for e in entries.values() for name in e.get("scores", {})})
    rows = [["step", *names, ""]]
    for step, entry in sorted(entries.items(), key=_by_step):
        scores = entry.get("scores", {})
        shown = [f"{100 * scores[name]:.1f}" if name in scores else "-" for name in names]
        state = (
            "" if entry["state"] == "done" else " ".join(filter(None, [entry["state"], entry.get("why", "")]))
        )
        rows.append([step, *shown, state])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join(
            [*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=True)), row[-1]]
        ).rstrip()
        for row in rows
    )


# ---- alone


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """Slurm's warning and its end ask to stop."""
    numbers = (signal.SIGTERM, signal.SIGUSR2)
    before = [signal.signal(number, lambda *_: stop.set()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _locked(path: Path) -> bool:
    """Whether the process that a lock names holds it, if it is one of this machine: it has the file open."""
    try:
        found = re.fullmatch(r"pid (\d+) on (.+)", path.read_text(encoding="utf-8").strip())
        if found is None or found[2] != socket.gethostname():
            return False
        return any(link.resolve() == path.resolve() for link in Path(f"/proc/{found[1]}/fd").iterdir())
    except OSError:
        return False
