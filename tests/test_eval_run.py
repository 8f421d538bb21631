"""An evaluation as a whole: what it asks, that it goes on after a kill, and that its numbers repeat."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from runs import hpcgrpo, make_model, write_config

from evaluation import command, config, files, prepare, records, samples, serving
from evaluation import source as sources
from evaluation.benchmarks import BENCHMARKS
from evaluation.progress import Progress
from evaluation.records import Recorder
from evaluation.run import merge
from evaluation.task import Task
from hpcgrpo.config_file import ConfigError
from hpcgrpo.rewards.grading import Grader
from hpcgrpo.study import warm_start
from hpcgrpo.types import Completion, Stopped

DATA = Path(__file__).parent / "data" / "benchmarks"
CHAIN = ("prompt_template={problem}", "require_box_or_tag=false")
IN_PROCESS = ("backend=transformers", *CHAIN)


def quiet(text: str) -> None:
    """What an evaluation says on the way."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny and untrained."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def prepared(model: Path, *overrides: str, benchmark: str = "chain:size=8") -> prepare.Prepared:
    found = config.load(None, [f"benchmarks={benchmark}", "max_completion_length=10", *overrides])
    return prepare.prepare(
        prepare.load_model(sources.find(str(model))), found, found.benchmarks[0], say=quiet
    )


# ---- what is said wrong


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), "benchmarks: required, but missing, e.g. benchmarks=gsm8k"),
        (("benchmarks=gsm8k", "num_sample=3"), "num_sample: unknown key; did you mean num_samples?"),
        (("benchmarks=gsm8k", "temperature=-1"), "temperature: Input should be greater than or equal to 0"),
        (("benchmarks=gsm8k", "seed"), "'seed': overrides have the form key=value"),
        (("benchmarks=gsm8k", "cluster.node=2"), "cluster.node: unknown key; did you mean nodes?"),
    ],
)
def test_wrong_settings_are_named(overrides: Sequence[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        config.load(None, overrides)
    assert words in str(error.value)


def test_texts_are_taken_as_they_are() -> None:
    said = ["benchmarks=a,b", "prompt_template={problem} costs $x$", "system_prompt=be: brief"]
    found = config.load(None, said)
    assert found.benchmarks == ("a", "b")
    assert (found.prompt_template, found.system_prompt) == ("{problem} costs $x$", "be: brief")


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run or model"):
        sources.find(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"neither a run .* nor a model"):
        sources.find(str(tmp_path))
    run = sources.find(str(write_config(tmp_path)))
    assert run.model is None and run.run is not None
    with pytest.raises(ConfigError, match="no complete checkpoint yet; wait for one, or queue"):
        prepare.load_model(run)
    with pytest.raises(ConfigError, match=r"--checkpoint 5: .* has no such checkpoint \(complete: none\)"):
        sources.find(str(tmp_path / "run.yaml"), checkpoint="5")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("eval",), "name what to evaluate"),
        (("eval", "nothing/there/at/all", "benchmarks=gsm8k"), "no such folder"),
        (("eval", "MODEL", "benchmarks=gsm9k"), "did you mean gsm8k?"),
        (("eval", "MODEL", "benchmarks=gsm8k", "data_dir=/nowhere"), "/nowhere"),
        (
            ("eval", "MODEL", "benchmarks=chain", "preset=cppo"),
            "preset cppo (arXiv 2503.22342) says nothing of chain",
        ),
        (
            ("eval", "MODEL", "benchmarks=chain", "temperature=0", "num_samples=4"),
            "all completions are alike",
        ),
        (("eval", "MODEL", "benchmarks=chain", "prompt_template=why"), "lacks {problem}"),
        (
            ("eval", "MODEL", "benchmarks=chain", "device=cuda", "backend=transformers"),
            "no GPU is visible here",
        ),
        (("eval", "MODEL", "benchmarks=chain", "--rolling"), "is no run"),
        (("eval", "--compare", "a", "b"), "a: "),
        (("submit", "RUN", "--eval", "x.yaml", "--executor", "local"), "jobs that wait for jobs need Slurm"),
    ],
)
def test_what_the_user_can_mend_is_said_in_a_line(
    model: Path, tmp_path: Path, arguments: Sequence[str], words: str
) -> None:
    path = {"MODEL": str(model), "RUN": "configs/cluster_cpu.yaml"}
    has_folder = arguments[0] == "eval" and not {"--rolling", "--compare"} & set(arguments)
    where = ["--output-dir", str(tmp_path)] if has_folder else []
    done = hpcgrpo(*(path.get(a, a) for a in arguments), *where)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert words in done.stderr and "hpcgrpo: error: " in done.stderr


