"""Studies: the runs that a file means, what is refused before any starts, the numbers, and real ones to their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import make_model, metrics

from hpcgrpo import config
from hpcgrpo.config import ConfigError
from hpcgrpo.study import command, design, local, plots, prepare, results, statistics, tables
from hpcgrpo.study.cells import slug
from hpcgrpo.study.design import Study
from hpcgrpo.study.warm_start import admitted, task_options

ROOT = Path(__file__).parents[1]
SLOW_REWARD = Path(__file__).parent / "programs" / "slow_reward.py"
BASE = """
name: base
model_name_or_path: {model}
algorithm: {{name: grpo, num_generations: 4, beta: 0.01}}
rewards: {{accuracy: {{weight: 1.0, require_box_or_tag: false}}}}
data: {{preset: chain, max_samples: 64, options: {{digits: 4}}}}
generation: {{max_prompt_length: 32, max_completion_length: 8}}
train: {{train_batch_size: 8, max_steps: 4, learning_rate: 1.0e-3, save_steps: 1}}
cluster: {{threads_per_rank: 1}}
grader_processes: 1
report_to: []
"""
STUDY = """
name: small
base: base.yaml
axes:
  arm:
    GRPO 4: {}
    iGRPO 2 + 4: {algorithm: {name: igrpo, drafts: 2, base: {name: grpo, num_generations: 4}}}
  seed: [0, 1]
compare: arm
metrics: {reward: {last: 2}, completions/sampled: sum, step_time: median}
"""


def write(folder: Path, study: str = STUDY, *, model: str = "nowhere") -> Path:
    """A base run and a study beside it -> the study's path."""
    (folder / "base.yaml").write_text(BASE.format(model=model))
    path = folder / "study.yaml"
    path.write_text(study)
    return path


def loaded(folder: Path, study: str = STUDY, *overrides: str) -> Study:
    return design.load(write(folder, study), overrides, output_dir=str(folder / "logs"))


