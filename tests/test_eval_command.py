"""`hpcgrpo eval` as its user sees it: who else is at work, what is moved, what stands beside, and how long it takes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import hpcgrpo, make_model

from evaluation import benchmarks, claims, command, progress, run
from evaluation import config as configs
from evaluation import source as sources
from hpcgrpo.config_file import ConfigError
from hpcgrpo.journal import FolderInUse, claim
from hpcgrpo.types import Stopped

CHAIN = (
    "benchmarks=chain:size=4", "max_completion_length=8", "backend=transformers", "prompt_template={problem}",
    "require_box_or_tag=false",
)  # fmt: skip
GSM8K = "igrpo_table_1:DeepSeek-R1-Distill-Qwen-7B + iGRPO"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny and untrained."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


# ---- who else is at work


def test_a_start_that_waits_says_for_whom_and_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that Slurm made anew, while the earlier one still ends."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    earlier = claim(tmp_path / "place")
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        earlier.close()

    with claims.sole(tmp_path / "place", say=say):
        assert earlier.closed
    waits, free = said
    assert waits.startswith(f"{tmp_path}/place: pid {os.getpid()} on ")
    assert waits.endswith(" is at work here; waiting up to 180 s for it to end")
    assert free.startswith(f"{tmp_path}/place: free after ")


def test_any_other_start_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    in_use = rf"another evaluation \(pid {os.getpid()} on .*--output-dir"
    with claim(tmp_path), pytest.raises(FolderInUse, match=in_use), claims.sole(tmp_path, say=print):
        pass


def test_who_waits_can_be_told_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with claim(tmp_path), pytest.raises(Stopped), claims.sole(tmp_path, say=str, stopping=lambda: True):
        pass


def test_a_folder_in_use_is_told_before_the_model_is_read(model: Path, tmp_path: Path) -> None:
    """And nothing is moved from under the other one's feet."""
    place = tmp_path / "chain-size-4" / ".whole"
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    for source, fresh in ((broken, False), (model, True)):
        options = command.Options(overrides=CHAIN, output_dir=str(tmp_path), fresh=fresh)
        with claim(place), pytest.raises(FolderInUse, match="another evaluation"):
            command.here(str(source), options)
    assert place.is_dir()