# ---- what is asked


def test_a_model_is_asked_as_the_benchmark_says_and_a_run_as_it_was_trained(
    model: Path, tmp_path: Path
) -> None:
    plain = prepared(model, "data_dir=" + str(DATA), benchmark="gsm8k")
    first = plain.problems[0]
    assert plain.prompts[first.id].messages == (
        {"role": "user", "content": BENCHMARKS["gsm8k"].template.replace("{problem}", first.question)},
    )
    assert plain.require_box_or_tag
    run = sources.find(str(write_config(tmp_path))).run  # its reward takes the last number
    found = config.load(None, ["benchmarks=gsm8k"])
    asked = prepare.recipe(BENCHMARKS["gsm8k"], found, run)
    assert (asked.template, asked.require_box_or_tag) == ("{problem}", False)
    published = prepare.recipe(
        BENCHMARKS["gsm8k"], config.load(None, ["benchmarks=gsm8k", "preset=igrpo"]), run
    )
    assert published.require_box_or_tag and "{problem}" in published.template


def test_a_completion_is_no_longer_than_the_model_has_room_for(model: Path) -> None:
    said: list[str] = []
    found = config.load(None, ["benchmarks=chain:size=8", "max_completion_length=99999", *CHAIN])
    ready = prepare.prepare(
        prepare.load_model(sources.find(str(model))), found, "chain:size=8", say=said.append
    )
    longest = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert ready.protocol.max_completion_length == longest - ready.longest_prompt
    assert ready.settings["fixed"]["sampling"]["max_completion_length"] == longest - ready.longest_prompt
    assert f"cut at {longest - ready.longest_prompt} tokens instead of 99999" in said[0]


def test_seeds_depend_on_problem_and_number_alone(model: Path) -> None:
    few, many = prepared(model, *CHAIN), prepared(model, *CHAIN, "num_samples=3", "temperature=1.0")
    todo = [(x.id, 0) for x in few.problems]
    one = {key: r.seed for key, r in zip(todo, prepare.requests(few, todo, 7), strict=True)}
    more = [(x.id, n) for n in range(3) for x in reversed(many.problems)]
    three = {key: r.seed for key, r in zip(more, prepare.requests(many, more, 7), strict=True)}
    assert all(three[key] == seed for key, seed in one.items()) and len(set(three.values())) == 24
    other = prepare.requests(few, todo, 8)
    assert not {r.seed for r in other} & set(three.values())


def test_the_settings_hold_all_that_a_score_depends_on(model: Path) -> None:
    fixed = prepared(model, *CHAIN).settings["fixed"]
    changes = {
        "weights": (), "prompt.template": ("prompt_template=Q: {problem}",),
        "sampling.temperature": ("temperature=0.5",),
        "sampling.top_p": ("temperature=0.5", "top_p=0.8"), "sampling.seed": ("seed=1",),
        "require_box_or_tag": ("require_box_or_tag=true",), "backend": ("backend=transformers",),
    }  # fmt: skip
    for key, overrides in changes.items():
        if overrides:
            changed = prepared(model, *CHAIN, *overrides).settings["fixed"]
            assert any(d.startswith(f"{key}:") for d in records._differences(fixed, changed)), key
    assert not list(
        records._differences(fixed, prepared(model, *CHAIN, "vllm_max_concurrency=3").settings["fixed"])
    )
    settings = prepared(model, *CHAIN).settings
    assert settings["grader"]["math-verify"] == "0.9.0" and len(fixed["prompt"]["chat_template_sha256"]) == 16


# ---- records


def some_records(folder: Path, ready: prepare.Prepared, **others: Any) -> Path:
    """One of each problem, as the evaluation of these settings leaves them."""
    file = records.file_of(folder, ready, (0, 1))
    file.parent.mkdir(parents=True, exist_ok=True)
    one = samples.Sample("", 0, 1, "right", "1", "stop", 3, "x", "", ready.grader, ready.fixed)
    kept = [replace(one, problem=p.id, asked=ready.asked[p.id], **others) for p in ready.problems]
    file.write_text(samples.to_lines(kept))
    return file


