"""Start a run's ranks on this machine: everything checked first, then torchrun's agent in this process."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcgrpo import checks
from hpcgrpo.attempt import Attempt
from hpcgrpo.checkpoint_folder import complete
from hpcgrpo.config import ConfigError, load, to_yaml
from hpcgrpo.journal import LAUNCHER, claim, read_metrics, write_atomically
from hpcgrpo.launch import ranks
from hpcgrpo.launch.ranks import CONFIG_FILE, USER_ERROR
from hpcgrpo.sections import RunConfig, TrainConfig

# What may differ between a run and its resumption: nothing here changes what is computed, but for the length.
MAY_CHANGE = {
    "cluster",
    "device",
    "eval",
    "grader_processes",
    "log_completions",
    "peer.vllm_engines",
    "peer.vllm_tensor_parallel_size",
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
    "generation.parity_check",
    "generation.parity_threshold",
    "generation.vllm_enforce_eager",
    "generation.vllm_extra_args",
    "generation.vllm_gpu_memory_utilization",
    "generation.vllm_kv_cache_memory_bytes",
    "generation.vllm_max_concurrency",
    "generation.vllm_request_timeout",
    "generation.vllm_server_timeout",
    "generation.vllm_tensor_parallel_size",
    "generation.weight_sync",
    "generation.weight_sync_bucket_bytes",
    "generation.weight_sync_timeout",
}


def preflight(run: RunConfig, *, fresh: bool) -> bool:
    """Every check that needs no torch, then `prepare`. Raises ValueError for what the user can mend."""
    checks.inputs(run)
    return prepare(run, fresh=fresh)


def prepare(run: RunConfig, *, fresh: bool) -> bool:
    """Claim the run's folder for a moment and write config.yaml.

    False where the run is finished already, and then nothing is touched. Raises ValueError for what the user can
    mend: nothing of an earlier run is lost by it.
    """
    try:
        return _prepare(run, fresh)
    except OSError as error:
        raise ConfigError(
            f"output_dir {run.output_dir}: the run's folder {run.folder} cannot be written ({error}); set output_dir"
            " to a folder of yours, on a disk with space"
        ) from None


def _prepare(run: RunConfig, fresh: bool) -> bool:
    folder, existed = run.folder, run.folder.exists()
    claim(folder, LAUNCHER).close()  # refused where a launcher is at work
    lock = claim(folder)
    try:
        if existed and fresh:
            folder = _set_aside(folder)
        elif existed and read_metrics(folder):  # it got as far as a first step
            _same_run(run)
            step, finished = newest_checkpoint(folder, run.train)
            if finished or (run.train.max_steps and step >= run.train.max_steps):
                print(f"{run.name} is finished: {step} steps, in {folder}", file=sys.stderr)
                return False
    finally:
        lock.close()
    write_atomically(run.folder / CONFIG_FILE, to_yaml(run))
    return True


def newest_checkpoint(folder: Path, train: TrainConfig) -> tuple[int, bool]:
    """The step of the newest complete checkpoint, 0 without one, and whether a run of this length ends with it."""
    newest = next(iter(complete(folder / "checkpoints")), None)
    if newest is None:
        return 0, False
    state = json.loads((newest / "trainer_state.json").read_text())
    same_length = state.get("length") == [train.max_steps, train.num_train_epochs]
    return int(state["progress"]["step"]), bool(state["finished"]) and same_length


def _set_aside(folder: Path) -> Path:
    kept = folder.with_name(f"{folder.name}.until-{time.strftime('%Y%m%d-%H%M%S')}")
    folder.rename(kept)
    print(f"moved the earlier run to {kept}", file=sys.stderr)
    folder.mkdir(mode=0o700)
    return folder


def _same_run(run: RunConfig) -> None:
    """An existing folder is resumed only by the configuration that made it, but for what changes no result."""
    path = run.folder / CONFIG_FILE
    if not path.exists():
        return
    before, now = _flat(load(path)), _flat(run)
    changed = [k for k in sorted({*before, *now}) if before.get(k) != now.get(k) and not _may_change(k)]
    if changed:
        shown = "; ".join(f"{k}: {before.get(k)!r} -> {now.get(k)!r}" for k in changed[:5])
        raise ConfigError(
            f"{run.folder} holds a run with another configuration ({shown}). Give this one a name of its own"
            f" (name=...), or move the old folder aside, as --fresh of train and submit does"
        )
    longer = [k for k in ("train.max_steps", "train.num_train_epochs") if before.get(k) != now.get(k)]
    for k in longer:
        print(
            f"note: {k} {before.get(k)} -> {now.get(k)}: from here on the learning rate follows the new length",
            file=sys.stderr,
        )


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


def launch(run: RunConfig, *, resumes: bool = True) -> int:
    """Run all ranks on this machine to their end -> exit code: the first failing rank's 2, or 1.

    A SIGTERM makes them save and end, a second one ends them at once: 143. `resumes`: what it tells of the same command
    is true, as the run saves. Raises FolderInUse where another launcher is at work in the run's folder.
    """
    with claim(run.folder, LAUNCHER):
        return _launch(run, resumes)


def _launch(run: RunConfig, resumes: bool) -> int:
    before = signal.getsignal(signal.SIGTERM)
    attempt = stop_on_sigterm(run.folder / "torchrun")
    settings = {
        "min_nodes": 1,
        "max_nodes": 1,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "signals_to_handle": "SIGINT,SIGHUP,SIGQUIT",
    }
    try:
        code = ranks.start(run, run.folder, settings)
    finally:
        signal.signal(signal.SIGTERM, before)
    if code == 0 and attempt.stop_request() is not None and not newest_checkpoint(run.folder, run.train)[1]:
        goes_on = "; the same command goes on from here" if resumes else ""
        print(f"hpcgrpo: ended by SIGTERM{goes_on}", file=sys.stderr)
        return 128 + signal.SIGTERM
    if code not in (0, USER_ERROR):
        if resumes:
            goes_on = "the same command goes on from the last checkpoint"
            print(f"hpcgrpo: once its cause is gone, {goes_on}", file=sys.stderr)
        return code if code in (128 + signal.SIGTERM, 128 + signal.SIGINT) else 1
    return code


def stop_on_sigterm(folder: Path) -> Attempt:
    """Have the first SIGTERM ask the ranks to save and end; a second one, like the other signals, is the agent's."""
    folder.mkdir(parents=True, exist_ok=True)
    attempt = Attempt(folder, 0)
    attempt.forget_stop()
    os.environ |= {"HPCGRPO_ATTEMPT": str(folder), "HPCGRPO_NODE": "0"}

    def stop(number: int, frame: Any) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        if attempt.stop_request() is not None:
            raise SignalException("ended by a second SIGTERM", signal.SIGTERM)
        attempt.request_stop("SIGTERM", urgent=True)

    signal.signal(signal.SIGTERM, stop)
    return attempt


def profile(run: RunConfig) -> dict[str, Any]:
    """A finished run's profile.json."""
    return dict(json.loads((run.folder / "profile.json").read_text()))