def test_shards_go_side_by_side_but_never_beside_the_whole(model: Path, tmp_path: Path) -> None:
    """Tried while one is at work: another shard does its share, the whole is refused, and so is a shard beside it."""
    source, found = sources.find(str(model)), configs.load(None, CHAIN)

    def evaluate(shard: tuple[int, int], stopping: Callable[[], bool] = claims.never) -> list[dict[str, Any]]:
        return run.evaluate(source, found, folder=tmp_path, shard=shard, stopping=stopping, say=str)

    def meanwhile(shard: tuple[int, int]) -> Iterator[bool]:
        in_use = rf"another evaluation \(pid {os.getpid()} on .*\) is at work here"
        with pytest.raises(FolderInUse, match=in_use):
            evaluate((0, 1))
        with pytest.raises(FolderInUse, match=in_use):
            evaluate(shard)
        if shard == (0, 2):
            evaluate((1, 2))
        yield from iter(bool, True)  # never to stop

    assert [r["summary"]["num_problems"] for r in evaluate((0, 2), meanwhile((0, 2)).__next__)] == [4]
    files = sorted((tmp_path / "chain-size-4").glob("samples*"))
    assert [(f.name, f.read_text().count("\n")) for f in files] == [
        ("samples-0-of-2.jsonl", 2),
        ("samples-1-of-2.jsonl", 2),
    ]
    for file in files:
        file.unlink()
    assert len(evaluate((0, 1), meanwhile((1, 2)).__next__)) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("eval", "model", "--config"), "; what was graded is kept, and the same command goes on"),
        (("train",), "; the same command goes on from the last checkpoint"),
        (("grade",), ""),
    ],
)
def test_an_interruption_is_told_in_the_words_of_the_command(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    """At the very start, while its file is read."""
    file = tmp_path / "file.yaml"
    os.mkfifo(file)
    line = [sys.executable, "-m", "hpcgrpo.cli", *arguments, str(file)]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        with file.open("w"):  # waits for who reads it
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
        assert process.stderr is not None and process.stderr.read() == f"hpcgrpo: interrupted{words}\n"


# ---- how long it takes


def test_what_passes_before_the_first_completions_is_not_in_the_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """10 at 100 s, 10 more at 120 s: two seconds each since the first, so 80 take 160 s."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with progress.Progress("gsm8k", total=130, done=30, right=15, stream=out) as shown:
        now[0] = 100.0
        shown.add(10, 5)
        now[0] = 120.0
        shown.add(10, 5)
    assert out.getvalue().splitlines() == [
        "gsm8k 30/130",
        "gsm8k 40/130 right 0.500",
        "gsm8k 50/130 right 0.500 about 3 min left",
    ]


# ---- what is moved


def test_fresh_tells_where_the_earlier_samples_are(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = command.Options(overrides=CHAIN, output_dir=str(tmp_path))
    assert command.here(str(model), options) == 0
    before = (tmp_path / "chain-size-4" / "samples.jsonl").read_text()
    capsys.readouterr()
    fresh = command.Options(overrides=(*CHAIN, "seed=1"), output_dir=str(tmp_path), fresh=True, as_json=True)
    assert command.here(str(model), fresh) == 0
    said = capsys.readouterr()
    moved = json.loads(said.out)["moved"]
    assert list(moved) == [str(tmp_path / "chain-size-4"), str(tmp_path / "chain-size-4.json")]
    assert all(f"moved {was} to {now}" in said.err for was, now in moved.items())
    assert (Path(moved[str(tmp_path / "chain-size-4")]) / "samples.jsonl").read_text() == before


def test_nothing_is_moved_for_an_evaluation_that_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    line = ("benchmarks=gsm8k", f"data_dir={tmp_path}", *CHAIN[1:])
    with pytest.raises(ValueError, match=r"there is none of gsm8k_test\.jsonl"):
        command.here(str(model), command.Options(overrides=line, output_dir=str(tmp_path), fresh=True))
    assert [path.name for path in tmp_path.iterdir()] == ["gsm8k"]


def test_only_what_is_there_is_moved(tmp_path: Path) -> None:
    found = configs.load(None, ["benchmarks=chain:size=4"])
    (tmp_path / "chain-size-4").mkdir()
    assert command.set_aside(tmp_path / "nowhere", found) == {}
    assert list(command.set_aside(tmp_path, found)) == [str(tmp_path / "chain-size-4")]


def test_more_problems_join_those_that_are_there(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The subsets lie in one another, so nothing is asked twice; other problems under the same ids are refused."""
    rows = [{"problem": f"{i}{i}{i}", "answer": str(i)} for i in range(1, 8)]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mine = (f"benchmarks=mine={file}", *CHAIN[1:], "num_samples=1", "temperature=1.0")
    samples = []
    for count in (2, 5):
        options = command.Options(
            overrides=(*mine, f"max_problems={count}"), output_dir=str(tmp_path / "out")
        )
        assert command.here(str(model), options) == 0
        samples.append((tmp_path / "out" / "mine" / "samples.jsonl").read_text())
    assert samples[1].startswith(samples[0]) and [s.count("\n") for s in samples] == [2, 5]
    file.write_text("".join(json.dumps({**row, "problem": "other"}) + "\n" for row in rows))
    with pytest.raises(
        ConfigError, match=r"the question or the answer of mine-0, mine-2, mine-3 and 2 more\)"
    ):
        command.here(str(model), options)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = capsys.readouterr().err
    fewer = command.Options(overrides=(*mine, "max_problems=2"), output_dir=str(tmp_path / "out"))
    assert command.here(str(model), fewer) == 0 and "is replaced" not in said
    assert "mine.json: the result of 5 problems is replaced by that of 2" in capsys.readouterr().err
    asked = {
        json.loads(line)["problem"] for line in samples[0].splitlines()
    }  # the smaller subset alone is as it was
    kept = [row if f"mine-{i}" in asked else {**row, "answer": "9"} for i, row in enumerate(rows)]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert command.here(str(model), fewer) == 0
    with pytest.raises(ConfigError, match="the question or the answer of mine-"):
        command.here(str(model), options)


def test_records_of_another_grader_are_graded_again(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text is kept, so a verdict is never of an older grader than the result says; nothing is sampled anew."""
    file, out = tmp_path / "mine.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps({"problem": f"{i}", "answer": str(i)}) + "\n" for i in range(4)))
    options = command.Options(
        overrides=(f"benchmarks=mine={file}", *CHAIN[1:], "num_samples=1", "temperature=1.0"),
        output_dir=str(out),
    )
    assert command.here(str(model), options) == 0
    path = out / "mine" / "samples.jsonl"
    now = [json.loads(line) for line in path.read_text().splitlines()]
    before = [{**s, "outcome": "error", "answer": "?", "grader": "older"} for s in now[:3]]
    unmarked = {k: v for k, v in now[3].items() if k not in ("grader", "asked", "fixed")} | {
        "outcome": "error"
    }
    path.write_text("".join(json.dumps(s) + "\n" for s in [*before, unmarked]))
    capsys.readouterr()
    for said in ("mine: 4 completions that another version of the grader had graded were graded again", ""):
        assert command.here(str(model), options) == 0
        found = capsys.readouterr().err
        assert said in found and ("graded again" in found) == bool(said)
        assert json.loads((out / "mine.json").read_text())["summary"]["counts"]["error"] == 0
    after = [json.loads(line) for line in path.read_text().splitlines()]
    assert after[:4] == [*before, unmarked]
    assert after[4:7] == now[:3] and after[7] == {**now[3], "asked": "", "fixed": ""}


def test_the_summary_is_of_all_results_in_the_folder(model: Path, tmp_path: Path) -> None:
    """The second evaluation's first, then the earlier one's, and of which model each is where they differ."""
    for benchmark in ("chain:size=4", "chain:size=3"):
        line = (f"benchmarks={benchmark}", *CHAIN[1:])
        assert command.here(str(model), command.Options(overrides=line, output_dir=str(tmp_path))) == 0
    assert list(json.loads((tmp_path / "summary.json").read_text())["results"]) == [
        "chain-size-3",
        "chain-size-4",
    ]
    text = (tmp_path / "summary.md").read_text()
    assert "| chain-size-4 " in text and "| average of 2 " in text and "several models" not in text
    earlier = json.loads((tmp_path / "chain-size-4.json").read_text())
    earlier["model"] = {"name": "base", "path": "somewhere", "step": 8}
    (tmp_path / "chain-size-4.json").write_text(json.dumps(earlier))
    assert command.here(str(model), command.Options(overrides=line, output_dir=str(tmp_path))) == 0
    said = "chain-size-3: tiny; chain-size-4: checkpoint-8 of base."
    assert said in (tmp_path / "summary.md").read_text()


# ---- what stands beside


def test_a_published_row_stands_beside(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text('{"question": "1+1", "answer": "#### 2"}\n')
    line = (f"benchmarks=gsm8k={file}", *CHAIN[1:])
    options = command.Options(overrides=line, output_dir=str(tmp_path / "out"), published=GSM8K)
    assert command.here(str(model), options) == 0
    said = capsys.readouterr()
    assert "92.42" in said.out and f"published: {GSM8K}; iGRPO (arXiv" in " ".join(said.out.split())
    assert "the row was measured by its paper's protocol; here that is preset=igrpo" in said.err
    assert "92.42" in (tmp_path / "out" / "summary.md").read_text()
    as_json = command.Options(overrides=line, output_dir=str(tmp_path / "out"), published=GSM8K, as_json=True)
    assert command.here(str(model), as_json) == 0
    assert json.loads(capsys.readouterr().out)["published"]["rows"][0]["b"] == pytest.approx(0.9242)


def test_a_published_row_without_the_benchmark_is_refused(model: Path, tmp_path: Path) -> None:
    options = command.Options(overrides=CHAIN, output_dir=str(tmp_path), published=GSM8K)
    with pytest.raises(ConfigError, match=r"has no score of chain-size-4, but of aime25, .*--list-published"):
        command.here(str(model), options)


def test_fresh_is_not_of_rolling(tmp_path: Path) -> None:
    from runs import write_config

    options = command.Options(overrides=CHAIN, fresh=True)
    with pytest.raises(ConfigError, match="--fresh goes with one evaluation"):
        command.follow_training(str(write_config(tmp_path)), options)


# ---- lists


@pytest.mark.parametrize("columns", ["30", "80"])
def test_names_in_the_list_stay_whole(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = hpcgrpo("eval", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list(benchmarks.BENCHMARKS)
    assert max(map(len, lines)) < 80
    assert lines[7].split() == ["amc_2022_2023", "83", "math", "igrpo", "cppo", "amc_2022_2023.jsonl"]