@pytest.mark.parametrize("version", [{}, {"fixed": ""}])  # now, and one that kept no hash
def test_records_of_other_settings_are_not_mixed_in(
    model: Path, tmp_path: Path, version: dict[str, str]
) -> None:
    ready = prepared(model, *CHAIN, "temperature=1.0", "num_samples=2")
    records.keep_settings(tmp_path, ready)
    some_records(tmp_path, ready, **version)
    records.keep_settings(
        tmp_path, prepared(model, *CHAIN, "temperature=1.0", "num_samples=4")
    )  # more of the same
    with pytest.raises(
        ConfigError, match=r"sampling.temperature: 1.0 before, 0.5 now.*--output-dir.*--fresh"
    ):
        records.keep_settings(tmp_path, prepared(model, *CHAIN, "temperature=0.5"))


@pytest.mark.parametrize("left", [None, b"", b'{"fixed": {"wei', b"\xff\xfe", b"[]", b"{}", b'{"fixed": 4}'])
def test_records_say_themselves_of_which_settings_they_are(
    model: Path, tmp_path: Path, left: bytes | None
) -> None:
    """Where the file beside them is lost or damaged it is written anew, and others' records are still refused."""
    ready, other = prepared(model, *CHAIN), prepared(model, *CHAIN, "temperature=0.5")
    some_records(tmp_path, ready)
    path = tmp_path / "chain-size-8" / records.SETTINGS
    ways_out = r"name another folder \(--output-dir\), or move these aside \(--fresh\)"

    def spoil() -> None:
        path.unlink(missing_ok=True)
        if left is not None:
            path.write_bytes(left)

    spoil()
    records.keep_settings(tmp_path, ready)
    assert json.loads(path.read_text()) == ready.settings
    spoil()
    others = rf"chain-size-8: holds results of other settings \(which, .*\); set them back, {ways_out}"
    with pytest.raises(ConfigError, match=others):
        records.keep_settings(tmp_path, other)
    assert records.records(tmp_path, other) == {}
    some_records(tmp_path, ready, fixed="")
    why = "missing" if left is None else "damaged"
    unknown = rf"of unknown settings \({path} is {why}\); put it back, {ways_out}"
    with pytest.raises(ConfigError, match=unknown):
        records.keep_settings(tmp_path, ready)


def test_settings_without_a_record_bind_nobody(model: Path, tmp_path: Path) -> None:
    """A merge of tasks that never ran, behind a training that was cancelled, leaves none; others are replaced."""
    found = config.load(None, ["benchmarks=chain:size=8", "max_completion_length=10", *IN_PROCESS])
    task = Task(str(model), found, "chain-size-8", str(tmp_path))
    task.write(tmp_path / "jobs" / "chain-size-8.json")
    assert merge(tmp_path) == 1
    assert not (tmp_path / "chain-size-8").exists()
    records.keep_settings(tmp_path, prepared(model, *IN_PROCESS, "temperature=1.0"))
    assert merge(tmp_path) == 1
    options = command.Options(
        overrides=("benchmarks=chain:size=8", "max_completion_length=10", *IN_PROCESS),
        output_dir=str(tmp_path),
    )
    assert command.here(str(model), options) == 0
    kept = json.loads((tmp_path / "chain-size-8" / records.SETTINGS).read_text())
    assert kept["fixed"]["sampling"]["temperature"] == 0


def test_a_line_that_a_crash_cut_off_is_asked_again(model: Path, tmp_path: Path) -> None:
    ready = prepared(model, *CHAIN)
    kept = [samples.Sample(p.id, 0, 1, "right", "1", "stop", 3, "x") for p in ready.problems]
    file = records.file_of(tmp_path, ready, (0, 1))
    file.parent.mkdir()
    file.write_text(samples.to_lines(kept)[:-20])
    left = records.missing(tmp_path, ready, (0, 1), again=True)
    assert left == [(ready.problems[-1].id, 0)]
    files.append(file, samples.to_lines([kept[-1]]))
    assert records.missing(tmp_path, ready, (0, 1), again=True) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("problem", 3), ("sample", "x"), ("sample", -1), ("sample", 1.5), ("sample", True), ("seed", None),
        ("outcome", "great"), ("outcome", []), ("answer", 7), ("answer", 0), ("finish_reason", ""),
        ("num_tokens", "a"), ("num_tokens", -5), ("text", None), ("asked", 1), ("fixed", {}), ("other", 1),
    ],
)  # fmt: skip
def test_a_line_that_is_no_record_is_left_out(tmp_path: Path, key: str, value: Any) -> None:
    kept = samples.Sample("p", 0, 1, "right", "1", "stop", 3, "x")
    wrong = [json.dumps(asdict(kept) | {key: value}), "7", "null", "[" * 100_000]
    (tmp_path / "samples.jsonl").write_text("\n".join(wrong) + "\n" + samples.to_lines([kept]))
    assert samples.read(tmp_path / "samples.jsonl") == [kept]


