"""`hpcgrpo doctor` names the process that failed first, not the ones that noticed, and the way out."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from runs import hpcgrpo

from hpcgrpo import doctor
from hpcgrpo.causes import CAUSES
from hpcgrpo.config import ConfigError
from hpcgrpo.evidence import bare, of_log, time_in

BEGAN = 1_760_000_000.0  # epoch seconds of the first start
CLOSED = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:23718."
    " This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting"
)


class Run:
    """A run's folder as its processes leave it, at times of our choosing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        (self.folder / "slurm").mkdir(parents=True)
        (self.folder / "config.yaml").write_text("name: run\ntrain:\n  max_steps: 10\n")

    def write(self, name: str, text: str | bytes, *, at: float) -> Path:
        """A file of the run, last written `at` seconds after the first start began."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        os.utime(path, (BEGAN + at, BEGAN + at))
        return path

    def error(self, start: str, rank: int, kind: str, message: str, *, at: float) -> None:
        said = {"time": BEGAN + at, "rank": rank, "type": kind, "message": message}
        said["traceback"] = (
            f'Traceback (most recent call last):\n  File "x.py", line 1, in f\n{kind}: {message}\n'
        )
        self.write(f"slurm/{start}/rank-{rank}.error.json", json.dumps(said), at=at)

    def ended(self, start: str, code: int, reason: str, *, began: float, at: float, **more: Any) -> None:
        said = {"job": start.split(".")[0], "attempt": start, "code": code, "reason": reason} | more
        said |= {"began": BEGAN + began, "ended": BEGAN + at}
        said = {"requeued": False, "first_step": 0, "last_step": 0} | said
        self.write(f"slurm/{start}/ended.json", json.dumps(said), at=at)

    def finish(self, step: int) -> None:
        self.write("metrics.jsonl", "".join(f'{{"step": {i}, "reward": 1}}\n' for i in range(step + 1)), at=9)
        self.write(f"checkpoints/checkpoint-{step}/COMPLETE", "{}", at=9)
        state = {"progress": {"step": step}, "finished": True}
        self.write(f"checkpoints/checkpoint-{step}/trainer_state.json", json.dumps(state), at=9)

    def failure(self) -> dict[str, Any]:
        """What the doctor says of it; the run must have failed."""
        report = doctor.diagnose(self.folder)
        assert report["state"] in doctor.UNHEALTHY
        json.dumps(report)
        return dict(report["failure"])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def clock(at: float) -> str:
    """HH:MM:SS as this machine's logs have it."""
    return time.strftime("%H:%M:%S", time.localtime(BEGAN + at))


# ---- who failed first


def test_the_rank_that_ran_out_of_memory_not_those_that_lost_it(run: Run) -> None:
    """Rank 3 fails; ranks 0 and 1 notice, and by a clock that is behind they even do so before."""
    run.error("7.0", 0, "RuntimeError", CLOSED, at=60.0)
    run.error("7.0", 1, "RuntimeError", CLOSED, at=59.0)
    run.error(
        "7.0",
        3,
        "OutOfMemoryError",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has ...",
        at=59.5,
    )
    run.write(
        "slurm/7.0/node-2.log",
        f"hpcgrpo: rank 3 ended with exit code 1\n{clock(61)} [node2] ended with code 1: x\n",
        at=61,
    )
    run.ended("7.0", 1, f"node1: rank 0: RuntimeError: {CLOSED}", began=0, at=62)
    found = run.failure()
    assert (found["process"], found["name"]) == ("rank 3", "GPU memory")
    assert found["time"] == BEGAN + 59.5
    assert "CUDA out of memory" in found["error"] and "max_tokens_per_device" in found["way_out"]
    assert found["followed_by"] == ["node 2", "rank 0", "rank 1"]


