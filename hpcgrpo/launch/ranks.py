"""torchrun's agent: starts the learner ranks of one node and ends when the first of them does."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcgrpo.attempt import Attempt
from hpcgrpo.config import load
from hpcgrpo.sections import RunConfig

CONFIG_FILE = "config.yaml"
USER_ERROR = 2  # a rank's exit code for what the user can mend; it has said so itself
PR_SET_PDEATHSIG = 1


def main(folder: str) -> int:
    """The agent of one learner node of a job, as launch.node starts it -> the first failing rank's exit code."""
    die_with_parent()
    run = load(Path(folder) / CONFIG_FILE)
    held = os.environ.get("HPCGRPO_MASTER_FD")

    def release() -> None:
        if held is not None:
            with suppress(OSError):
                os.close(int(held))

    settings: dict[str, Any] = {
        "min_nodes": run.cluster.learn_nodes,
        "max_nodes": run.cluster.learn_nodes,
        "run_id": Path(os.environ["HPCGRPO_ATTEMPT"]).name,
        "rdzv_backend": "static",
        "rdzv_endpoint": os.environ["HPCGRPO_MASTER"],
        "rdzv_configs": {
            "rank": int(os.environ["HPCGRPO_NODE"]) - run.cluster.vllm_nodes,
            "timeout": int(run.cluster.rendezvous_timeout),
        },
        "local_addr": os.environ["HPCGRPO_ADDRESS"],
    }
    return start(run, Path(folder), settings, before=release)


def start(run: RunConfig, folder: Path, settings: dict[str, Any], before: Any = None) -> int:
    """Run this node's ranks to their end under torchrun's agent -> 0, or the first failing rank's exit code.

    `settings` are LaunchConfig's; `before` runs when everything is imported and the port is about to be bound.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks say what went wrong
    ranks = run.cluster.ranks_per_node
    threads = run.cluster.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    launch = LaunchConfig(
        nproc_per_node=ranks,
        max_restarts=0,
        monitor_interval=0.2,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "torchrun")),
        **settings,
    )
    if before is not None:
        before()
    attempt = Attempt.of_environment()
    if attempt is not None:
        attempt.forget_return()
    try:
        elastic_launch(launch, sys.executable)("-m", "hpcgrpo.cli", "rank", str(folder / CONFIG_FILE))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != USER_ERROR:
            how = f"exit code {failure.exitcode}" if failure.exitcode >= 0 else f"signal {-failure.exitcode}"
            _tell(attempt, rank, how)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    if attempt is not None and not attempt.returned():
        _tell(
            attempt,
            0,
            "exit code 0 before its work was done; does a reward or what it imports call os._exit?",
        )
        return 1
    return 0


def _tell(attempt: Attempt | None, rank: int, how: str) -> None:
    print(f"hpcgrpo: rank {rank} ended with {how}", file=sys.stderr)
    if attempt is not None:
        attempt.note("failure", {"rank": rank, "how": how})


def die_with_parent() -> None:
    """On Linux: be killed when the process that started this one ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