@pytest.mark.parametrize(
    "name", ["chain-size-8/samples.jsonl", "chain-size-8/settings.json", "chain-size-8.json"]
)
def test_a_folder_in_a_files_place_is_named(model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"{tmp_path / name}: a folder, .*; move it away"):
        records.keep_settings(tmp_path, prepared(model, *CHAIN))


def test_shards_share_the_problems_and_read_each_others_records(model: Path, tmp_path: Path) -> None:
    ready = prepared(model, *CHAIN)
    parts = [ready.share((i, 3)) for i in range(3)]
    assert sorted(p.id for part in parts for p in part) == sorted(p.id for p in ready.problems)
    for i, part in enumerate(parts):
        file = records.file_of(tmp_path, ready, (i, 3))
        file.parent.mkdir(exist_ok=True)
        file.write_text(
            samples.to_lines(samples.Sample(p.id, 0, 1, "wrong", "1", "stop", 3, "x") for p in part)
        )
    assert records.missing(tmp_path, ready, (0, 1), again=True) == []
    assert records.missing(tmp_path, ready, (1, 2), again=True) == []


def test_what_an_engine_could_not_answer_is_asked_again_but_holds_up_no_result(
    model: Path, tmp_path: Path
) -> None:
    ready = prepared(model, *CHAIN)
    file = records.file_of(tmp_path, ready, (0, 1))
    file.parent.mkdir()
    outcomes: list[Any] = ["unanswered", *["wrong"] * 7]
    told = zip(ready.problems, outcomes, strict=True)
    file.write_text(
        samples.to_lines(samples.Sample(p.id, 0, 1, outcome, None, "abort", 0, "") for p, outcome in told)
    )
    assert records.missing(tmp_path, ready, (0, 1), again=True) == [(ready.problems[0].id, 0)]
    assert records.missing(tmp_path, ready, (0, 1), again=False) == []


def recorder(ready: prepare.Prepared, file: Path, grader: Grader, stopping: Any = lambda: False) -> Recorder:
    todo = [(p.id, 0) for p in ready.problems]
    return Recorder(
        ready, todo, prepare.requests(ready, todo, 0), file, grader, Progress("x", len(todo)), stopping
    )


def answer(text: str, reason: Any = "stop") -> Completion:
    return Completion((1, 2), (-0.1, -0.1), reason, text, 0)


def test_completions_are_graded_as_they_arrive_whatever_ends_the_sampling(
    model: Path, tmp_path: Path
) -> None:
    ready = prepared(model, *CHAIN)
    file = tmp_path / "samples.jsonl"
    with Grader(num_processes=1) as grader, pytest.raises(KeyError), recorder(ready, file, grader) as keeping:
        keeping.arrived(3, answer(f"so it is {ready.problems[3].gold}"))
        keeping.arrived(0, answer("no number"))
        keeping.arrived(5, answer("", "abort"))
        raise KeyError("the engine fell")
    found = {s.problem: (s.outcome, s.answer) for s in samples.read(file)}
    assert found == {
        ready.problems[3].id: ("right", ready.problems[3].gold),
        ready.problems[0].id: ("unparsed", None),
        ready.problems[5].id: ("unanswered", None),
    }


def test_a_disk_that_is_full_is_told_and_costs_no_earlier_record(model: Path) -> None:
    ready = prepared(model, *CHAIN)
    full = pytest.raises(
        ConfigError, match=r"/dev/full: cannot be written \(No space left.*make room; what was"
    )
    with Grader(num_processes=1) as grader, full, recorder(ready, Path("/dev/full"), grader) as keeping:
        for number in range(8):
            keeping.arrived(number, answer("7"))