def test_a_killed_rank_leaves_no_word_of_its_own(run: Run) -> None:
    """As a kill -9 of a rank really looked: its agent says so in the node's log, between two lines with a time."""
    run.error("7.0", 0, "RuntimeError", CLOSED, at=100)
    run.write(
        "slurm/7.0/node-1.log",
        f"{clock(1)} [node1] starting 1 learner ranks; their store is at 10.0.0.1:21195\n"
        "[W1129 21:02:57.991052297 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved.\n"
        "hpcgrpo: rank 1 ended with signal 9\n"
        f"{clock(101)} [node1] ended with code 137: rank 0: RuntimeError: {CLOSED}\n"
        f"{clock(102)} [node1] SIGTERM: saving and ending now\n",
        at=102,
    )
    run.write(
        "slurm/job-7.log",
        "srun: error: node0: task 0: Killed\nsrun: Force Terminated StepId=7.0\n",
        at=103,
    )
    run.ended("7.0", 137, f"node1: rank 0: RuntimeError: {CLOSED}", began=0, at=102)
    found = run.failure()
    assert (found["process"], found["name"], found["line"]) == ("rank 1", "killed", 3)


def test_an_engine_that_does_not_come_up(run: Run) -> None:
    """The engine's own error in its log, not the node's that gave it up after five restarts."""
    day = time.strftime("%m-%d", time.localtime(BEGAN))
    mark = f"(EngineCore_DP0 pid=812) ERROR {day} {clock(40)} [core.py:708]"
    run.write(
        "slurm/7.0/engine-1.log",
        f"(APIServer pid=1) INFO {day} {clock(30)} [gpu_worker.py:1] Available KV cache memory: 0.31 GiB\n"
        f"{mark} EngineCore failed to start.\n{mark} Traceback (most recent call last):\n"
        f'{mark}   File "core.py", line 699, in run_engine_core\n'
        f"{mark} ValueError: To serve at least one request with the models's max seq len (9280), (0.51 GiB KV cache is"
        " needed, which is larger than the available KV cache memory (0.31 GiB).\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n",
        at=42,
    )
    run.write(
        "slurm/7.0/node-0.log",
        f"{clock(300)} [node0] ended with code 1: engine 1 (http://10.0.0.1:2) ended with code 1, the 6th fall\n",
        at=300,
    )
    reason = (
        "node0: engine 1 (http://10.0.0.1:2) ended with code 1, the 6th fall within ten minutes; its log is x"
    )
    run.ended("7.0", 1, reason, began=0, at=301)
    found = run.failure()
    assert (found["process"], found["name"]) == ("engine 1", "unfit key-value cache")
    assert found["file"].endswith("engine-1.log") and found["time"] == BEGAN + 40
    assert "vllm_gpu_memory_utilization" in found["way_out"]


def test_without_its_log_an_engine_is_known_by_the_reason(run: Run) -> None:
    reason = (
        "node0: engine 0 (http://10.0.0.1:2) was not up within 900 s (generation.vllm_server_timeout); its log"
        " is x\n  Consider increasing with ulimit -n: OSError: [Errno 24] Too many open files"
    )
    run.ended("7.0", 1, reason, began=0, at=900)
    found = run.failure()
    assert (found["process"], found["name"]) == ("engine 0", "engine")
    assert "vllm_server_timeout" in found["way_out"]


def test_the_root_of_a_chain_of_exceptions(run: Run) -> None:
    trace = (
        "Traceback (most recent call last):\nOSError: [Errno 28] No space left on device\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\nRuntimeError: writing failed\n"
    )
    said = {"time": BEGAN, "rank": 0, "type": "RuntimeError", "message": "writing failed", "traceback": trace}
    run.write("slurm/7.0/rank-0.error.json", json.dumps(said), at=1)
    assert run.failure()["name"] == "disk full"


def test_an_error_of_no_known_cause_is_shown_as_it_is(run: Run) -> None:
    run.error("7.0", 2, "ZeroDivisionError", "division by zero", at=5)
    run.error("7.0", 0, "RuntimeError", CLOSED, at=4)
    found = run.failure()
    assert (found["process"], found["name"]) == ("rank 2", None)
    assert found["error"] == "ZeroDivisionError: division by zero"


def test_what_only_followed_is_named_when_there_is_nothing_else(run: Run) -> None:
    run.error("7.0", 0, "RuntimeError", CLOSED, at=4)
    found = run.failure()
    assert (found["process"], found["name"]) == ("rank 0", "another process failed")