def refused(folder: Path, study: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        loaded(folder, study, *overrides)
    return str(error.value)


def axes(text: str) -> str:
    return f"name: small\nbase: base.yaml\naxes:\n  {text}\n"


# ---- the runs


def test_the_runs_are_the_product_of_the_axes(tmp_path: Path) -> None:
    study = loaded(tmp_path)
    assert [c.name for c in study.cells] == [
        "GRPO-4_seed0",
        "GRPO-4_seed1",
        "iGRPO-2-4_seed0",
        "iGRPO-2-4_seed1",
    ]
    last = study.cells[-1].run
    assert last.folder == tmp_path / "logs" / "small" / "iGRPO-2-4_seed1"
    assert (last.seed, last.algorithm["name"], last.algorithm["base"]) == (
        1,
        "igrpo",
        {"name": "grpo", "num_generations": 4},  # replaced as a whole: no beta of the base run's
    )
    assert study.cells[0].run.algorithm["beta"] == 0.01
    assert (study.compare, study.pair, study.baseline) == (("arm",), ("seed",), "GRPO 4")


def test_overrides_are_nested_or_dotted_and_the_nearest_wins(tmp_path: Path) -> None:
    text = """
name: small
base: base.yaml
set: {train: {learning_rate: 0.5, max_steps: 3}, data.options: {size: 9}}
axes:
  algorithm.beta: [0.0, 1e-4]
  rate: {low: {train.learning_rate: 1e-5}, same: {}}
  seed: [7]
skip: [{algorithm.beta: [0.0], rate: same}]
"""
    study = loaded(tmp_path, text, "train.save_steps=2", "name=other", "axes.seed=[3]")
    assert [(c.name, c.run.train.learning_rate, c.run.algorithm["beta"]) for c in study.cells] == [
        ("beta0.0_low_seed3", 1e-5, 0.0),
        ("beta0.0001_low_seed3", 1e-5, 1e-4),
        ("beta0.0001_same_seed3", 0.5, 1e-4),
    ]
    run = study.cells[0].run
    assert (run.train.max_steps, run.train.save_steps, run.train.train_batch_size) == (3, 2, 8)
    assert run.data.options == {"digits": 4, "size": 9} and run.output_dir == str(tmp_path / "logs" / "other")
    assert study.compare == ("algorithm.beta", "rate")  # all but the seed
    assert study.labels == ["0.0 / low", "0.0001 / low", "0.0001 / same"]


def test_names_are_safe_and_distinct(tmp_path: Path) -> None:
    text = axes('arm: {a b: {}, a+b: {}, "A/B": {}, "../x": {}, "β 1": {}, "—": {}}')
    names = [c.name for c in loaded(tmp_path, text).cells]
    assert names == ["a-b", "a-b-2", "A-B-3", "x", "1", "x-2"]
    assert slug("iGRPO 4 + 4, lr 1e-4") == "iGRPO-4-4-lr-1e-4"


REFUSED = [
    (STUDY.replace("seed: [0, 1]", "sede: [0, 1]"), "cell arm=GRPO 4, sede=0 (and in 3 more): run: sede: unknown key"),
    (STUDY.replace("num_generations: 4}}}", "num_generation: 4}}}"), "cell arm=iGRPO 2 + 4, seed=0 (and in 1 more)"),
    (axes("train.train_batch_size: [8, 9]"), "cell train.train_batch_size=9: run: the batch of completions"),
    (STUDY.replace("compare: arm", "compare: arms"), "compare: 'arms' is no axis; did you mean arm?"),
    (STUDY + "baseline: GRPO 8\n", "baseline: 'GRPO 8' is no label that is compared; did you mean GRPO 4?"),
    (STUDY + "group: [arm]\n", "group: arm: must be among pair (seed)"),
    (STUDY + "pair: [arm]\n", "pair: arm is compared"),
    (STUDY + "skip: [{arm: GRPO}]\n", "skip: arm has no label 'GRPO'; did you mean GRPO 4?"),
    (STUDY + "skip: [{seed: [0, 1]}]\n", "skip leaves no run"),
    (STUDY + "basline: GRPO 4\n", "basline: unknown key of a study; did you mean baseline?"),
    (STUDY.replace("sum", "total"), "metrics: completions/sampled: 'total': write one of first, last"),
    (STUDY.replace("{last: 2}", "{last: 0}"), "metrics: reward: {'last': 0}: write one of"),
    (STUDY.replace("GRPO 4: {}", "GRPO 4: {seed: 3}"), "seed is set by the axes arm and seed"),
    (STUDY.replace("GRPO 4: {}", "GRPO 4: {name: x}"), "arm: name is set by the study itself"),
    (axes("seed: []"), "axes: seed is empty"),
    (axes("seed: [1, 1]"), "holds a value twice"),
    (axes("data: [{preset: chain}]"), "give what is no plain value a label"),
    ("name: a\naxes: {seed: [1]}\n", "base: required, but missing"),
    ("name: a/b\nbase: base.yaml\naxes: {seed: [1]}\n", "name: String should match pattern"),
    (axes("seed: [1]") + "base: other.yaml\n", "duplicate key"),
    (axes("seed: [1]").replace("base.yaml", "bas.yaml"), "bas.yaml: no such configuration file; did you mean"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_what_is_wrong_is_told_with_its_cell_before_anything_starts(
    tmp_path: Path, text: str, said: str
) -> None:
    assert said in refused(tmp_path, text)
    assert not (tmp_path / "logs").exists()


def test_an_override_that_an_axis_would_undo_is_refused(tmp_path: Path) -> None:
    assert "override seed: the axis seed sets seed itself" in refused(tmp_path, STUDY, "seed=4")
    assert "override 'seed': write it as key.sub=value" in refused(tmp_path, STUDY, "seed")


def test_only_some_runs(tmp_path: Path) -> None:
    study = loaded(tmp_path)
    assert [c.name for c in command.select(study, ["seed=1"])] == ["GRPO-4_seed1", "iGRPO-2-4_seed1"]
    assert len(command.select(study, ["seed=1", "seed=0", "arm=GRPO 4"])) == 2
    for item, said in (
        ("sed=1", "did you mean seed?"),
        ("seed=2", "has no label '2'"),
        ("arm", "no label ''"),
    ):
        with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
            command.select(study, [item])


# ---- preparing


PREPARE = """
prepare:
  - {run: "hpcgrpo warm-start models/{arm} --template '{question}#{draft}'", creates: "made/{arm}/config.json"}
  - {run: "echo {seed} {arm}"}
"""


def test_a_command_is_run_once_for_each_filling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = prepare.commands(loaded(tmp_path, STUDY + PREPARE))
    assert [c.words[1:] for c in found] == [
        ("warm-start", "models/GRPO 4", "--template", "{question}#{draft}"),
        ("warm-start", "models/iGRPO 2 + 4", "--template", "{question}#{draft}"),
        ("0", "GRPO 4"),
        ("1", "GRPO 4"),
        ("0", "iGRPO 2 + 4"),
        ("1", "iGRPO 2 + 4"),
    ]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made" / "GRPO 4").mkdir(parents=True)
    (tmp_path / "made" / "GRPO 4" / "config.json").touch()
    assert [c.outstanding for c in found[:3]] == [False, True, True]
    with pytest.raises(ConfigError, match=r"\{arn\} is no axis; did you mean arm\?"):
        prepare.commands(loaded(tmp_path, STUDY + PREPARE.replace("{seed}", "{arn}")))


def test_a_command_that_fails_or_creates_nothing_is_named(tmp_path: Path) -> None:
    made = tmp_path / "made"
    prepare.run(prepare.Command(("touch", str(made)), made))
    for words, said in (
        (("false",), "false: ended with code 1"),
        (("true",), "mend `creates`"),
        (("no-such-program",), "No such file"),
    ):
        with pytest.raises(ConfigError, match=said):
            prepare.run(prepare.Command(words, tmp_path / "other"))


def test_options_of_a_task_and_the_rule_of_admission() -> None:
    from hpcgrpo.tiny import WarmStart

    assert task_options(["digits=12", "name=x"]) == {"digits": 12, "name": "x"}
    with pytest.raises(ConfigError, match="--option digits: write it as key=value"):
        task_options(["digits"])
    fair = WarmStart(10, 1.0, single=0.50, empty=0.475, right=0.45, corrupted=0.40)
    assert admitted(fair)
    assert not admitted(replace(fair, empty=0.474))
    assert not admitted(replace(fair, corrupted=0.39)) and not admitted(replace(fair, corrupted=0.51))


# ---- numbers


def test_mean_error_and_interval() -> None:
    found = statistics.mean([3.0, 5.0, 7.0])
    assert found is not None and (found.n, found.mean) == (3, 5.0)
    half = 4.302652729911275 * 2 / 3**0.5  # t(0.975, 2), standard deviation 2
    assert found.standard_error == pytest.approx(2 / 3**0.5)
    assert (found.low, found.high) == (pytest.approx(5 - half), pytest.approx(5 + half))
    assert statistics.mean([4.0]) == statistics.Mean(1, 4.0, None, None, None)
    assert statistics.mean([]) is None


def test_differences_are_paired() -> None:
    a, b = {("0",): 3.0, ("1",): 5.0, ("2",): 7.0, ("3",): 99.0}, {("2",): 4.0, ("0",): 2.0, ("1",): 5.0}
    found = statistics.difference(a, b, [0])  # 1, 0, 3; the fourth has no partner
    assert found is not None and found.difference.n == 3
    assert found.difference.mean == pytest.approx(4 / 3) and found.ratio == pytest.approx(15 / 11)
    t = (4 / 3) / ((7 / 3) ** 0.5 / 3**0.5)
    assert found.p_t == pytest.approx(
        1 - t / (2 + t * t) ** 0.5
    )  # Student's t with 2 degrees, in closed form
    assert found.p_wilcoxon is None


def test_signed_ranks_from_six_pairs_on() -> None:
    b = {(str(i),): 0.0 for i in range(6)}
    found = statistics.difference({(str(i),): 1.0 + i for i in range(6)}, b, [0])
    assert found is not None and found.p_wilcoxon == pytest.approx(2 / 2**6)  # all signs alike, both sides
    assert found.ratio is None
    equal = statistics.difference(b, b, [0])
    assert equal is not None and (equal.p_t, equal.p_wilcoxon, equal.difference.mean) == (None, None, 0.0)


def test_groups_are_averaged_before_they_are_compared() -> None:
    a = {("w0", "0"): 1.0, ("w0", "1"): 3.0, ("w1", "0"): 10.0, ("w1", "1"): 20.0}
    b = {("w0", "0"): 0.0, ("w0", "1"): 0.0, ("w1", "0"): 4.0}  # w1, seed 1 is missing
    assert statistics.grouped(a, [0]) == {("w0",): 2.0, ("w1",): 15.0}
    found = statistics.difference(a, b, [0])
    assert found is not None and found.difference.n == 2
    assert found.difference.mean == pytest.approx((2 + 6) / 2)  # w1 over the pair that both have


MEASURED = [
    {"step": 0, "eval": 0.5},
    {"step": 1, "r": 1.0},
    {"step": 2, "r": 4.0, "eval": 0.7},
    {"step": 3, "r": 9.0},
]


@pytest.mark.parametrize(
    ("name", "how", "value"),
    [
        ("eval", "last", 0.7),
        ("eval", "first", 0.5),
        ("r", "median", 4.0),
        ("r", "mean", 14 / 3),
        ("r", "sum", 14.0),
        ("r", "min", 1.0),
        ("r", "max", 9.0),
        ("r", {"last": 2}, 6.5),
        ("r", {"first": 2}, 2.5),
        ("r", {"last": 50}, 14 / 3),
        ("profile/seconds", "last", 7.0),
        ("absent", "last", None),
        ("profile/absent", "last", None),
    ],
)
def test_a_metric_of_a_run_is_one_number(name: str, how: Any, value: float | None) -> None:
    found = results.measure(name, how, MEASURED, {"seconds": 7})
    assert found == (None if value is None else pytest.approx(value))


def finish(study: Study, value: Callable[[Any], float], *, but: tuple[str, ...] = ()) -> None:
    """Leave what a finished run leaves in every cell's folder; of those in `but`, an unfinished one's."""
    for cell in study.cells:
        folder = cell.run.folder
        checkpoint = folder / "checkpoints" / "checkpoint-4"
        checkpoint.mkdir(parents=True)
        state = {"progress": {"step": 4}, "finished": cell.name not in but, "length": [4, 1.0]}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        (checkpoint / "COMPLETE").write_text("{}")
        lines = [{"step": i, "reward": value(cell) * i / 4, "step_time": 2.0} for i in range(1, 5)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


WARM = """
name: small
base: base.yaml
axes:
  arm: {A: {}, B: {algorithm.beta: 0.5}}
  warm: {w0: {data.seed: 0}, w1: {data.seed: 1}}
  seed: [0, 1]
baseline: B
group: [warm]
metrics: {reward: last}
curves: [reward]
published: [{table: Table 1, rows: {A: {AIME25: 38.9}, C: {AIME24: 50}}}]
compare: arm
"""


def test_the_table_of_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = loaded(tmp_path, WARM)
    worth = {"A": 1.0, "B": 0.25}
    finish(
        study,
        lambda c: worth[c.labels["arm"]] + (c.labels["warm"] == "w1") * 0.5 + int(c.labels["seed"]) * 0.1,
        but=("A_w1_seed1",),
    )
    assert command.run(study, command.Options(table_only=True, as_json=True)) == 0
    table = json.loads(capsys.readouterr().out)
    assert table == json.loads((study.folder / "table.json").read_text())
    rows = table["metrics"]["reward"]
    assert list(rows) == ["B", "A"] and table["units"] == ["warm"]
    assert (rows["B"]["n"], rows["B"]["mean"]) == (2, pytest.approx((0.3 + 0.8) / 2))
    assert rows["A"]["mean"] == pytest.approx((1.05 + 1.5) / 2)  # w1 has seed 0 alone
    gap = rows["A"]["against_baseline"]["difference"]
    assert (gap["n"], gap["mean"]) == (2, pytest.approx(0.75))  # over the pairs that both have
    assert "against_baseline" not in rows["B"]
    assert [m["cell"] for m in table["missing"]] == ["A_w1_seed1"]
    text = (study.folder / "table.md").read_text()
    assert "Missing: 1 of 8 runs are not finished: A_w1_seed1 (4 steps)" in text
    assert "## Published: Table 1" in text and "| A | 38.9 |  |" in text and "| C |  | 50.0 |" in text
    runs = json.loads((study.folder / "results.json").read_text())
    assert [r["values"]["reward"] for r in runs][:4] == [1.0, 1.1, 1.5, None]
    for name in ("curves.png", "metrics.png"):
        assert (study.folder / name).read_bytes().startswith(b"\x89PNG")
    tables.show(table)
    assert "Missing: 1 of 8" in capsys.readouterr().out


def test_runs_that_differ_in_other_axes_are_averaged_within_a_pair(tmp_path: Path) -> None:
    study = loaded(tmp_path, WARM.replace("group: [warm]", "pair: [seed]"))
    finish(study, lambda c: 1.0 + (c.labels["warm"] == "w1"))
    outcomes = results.collect(study)
    assert tables.of_label(study, outcomes, "reward", "A") == {("0",): 1.5, ("1",): 1.5}
    assert [p[:2] for p in plots._band(study, outcomes, "reward", "A")] == [
        (1, 0.375),
        (2, 0.75),
        (3, 1.125),
        (4, 1.5),
    ]


def test_a_changed_study_is_refused_over_its_runs(tmp_path: Path) -> None:
    study = loaded(tmp_path)
    finish(study, lambda c: 1.0)
    for cell in study.cells:
        (cell.run.folder / "config.yaml").write_text(config.to_yaml(cell.run))
    assert command.unfinished(study.cells) == []
    assert len(command.unfinished(loaded(tmp_path, STUDY, "train.max_steps=5").cells)) == 4  # to go on
    with pytest.raises(
        ConfigError, match=r"cell GRPO-4_seed0: .*another configuration \(train.learning_rate"
    ):
        command.unfinished(loaded(tmp_path, STUDY, "train.learning_rate=0.1").cells)


# ---- the share of the machine


def test_runs_at_once_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    run = loaded(tmp_path, STUDY, "cluster.threads_per_rank=null", "grader_processes=null").cells[0].run
    assert local.shared(run, 1) == run
    assert (local.shared(run, 4).cluster.threads_per_rank, local.shared(run, 4).grader_processes) == (2, 2)
    given = run.model_copy(update={"cluster": run.cluster.model_copy(update={"threads_per_rank": 3})})
    assert local.shared(given, 16).cluster.threads_per_rank == 3


def test_a_run_of_several_nodes_is_not_for_this_machine(tmp_path: Path) -> None:
    study = loaded(tmp_path, STUDY, "cluster.nodes=2")
    with pytest.raises(
        ConfigError, match=r"GRPO-4_seed0: cluster\.nodes is 2: run the study with --executor slurm"
    ):
        local.run(study.cells, jobs=1, total=4, done=0, say=print)


# ---- real ones


def hpcgrpo(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "hpcgrpo.cli", *arguments], **pipes, **options)


def ended(process: subprocess.Popen[str], timeout_seconds: float = 800) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    finally:
        process.kill()  # and with it all of its runs
    return process.returncode, out, err


def until(met: Callable[[], Any], timeout_seconds: float = 400) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def timeless(table: dict[str, Any]) -> dict[str, Any]:
    return {**table, "metrics": {k: v for k, v in table["metrics"].items() if k != "step_time"}}


def steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def left_running(folder: Path) -> list[str]:
    """Command lines of processes that have a file below the folder open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            files = [str(f.readlink()) for f in (process / "fd").iterdir()]
            command_line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if any(f.startswith(f"{folder}/") for f in files) and int(process.name) != os.getpid():
            found.append(command_line)
    return found


def test_a_dry_run_downloads_nothing_and_says_what_it_could_not_look_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    text = STUDY + "set: {model_name_or_path: nobody/nothing, data: {preset: gsm8k, options: {}}}\n"
    study = loaded(tmp_path, text, "data.options=null")
    assert command.run(study, command.Options(dry_run=True, as_json=True)) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["runs"]) == 4 and not (tmp_path / "logs").exists()
    assert any("hf download nobody/nothing" in note for note in said["notes"])
    missing = loaded(tmp_path, STUDY, "model_name_or_path=./nothing")
    with pytest.raises(ConfigError, match=r"cell GRPO-4_seed0: model_name_or_path .*no such folder"):
        command.run(missing, command.Options())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_study_that_is_killed_and_run_again_gives_the_same_table(tmp_path: Path) -> None:
    """Once killed outright, once ended by SIGTERM, against one that ran through; one of its runs has two ranks."""
    model = make_model(tmp_path / "model")
    text = STUDY.replace("GRPO 4: {}", "GRPO 4: {cluster.nproc_per_node: 2}")
    hold = tmp_path / "hold"  # where it is, iGRPO's runs end their first step, of two calls, and no other
    slowly = f"rewards: {{'{SLOW_REWARD}:slowly': {{weight: 1.0, hold: {hold}, free: 2}}}}"
    text = text.replace("num_generations: 4}}}", f"num_generations: 4}}}}, {slowly}}}")
    path = write(tmp_path, text, model=str(model))

    def study(name: str, *more: str) -> subprocess.Popen[str]:
        return hpcgrpo(
            "study", str(path), "--output-dir", str(tmp_path / name), "--json", "--jobs", "2", *more
        )

    code, out, err = ended(study("whole"))
    assert code == 0, err
    whole = json.loads(out)
    assert not whole["missing"] and "4 of 4 done" in err
    assert whole["metrics"]["completions/sampled"]["iGRPO 2 + 4"]["mean"] == 4 * 2 * 6
    forked = tmp_path / "whole" / "small" / "iGRPO-2-4_seed0"  # a run by itself is the same
    code, out, err = ended(
        hpcgrpo("train", str(forked / "config.yaml"), "name=alone", f"output_dir={tmp_path}")
    )
    assert code == 0, err
    assert metrics(forked) == metrics(tmp_path / "alone")

    first = study("cut")
    until(
        lambda: (
            any(1 <= steps(f) < 4 for f in (tmp_path / "cut" / "small").glob("*")) or first.poll() is not None
        )
    )
    first.kill()
    first.communicate()
    until(lambda: not left_running(tmp_path / "cut"), 60)
    assert sum(map(steps, (tmp_path / "cut" / "small").glob("*"))) < 16
    hold.touch()
    second = study("cut")
    until(lambda: steps(tmp_path / "cut" / "small" / "iGRPO-2-4_seed0") >= 1 or second.poll() is not None)
    second.send_signal(signal.SIGTERM)
    hold.unlink()
    code, out, err = ended(second)
    assert code == 143 and "SIGTERM: " in err and "the same command goes on from here" in err, err
    until(lambda: not left_running(tmp_path / "cut"), 20)
    code, out, err = ended(study("cut"))
    assert code == 0, err
    assert timeless(json.loads(out)) == timeless(whole)


@pytest.mark.slow
def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (tmp_path / "bad.py").write_text(
        "def bad(completions, **columns):\n    raise RuntimeError('out of luck')\n"
    )
    text = STUDY.replace("GRPO 4: {}", f"GRPO 4: {{rewards: {{'{tmp_path}/bad.py:bad': 1.0}}}}")
    path = write(tmp_path, text, model=str(model))
    arguments = ("study", str(path), "train.max_steps=1", "--output-dir", str(tmp_path / "logs"))
    code, out, err = ended(hpcgrpo(*arguments, "--only", "seed=0"))
    assert code == 1
    assert "1 of 2 done, 1 failed" in err and "GRPO-4_seed0 ended with code 2" in err and "out of luck" in err
    assert "Missing: 3 of 4 runs" in out
    assert steps(tmp_path / "logs" / "small" / "iGRPO-2-4_seed0") == 1


@pytest.mark.long
@pytest.mark.slow
def test_a_sweep_is_a_study_and_the_smoke_study_runs_from_nothing(tmp_path: Path) -> None:
    config_path = tmp_path / "base.yaml"
    config_path.write_text(BASE.format(model=make_model(tmp_path / "model")))
    code, out, err = ended(
        hpcgrpo(
            *("train", str(config_path), f"output_dir={tmp_path}/logs", "train.max_steps=1"),
            *("--sweep", "train.learning_rate=1e-4,2e-4", "--sweep", "seed=0,1", "--jobs", "2"),
        )
    )
    assert code == 0, err
    table = json.loads((tmp_path / "logs" / "base-sweep" / "table.json").read_text())
    assert (table["compare"], table["baseline"], table["units"]) == (
        ["train.learning_rate"],
        "0.0001",
        ["seed"],
    )
    assert table["metrics"]["reward"]["0.0002"]["n"] == 2
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    smoke = ("study", "configs/studies/smoke.yaml", "--json", "--only", "seed=0")
    code, out, err = ended(hpcgrpo(*smoke, "--dry-run", cwd=tmp_path))
    assert code == 0 and json.loads(out)["prepare"] == ["hpcgrpo tiny-model models/tiny"], err
    assert not (tmp_path / "models").exists()
    code, out, err = ended(hpcgrpo(*smoke, cwd=tmp_path))
    assert code == 0, err
    assert json.loads(out)["metrics"]["completions/sampled"]["iGRPO 4 + 4"]["mean"] == 32


def test_a_sweep_adds_up_and_a_study_that_never_ran_has_no_table(tmp_path: Path) -> None:
    swept = command.sweep(str(ROOT / "configs" / "quickstart.yaml"), [], ["seed=0,1", "seed=2"])
    assert [axis.name for axis in swept.axes] == ["seed"]
    assert list(swept.axes[0].sets) == ["0", "1", "2"]
    study = design.load(ROOT / "configs" / "studies" / "smoke.yaml", output_dir=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="none of the study's runs has been started"):
        command.run(study, command.Options(table_only=True))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("axes", [{"seed": None}, {"seed": 3}, {"arm": {1: {}}}])
def test_axes_that_are_neither_values_nor_labels(axes: dict) -> None:
    with pytest.raises(
        ConfigError, match=r"axes: (seed|arm): .*: (write a list of values|a label is a text)"
    ):
        design.parse({"name": "x", "axes": axes}, source="x.yaml")


def test_a_runs_file_is_told_from_a_studys() -> None:
    with pytest.raises(ConfigError, match="describes a run, not a study"):
        design.load(ROOT / "configs" / "quickstart.yaml")