def test_once_there_is_room_the_same_command_goes_on(model: Path, tmp_path: Path) -> None:
    """Files may hold 16 KiB, which is not enough, and then any number."""
    options = command.Options(
        overrides=("benchmarks=chain:size=100", "max_completion_length=8", *IN_PROCESS),
        output_dir=str(tmp_path),
    )
    file = tmp_path / "chain-size-100" / "samples.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, hard))
    try:
        full = rf"{file}: cannot be written \(File too large\); make room; .* and the same command goes on"
        with pytest.raises(ConfigError, match=full):
            command.here(str(model), options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kept = samples.read(file)
    assert 10 < len(kept) < 100
    assert command.here(str(model), options) == 0
    after = samples.read(file)
    assert after[: len(kept)] == kept and len({s.problem for s in after}) == len(after) == 100


@pytest.mark.parametrize("name", ["summary.json", "summary.md"])
def test_a_folder_in_the_place_of_a_summary_is_named(model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    overrides = ("benchmarks=chain:size=2", "max_completion_length=8", *IN_PROCESS)
    with pytest.raises(ConfigError, match=rf"{name}: cannot be written \(Is a directory\); move it away"):
        command.here(str(model), command.Options(overrides=overrides, output_dir=str(tmp_path)))


def test_told_to_stop_nothing_new_is_taken(model: Path, tmp_path: Path) -> None:
    ready, file = prepared(model, *CHAIN), tmp_path / "samples.jsonl"
    told = pytest.raises(Stopped)
    with Grader(num_processes=1) as grader, told, recorder(ready, file, grader, lambda: True) as keeping:
        keeping.arrived(0, answer("7"))
    assert len(samples.read(file)) == 1  # what came is kept


# ---- from one end to the other


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Right now and then on running sums of four digits."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    warm_start.make(
        folder, data={"preset": "chain", "digits": 4}, seed=0, admit=False, tries=1, target_accuracy=0.5,
        template="{question}#{draft}#{question}", max_steps=1500, num_rows=4096, hidden=64, layers=2,
    )  # fmt: skip
    return folder


def texts(folder: Path) -> dict[tuple[str, str, int], tuple[str, str]]:
    """(benchmark, problem, number) -> text and outcome."""
    found = {}
    for path in sorted(folder.glob("*/samples*.jsonl")):
        for s in samples.read(path):
            assert (path.parent.name, s.problem, s.sample) not in found, "a sample was made twice"
            found[path.parent.name, s.problem, s.sample] = (s.text, s.outcome)
    return found


def result(folder: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / f"{name}.json").read_text()))


def test_an_evaluation_in_this_process_repeats_and_grows(model: Path, tmp_path: Path) -> None:
    arguments = ("benchmarks=chain:size=16", "temperature=1.0", "max_completion_length=10", *IN_PROCESS)
    options = command.Options(
        overrides=(*arguments, "num_samples=2"), output_dir=str(tmp_path / "a"), as_json=True
    )
    assert command.here(str(model), options) == 0
    grown = command.Options(overrides=(*arguments, "num_samples=4"), output_dir=str(tmp_path / "a"))
    at_once = command.Options(
        overrides=(*arguments, "num_samples=4", "max_batch_tokens=100"),
        output_dir=str(tmp_path / "b"),
        pass_at_n=None,
    )
    assert command.here(str(model), grown) == command.here(str(model), at_once) == 0
    assert texts(tmp_path / "a") == texts(tmp_path / "b")
    first, second = (result(tmp_path / x, "chain-size-16") for x in "ab")
    assert first["summary"] == second["summary"] and first["problems"] == second["problems"]
    assert first["summary"]["num_samples"] == 4


def test_pass_at_n_is_drawn_and_told(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = command.Options(
        overrides=("benchmarks=chain:size=8", "temperature=1.0", "max_completion_length=10", *IN_PROCESS),
        output_dir=str(tmp_path), pass_at_n=8, as_json=True,
    )  # fmt: skip
    assert command.here(str(model), options) == 0
    said = json.loads(capsys.readouterr().out)
    assert [r["summary"]["num_samples"] for r in said["results"]] == [8]
    assert (tmp_path / "pass_at_n.png").stat().st_size > 1000 and "pass_at_n" in said


def start(model: Path, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "hpcgrpo.cli", "eval", str(model), "--output-dir", str(folder), *arguments]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)


