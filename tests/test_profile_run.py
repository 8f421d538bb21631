"""`hpcgrpo profile`: what is run, that it runs so, and the table by hand from what the runs measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from runs import hpcgrpo, make_model

from hpcgrpo import config, profile_run, profile_table, tiny
from hpcgrpo.config import ConfigError
from hpcgrpo.generation.forced import ForcedGenerator
from hpcgrpo.generation.transformers import TransformersGenerator
from hpcgrpo.generation.wire import body
from hpcgrpo.launch import follow, submit
from hpcgrpo.profile_run import Options
from hpcgrpo.sections import RunConfig
from hpcgrpo.types import Request, Sampling

CONFIG = """
name: small
model_name_or_path: {model}
algorithm: {{name: grpo, num_generations: 4, epsilon: 0.3, beta: 0.01}}
rewards: {{accuracy: 1.0}}
data: {{preset: chain, max_samples: 40, options: {{digits: 4}}}}
generation: {{max_prompt_length: 32, max_completion_length: 24}}
train: {{train_batch_size: 8, num_train_epochs: 3}}
eval: {{data: {{preset: chain, max_samples: 8, options: {{digits: 4}}}}}}
cluster: {{nproc_per_node: 2}}
output_dir: {folder}
device: cpu
"""
TWO_STAGES = {"name": "igrpo", "drafts": 4, "base": {"name": "grpo", "num_generations": 4}}


def base(tmp_path: Path, **changes: Any) -> RunConfig:
    values = config.load("x.yaml", text=CONFIG.format(model="models/none", folder=tmp_path)).model_dump(
        mode="json"
    )
    return config.parse(values | changes)


def specifications(run: RunConfig, *names: str) -> dict[str, Any]:
    found = profile_run.runs_of(run, Options(algorithms=names))
    return {label: each.algorithm for label, each in found.items()}


# ---- what is run


def test_by_default_grpo_igrpo_and_the_configurations_own(tmp_path: Path) -> None:
    plain = {"epsilon": 0.3, "beta": 0.01}
    assert specifications(base(tmp_path)) == {
        "grpo": {"name": "grpo", "num_generations": 4, **plain},
        "igrpo": {"name": "igrpo", "drafts": 2, "base": {"name": "grpo", "num_generations": 2, **plain}},
    }
    inner = {"name": "dapo", "num_generations": 4, "epsilon_high": 0.28}
    own = {"name": "cppo", "pruning_rate": 0.5, "base": inner}
    assert specifications(base(tmp_path, algorithm=own)) == {
        "grpo": {"name": "grpo", "num_generations": 4, "epsilon_high": 0.28},
        "igrpo": {"name": "igrpo", "drafts": 2, "base": inner | {"num_generations": 2}},
        "cppo": own,
    }


def test_grpo_beside_igrpo_samples_as_much(tmp_path: Path) -> None:
    found = specifications(base(tmp_path, algorithm=TWO_STAGES))
    assert found == {"grpo": {"name": "grpo", "num_generations": 8}, "igrpo": TWO_STAGES}


def test_other_algorithms_by_name_and_by_file(tmp_path: Path) -> None:
    path = tmp_path / "half.yaml"
    path.write_text(
        CONFIG.format(model="m", folder="logs")
        .replace("{name: grpo,", "{name: cppo, pruning_rate: 0.5, base: {name: grpo,")
        .replace("beta: 0.01}", "beta: 0.01}}")
    )
    found = specifications(base(tmp_path), "gspo", str(path))
    assert found["gspo"]["name"] == "gspo" and found["gspo"]["num_generations"] == 4
    plain = {"name": "grpo", "num_generations": 4, "epsilon": 0.3, "beta": 0.01}
    assert profile_run.algorithm_of(base(tmp_path), "kdrl")[1] == {"name": "kdrl", "base": plain}
    assert found["half"]["pruning_rate"] == 0.5
    runs = profile_run.runs_of(base(tmp_path), Options(algorithms=("grpo",), steps=3, warm_up=2))
    assert runs["grpo"].folder == tmp_path / "small-profile" / "grpo"
    assert (runs["grpo"].train.max_steps, runs["grpo"].eval, runs["grpo"].report_to) == (5, None, ())


@pytest.mark.parametrize(
    ("names", "changes", "said"),
    [
        (("igrop",), {}, r"igrop: no algorithm \(did you mean igrpo\?\) and no YAML file"),
        (("grpo", "grpo"), {}, "has grpo twice"),
        (("kdrl",), {}, "kdrl cannot be run with this configuration: .*peer"),
        (("cppo",), {}, "cppo cannot be run .*pruning_rate is missing.* --algorithms grpo,my-run.yaml"),
        (("nothing.yaml",), {}, "nothing.yaml"),
        (
            ("grpo", "igrpo"),
            {"algorithm": TWO_STAGES, "train": {"per_device_train_batch_size": 6}},
            "batch of 12 completions .*: of a prompt grpo trains 8, igrpo trains 4.* train.train_batch_size=8, and"
            " another value or none to train.per_device_train_batch_size",
        ),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    tmp_path: Path, names: tuple[str, ...], changes: dict[str, Any], said: str
) -> None:
    run = base(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"(?s){said}"):
        profile_run.runs_of(run, Options(algorithms=names))


@pytest.mark.parametrize(
    ("batch", "ranks", "shares", "common"),
    [
        (16, 1, {"grpo": 6, "igrpo": 4}, 12),  # 12 and 24 are multiples of both
        (20, 1, {"grpo": 6, "igrpo": 4}, 24),
        (12, 1, {"grpo": 8, "igrpo": 4}, 8),  # as near as 16
        (4, 1, {"grpo": 6, "igrpo": 4}, 12),
        (24, 1, {"grpo": 6, "igrpo": 4}, 24),
        (20, 1, {"grpo": 12, "igrpo": 4}, 24),
        (100, 4, {"grpo": 6, "igrpo": 2}, 96),  # a fourth of it for each rank, as of 100
    ],
)
def test_one_batch_size_serves_all_algorithms(
    tmp_path: Path, batch: int, ranks: int, shares: dict[str, int], common: int
) -> None:
    own = {"name": "grpo", "num_generations": shares["igrpo"]}
    run = base(tmp_path, algorithm=own, train={"train_batch_size": batch}, cluster={"nproc_per_node": ranks})
    assert profile_run.common_batch(run, shares) == common


def test_another_batch_size_is_told(tmp_path: Path) -> None:
    spec = {"name": "igrpo", "drafts": 2, "base": {"name": "grpo", "num_generations": 4}}
    run = base(tmp_path, algorithm=spec, train={"train_batch_size": 16})
    runs = profile_run.runs_of(run, Options())
    assert {label: each.train.train_batch_size for label, each in runs.items()} == {"grpo": 12, "igrpo": 12}
    (note,) = profile_run.batch_notes(run, runs)
    assert "train.train_batch_size 12, not the configuration's 16" in note
    assert "grpo trains 6, igrpo trains 4" in note
    line = {"epoch": 0.5, "epoch_position": 60.0}  # of 120 questions, 12 / 6 and 12 / 4 a step
    assert [profile_run.full_length(run, each, line) for each in runs.values()] == [60, 40]
    kept = base(tmp_path, algorithm=spec, train={"train_batch_size": 24})
    assert profile_run.batch_notes(kept, profile_run.runs_of(kept, Options())) == []


# ---- what lies in the profile's folder


REQUESTED = '{"lengths": null}\n'


def measure(run: RunConfig, steps: int) -> None:
    """Files as a measured run of so many steps leaves them."""
    run.folder.mkdir(parents=True)
    (run.folder / profile_run.REQUEST).write_text(REQUESTED)
    (run.folder / "config.yaml").write_text(config.to_yaml(run))
    lines = (json.dumps({"step": step}) + "\n" for step in range(1, steps + 1))
    (run.folder / "metrics.jsonl").write_text("".join(lines))


def take(tmp_path: Path, runs: dict[str, RunConfig]) -> list[dict[str, Any]]:
    lock, kept = profile_run._take(tmp_path / "small-profile", runs, REQUESTED)
    lock.close()
    return kept


def test_a_profile_replaces_what_it_measures_again_and_keeps_the_rest(tmp_path: Path) -> None:
    run = base(tmp_path)
    both = profile_run.runs_of(run, Options(algorithms=("grpo", "igrpo")))
    for each in both.values():
        measure(each, 7)
    how = {"steps": 5, "warm_up": 2, "lengths": None}
    result = tmp_path / "small-profile" / profile_run.RESULT
    result.write_text(json.dumps(how | {"rows": [{"name": "grpo", "s": 1}, {"name": "igrpo", "s": 2}]}))
    kept = take(tmp_path, {"grpo": both["grpo"]})
    assert kept == [{"name": "igrpo", "profile": how, "s": 2}]
    assert not both["grpo"].folder.exists() and both["igrpo"].folder.exists()
    assert (
        take(tmp_path, profile_run.runs_of(run, Options(algorithms=("gspo",)))) == kept
    )  # after a stop, too
    assert take(tmp_path, both) == []


def test_a_stopped_profile_goes_on_with_the_algorithm_at_hand(tmp_path: Path) -> None:
    runs = profile_run.runs_of(base(tmp_path), Options(algorithms=("grpo", "igrpo")))
    take(tmp_path, runs)
    measure(runs["grpo"], 7)
    measure(runs["igrpo"], 4)
    take(tmp_path, runs)
    assert profile_run.is_measured(runs["grpo"], REQUESTED)
    assert not runs["igrpo"].folder.exists()
    longer = profile_run.runs_of(base(tmp_path), Options(algorithms=("grpo",), steps=6))
    assert not profile_run.is_measured(longer["grpo"], REQUESTED)
    assert not profile_run.is_measured(runs["grpo"], '{"lengths": [6]}\n')


def test_a_live_job_of_this_very_run_is_followed_and_no_other_one_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = base(tmp_path, model_name_or_path=str(make_model(tmp_path / "model")))
    runs = profile_run.runs_of(asked, Options(algorithms=("grpo",)))
    run = runs["grpo"]
    take(tmp_path, runs)
    measure(run, 0)
    monkeypatch.setattr(follow, "LEAVING_SECONDS", 0.0)
    # what submit takes for a job on this machine: a live process whose command names submitit
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()", "submitit"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE) as process:
        job = f"local{process.pid}"
        submit.record_job(run.folder, job, [tmp_path / "log"], executor="local")
        longer = profile_run.runs_of(asked, Options(algorithms=("grpo",), steps=6))
        with pytest.raises(ConfigError, match=rf"as job {job} \(RUNNING\); end it with `kill {process.pid}`"):
            take(tmp_path, longer)
        take(tmp_path, runs)
        assert run.folder.exists()
        ended = {"job": job, "code": 3, "reason": "as the job says"}
        (run.folder / "slurm" / "ended.json").write_text(json.dumps(ended))
        assert profile_run.launch(run, "local") == 3
    take(tmp_path, runs)
    assert not run.folder.exists()


def test_lengths_are_a_number_or_a_runs(tmp_path: Path) -> None:
    run = base(tmp_path)
    assert profile_run.forced_lengths(None, run) is None
    assert profile_run.forced_lengths("24", run) == [24]
    rows = [{"token_ids": [1] * n} for n in (9, 3)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert profile_run.forced_lengths(str(path), run) == [3, 9]
    for asked in ("25", "0"):
        with pytest.raises(ValueError, match="max_completion_length is 24"):
            profile_run.forced_lengths(asked, run)
    with pytest.raises(ValueError, match="no such run or file"):
        profile_run.forced_lengths("-3", run)


# ---- forced lengths


def test_completions_have_the_lengths_that_are_forced() -> None:
    model = tiny.build_tiny_model(seed=0)
    plain = TransformersGenerator(model, decode=str, eos_token_ids=range(64), max_batch_tokens=200)
    requests = [Request(tuple(range(2, 5 + n)), seed) for n in (0, 3) for seed in range(7)]
    sampling = Sampling(1.0, 12)
    assert min(len(c.token_ids) for c in plain.generate(requests, sampling)) == 1  # half of all tokens end it
    forced = ForcedGenerator(plain, [12, 3, 7, 40, 1])
    done = forced.generate(requests, sampling)
    assert [len(c.token_ids) for c in done] == [[12, 3, 7, 12, 1][r.seed % 5] for r in requests]
    assert {c.finish_reason for c in done if len(c.token_ids) < 12} == {"stop"}
    assert {c.finish_reason for c in done if len(c.token_ids) == 12} == {"length"}
    assert forced.take_decoded()[""].steps >= 11
    for completion in done:  # what was sampled is the model's own: the log-probs are those of its tokens
        request = requests[done.index(completion)]
        ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids[:, :-1]).logits[0, len(request.prompt_token_ids) - 1 :]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert torch.allclose(wanted, torch.tensor(completion.logprobs), atol=2e-5)


def test_a_length_beyond_the_longest_is_refused() -> None:
    generator = TransformersGenerator(tiny.build_tiny_model(seed=0), decode=str, eos_token_ids=[1])
    with pytest.raises(ValueError, match="5 tokens was asked for, but max_completion_length is 4"):
        generator.generate([Request((2, 3), 0, length=5)], Sampling(1.0, 4))
    with pytest.raises(ValueError, match="at least one"):
        ForcedGenerator(generator, [])


def test_vllm_is_asked_for_the_length_and_nothing_ends_it() -> None:
    asked = json.loads(body(Request((1, 2), 3, length=9), Sampling(0.7, 20), model="m", stop_token_ids=[7]))
    assert (asked["max_tokens"], asked["stop_token_ids"], asked["ignore_eos"]) == (9, [], True)
    free = json.loads(body(Request((1, 2), 3), Sampling(0.7, 20), model="m", stop_token_ids=[7]))
    assert (free["max_tokens"], free["stop_token_ids"]) == (20, [7])


# ---- the table


def test_differences_are_against_the_first_row() -> None:
    rows = {
        "grpo": {
            "peak_memory_gb": 54.9286,
            "samples_per_second": 0.41,
            "gpu_hours": 83.3,
            "step_seconds": 312.0,
        },
        "igrpo": {
            "peak_memory_gb": 54.9349,
            "samples_per_second": 0.34,
            "gpu_hours": 94.1,
            "step_seconds": 376.0,
        },
    }
    found = profile_run.compared(rows)["igrpo"]["differences"]
    assert found["peak_memory_gb"] == pytest.approx(0.0063)
    assert found["samples_per_second"] == pytest.approx(-0.1707, abs=1e-4)
    assert found["gpu_hours"] == pytest.approx(0.1297, abs=1e-4)  # the paper's +13 %


def rows() -> list[dict[str, Any]]:
    """A second row that differs from the first by as much as a table must bear."""
    first = {"peak_memory_gb": 54.9286, "samples_per_second": 0.41, "gpu_hours": 83.3, "step_seconds": 312.0}
    second = {
        "peak_memory_gb": 154.9349,
        "samples_per_second": 155.0,
        "gpu_hours": 30649.6,
        "step_seconds": 376.0,
    }
    found = profile_run.compared({"grpo": first, "co-distillation": second})
    return [{"name": name, "steps": 14000, **row} for name, row in found.items()]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_table_is_never_cut(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    said = {"name": "small", "steps": 5, "warm_up": 2, "lengths": None, "rows": rows(), "published": {}}
    profile_table.show(said | {"notes": [], "kept": [{"name": "gspo"}]})
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    assert "…" not in shown and all(len(line) <= width for line in shown.splitlines())
    for text in ("54.9286", "+100.0063", "155", "+37704.9%", "3.06e+04", "+36694.2%", "14,000", "376"):
        assert text in words
    assert "Kept from earlier profiles, in profiled.json: gspo." in words
    assert ("diff." in words) == (width == 120)
    assert ("co-distillation: peak GB 154.9349 (+100.0063), samples/s 155 (+37704.9%)" in words) == (
        width < 120
    )


@pytest.mark.slow
def test_two_algorithms_are_measured_and_compared(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(model=make_model(tmp_path / "model"), folder=tmp_path / "logs"))
    own = tmp_path / "logs" / "small"
    own.mkdir(parents=True)
    (own / "metrics.jsonl").write_text("of the run itself\n")
    options = ("profile", str(path), "--steps", "2", "--warm-up", "1", "--lengths", "6")
    done = hpcgrpo(*options, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [row["name"] for row in said["rows"]] == ["grpo", "igrpo"]
    home = tmp_path / "logs" / "small-profile"
    for row in said["rows"]:
        lines = [json.loads(text) for text in (home / row["name"] / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert {line["completions/mean_length"] for line in lines} == {6.0}
        seconds = [line["step_time"] for line in lines[1:]]
        assert row["step_seconds"] == pytest.approx(fmean(seconds))
        # 2 optimizer steps x 4 completions a device x 2 devices
        assert row["samples_per_second"] == pytest.approx(2 * 4 * 2 / sum(seconds))
        assert row["peak_memory_gb"] == lines[-1]["perf/peak_memory_gb"]
        assert sum(
            row["phase_seconds"].get(p, 0.0) for p in row["phase_seconds"] if "/" not in p
        ) == pytest.approx(row["step_seconds"], rel=0.02)
        # 40 questions 3 times: of 4 completions each 2 a step, of 2 completions each 4 a step
        steps = {"grpo": 60, "igrpo": 30}[row["name"]]
        assert row["steps"] == steps
        assert row["cpu_rank_hours"] == pytest.approx(2 * steps * row["step_seconds"] / 3600)
        assert not (home / row["name"] / "checkpoints").exists() or not any(
            (home / row["name"] / "checkpoints").iterdir()
        )
    assert (own / "metrics.jsonl").read_text() == "of the run itself\n"
    again = hpcgrpo(*options[:-2], "--algorithms", "grpo")
    assert again.returncode == 0, again.stderr
    assert f"replacing the earlier grpo in {home}" in again.stderr
    assert "peak GB" in again.stdout and "54.9286" in again.stdout
    kept = json.loads((home / "profiled.json").read_text())
    assert [row["name"] for row in kept["rows"]] == ["grpo"] and kept["runs"] == ["grpo", "igrpo"]
    assert kept["kept"][0]["step_seconds"] == said["rows"][1]["step_seconds"]
    assert kept["kept"][0]["profile"] == {"steps": 2, "warm_up": 1, "lengths": "6"}
    claimed = hpcgrpo(
        "profile", str(path), "name=small-profile", f"output_dir={tmp_path / 'logs'}", "--steps", "0"
    )
    assert claimed.returncode == 2 and "measure 1 step or more" in claimed.stderr


@pytest.mark.slow
def test_several_nodes_are_measured_as_a_job_here(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(model=make_model(tmp_path / "model"), folder=tmp_path / "logs"))
    changes = ["cluster.nodes=2", "cluster.nproc_per_node=1", "cluster.interface=lo"]
    command = [sys.executable, "-m", "hpcgrpo.cli", "profile", str(path), *changes]
    asked = ["--algorithms", "grpo", "--steps", "1", "--warm-up", "1", "--json"]
    done = subprocess.run([*command, *asked], capture_output=True, text=True, timeout=280, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[node 1]" in done.stderr
    assert json.loads(done.stdout)["rows"][0]["samples_per_second"] > 0
