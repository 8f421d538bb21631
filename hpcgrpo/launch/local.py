"""Start a run's ranks on this machine: everything checked first, then torchrun's agent in this process."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcgrpo import checks
from hpcgrpo.config import ConfigError, load, to_yaml
from hpcgrpo.journal import claim, read_metrics, write_atomically
from hpcgrpo.sections import RunConfig

CONFIG_FILE = "config.yaml"
USER_ERROR = 2  # a rank's exit code for what the user can mend; it has said so itself
PR_SET_PDEATHSIG = 1

# What may differ between a run and its resumption: nothing here changes what is computed, but for the length.
MAY_CHANGE = {
    "cluster",
    "device",
    "eval",
    "grader_processes",
    "log_completions",
    "output_dir",
    "report_to",
    "train.async_save",
    "train.logprob_chunk_bytes",
    "train.max_steps",
    "train.max_tokens_per_device",
    "train.num_train_epochs",
    "train.save_steps",
    "train.save_total_limit",
    "generation.max_batch_tokens",
}


def preflight(run: RunConfig, *, fresh: bool) -> bool:
    """Every check that needs no torch; then the folder is claimed for a moment and config.yaml written.

    False where the run is finished already, and then nothing is touched. Raises ValueError for what the user can
    mend: nothing of an earlier run is lost by it.
    """
    checks.inputs(run)
    try:
        return _prepare(run, fresh)
    except OSError as error:
        raise ConfigError(
            f"output_dir {run.output_dir}: the run's folder {run.folder} cannot be written ({error}); set output_dir"
            " to a folder of yours, on a disk with space"
        ) from None


def _prepare(run: RunConfig, fresh: bool) -> bool:
    folder, existed = run.folder, run.folder.exists()
    lock = claim(folder)
    try:
        if existed and fresh:
            folder = _set_aside(folder)
        elif existed and read_metrics(folder):  # it got as far as a first step
            same_length = _same_run(run)
            step, finished = newest_checkpoint(folder)
            if (finished and same_length) or (run.train.max_steps and step >= run.train.max_steps):
                print(f"{run.name} is finished: {step} steps, in {folder}", file=sys.stderr)
                return False
    finally:
        lock.close()
    write_atomically(run.folder / CONFIG_FILE, to_yaml(run))
    return True


def newest_checkpoint(folder: Path) -> tuple[int, bool]:
    """The step of the newest complete checkpoint, 0 without one, and whether it is the run's last."""
    complete = [p.parent for p in (folder / "checkpoints").glob("checkpoint-*/COMPLETE")]
    newest = max(complete, key=lambda p: int(p.name.rpartition("-")[2]), default=None)
    if newest is None:
        return 0, False
    state = json.loads((newest / "trainer_state.json").read_text())
    return int(state["progress"]["step"]), bool(state["finished"])


def _set_aside(folder: Path) -> Path:
    kept = folder.with_name(f"{folder.name}.until-{time.strftime('%Y%m%d-%H%M%S')}")
    folder.rename(kept)
    print(f"moved the earlier run to {kept}", file=sys.stderr)
    folder.mkdir(mode=0o700)
    return folder


def _same_run(run: RunConfig) -> bool:
    """An existing folder is resumed only by the configuration that made it -> whether its length is the same."""
    path = run.folder / CONFIG_FILE
    if not path.exists():
        return True
    before, now = _flat(load(path)), _flat(run)
    changed = [k for k in sorted({*before, *now}) if before.get(k) != now.get(k) and not _may_change(k)]
    if changed:
        shown = "; ".join(f"{k}: {before.get(k)!r} -> {now.get(k)!r}" for k in changed[:5])
        raise ConfigError(
            f"{run.folder} holds a run with another configuration ({shown}). Give this run a name of its own"
            f" (name=...), or start anew with --fresh, which moves the old folder aside"
        )
    longer = [k for k in ("train.max_steps", "train.num_train_epochs") if before.get(k) != now.get(k)]
    for k in longer:
        print(
            f"note: {k} {before.get(k)} -> {now.get(k)}: from here on the learning rate follows the new length",
            file=sys.stderr,
        )
    return not longer


def _may_change(key: str) -> bool:
    return any(key == allowed or key.startswith(allowed + ".") for allowed in MAY_CHANGE)


def _flat(run: RunConfig) -> dict[str, Any]:
    def walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                yield from walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            yield prefix, value

    return dict(walk("", run.model_dump(mode="json")))


def launch(run: RunConfig) -> int:
    """Run all ranks to their end under torchrun's agent -> exit code: the first failing rank's 2, or 1."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks say what went wrong
    ranks = run.cluster.ranks
    threads = run.cluster.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        logs_specs=DefaultLogsSpecs(log_dir=str(run.folder / "torchrun")),
    )
    path = str(run.folder / CONFIG_FILE)
    try:
        elastic_launch(settings, sys.executable)("-m", "hpcgrpo.cli", "rank", path)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != USER_ERROR:
            how = f"exit code {failure.exitcode}" if failure.exitcode >= 0 else f"signal {-failure.exitcode}"
            print(
                f"hpcgrpo: rank {rank} ended with {how}; once its cause is gone, the same command goes on from the"
                " last checkpoint",
                file=sys.stderr,
            )
        return USER_ERROR if failure.exitcode == USER_ERROR else 1
    except SignalException as error:
        print(f"hpcgrpo: ended by signal {int(error.sigval)}; run again to resume", file=sys.stderr)
        return 128 + int(error.sigval)
    return 0


def die_with_parent() -> None:
    """On Linux: be killed when the process that started this one ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def profile(run: RunConfig) -> dict[str, Any]:
    """A finished run's profile.json."""
    return dict(json.loads((run.folder / "profile.json").read_text()))
