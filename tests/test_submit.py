"""Submission to a real Slurm: what is refused before the queue, what is queued, and following it to its end."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, write_cluster_config

from hpcgrpo import config
from hpcgrpo.config import ConfigError
from hpcgrpo.journal import read_metrics
from hpcgrpo.launch import follow, queue, submit
from hpcgrpo.launch.job import job_for
from hpcgrpo.sections import RunConfig

LATER = "cluster.slurm_additional_parameters={begin: now+1hour}"  # a job that stays in the queue

REWARD = """
import itertools, os, time, hpcgrpo
CALLS = itertools.count(1)
def one(completions, **columns):
    held = next(CALLS) > 2
    while held and os.path.exists({hold!r}):
        time.sleep(0.05)
    with open({record!r}, "a") as file:
        print(__file__, hpcgrpo.__file__, file=file)
    return [float(len(text) % 3) for text in completions]
"""


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    return write_cluster_config(tmp_path)


@pytest.fixture
def slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """This process stands on the login node."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    return cluster


@pytest.fixture
def accounting(accounting_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("SLURM_CONF", accounting_cluster.environment["SLURM_CONF"])
    return accounting_cluster


def queued(run: RunConfig, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, str]:
    """Submit -> what --json says."""
    given = {"executor": "slurm", "wait": False, "fresh": False, "as_json": True, **options}
    assert submit.submit(run, **given) == 0
    return dict(json.loads(capsys.readouterr().out))


def refused(run: RunConfig, **options: Any) -> str:
    with pytest.raises(ValueError) as error:
        submit.submit(run, **{"executor": "slurm", "wait": False, "fresh": False, "as_json": True, **options})
    return str(error.value)


# ---- before the queue

REFUSED = [
    ("cluster.slurm_partition=mian", "cluster.slurm_partition mian: no such partition (did you mean main?)"),
    ("cluster.nodes=7", "cluster.nodes 7: partition main grants a job 6 at most"),
    ("cluster.gpus_per_node=9", "cluster.gpus_per_node 9: 2 nodes with 9 GPUs"),
    ("cluster={nodes: 2, slurm_partition: short, timeout_min: 11}", "cluster.timeout_min 11: partition short"),
    ("cluster.slurm_constraint=h100", "cluster.slurm_constraint: Slurm refuses the job (Invalid feature"),
    ("cluster.slurm_nodelist=nodeX", "cluster.slurm_nodelist, slurm_exclude: Slurm refuses the job (Invalid node"),
    ("cluster.slurm_dependency=afterok:abc", "cluster.slurm_dependency: Slurm refuses the job (Job dependency"),
    ("cluster.mem_gb=5000", "cluster.mem_gb"),
    ("cluster.cpus_per_task=500", "cluster.cpus_per_task: Slurm refuses"),
    ("cluster.slurm_gres='tpu:2'", "slurm_gres: Slurm refuses the job (Invalid generic resource"),
    ("cluster.slurm_additional_parameters={foo: 1}", "cluster.slurm_additional_parameters: Slurm refuses"),
    ("cluster.slurm_additional_parameters={reservation: x}", "cluster.slurm_additional_parameters: Slurm refuses"),
    ("cluster={nodes: 2, slurm_partition: 'main,nowhere'}", "slurm_partition nowhere: no such partition"),
    ("model_name_or_path=/does/not/exist", "no such folder"),
    ("data={path: /does/not/exist.jsonl}", "/does/not/exist.jsonl"),
]  # fmt: skip


def test_a_reward_that_raises_is_told_before_the_queue(yaml: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def raises(completions, **columns):\n    raise RuntimeError('my own trouble')\n")
    error = refused(config.load(yaml, [f"rewards={{'{path}:raises': 1.0}}"]), executor="local")
    assert error == f"reward raises raised RuntimeError: my own trouble ({path}, line 2)"
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
def test_what_slurm_would_refuse_is_told_before_the_queue(slurm: Cluster, yaml: Path) -> None:
    for override, said in REFUSED:
        assert said in refused(config.load(yaml, [override])), override
        assert not (yaml.parent / "logs").exists(), f"{override}: nothing may be left behind"
    done = slurm.hpcgrpo("submit", str(yaml), REFUSED[0][0])
    assert done.returncode == 2 and done.stderr.startswith("hpcgrpo: error: cluster.slurm_partition mian")
    assert slurm.login("squeue", "-h").stdout == ""


@pytest.mark.slow
def test_a_controller_that_is_down_is_named(slurm: Cluster, yaml: Path) -> None:
    slurm.crash("slurmctld")
    assert "does not reach Slurm's controller" in refused(config.load(yaml))
    assert not (yaml.parent / "logs").exists()


@pytest.mark.slow
def test_with_accounting_unknown_accounts_and_qos_are_told(accounting: Cluster, yaml: Path) -> None:
    for key, said in (("account", "cluster.slurm_account"), ("qos", "cluster.slurm_qos")):
        assert f"{said}" in refused(config.load(yaml, [f"cluster.slurm_{key}=nobody"]))
    assert not (yaml.parent / "logs").exists()


@pytest.mark.slow
def test_refused_by_the_queue_itself_after_all(slurm: Cluster, yaml: Path, tmp_path: Path) -> None:
    """What passed the checks may have changed since: the words of the refusal are shown, and nothing is left."""
    run = config.load(yaml, ["cluster.slurm_dependency=afterok:abc"])
    with pytest.raises(ConfigError) as error:
        submit._hand_over(run, job_for(run, directory=tmp_path), "slurm")
    assert str(error.value).startswith(
        "cluster.slurm_dependency: Slurm refuses the job (Job dependency problem)"
    )
    assert not list((tmp_path / "logs" / "run" / "slurm" / "submitit").glob("*"))
    assert not (tmp_path / "logs" / "run" / "slurm" / "job.json").exists()


# ---- in the queue


@pytest.mark.slow
def test_a_live_run_is_not_submitted_twice(
    slurm: Cluster, yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config.load(yaml, [LATER])
    answer = queued(run, capsys)
    job, folder = answer["job_id"], Path(answer["folder"])
    slurm.track(job)
    assert folder == tmp_path / "logs" / "run"
    assert slurm.job(job)["StdOut"] == answer["log"] == f"{folder}/slurm/job-{job}.log"
    assert (slurm.job(job)["JobName"], slurm.job(job)["Requeue"]) == ("run", "1")
    before = (folder / "config.yaml").read_text()
    other = config.load(yaml, [LATER, "train.learning_rate=0.5"])
    for tried in (
        lambda: refused(run),
        lambda: refused(run, fresh=True),
        lambda: refused(run, executor="local"),
        lambda: refused(other, wait=True),
    ):
        error = tried()
        assert f"live as job {job} (PENDING)" in error and f"scancel {job}" in error and "--wait" in error
    assert (folder / "config.yaml").read_text() == before and len(list(tmp_path.glob("logs/*"))) == 1
    slurm.cancel(job)
    slurm.until(lambda: queue.state(job) is None, "the job leaves the queue")
    assert queue.final_state(job) == "CANCELLED"
    again = queued(run, capsys)["job_id"]  # now it may
    slurm.track(again)
    slurm.cancel(again)
    assert again != job


@pytest.mark.slow
def test_two_submissions_at_once_make_one_job(slurm: Cluster, yaml: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        tries = [pool.submit(slurm.hpcgrpo, "submit", str(yaml), LATER, "--json") for _ in range(3)]
    codes = sorted(t.result().returncode for t in tries)
    jobs = slurm.login("squeue", "-h", "-o", "%A").stdout.split()
    slurm.login("scancel", *jobs)
    assert codes == [0, 2, 2] and len(jobs) == 1, [t.result().stderr for t in tries]


@pytest.mark.slow
def test_following_outlasts_the_controller_and_tells_of_a_cancelled_job(
    slurm: Cluster, yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By another --wait on the live run, which joins it."""
    run = config.load(yaml, [LATER])
    job = queued(run, capsys)["job_id"]
    slurm.track(job)
    codes: list[int] = []
    given = {"executor": "slurm", "wait": True, "fresh": False, "as_json": False}
    thread = threading.Thread(target=lambda: codes.append(submit.submit(run, **given)))
    thread.start()
    said = ""

    def heard(words: str) -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return words in said

    slurm.until(lambda: heard(f"job {job} PENDING"), "the job's state is shown")
    slurm.crash("slurmctld")
    slurm.until(lambda: heard("still following"), "the silence is noticed")
    time.sleep(2)
    assert thread.is_alive()
    slurm.boot("slurmctld")
    slurm.until(lambda: heard("answers again"), "the controller is heard again")
    slurm.cancel(job)
    thread.join(200)
    assert codes == [1]
    assert heard("Slurm says CANCELLED") and said.count("still following") == 1


@pytest.mark.slow
def test_with_accounting_the_end_is_known_without_the_controller(
    accounting: Cluster, yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config.load(yaml, [LATER, "cluster.slurm_account=research"])
    job = queued(run, capsys)["job_id"]
    accounting.track(job)
    accounting.cancel(job)
    accounting.until(
        lambda: "CANCELLED" in accounting.login("sacct", "-X", "-n", "-j", job).stdout, "sacct knows"
    )
    accounting.crash("slurmctld")
    assert queue.final_state(job) == "CANCELLED"


# ---- to the end


@pytest.mark.slow
def test_a_run_is_followed_through_a_requeue_with_the_code_it_was_submitted_with(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder whose name the shell and Slurm would both read as something else."""
    folder = tmp_path / "it's 100%x `y`"
    folder.mkdir()
    record, hold = tmp_path / "record", tmp_path / "hold"
    hold.touch()  # its third step waits until it is requeued
    (folder / "mine.py").write_text(REWARD.format(record=str(record), hold=str(hold)))
    yaml = write_cluster_config(folder, nodes=1, steps=5, save_steps=1)
    config_path, metrics = str(yaml), folder / "logs" / "run" / "metrics.jsonl"
    command = ("submit", config_path, "rewards={'mine:one': 1.0}", "--wait")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slurm.hpcgrpo, *command, timeout_seconds=600, cwd=folder)
        slurm.until(lambda: job_of(folder) or waiting.done(), "the job is submitted")
        job = job_of(folder)
        assert job is not None, waiting.result().stderr
        slurm.track(job, folder / "logs" / "run")
        (folder / "mine.py").write_text("raise SystemExit('edited')\n")
        slurm.until(lambda: steps(metrics)[1:], "two steps", timeout_seconds=200)
        slurm.login("scontrol", "requeue", job)
        slurm.until((folder / "logs" / "run" / "slurm" / f"{job}.1").exists, "the next start")
        hold.unlink()
        done = waiting.result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps(metrics) == [1, 2, 3, 4, 5]
    assert slurm.job(job)["Restarts"] == "1"
    states = [line.split()[3] for line in done.stderr.splitlines() if line.startswith(f"hpcgrpo: job {job} ")]
    assert "RUNNING" in states and "PENDING" in states[states.index("RUNNING") :], done.stderr
    assert done.stderr.splitlines()[-1] == f"hpcgrpo: job {job} ended with code 0: finished"
    assert "run step 5/5" in done.stdout and done.stdout.count("run step 1/5") == 1
    checked, *lines = record.read_text().splitlines()
    assert checked.startswith(f"{folder}/mine.py ")  # before it was queued
    ran = {tuple(line.split(f"{folder}/")[1:]) for line in lines}
    (code,) = (folder / "logs" / "run" / "slurm").glob("code-*")
    place = f"logs/run/slurm/{code.name}"
    assert ran == {(f"{place}/mine.py ", f"{place}/hpcgrpo/__init__.py")}


def job_of(folder: Path) -> str | None:
    path = folder / "logs" / "run" / "slurm" / "job.json"
    return str(json.loads(path.read_text())["job_id"]) if path.exists() else None


def steps(metrics: Path) -> list[int]:
    return [line["step"] for line in read_metrics(metrics.parent)]


@pytest.mark.slow
def test_a_dry_run_leaves_a_script_that_can_be_queued_by_hand(slurm: Cluster, tmp_path: Path) -> None:
    yaml = write_cluster_config(tmp_path, nodes=1, steps=1)
    done = slurm.hpcgrpo("submit", str(yaml), "--dry-run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "to start at" in answer["sbatch"] and slurm.login("squeue", "-h").stdout == ""
    assert config.load(answer["config"]) == config.load(yaml)
    run = tmp_path / "logs" / "run"
    assert [p.name for p in run.iterdir()] == ["slurm"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    job = slurm.login(*answer["command"].split(), cwd=elsewhere).stdout.split()[-1]
    slurm.track(job, run)
    slurm.wait_for(job, "COMPLETED", timeout_seconds=200)
    assert steps(run / "metrics.jsonl") == [1]
    log = run / "slurm" / f"job-{job}.log"
    assert "run step 1/1" in log.read_text()
    assert (tmp_path / f"slurm-{job}.out").read_text() == f"all further output: {log}\n"
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and "dry-run" not in p.parts}
    again = slurm.hpcgrpo("submit", str(yaml), "--dry-run", "train.learning_rate=0.5", cwd=tmp_path)
    assert again.returncode == 0 and answer["command"] in again.stdout
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and "dry-run" not in p.parts} == before
    queued_by_hand = ("sbatch", "--wait", answer["script"])
    refusal = slurm.login(*queued_by_hand, cwd=elsewhere, check=False, timeout_seconds=240)
    assert refusal.returncode == 2  # the folder holds a run with another learning rate


@pytest.mark.slow
def test_a_finished_run_is_not_queued_again(tmp_path: Path) -> None:
    """And --executor debug runs one node in this process, without any Slurm."""
    yaml = write_cluster_config(tmp_path, nodes=1, steps=1)
    command = [sys.executable, "-m", "hpcgrpo.cli", "submit", str(yaml)]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], capture_output=True, text=True, timeout=400)

    several = run("--executor", "debug", "cluster.nodes=2")
    assert several.returncode == 2 and "cluster.nodes 2: --executor debug" in several.stderr
    first = run("--executor", "debug")
    assert first.returncode == 0, first.stdout + first.stderr
    assert steps(tmp_path / "logs" / "run" / "metrics.jsonl") == [1]
    again = run("--executor", "local", "--json")
    assert again.returncode == 0 and json.loads(again.stdout)["job_id"] is None
    assert "run is finished: 1 steps" in again.stderr


@pytest.mark.slow
def test_the_local_executor_runs_every_node_here(tmp_path: Path) -> None:
    yaml = write_cluster_config(tmp_path, nodes=2, steps=1)
    command = [sys.executable, "-m", "hpcgrpo.cli", "submit", str(yaml), "--executor", "local", "--wait"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[node 0]" in done.stdout and "[node 1]" in done.stdout
    assert steps(tmp_path / "logs" / "run" / "metrics.jsonl") == [1]


# ---- following, by itself


def job_at(folder: Path, states: list[str | None]) -> follow.Submitted:
    """A job that takes on the states one after the other and then keeps the last."""
    (folder / "slurm").mkdir()
    return follow.Submitted(
        job_id="7",
        folder=folder,
        logs=(folder / "log",),
        cancel="scancel 7",
        state=lambda: states.pop(0) if len(states) > 1 else states[0],
        reason=lambda: "",
        final_state=lambda: "TIMEOUT",
    )


def test_the_run_s_own_word_decides(tmp_path: Path) -> None:
    job, out = job_at(tmp_path, ["RUNNING", None]), io.StringIO()
    (tmp_path / "log").write_text("one\ntwo")
    (tmp_path / "slurm" / "ended.json").write_text(json.dumps({"job": "7", "code": 3, "reason": "because"}))
    assert follow.follow(job, out=out, poll_seconds=0.01) == 3
    assert out.getvalue() == "one\ntwo"


@pytest.mark.parametrize(
    "ended",
    [
        '{"job": "6", "code": 0, "reason": ""}',
        '{"job": "7", "code": 0, "requeued": true}',
        '{"job": "7", "co',
        "",
    ],
)
def test_the_word_of_another_job_or_of_a_start_that_was_not_the_last_does_not(
    tmp_path: Path, ended: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(follow, "GONE_SECONDS", 0.05)
    job = job_at(tmp_path, ["RUNNING", "PENDING", "RUNNING", None])
    (tmp_path / "slurm" / "ended.json").write_text(ended)
    assert follow.follow(job, out=io.StringIO(), poll_seconds=0.01) == 1
    assert "Slurm says TIMEOUT" in capsys.readouterr().err


def test_lines_are_shown_whole_and_once(tmp_path: Path) -> None:
    out, log = io.StringIO(), tmp_path / "log"
    tail = follow.Tail([log, tmp_path / "missing"], out)
    shown = []
    for text in ("a\nb", "c\n", "", "d\né"):
        with log.open("a", encoding="utf-8") as file:
            file.write(text)
        tail.copy()
        shown.append(out.getvalue())
    tail.copy(last=True)
    assert shown == ["a\n", "a\nbc\n", "a\nbc\n", "a\nbc\nd\n"] and out.getvalue() == "a\nbc\nd\né"


def test_ctrl_c_ends_the_following_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    job = follow.Submitted("7", tmp_path, (), "scancel 7", interrupted, str, str)
    assert follow.follow(job, out=io.StringIO()) == 130
    assert "job 7 goes on. To end it: scancel 7" in capsys.readouterr().err
