"""Evaluations on a real Slurm: behind a training that ends well or not, through faults, and checkpoint by checkpoint.

What the jobs run are stand-ins (programs/evaluation_job.py), so that a job lasts as long as a test needs.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, write_cluster_config
from programs import evaluation_job

from evaluation import following, jobs, rolling
from evaluation.config import EvaluationConfig
from evaluation.task import Task
from hpcgrpo import config
from hpcgrpo.config import ConfigError
from hpcgrpo.launch import submit
from hpcgrpo.sections import ClusterConfig

CLUSTER = ClusterConfig(slurm_partition="main", timeout_min=20, gpus_per_node=1, cpus_per_task=2, mem_gb=1)
PROGRAM = str(Path(evaluation_job.__file__).absolute())


@pytest.fixture
def slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """This process submits as one on the login node does."""
    monkeypatch.setenv("SLURM_CONF", f"{cluster.folder}/slurm.conf")
    return cluster


def train(slurm: Cluster, run: Path, command: str, *options: str) -> str:
    """A small job in the place of a run's -> its id."""
    (run / "slurm").mkdir(parents=True, exist_ok=True)
    script = run / "train.sbatch"
    script.write_text(f"#!/bin/bash\n{command}\n")
    log = run / "slurm" / "train.log"
    job = slurm.login("sbatch", "--parsable", f"--output={log}", *options, str(script)).stdout.strip()
    submit.record_job(run, job, [log])
    slurm.track(job, run)
    return str(job)


def checkpoints(run: Path, count: int, seconds: float, keep: int, go_on: Path | None = None) -> str:
    return f"{sys.executable} {PROGRAM} train {run} {count} {seconds} {keep} {go_on or ''}"


def evaluate(
    slurm: Cluster, source: Path, folder: Path, *names: str, after: str | None = None, **play: Any
) -> jobs.Submitted:
    """An evaluation of three benchmarks unless said; `play` is what the stand-ins read."""
    names = names or ("a", "b", "c")
    config = EvaluationConfig(benchmarks=names)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "play.json").write_text(json.dumps(play))
    made = [Task(str(source), config, name, str(folder), waits_for=after) for name in names]
    done = jobs.submit(
        made, cluster=CLUSTER, after=after, name="ev", folder=folder, commands=evaluation_job.commands()
    )
    for job in done.ids:
        slurm.track(job)
    return done


def follow(folder: Path, *, interrupted: bool = False) -> tuple[int, str, list[str]]:
    """The code, what the merge printed, what was told; `interrupted` as by Ctrl-C once the jobs' states are told."""
    out, told = io.StringIO(), list[str]()

    def tell(text: str) -> None:
        told.append(text)
        if interrupted and len(told) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    return following.follow(folder, out=out, tell=tell, poll_seconds=0.5), out.getvalue(), told


def starts(folder: Path, name: str) -> list[dict[str, str]]:
    """The variables that each start of a task found, of those that are written whole."""
    path = folder / f"{name}.starts"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def left(folder: Path) -> bool:
    return not jobs.live(folder)


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