def test_nothing_moved(run: Run) -> None:
    """An idle job's own end comes before what failed because of it, but after what made it idle."""
    run.write(
        "slurm/7.0/node-0.log",
        f"{clock(10)} [node0] nothing has moved on any node for 30.0 min; stacks go to the ranks' logs\n",
        at=13,
    )
    run.ended("7.0", 1, "idle for 30.1 min (cluster.idle_timeout_min)", began=0, at=14)
    run.error("7.0", 1, "RuntimeError", CLOSED, at=9)
    assert run.failure()["name"] == "idle"
    run.error("7.0", 0, "ParityError", "the generator's weights differ", at=9.5)
    assert run.failure()["name"] == "parity"


# ---- starts


def test_requeued_starts_share_one_log_and_the_run_is_healthy_in_the_end(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node fails in 7.0 (no ended.json), 7.1 saves at its time limit, 7.2 finishes: 20 s and 10 s were waited."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(BEGAN + 100))
    run.write("slurm/7.0/server.json", "{}", at=0)
    run.write("slurm/7.0/rank-0.log", "step 1\n", at=98)
    run.ended("7.1", 75, "saved: time limit", began=118, at=200, requeued=True, first_step=2, last_step=5)
    run.ended("7.2", 0, "finished", began=210, at=300, first_step=5, last_step=10)
    run.write(
        "slurm/job-7.log",
        f"{clock(0)} [node0] starting 2 learner ranks\nsrun: error: Node failure on node2\n"
        f"slurmstepd: error: *** JOB 7 ON node0 CANCELLED AT {stamp} DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***\n"
        f"{clock(118)} [node0] starting 2 learner ranks\n{clock(195)} [node0] saving at the end of the step\n"
        f"slurmstepd: error: *** JOB 7 ON node0 CANCELLED AT {stamp} DUE TO JOB REQUEUE ***\n"
        f"{clock(300)} [node0] finished\n",
        at=300,
    )
    run.finish(10)
    report = doctor.diagnose(run.folder)
    assert [s["state"] for s in report["starts"]] == ["failed", "saved", "finished"]
    assert report["starts"][0]["failure"]["name"] == "node failure"
    assert (report["state"], report["step"], report["seconds_between_starts"]) == ("finished", 10, 30.0)
    assert doctor.run(run.folder, as_json=False) == 0
    shown = capsys.readouterr().out
    assert "finished; step 10, 3 starts, 30 s between them" in shown
    assert "7.1  saved: saved: time limit (82 s, steps 2 to 5)" in shown


def test_a_start_without_a_word(run: Run) -> None:
    run.write("slurm/7.0/server.json", "{}", at=0)
    run.write("slurm/7.0/rank-0.log", "step 1\n", at=50)
    found = run.failure()
    assert found["process"] is None and "its first node was lost" in found["cause"]


def test_a_cancelled_job(run: Run) -> None:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(BEGAN + 50))
    run.write("slurm/7.0/node-1.log", f"{clock(50)} [node1] SIGTERM: saving and ending now\n", at=51)
    run.write(
        "slurm/job-7.log",
        f"slurmstepd: error: *** STEP 7.0 ON node0 CANCELLED AT {stamp} ***\nsrun: error: node1: task 1: Terminated\n",
        at=52,
    )
    run.ended(
        "7.0",
        75,
        "saved: SIGTERM; cancelled; submit again to resume",
        began=0,
        at=51,
        first_step=0,
        last_step=3,
    )
    report = doctor.diagnose(run.folder)
    assert report["state"] == "stopped"
    assert report["failure"]["cause"].startswith("somebody cancelled")


def test_a_job_that_died_before_the_run_began(run: Run) -> None:
    run.write("slurm/job-9.log", "slurmstepd: error: execve(): python: No such file or directory\n", at=5)
    found = run.failure()
    assert (found["start"], found["process"], found["name"]) == ("9", "Slurm", "Slurm")