def killed_half_way(
    process: subprocess.Popen[str], folder: Path, enough: int, kind: int, seconds: float = 400
) -> None:
    """Wait for some records, then send the signal."""
    end = time.monotonic() + seconds
    while sum(len(samples.read(p)) for p in folder.glob("*/samples*.jsonl")) < enough:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(kind)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_in_process_a_stop_costs_nothing(model: Path, tmp_path: Path, kind: int, code: int) -> None:
    arguments = (
        "benchmarks=chain:size=64,addition:size=32", "num_samples=4", "temperature=1.0", "max_completion_length=40",
        "max_batch_tokens=1000", *IN_PROCESS,
    )  # fmt: skip
    slower = "max_batch_tokens=50"  # lest it be done before it is ended
    cut = start(model, tmp_path / "cut", *arguments, slower)
    killed_half_way(cut, tmp_path / "cut", 20, kind)
    cut.communicate(timeout=120)
    assert cut.returncode == code
    before = texts(tmp_path / "cut")
    assert 20 <= len(before) < 96 * 4
    for folder in ("cut", "whole"):
        done = hpcgrpo(
            "eval", str(model), "--output-dir", str(tmp_path / folder), *arguments, timeout_seconds=300
        )
        assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "cut") == texts(tmp_path / "whole")
    assert before.items() <= texts(tmp_path / "whole").items()
    for name in ("chain-size-64", "addition-size-32"):
        one, other = result(tmp_path / "cut", name), result(tmp_path / "whole", name)
        assert one["summary"] == other["summary"] and one["settings"]["fixed"] == other["settings"]["fixed"]


def test_a_folder_that_cannot_be_written_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    overrides = ("benchmarks=chain:size=2", "max_completion_length=8", *IN_PROCESS)
    with pytest.raises(ConfigError, match=r"file: results cannot be written there \(Not a directory\)"):
        command.here(str(model), command.Options(overrides=overrides, output_dir=str(tmp_path / "file")))


@pytest.mark.slow
def test_two_in_one_folder_are_one_too_many(model: Path, tmp_path: Path) -> None:
    arguments = (
        "benchmarks=chain:size=64",
        "num_samples=8",
        "temperature=1.0",
        "max_batch_tokens=500",
        *IN_PROCESS,
    )
    first = start(model, tmp_path, *arguments)
    killed_half_way(first, tmp_path, 8, signal.SIGSTOP)
    second = hpcgrpo("eval", str(model), "--output-dir", str(tmp_path), *arguments)
    assert second.returncode == 2 and f"another evaluation (pid {first.pid} on " in second.stderr
    first.kill()
    first.communicate()


@pytest.mark.slow
@pytest.mark.long
def test_with_vllm_killed_and_resumed_it_is_the_same(trained: Path, tmp_path: Path) -> None:
    """The whole way on a CPU: engines of its own, generated arithmetic and questions of GSM8K, kill -9, resumed; and at
    temperature 0 what the model in process says."""
    both = ("benchmarks=chain:digits=4:size=96,gsm8k", f"data_dir={DATA}", "max_completion_length=12", *CHAIN)
    sampled = (*both, "num_samples=4", "temperature=0.7", "top_p=0.95", "vllm_max_concurrency=4")
    cut = start(trained, tmp_path / "cut", *sampled, "vllm_max_concurrency=1")
    killed_half_way(cut, tmp_path / "cut", 30, signal.SIGKILL)
    cut.communicate(timeout=120)
    before = texts(tmp_path / "cut")
    for folder, extra in (("cut", ()), ("whole", ("engines=2", "vllm_max_concurrency=16"))):
        line = ("eval", str(trained), "--output-dir", str(tmp_path / folder), *sampled, *extra)
        done = hpcgrpo(*line, timeout_seconds=600)
        assert done.returncode == 0, done.stderr
    assert 30 <= len(before) < len(texts(tmp_path / "whole"))
    assert texts(tmp_path / "cut") == texts(tmp_path / "whole")  # another number of engines, another order
    name = "chain-digits-4-size-96"
    assert result(tmp_path / "cut", name)["summary"] == result(tmp_path / "whole", name)["summary"]
    assert 0.2 < result(tmp_path / "whole", name)["summary"]["avg@k"]["mean"] < 0.95
    greedy = (*both, "temperature=0")
    for folder, backend in (("vllm", "vllm"), ("process", "transformers")):
        line = ("eval", str(trained), "--output-dir", str(tmp_path / folder), *greedy, f"backend={backend}")
        done = hpcgrpo(*line, timeout_seconds=600)
        assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "vllm") == texts(tmp_path / "process")


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_told_with_its_log(model: Path, tmp_path: Path) -> None:
    broken = ("benchmarks=chain:size=4", "max_completion_length=10", "vllm_extra_args=[--no-such]", *CHAIN)
    done = hpcgrpo("eval", str(model), *broken, "--output-dir", str(tmp_path), timeout_seconds=300)
    assert done.returncode != 0 and "no-such" in done.stderr
    assert serving.ADDRESS in done.stderr and "engine-0.log" in done.stderr