@pytest.mark.slow
def test_an_evaluation_waits_for_its_training(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which starts later, and twice. Queued in a shell with another job's variables; a second time it is refused."""
    run, folder = tmp_path / "my run", tmp_path / "my run" / "eval"
    again = "[[ $SLURM_RESTART_COUNT ]] || { scontrol requeue $SLURM_JOB_ID; sleep 60; }; "
    training = train(slurm, run, again + checkpoints(run, 2, 0.1, 1).replace("my run", "'my run'"), "--hold")
    for name, value in {
        "SLURM_JOB_ID": "77", "SLURM_NNODES": "3", "SLURM_CPU_BIND": "none", "SLURM_MEM_PER_CPU": "1",
        "SBATCH_ARRAY_INX": "0-7", "SBATCH_KILL_INVALID_DEP": "no", "SBATCH_TIMELIMIT": "1", "SBATCH_REQUEUE": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert jobs.training_job(run) == training
    done = evaluate(slurm, run, folder, after=training)
    (array,) = done.arrays
    assert done.elements == {"a": f"{array}_0", "b": f"{array}_1", "c": f"{array}_2"}
    fields = slurm.job(array)
    assert fields["Dependency"].startswith(f"afterok:{training}") and fields["TimeLimit"] == "00:20:00"
    assert slurm.job(str(done.merge))["Dependency"].startswith(f"afterany:{array}")
    with pytest.raises(
        ConfigError, match=rf"live as job {array}, {done.merge}; .* `scancel {array} {done.merge}`"
    ):
        evaluate(slurm, run, folder, after=training)
    made = [Task(str(run), EvaluationConfig(benchmarks=tuple("abc")), name, str(folder)) for name in "abc"]
    assert jobs.join(made, folder, wait=True)
    with pytest.raises(ConfigError, match="follow it with --wait and the same settings"):
        jobs.join(made[:2], folder, wait=True)
    code, _, told = follow(folder, interrupted=True)
    assert code == 130 and f"scancel {array} {done.merge}" in told[-1] and len(jobs.live(folder)) == 4
    slurm.login("scontrol", "release", training)
    code, out, told = follow(folder)
    assert (code, out) == (0, "merged a b c\n"), (out, told)
    assert told[0] == f"job {array}: 3 PENDING of 3, waiting for job {training}"
    assert summary(folder) == {"results": {"a": 0.2, "b": 0.2, "c": 0.2}, "missing": {}}
    for name in "abc":
        (found,) = starts(folder, name)
        assert found["SLURM_ARRAY_TASK_COUNT"] == "3" and found["SLURM_JOB_NUM_NODES"] == "1"
        assert not {"SBATCH_ARRAY_INX", "SBATCH_TIMELIMIT"} & set(found)
        assert Path(found["HPCGRPO_CODE"]).parent == folder / "jobs" / "slurm"
        assert (folder / "jobs" / f"{name}.log").exists()
    assert jobs.live(folder) == {} and not list((folder / "jobs").glob("*.reason"))


@pytest.mark.slow
def test_a_training_that_fails_leaves_its_evaluation_cancelled_with_the_reason(
    slurm: Cluster, tmp_path: Path
) -> None:
    run, folder = tmp_path / "run", tmp_path / "run" / "eval"
    words = {"job": "$SLURM_JOB_ID", "code": 3, "reason": "rank 1: out of memory", "requeued": False}
    text = json.dumps(words).replace('"', '\\"')
    ended = f'mkdir -p {run}/slurm/$SLURM_JOB_ID.0; echo "{text}" >{run}/slurm/$SLURM_JOB_ID.0/ended.json'
    training = train(slurm, run, f"{ended}; exit 3", "--hold")
    done = evaluate(slurm, run, folder, after=training)
    slurm.login("scontrol", "release", training)
    code, out, told = follow(folder)
    reason = f"cancelled: the training job {training} ended FAILED (exit code 3): rank 1: out of memory"
    assert code == 1
    assert out.splitlines() == ["merged", *(f"{name}: not evaluated: {reason}" for name in "abc")]
    assert not [line for line in told if reason in line]  # once is enough
    assert summary(folder)["missing"] == dict.fromkeys("abc", reason)
    assert slurm.job(done.elements["b"])["JobState"] == "CANCELLED" and not starts(folder, "b")
    with pytest.raises(ConfigError, match=rf"training job {training} ended FAILED .* no complete checkpoint"):
        jobs.training_job(run)


@pytest.mark.slow
@pytest.mark.long
def test_elements_come_back_after_a_crash_and_after_a_stop_but_not_when_cancelled(
    slurm: Cluster, tmp_path: Path
) -> None:
    model, folder = tmp_path / "model", tmp_path / "eval"
    model.mkdir()
    (model / "model.safetensors").write_text("12345")
    long = [300.0]
    done = evaluate(
        slurm, model, folder, "crashed", "stopped", "ended", "failed",
        crashed={"seconds": long}, stopped={"codes": [75]}, ended={"seconds": long}, failed={"codes": [2]},
    )  # fmt: skip
    for name in ("crashed", "ended"):
        slurm.until(partial(starts, folder, name), f"{name} runs")
    slurm.until(lambda: len(starts(folder, "stopped")) == 2, "the second start")
    slurm.login("scancel", done.elements["ended"])
    slurm.wait_for(done.elements["ended"], "CANCELLED")
    slurm.crash(slurm.job(done.elements["crashed"])["NodeList"])
    code, _, told = follow(folder)
    assert code == 1, told
    assert summary(folder) == {
        "results": {"crashed": 0.5, "stopped": 0.5},
        "missing": {
            "ended": f"cancelled: job {done.elements['ended']} was ended from outside",
            "failed": "failed with exit code 2: ValueError: failed was told to fail",
        },
    }
    restarts = {
        name: [s.get("SLURM_RESTART_COUNT", "0") for s in starts(folder, name)] for name in done.elements
    }
    assert restarts == {"crashed": ["0", "1"], "stopped": ["0", "1"], "ended": ["0"], "failed": ["0"]}


@pytest.mark.slow
def test_an_evaluation_is_queued_from_inside_a_job(slurm: Cluster, tmp_path: Path) -> None:
    """Of two nodes, whose variables its jobs must not take for theirs."""
    (tmp_path / "model.safetensors").write_text("123")
    folder, file = tmp_path / "eval", tmp_path / "told.json"
    told = {
        "folder": str(folder),
        "cluster": CLUSTER.model_dump(),
        "benchmarks": ["a", "b"],
        "source": str(tmp_path),
    }
    file.write_text(json.dumps({**told, "after": None}))
    script = tmp_path / "outer.sbatch"
    script.write_text(
        f"#!/bin/bash\nsrun --ntasks=1 --nodes=1 {sys.executable} -u {PROGRAM} submit {file} >{tmp_path}/ids.json\n"
    )
    options = ("--nodes=2", "--ntasks-per-node=2", "--mem=2G", f"--output={tmp_path}/outer.log", "--parsable")
    outer = slurm.login("sbatch", *options, str(script)).stdout.strip()
    slurm.track(outer)
    slurm.wait_for(outer, "COMPLETED")
    ids = json.loads((tmp_path / "ids.json").read_text())
    for job in ids:
        slurm.track(job)
    assert jobs.submitted(folder).ids == ids and follow(folder)[0] == 0  # type: ignore[union-attr]
    for name in "ab":
        (found,) = starts(folder, name)
        assert (found["SLURM_JOB_NUM_NODES"], found["SLURM_NTASKS"]) == ("1", "1")
        assert found["SLURM_ARRAY_JOB_ID"] == ids[0] and "SLURM_JOB_ID" in found
        assert outer not in found.values()


@pytest.mark.slow
def test_checkpoints_are_evaluated_as_they_appear_though_the_training_removes_them(
    slurm: Cluster, tmp_path: Path
) -> None:
    """The watch is a job that starts when the training does, and again when it was stopped; so are its evaluations."""
    run = tmp_path / "run"
    go_on = tmp_path / "go_on"  # the first one is there until it was seen
    training = train(slurm, run, checkpoints(run, 3, 2, 2, go_on), "--hold")
    file, place = tmp_path / "watch.json", run / "eval" / "rolling"
    file.write_text(json.dumps({"run": str(run), "cluster": CLUSTER.model_dump()}))
    common = {"cluster": CLUSTER, "after": training, "name": "ev", "folder": place}
    watch = jobs.submit_watch(file, commands=evaluation_job.commands(), **common)  # type: ignore[arg-type]
    slurm.track(watch)
    assert slurm.job(watch)["Dependency"].startswith(f"after:{training}")
    with pytest.raises(ConfigError, match=f"watched by job {watch} already"):
        jobs.submit_watch(file, commands=evaluation_job.commands(), **common)  # type: ignore[arg-type]
    slurm.login("scontrol", "release", training)
    slurm.until(lambda: "1" in rolling.table(run), "the first checkpoint")
    go_on.touch()
    slurm.login("scancel", "--signal=USR2", watch)
    assert jobs.join_watch(place, wait=True)
    told: list[str] = []
    assert following.follow_watch(place, tell=told.append, poll_seconds=0.5) == 0, told
    assert told[0].startswith(f"job {watch} (watches for checkpoints): ")
    assert slurm.wait_for(watch, "COMPLETED", timeout_seconds=120)["Restarts"] == "1"
    for folder in rolling.submitted(run):
        assert follow(folder)[0] == 0
    assert rolling.submitted(run) == [] and len(rolling.curve(run)) == 3
    assert rolling.curve(run) == {step: {"a": step / 10, "b": step / 10} for step in (1, 2, 3)}
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"checkpoint-2", "checkpoint-3"}
    slurm.until(lambda: not list((run / "eval").glob("checkpoint-*/model")), "kept models are removed")
    for step in (1, 2, 3):
        folder = rolling.folder_of(run, step)
        slurm.until(partial(left, folder), "the merge leaves the queue")
        assert not list(folder.glob("jobs/slurm/code-*"))
    assert len(list((place / "slurm").glob("code-*"))) == 1
    assert "by job" in (place / "watch.log").read_text()


@pytest.mark.slow
def test_what_slurm_refuses_is_told_before_anything_is_queued(slurm: Cluster, tmp_path: Path) -> None:
    made = [Task("m", EvaluationConfig(benchmarks=("a",)), "a", str(tmp_path))]
    common: dict[str, Any] = {"after": None, "name": "ev", "folder": tmp_path}
    for change, words in (
        ({"slurm_partition": "mian"}, r"cluster.slurm_partition mian: no such partition \(did you mean main"),
        ({"gpus_per_node": 9}, "cluster.gpus_per_node 9: 1 nodes with 9 GPUs each"),
        ({"slurm_nodelist": "node99"}, "cluster.slurm_nodelist.*Slurm refuses the job"),
    ):
        wrong = CLUSTER.model_copy(update=change)
        with pytest.raises(ConfigError, match=words):
            jobs.submit(made, cluster=wrong, **common)
    with pytest.raises(ConfigError, match=r"the job that merges the results: cluster.timeout_min 99"):
        small = ClusterConfig(slurm_partition="short", timeout_min=99)
        jobs.submit(made, cluster=CLUSTER, merge_cluster=small, **common)
    assert not (tmp_path / "jobs").exists()
    said = jobs.dry_run(made, cluster=CLUSTER, **common)
    assert [Path(path).name for path in said] == ["array-0.sbatch", "merge.sbatch"]
    assert all("to start at" in answer for answer in said.values()), said
    assert [p.name for p in (tmp_path / "jobs").iterdir()] == ["dry-run"]
    training, file = write_cluster_config(tmp_path), tmp_path / "eval.yaml"
    for change, words in (
        ("cluster: {slurm_partition: mian}", "cluster.slurm_partition mian: no such partition"),
        ("shards: {cain: 2}", "shards: cain: 2"),
        ("shards: {chain: 0}", "shards: chain: 0"),
    ):
        file.write_text(f"benchmarks: [chain]\n{change}\n")
        done = slurm.hpcgrpo("submit", str(training), "--eval", str(file))
        assert done.returncode == 2 and words in done.stderr, done.stderr
    assert slurm.login("squeue", "-h").stdout == ""


EVALUATION = """
benchmarks: ["chain:digits=4:size=16", "chain:digits=5:size=16", "addition:size=8"]
num_samples: 2
temperature: 1.0
max_completion_length: 8
vllm_kv_cache_memory_bytes: 67108864
vllm_server_timeout: 400
shards: {"chain:digits=4:size=16": 2}
cluster: {slurm_partition: main, timeout_min: 15}
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_training_and_evaluation_in_one_command(slurm: Cluster, tmp_path: Path) -> None:
    """The real thing: a training, then an array of three benchmarks (four elements) with vLLM, then the table."""
    training = write_cluster_config(tmp_path, nodes=1, steps=2, save_steps=1)
    (tmp_path / "eval.yaml").write_text(EVALUATION)
    done = slurm.hpcgrpo(
        "submit",
        str(training),
        "--eval",
        str(tmp_path / "eval.yaml"),
        "--wait",
        "--json",
        timeout_seconds=1100,
    )
    run = config.load(training).folder
    for job in (jobs.submitted(run / "eval") or pytest.fail(done.stderr)).ids:
        slurm.track(job)
    assert done.returncode == 0, done.stderr + slurm.tails()
    names = ["chain-digits-4-size-16", "chain-digits-5-size-16", "addition-size-8"]
    said = summary(run / "eval")
    assert list(said["results"]) == names and said["missing"] == {}
    shown = json.loads(done.stdout)  # and nothing else is on standard output
    assert shown["folder"] == str(run) and shown["eval"]["summary"] == said
    for name, problems in zip(names, (16, 16, 8), strict=True):
        result = json.loads((run / "eval" / f"{name}.json").read_text())
        assert result["summary"]["num_problems"] == problems and result["summary"]["num_samples"] == 2
        assert result["model"]["step"] == 2 and result["settings"]["engine"].startswith("vllm")
        assert name.rpartition("-")[0] in done.stderr  # the table
    assert len(list((run / "eval" / "logs").glob("*/engine-0.log"))) == 4  # every element's own
    assert {p.name for p in (run / "eval" / names[0]).glob("*.jsonl")} == {
        f"samples-{i}-of-2.jsonl" for i in (0, 1)
    }