def test_a_running_start_is_no_failure(run: Run) -> None:
    run.error("7.0", 2, "ZeroDivisionError", "division by zero", at=5)
    run.ended("7.0", 1, "node1: rank 2: ZeroDivisionError: division by zero", began=0, at=6, requeued=True)
    run.write("slurm/7.1/rank-0.log", "step 4\n", at=time.time() - BEGAN)
    report = doctor.diagnose(run.folder)
    assert [s["state"] for s in report["starts"]] == ["failed", "running"]
    assert report["state"] == "running" and report["failure"] is None


def test_a_run_on_this_machine(run: Run) -> None:
    inner = {"message": "RuntimeError: CUDA out of memory", "extraInfo": {"timestamp": str(BEGAN + 3)}}
    run.write("torchrun/abc_x/attempt_0/1/error.json", json.dumps({"message": inner}), at=4)
    found = run.failure()
    assert (found["process"], found["name"], found["time"]) == ("rank 1", "GPU memory", BEGAN + 3)


# ---- known causes, in the words of those who fail

LINES = [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB", "GPU memory"),
    (
        "ValueError: Free memory on device (3.2/79.1 GiB) on startup is less than desired GPU memory utilization",
        "busy GPU",
    ),
    ("ValueError: No available memory for the cache blocks. Try increasing it", "unfit key-value cache"),
    (
        "ValueError: User-specified max_model_len (9280) is greater than the derived max_model_len (4096)",
        "model length",
    ),
    ("ValueError: Head size 48 is not supported by CPU attention", "head size"),
    (
        "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).",
        "tensor parallel",
    ),
    ("OSError: [Errno 98] Address already in use", "port in use"),
    ("RuntimeError: engine http://10.0.0.1:2 answers 401: it does not know the run's secret", "secret"),
    ("hpcgrpo.generation.parity.ParityError: mean difference 0.31 nats", "parity"),
    (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.",
        "host memory",
    ),
    (
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-29T20:33:21 DUE TO TIME LIMIT ***",
        "time limit",
    ),
    (
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-29T20:33:21 DUE TO PREEMPTION ***",
        "preemption",
    ),
    ("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-29T20:33:21 ***", "cancelled"),
    ("hpcgrpo: rank 5 ended with signal 11", "crash"),
    ("Fatal Python error: Segmentation fault", "crash"),
    ("hpcgrpo: rank 5 ended with signal 7", "shared memory"),
    (
        "[rank1]:[E1129 20:33:21.1 ProcessGroupNCCL.cpp:1] [Rank 1] Watchdog caught collective operation timeout",
        "time-out between ranks",
    ),
    (
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/buffer.cc:81] Timed out waiting 1800000ms for recv",
        "time-out between ranks",
    ),
    (
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
        "time-out between ranks",
    ),
    (
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system error",
        "NCCL",
    ),
    ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "GPU hardware"),
    ("RuntimeError: No CUDA GPUs are available: Found no NVIDIA driver on your system.", "no GPU"),
    (
        "hpcgrpo.launch.channel.HopError: node1 -> node0 (10.0.0.1:22000): [Errno 111] Connection refused",
        "unreachable",
    ),
    ("OSError: [Errno 113] No route to host", "unreachable"),
    ("OSError: checkpoint could not be written to /x: [Errno 28] No space left on device", "disk full"),
    ("OSError: [Errno 122] Disk quota exceeded: '/home/x'", "disk full"),
    ("OSError: [Errno 116] Stale file handle: '/scratch/x'", "file system"),
    ("PermissionError: [Errno 13] Permission denied: '/data/x'", "permissions"),
    ("ModuleNotFoundError: No module named 'vllm'", "missing module"),
    (
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "missing module",
    ),
    ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", "damaged weights"),
    (
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder",
        "hub offline",
    ),
    (
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them",
        "hub offline",
    ),
    ("huggingface_hub.errors.GatedRepoError: 403 Client Error. Cannot access gated repo", "hub access"),
    ("srun: error: Unable to create step for job 7: Invalid job credential", "Slurm"),
    ("sbatch: error: Munge encode failed: Failed to access /run/munge/munge.socket.2", "Slurm"),
    ("ValueError: reward mine raised KeyError: 'answer' (mine.py, line 3)", "reward"),
    ("OSError: [Errno 24] Too many open files", "limits"),
    ("RuntimeError: can't start new thread", "limits"),
    ("MemoryError", "host memory"),
    ("hpcgrpo: error: data.jsonl, line 2: empty line; remove it", "configuration"),
    ("api_server.py: error: unrecognized arguments: --enable-scale-out", "unknown argument"),
    (
        "RuntimeError: generation.weight_sync: no engine took the weights: http://10.0.0.1:2 said x",
        "weight sync",
    ),
    ("hpcgrpo.launch.serve.EngineError: engine 0 (http://10.0.0.1:2) was not up within 900 s", "engine"),
    ("RuntimeError: Connection reset by peer", "another process failed"),
    ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:", "another process failed"),
]


