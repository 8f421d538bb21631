"""The whole thing on a real Slurm with real vLLM: one node serves, the others learn, whatever their number."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import REPORT, SLOW_REWARD, Cluster, write_cluster_config
from transformers import AutoModelForCausalLM

from hpcgrpo import tiny
from hpcgrpo.journal import read_metrics

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "configs" / "cluster_cpu.yaml"
STEPS = 5
LAUNCHER = r"^\S*python\S* .*submitit\S*_submit"
OURS = rf"{LAUNCHER}|hpcgrpo\.cli rank"
EVAL = "eval={data: {preset: chain, max_samples: 24, seed: 1, options: {digits: 8}}, num_samples: 24, every_steps: 1}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that `hpcgrpo tiny-model` writes."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny.save(tiny.build_tiny_model(seed=0), tiny.build_character_tokenizer(), folder)
    return folder


def overrides(folder: Path, model: Path, name: str, *more: str) -> list[str]:
    common = [f"model_name_or_path={model}", f"output_dir={folder}", f"name={name}", EVAL]
    return [*common, "train.save_total_limit=null", "generation.vllm_server_timeout=340", *more]


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts" / f"{name}.jsonl").read_text().splitlines()]


def greedy(model: Path, prompts: Sequence[str], length: int) -> list[list[int]]:
    """What plain transformers answers, token by token, without a cache or sampling code of ours."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = tiny.build_character_tokenizer()
    ends = lm.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends)
    found = []
    with torch.no_grad():
        for text in prompts:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            answer: list[int] = []
            while len(answer) < length and not (answer and answer[-1] in ends):
                answer.append(int(lm(torch.tensor([ids + answer])).logits[0, -1].argmax()))
            found.append(answer)
    return found