@pytest.mark.parametrize(("line", "name"), LINES, ids=lambda x: str(x)[:40])
def test_known_causes(line: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text(f"loading\nTraceback (most recent call last):\n{line}\n")
    (found,) = of_log(path, "rank 0")
    assert found.cause is not None and found.cause.name == name
    assert found.line == 3


def test_every_known_cause_has_a_line_here_and_a_way_out() -> None:
    elsewhere = {"node failure", "killed", "idle", "folder in use", "grading", "not finite"}
    elsewhere |= {"step killed", "ended from outside"}
    assert {c.name for c in CAUSES} == {name for _, name in LINES} | elsewhere
    assert all(len(c.what) > 10 and len(c.way_out) > 10 for c in CAUSES)


@pytest.mark.parametrize(
    "line",
    [
        "(APIServer pid=1) INFO 11-29 20:33:21 [x.py:1] Available KV cache memory: error: none",
        "WARNING 11-29 20:33:21 [x.py:1] Connection closed by peer, trying again",
        "k9 step 5/12 reward 0.930 length 8 13.3 samples/s left 0:00:09",
        "20:33:21 [node0] 12 s are left of the job's time limit: saving at the end of the step",
        "20:33:21 [node0] ended with code 0: its ranks ended",
        '[rank0]:   File "/x/train.py", line 71, in rank_main',
        "slurmstepd-node0: error: *** JOB 7 ON node0 CANCELLED AT 2026-11-29T21:03:19 DUE TO JOB REQUEUE ***",
        "the answer of this error: is a lesson",
    ],
)
def test_lines_that_say_nothing_of_a_failure(line: str, tmp_path: Path) -> None:
    path = tmp_path / "node-0.log"
    path.write_text(line + "\n")
    assert of_log(path, "node 0") == []


# ---- times and marks


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=12) ERROR 10-09 08:53:20 [core.py:1] ValueError: x",
        "ERROR 10-09 08:53:20 [core.py:1] ValueError: x",
        "[rank1]:[E1009 08:53:20.123 x.cpp:1] ValueError: x",
        "2025-10-09 08:53:20,123 ValueError: x",
        "08:53:20 [node3] ValueError: x",
        "[rank1]: ValueError: x",
        "\x1b[31mValueError: x\x1b[0m",
        "3: ValueError: x",
    ],
)
def test_what_loggers_put_before_a_message(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        assert bare(line) == "ValueError: x"
        if "08:53:20" in line:
            assert time_in(line, BEGAN + 3600) == BEGAN  # 2025-10-09 08:53:20 UTC
            assert time_in(line, BEGAN + 86400 * 40) != BEGAN or "10-09" in line or "1009" in line
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_time_after_midnight_belongs_to_the_day_before() -> None:
    noon = time.mktime((2026, 3, 5, 12, 0, 0, 0, 0, -1))
    assert time_in("23:59:00 [node0] x", noon - 12 * 3600 + 60) == noon - 12 * 3600 - 60


# ---- odd files


def test_odd_files_are_survived(run: Run) -> None:
    run.write("slurm/7.0/rank-0.log", os.urandom(5000) + b"\nRuntimeError: CUDA out of memory\xff\n", at=5)
    run.write("slurm/7.0/rank-1.error.json", '{"time": 1, "mess', at=5)
    run.write("slurm/7.0/rank-2.error.json", '["a list"]', at=5)
    run.write("slurm/7.0/rank-3.error.json", '{"time": "soon", "message": null, "traceback": 5}', at=9)
    run.write("slurm/7.0/rank-4.error.json", '{"message": {"message": null, "extraInfo": []}}', at=9)
    run.write("slurm/7.0/ended.json", '{"code": "x", "began": "y", "reason": null}', at=20)
    run.write("slurm/7.0/node-0.log", "x" * 3_000_000 + "\n", at=6)
    (run.folder / "slurm/7.0/engine-0.log").mkdir()
    (run.folder / "slurm/7.0/node-9.log").symlink_to("nowhere")
    run.write("metrics.jsonl", '{"step": 4, "reward": 1}\n{"step": 5, "rew', at=6)
    huge = run.write("slurm/job-7.log", "", at=1)
    with huge.open("ab") as file:
        file.truncate(3 * 2**30)  # a hole of 3 GiB
        file.seek(0, 2)
        file.write(b"\nslurmstepd: error: Detected 1 oom_kill event in StepId=7.0\n")
    os.utime(huge, (BEGAN + 8, BEGAN + 8))
    began = time.process_time()
    report = doctor.diagnose(run.folder)
    assert time.process_time() - began < 3
    assert report["step"] == 4
    assert report["starts"][0]["failure"]["name"] == "GPU memory"  # at 5 s; the kill is of 8 s
    json.dumps(report)
    assert doctor.run(run.folder, as_json=False) == 1


def test_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text("step 5/12 reward 0.930 length 8\n" * 100_000 + "RuntimeError: CUDA out of memory\n")
    (found,) = of_log(path, "rank 0")
    assert found.line is None and found.cause is not None


def test_a_local_run_whose_process_has_ended_is_not_running(tmp_path: Path) -> None:
    """Its files being new; of a process elsewhere, nothing is known."""
    (tmp_path / "config.yaml").write_text("max_steps: 4\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    ended = subprocess.Popen(["true"])
    ended.wait()
    here, pid = socket.gethostname(), ended.pid
    states = {}
    for owner in (f"pid {os.getpid()} on {here}", f"pid {pid} on {here}", f"pid {pid} on elsewhere", ""):
        (tmp_path / ".lock").write_text(owner)
        states[owner] = doctor.diagnose(tmp_path)["state"]
    assert list(states.values()) == ["running", "stopped", "running", "running"]
    (tmp_path / ".lock").write_text(f"pid {pid} on {here}")
    (tmp_path / ".launcher").write_text(f"pid {os.getpid()} on {here}")
    assert doctor.diagnose(tmp_path)["state"] == "running"


def test_a_run_that_left_no_checkpoint_is_said_to_start_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    os.utime(tmp_path / "metrics.jsonl", (BEGAN, BEGAN))
    assert doctor.run(tmp_path, as_json=False) == 1
    said = capsys.readouterr().out
    assert "without a checkpoint" in said and "the same command starts it over" in said
    for step in (0, 1):
        saved = tmp_path / "checkpoints" / f"checkpoint-{step}"
        saved.mkdir(parents=True)
        (saved / "COMPLETE").write_text("{}")
        assert doctor.run(tmp_path, as_json=False) == 1
        said = capsys.readouterr().out
        assert f"with a checkpoint of step {step}" in said and "goes on from there" in said


# ---- the command


def test_the_command_and_its_exit_codes(run: Run) -> None:
    failed = hpcgrpo("doctor", str(run.folder), "--json")
    assert failed.returncode == 0 and json.loads(failed.stdout)["state"] == "running"  # config.yaml is new
    run.error("7.0", 2, "ConfigError", "data.path: no such file", at=5)
    failed = hpcgrpo("doctor", str(run.folder))
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "first:   rank 2 at" in failed.stdout and "data.path: no such file" in failed.stdout
    assert "way out: the message names it" in failed.stdout
    nothing = hpcgrpo("doctor", str(run.folder.parent))
    assert nothing.returncode == 2 and "runs there: run" in nothing.stderr
    with pytest.raises(ConfigError, match="no such folder"):
        doctor.diagnose(run.folder / "nothing")