@pytest.fixture(scope="module")
def shipped(session_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The shipped configuration on three nodes: one of vLLM, two of two learner ranks each -> the run's folder."""
    folder, began = tmp_path_factory.mktemp("shipped"), time.time()
    done = session_cluster.hpcgrpo(
        "submit", str(SHIPPED), *overrides(folder, model, "shipped"), "--wait", timeout_seconds=800
    )
    seconds, run = time.time() - began, folder / "shipped"
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 5/5" in done.stdout and "finished" in done.stdout + done.stderr
    first = (run / "rollouts" / "eval-000000.jsonl").stat().st_mtime - began
    engine = engine_seconds(run / "slurm" / f"{job_of(run)}.0" / "node-0.log")
    REPORT.append(f"cluster_cpu.yaml from submission to end: {seconds:.0f} s")
    REPORT.append(
        f"from submission to the first answers: {first:.0f} s, of which the engine's start {engine:.0f} s"
    )
    return run


def job_of(run: Path) -> str:
    return str(json.loads((run / "slurm" / "job.json").read_text())["job_id"])


def test_the_shipped_configuration_on_three_nodes(cluster: Cluster, shipped: Path, model: Path) -> None:
    """After every sync the server answers as the learner's weights do in plain transformers."""
    run, job = shipped, job_of(shipped)
    assert cluster.wait_for(job, "COMPLETED")["NumNodes"] == "3"
    for step in range(STEPS + 1):
        weights = model if step == 0 else run / "checkpoints" / f"checkpoint-{step}"
        answers = rows(run, f"eval-{step:06d}")
        expected = greedy(weights, [row["prompt"] for row in answers], 10)
        assert [row["token_ids"] for row in answers] == expected, f"after step {step}"
    assert rows(run, "eval-000000") != rows(run, "eval-000005")  # something was learnt

    lines = [m for m in read_metrics(run) if m["step"] > 0]
    assert [m["step"] for m in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line["sampling/sampling_logp_difference/mean"] < 1e-4
        assert line["sampling/sampling_logp_difference/max"] < 1e-2
    for step in range(1, STEPS + 1):
        assert {row["weights_version"] for row in rows(run, f"step-{step:06d}")} == {step - 1}

    attempt = run / "slurm" / f"{job}.0"
    logs = {p.name for p in attempt.iterdir()}
    assert logs >= {f"rank-{r}.log" for r in range(4)} | {f"node-{n}.log" for n in range(3)}
    assert logs >= {"engine-0.log", "server.json", "ended.json"}
    assert "step 5/5" in Path(job_log(run, job)).read_text()
    assert json.loads((attempt / "server.json").read_text())["address"] != "127.0.0.1"


def engine_seconds(log: Path) -> float:
    """From an engine's start to its being ready, as its node's log has it."""
    at = {}
    for line in log.read_text().splitlines():
        for what in ("starting 1 vLLM engine", "engines ready"):
            if what in line:
                hours, minutes, seconds = map(int, line.split()[0].split(":"))
                at[what] = 3600 * hours + 60 * minutes + seconds
    return float((at["engines ready"] - at["starting 1 vLLM engine"]) % 86400)


def job_log(run: Path, job: str) -> Path:
    return run / "slurm" / f"job-{job}.log"


def test_the_first_step_is_the_same_on_any_number_of_nodes(
    cluster: Cluster, shipped: Path, tmp_path: Path, model: Path
) -> None:
    """2, 3 and 5 nodes, of 1, 4 and 4 ranks: same prompts, same greedy answers, same samples, same gradient."""
    runs = [shipped]
    for nodes in (2, 5):
        more = [f"cluster.nodes={nodes}", "cluster.nproc_per_node=1", "train.max_steps=1"]
        job = cluster.submit(SHIPPED, *overrides(tmp_path, model, f"nodes{nodes}", *more))
        cluster.wait_for(job, "COMPLETED", timeout_seconds=400)
        runs.append(tmp_path / f"nodes{nodes}")
    answers = [rows(run, "eval-000000") for run in runs]
    samples = [rows(run, "step-000001") for run in runs]
    norms = [next(m["grad_norm"] for m in read_metrics(run) if m["step"] == 1) for run in runs]
    for found, sampled, norm in zip(answers[1:], samples[1:], norms[1:], strict=True):
        assert without_noise(found, answers[0]) == answers[0]
        drafted = [[r["prompt"] for r in step if r["stage"] == "draft"] for step in (sampled, samples[0])]
        assert drafted[0] == drafted[1]
        assert [r["token_ids"] for r in sampled] == [r["token_ids"] for r in samples[0]]
        assert norm > 0 and abs(norm - norms[0]) <= 1e-5 * max(1.0, norms[0])


def without_noise(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Log-probs within 1e-4 count as equal: the engine's sums depend on what it computes together."""
    for row, other in zip(found, expected, strict=True):
        assert row["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)
        row["logprobs"] = other["logprobs"]
    return found


@pytest.mark.long
def test_engines_that_die_cost_no_step(cluster: Cluster, tmp_path: Path, model: Path) -> None:
    """kill -9 of an engine, then the crash of its node: the run finishes, every step once, by current weights.

    While something is done to it, the run is held in the middle of a step.
    """
    hold = tmp_path / "hold"
    rewards = f'rewards={{"{SLOW_REWARD}:slowly": {{weight: 1.0, seconds: 0.7, hold: {hold}}}}}'
    job = cluster.submit(
        SHIPPED,
        *overrides(tmp_path, model, "dying", rewards, "cluster.nproc_per_node=1", "train.max_steps=8"),
    )
    run = tmp_path / "dying"

    def step() -> int:
        return max((m["step"] for m in read_metrics(run)), default=0)

    cluster.until(lambda: step() >= 2, "step 2", timeout_seconds=300)
    hold.touch()
    stranger(cluster, run, job)
    began, server = time.monotonic(), json.loads((run / "slurm" / f"{job}.0" / "server.json").read_text())
    assert len(server["engines"]) == 1
    [engine] = [p for p in cluster.processes("vllm_extension") if p.node == server["host"]][:1]
    at = step()
    cluster.kill([engine])
    hold.unlink()
    cluster.until(lambda: step() >= at + 2, "two steps after the engine died", timeout_seconds=300)
    REPORT.append(f"kill -9 of an engine: next step but one after {time.monotonic() - began:.0f} s")
    assert cluster.job(job)["Restarts"] == "0"

    hold.touch()
    began, at = time.monotonic(), step()
    cluster.crash(server["host"])
    cluster.wait_for(job, lambda fields: fields["Restarts"] == "1")
    hold.unlink()
    cluster.until(lambda: step() > at, "a step after the vLLM node crashed", timeout_seconds=400)
    REPORT.append(f"crash of the vLLM node: next step after {time.monotonic() - began:.0f} s")
    fields = cluster.wait_for(job, "COMPLETED", timeout_seconds=400)
    assert fields["Restarts"] == "1"
    lines = [m for m in read_metrics(run) if m["step"] > 0]
    assert [m["step"] for m in lines] == list(range(1, 9))
    positions = [sorted({r["position"] for r in rows(run, f"step-{n:06d}")}) for n in range(1, 9)]
    assert positions == [list(range(16 * n, 16 * (n + 1))) for n in range(8)]
    assert all(m["sampling/sampling_logp_difference/mean"] < 1e-4 for m in lines)


@pytest.mark.long
def test_a_run_that_hangs_leaves_its_stacks_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    """A user's reward that never returns: the idle watchdog ends the start, and the next one finishes."""
    hanging = ROOT / "tests" / "programs" / "hanging_reward.py"
    config = write_cluster_config(tmp_path, name="hanging", nodes=2, steps=4, save_steps=1)
    rewards = f'rewards={{"{hanging}:hangs_once": 1.0}}'
    job = cluster.submit(config, rewards, "cluster.idle_timeout_min=0.3")
    fields = cluster.wait_for(job, "COMPLETED", timeout_seconds=400)
    assert fields["Restarts"] == "1"
    run = tmp_path / "logs" / "hanging"
    first = json.loads((run / "slurm" / f"{job}.0" / "ended.json").read_text())
    assert "idle for" in first["reason"] and first["requeued"] and first["last_step"] == 2
    for rank in range(2):
        log = (run / "slurm" / f"{job}.0" / f"rank-{rank}.log").read_text()
        assert "wait_for_the_service_that_never_answers" in log
    assert [m["step"] for m in read_metrics(run)] == [1, 2, 3, 4]


@pytest.mark.long
def test_a_start_that_was_taken_for_dead_writes_nothing_more(cluster: Cluster, tmp_path: Path) -> None:
    """Only a node's slurmd dies: Slurm starts the job elsewhere while the old processes still run there.

    Then node 0's launcher alone is killed, which Slurm takes for the job's end: the next node requeues it.
    """
    config = write_cluster_config(tmp_path, name="orphan", nodes=2, steps=40, save_steps=1, step_seconds=1.5)
    job = cluster.submit(config)
    run = tmp_path / "logs" / "orphan"
    cluster.until(lambda: len(read_metrics(run)) >= 2, "step 2", timeout_seconds=200)
    lead = json.loads((run / "slurm" / f"{job}.0" / "server.json").read_text())["host"]
    try:
        cluster.enter(lead, "pkill", "-x", "slurmd")
        cluster.wait_for(job, lambda f: f["Restarts"] == "1" and f["JobState"] == "RUNNING")
        again = run / "slurm" / f"{job}.1"
        cluster.until(again.exists, "the next start", timeout_seconds=60)
        cluster.until(
            lambda: not cluster.processes(OURS, node=lead), "the old start's end", timeout_seconds=90
        )
        before = len(read_metrics(run))
        cluster.until(lambda: len(read_metrics(run)) >= before + 2, "two more steps", timeout_seconds=200)
        assert cluster.job(job)["Restarts"] == "1"
        launcher = json.loads((again / "server.json").read_text())["host"]
        cluster.kill(cluster.processes(LAUNCHER, node=launcher))  # its node stays
        cluster.wait_for(job, lambda f: f["Restarts"] == "2" and f["JobState"] == "RUNNING")
        steps = [m["step"] for m in read_metrics(run)]
        assert steps == list(range(1, len(steps) + 1))
    finally:
        cluster.cancel(job)
        cluster.crash(lead)
        cluster.boot(lead)


def stranger(cluster: Cluster, run: Path, job: str) -> None:
    """Another node without the secret: everything but /health is closed to it."""
    server = json.loads((run / "slurm" / f"{job}.0" / "server.json").read_text())
    url = server["engines"][0]["url"]
    script = (
        "import json, sys, urllib.error, urllib.request\n"
        "codes = {}\n"
        "for method, path in json.loads(sys.argv[2]):\n"
        "    for header in ({}, {'Authorization': 'Bearer wrong'}):\n"
        "        request = urllib.request.Request(sys.argv[1] + path, data=b'{}' if method == 'POST' else None,\n"
        "                                         headers=header, method=method)\n"
        "        try: codes.setdefault(path, set()).add(urllib.request.urlopen(request, timeout=10).status)\n"
        "        except urllib.error.HTTPError as error: codes.setdefault(path, set()).add(error.code)\n"
        "print(json.dumps({path: sorted(found) for path, found in codes.items()}))\n"
    )
    closed = [
        ["POST", "/collective_rpc"],
        ["POST", "/v1/completions"],
        ["POST", "/pause"],
        ["POST", "/hpcgrpo/version"],
        ["GET", "/hpcgrpo/state"],
        ["GET", "/metrics"],
        ["GET", "/openapi.json"],
        ["GET", "/no/such/path"],
    ]
    asked = json.dumps([*closed, ["GET", "/health"]])
    done = cluster.enter("node5", "/usr/bin/env", "python3", "-c", script, url, asked)
    codes = json.loads(done.stdout)
    assert codes.pop("/health") == [200]
    assert codes == {path: [401] for _, path in closed}
