"""Two evaluations beside each other, beside the papers, as tables, and pass@N: on small result folders."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rich.console import Console

from evaluation import compare, metrics, pass_at_n, published, tables
from evaluation.samples import Sample

Rights = Mapping[str, Sequence[int]]
SETTINGS = {"temperature": 0.6, "num_samples": 4, "seed": 0, "template_hash": "ab12", "grader_version": "3"}


def result(benchmark: str, rights: Rights, *, model: str = "base", **settings: Any) -> dict[str, Any]:
    """A result file's contents, from which samples were right."""
    samples = {
        problem: [
            Sample(problem, i, i, "right" if r else "wrong", "7" if r else "8", "stop", 20, "")
            for i, r in enumerate(several)
        ]
        for problem, several in rights.items()
    }
    num_samples = len(next(iter(rights.values())))
    return {
        "benchmark": benchmark,
        "model": model,
        "settings": {**SETTINGS, **settings},
        "summary": metrics.summarize(samples, num_samples=num_samples, same=None),
        "problems": {problem: {"right": list(several)} for problem, several in rights.items()},
    }


def folder(path: Path, *results: Mapping[str, Any]) -> Path:
    path.mkdir(parents=True)
    for r in results:
        (path / f"{r['benchmark']}.json").write_text(json.dumps(r))
    (path / "summary.json").write_text("[1, 2]")  # what else lies in such folders
    return path


def drawn(n: int, chance: float, seed: int, num_samples: int = 4) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {f"{i}": [int(rng.random() < chance) for _ in range(num_samples)] for i in range(n)}


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    a = folder(
        tmp_path / "after" / "eval",
        result("aime24", drawn(30, 0.8, 1), model="trained"),
        result("gsm8k", {"p": [1, 1, 1, 1], "q": [1, 1, 0, 0], "r": [1, 0, 0, 0]}, model="trained"),
        result("minerva", drawn(5, 0.5, 2), model="trained"),
    )
    b = folder(
        tmp_path / "before",
        result("aime24", drawn(30, 0.3, 3)),
        result("gsm8k", {"p": [1, 1, 0, 0], "q": [1, 1, 0, 0], "r": [1, 1, 0, 0]}),
        result("math500", drawn(5, 0.5, 4)),
    )
    return a.parent, b


def compared(
    a: Path | str, b: Path | str, capsys: pytest.CaptureFixture[str], **given: Any
) -> dict[str, Any]:
    assert compare.run(str(a), str(b), as_json=True, **{"common_only": False, **given}) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_two_folders(both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(*both, capsys)
    aime, gsm8k = found["rows"]
    assert (aime["benchmark"], aime["problems"], aime["p"] < 0.001) == ("aime24", 30, True)
    assert aime["difference"]["low"] > 0
    assert (gsm8k["a"], gsm8k["b"]) == (pytest.approx(7 / 12), 0.5)
    assert gsm8k["difference"]["mean"] == pytest.approx(1 / 12)  # + 1/2, 0, - 1/4
    assert (gsm8k["won"], gsm8k["lost"], gsm8k["level"]) == (1, 1, 1)
    assert (gsm8k["p"], gsm8k["test"]) == (1.0, "exact")  # 2 and -1: all four sums are as far as 1
    average = found["average"]
    assert average["benchmark"] == "average of 2"
    assert average["difference"]["mean"] == pytest.approx(
        fmean(r["difference"]["mean"] for r in found["rows"])
    )
    assert average["difference"]["low"] < average["difference"]["mean"] < average["difference"]["high"]
    assert average["a"] - average["b"] == pytest.approx(average["difference"]["mean"])
    assert (found["only_a"], found["only_b"], found["warnings"]) == (["minerva"], ["math500"], [])
    assert found["a"].endswith("after (trained)")


def test_the_averages_p_flips_all_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two benchmarks of five problems each, all won: 2 of 2^10 signs are as far."""
    a, b = [
        folder(
            tmp_path / name, *(result(b, {f"{i}": [right] for i in range(5)}) for b in ("gsm8k", "math500"))
        )
        for name, right in (("a", 1), ("b", 0))
    ]
    found = compared(a, b, capsys)
    assert [row["p"] for row in found["rows"]] == [2 / 32, 2 / 32]
    assert found["average"]["p"] == pytest.approx(2 / 1024, abs=0.0013)
    gap = found["average"]["difference"]
    assert (gap["interval"], gap["high"]) == ("wilson", 1.0) and gap["low"] < 0.5


def test_the_averages_p_weighs_benchmarks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Differences 1, 1, -1 of three problems and 1 of one: (1/3 + 1)/2 = 2/3, as far as which 8 of 16 sums are."""
    a = folder(tmp_path / "a", result("gsm8k", {"p": [1], "q": [1], "r": [0]}), result("math", {"p": [1]}))
    b = folder(tmp_path / "b", result("gsm8k", {"p": [0], "q": [0], "r": [1]}), result("math", {"p": [0]}))
    assert compared(a, b, capsys)["average"]["p"] == pytest.approx(0.5, abs=0.02)  # unweighed: 10 of 16


def test_the_table_shows_the_same(both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    compare.run(*map(str, both), common_only=False, as_json=False)
    out = capsys.readouterr().out
    assert "58.33" in out and "+8.33" in out and "1/1/1" in out and "average of 2" in out
    assert "only A has: minerva" in out and "only B has: math500" in out and "warning" not in out


def test_one_file_against_a_folder(both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(both[0] / "eval" / "gsm8k.json", both[1], capsys)
    assert [row["benchmark"] for row in found["rows"]] == ["gsm8k"] and found["average"] is None


def test_settings_that_differ_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rights = {"p": [1, 0], "q": [0, 1]}
    nested: dict[str, Any] = {"sampling": {"top_p": 0.95, "seed": 1}, "system_prompt": "x" * 100}
    a = folder(tmp_path / "a", result("gsm8k", rights, **nested), result("amc23", rights, seed=3))
    b = folder(
        tmp_path / "b",
        result("gsm8k", rights, temperature=1.0, sampling={"top_p": 1.0, "seed": 2}, engines=4, vllm_x=1),
        result("amc23", rights, temperature=1.0, model="other", cluster={"nodes": 2}),
    )
    told = compared(a, b, capsys)["warnings"]
    assert told[0] == "temperature: 0.6 against 1.0 (amc23, gsm8k)"
    assert told[1] == "sampling.top_p: 0.95 against 1.0 (gsm8k)"
    assert told[2].startswith('system_prompt: "xxx') and told[2].endswith("x… against not recorded (gsm8k)")
    assert len(told) == 3
    compare.run(str(a), str(b), common_only=False, as_json=False)
    assert "warning: the settings differ: temperature: 0.6 against 1.0" in capsys.readouterr().out


def test_what_an_evaluation_records_of_its_model_is_named_not_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = []
    for step in (None, 100):
        r = result("gsm8k", {"p": [1], "q": [0]})
        r["model"] = r["settings"]["model"] = {"name": "run", "path": f"run/{step}", "step": step}
        r["settings"]["fixed"] = {"weights": f"sha{step}", "sampling": {"temperature": 0.6, "seed": step}}
        sides.append(folder(tmp_path / str(step), r))
    found = compared(sides[0], sides[1], capsys)
    assert found["warnings"] == []
    assert (found["a"], found["b"]) == (f"{sides[0]} (run)", f"{sides[1]} (run, step 100)")


def test_problems_of_one_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = folder(tmp_path / "a", result("gsm8k", {"p": [1], "q": [0], "r": [1]}))
    b = folder(tmp_path / "b", result("gsm8k", {"p": [0], "q": [0]}))
    with pytest.raises(
        ValueError, match=r"gsm8k: the problems differ: 2 on both sides, 1 only in A \(e.g. r\)"
    ):
        compare.run(str(a), str(b), common_only=False, as_json=True)
    found = compared(a, b, capsys, common_only=True)
    (row,) = found["rows"]
    assert (row["a"], row["b"], row["left_out"]) == (0.5, 0.0, {"a": 1, "b": 0})
    assert "compared on the 2 problems of both sides; left out: 1 that only A has" in found["notes"][0]


# ---- the papers' rows


ROW = "igrpo_table_1:DeepSeek-R1-Distill-Qwen-7B + iGRPO"


def test_a_folder_against_a_published_row(
    both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared(both[0], ROW, capsys)
    by_name = {row["benchmark"]: row for row in found["rows"]}
    assert {name: row["b"] for name, row in by_name.items()} == pytest.approx(
        {"aime24": 0.5630, "gsm8k": 0.9242, "minerva": 0.4154}
    )
    own = json.loads((both[0] / "eval" / "aime24.json").read_text())["summary"]["avg@k"]
    gap = by_name["aime24"]["difference"]
    assert (gap["low"], gap["high"]) == pytest.approx((own["low"] - 0.5630, own["high"] - 0.5630))
    assert all(row["p"] is None for row in [*found["rows"], found["average"]])
    assert found["average"]["b"] == pytest.approx((0.5630 + 0.9242 + 0.4154) / 3)
    assert "no test" in found["notes"][0] and found["only_b"] == ["aime25", "math500", "amc23"]
    compare.run(str(both[0]), ROW, common_only=False, as_json=False)
    assert "iGRPO (arXiv 2602.09000), Table 1" in capsys.readouterr().out


def test_a_published_row_against_a_folder_is_the_mirror_image(
    both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found, turned = compared(both[0], ROW, capsys), compared(ROW, both[0], capsys)
    there = {row["benchmark"]: row["difference"] for row in [*found["rows"], found["average"]]}
    for row in [*turned["rows"], turned["average"]]:
        gap, other = row["difference"], there[row["benchmark"]]
        assert (gap["mean"], gap["low"], gap["high"]) == pytest.approx(
            (-other["mean"], -other["high"], -other["low"])
        )


def test_two_published_rows(capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(ROW, "igrpo_table_1:deepseek-r1-distill-qwen-7b   + grpo", capsys)
    assert found["average"]["difference"] == {
        "mean": pytest.approx(0.6987 - 0.6829, abs=2e-4), "low": None, "high": None, "interval": None,
    }  # fmt: skip
    assert "neither test nor interval" in found["notes"][0]
    compare.run(ROW, ROW, common_only=False, as_json=False)
    assert "+0.00" in capsys.readouterr().out


def test_published_lays_results_beside_a_row() -> None:
    results = [result("gsm8k", {"p": [1], "q": [0]}), result("amc_2022_2023", {"p": [1], "q": [1]})]
    found = compare.beside_published(
        results, published.find("igrpo_table_1", "OpenMath-Nemotron-7B", beside=["amc_2022_2023"])
    )
    assert [(row["benchmark"], row["b"]) for row in found["rows"]] == [
        ("gsm8k", 0.9052),
        ("amc_2022_2023", 0.95),
    ]
    assert any("AMC is taken for amc_2022_2023" in note for note in found["notes"])
    row = published.find("cppo_math_v2", "P 0.75", beside=["math"])
    accuracy = compare.beside_published([result("math", {"p": [1]})], row)
    assert accuracy["rows"][0]["b"] == pytest.approx(0.7655)


def test_published_rows_are_all_that_hold_scores_of_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row["scores"] for row in published.every_row()}
    assert rows[ROW] == {
        "aime25": 40.16, "aime24": 56.30, "math500": 93.80, "amc23": 95.00, "gsm8k": 92.42, "minerva": 41.54,
    }  # fmt: skip
    assert rows["cppo_math_v1:P 0.5"] == {"math500": 75.20, "amc23": 53.12, "aime24": 10.00}
    assert rows["cppo_gsm8k_v2:GRPO"] == {"gsm8k": 77.38}
    assert rows["igrpo_figure_2:OpenReasoning-Nemotron-7B + iGRPO"]["gpqa_diamond"] == 62.9
    assert rows["codistill_qwen:Qwen2.5-Math-7B + GRPO"] == {
        "minerva": 38.75,
        "math500": 80.12,
        "olympiadbench": 42.73,
    }
    without = (
        "igrpo_figure_s1",
        "igrpo_table_s4_beta",
        "igrpo_figure_3",
        "codistill_llama",
        "codistill_cost",
    )
    assert not any(name.startswith(without) or "Printed" in name for name in rows)
    assert published.list_rows(as_json=True) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(rows)
    published.list_rows(as_json=False)
    assert f"{ROW}   aime25 40.16  aime24 56.3 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("igrpo_table1:x", "no such table .did you mean igrpo_table_1?"),
        (
            "igrpo_table_1:DeepSeek-R1-Distil-Qwen-7B + iGRPO",
            "did you mean 'DeepSeek-R1-Distill-Qwen-7B + iGRPO'?",
        ),
        ("igrpo_figure_s1:AIME25", "holds no score of a benchmark; see --list-published"),
        ("{tmp}/befor", "no such folder or result file.*did you mean .*/before?"),
        (
            "igrpo_table_1",
            "a table of the papers; name a row of it too, e.g. 'igrpo_table_1:Nemotron-H-8B-Base-8K'",
        ),
        ("igrpo_table1", "did you mean igrpo_table_1?.*--list-published"),
        ("{tmp}/after/eval/gsm8k", "holds no results .did you mean .*/eval/gsm8k.json?"),
        ("{tmp}/after/eval/gsm9k.json", "no such folder or result file .did you mean .*/eval/gsm8k.json?"),
        ("GSM-8K", "a benchmark, and no such .*two files, e.g. logs/RUN/eval/gsm8k.json"),
        ("{tmp}", r"holds no results .results lie in .*/after, .*/before, .*/twice.; expected"),
        ("{tmp}/going-on", "its evaluation is not finished: the same `hpcgrpo eval` goes on"),
        ("{tmp}/empty", "holds no results; expected <benchmark>.json"),
        ("{tmp}/broken", "gsm8k.json: cannot be read as JSON"),
        ("{tmp}/twice", "is a second result of gsm8k"),
    ],
)
def test_places_that_cannot_be_compared(
    both: tuple[Path, Path], tmp_path: Path, place: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (both[0] / "eval" / "gsm8k").mkdir()
    (tmp_path / "going-on" / "gsm8k").mkdir(parents=True)
    (tmp_path / "going-on" / "gsm8k" / "samples.jsonl").write_text("")
    (folder(tmp_path / "broken") / "gsm8k.json").write_text('{"benchmark": "gs')
    twice = folder(tmp_path / "twice", result("gsm8k", {"p": [1]}))
    (twice / "copy.json").write_text((twice / "gsm8k.json").read_text())
    with pytest.raises(ValueError, match=message.replace("?", r"\?").replace("+", r"\+")):
        compare.run(str(both[0]), place.replace("{tmp}", str(tmp_path)), common_only=False, as_json=False)


def test_a_place_that_is_none_is_told_where_results_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `hpcgrpo eval` writes them, and folders without results are not named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs" / "weird").mkdir(parents=True)
    (tmp_path / "logs" / "weird" / "profile.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"logs/weyrd: no such folder or result file\. A published row is TABLE:ROW"
    ):
        compare.load("logs/weyrd")
    folder(tmp_path / "logs" / "run" / "eval", result("gsm8k", {"p": [1]}))
    folder(tmp_path / "logs" / "eval" / "tiny", result("gsm8k", {"p": [1]}))
    with pytest.raises(ValueError, match=r"nowhere: no such .* \(results lie in logs/run, logs/eval/tiny\)"):
        compare.load("nowhere")


def test_nothing_in_common(tmp_path: Path) -> None:
    a = folder(tmp_path / "a", result("gsm8k", {"p": [1]}))
    with pytest.raises(
        ValueError, match=r"no benchmark in common: .*has gsm8k; igrpo_figure_2:.*has gpqa_diamond.*"
    ):
        compare.load(str(a))
        compare.compare(compare.load(str(a)), published.Side("igrpo_figure_2:x", {"gpqa_diamond": 0.5}, {}))


def test_neither_numbers_nor_comparison_import_torch() -> None:
    code = (
        "import sys, evaluation.compare, evaluation.tables, evaluation.pass_at_n\n"
        "print(*sorted({'torch', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


# ---- tables


def test_a_result_table() -> None:
    results = [
        result("gsm8k", {"p": [1, 1], "q": [1, 0], "r": [0, 0]}),
        result("aime24", {"p": [1, 1, 1, 1], "q": [1, 1, 1, 1]}),
    ]
    results[0]["summary"]["counts"]["timeout"] = 2
    row = published.Side("table:iGRPO 7B", {"gsm8k": 0.9242, "aime24": 0.5630}, {}, ("A paper, Table 1",))
    table = tables.result_table(results, published=row)
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    gsm8k, aime24, average = (x for x in lines if x.startswith(("gsm8k 3", "aime24 2", "average of 2")))
    assert gsm8k == "gsm8k 3 x 2 50.00±28.87 0.00–100.00 66.67 50.00 0.00 0.00 92.42"
    assert aime24 == "aime24 2 x 4 100.00 34.24–100.00 100.00 100.00 0.00 0.00 56.30"
    assert average.startswith("average of 2 75.00±") and average.endswith(" 74.36")
    assert "gsm8k: 2 of 6 samples took the grader too long and count as wrong." in " ".join(lines)
    assert "published: table:iGRPO 7B; A paper, Table 1." in " ".join(lines)
    assert "| 92.42 |" in tables.to_markdown(results, published=row)


def test_markdown_of_one_benchmark() -> None:
    text = tables.to_markdown([result("my|set", {"p": [1, 1], "q": [1, 0]})])
    heads, marks, row, *rest = text.splitlines()
    assert heads == f"| {' | '.join(tables.HEADS)} |"
    assert marks.count("---:") == len(tables.HEADS) - 1
    assert row.startswith("| my/set | 2 x 2 | 75.00±25.00 | 50.00–100.00 | 100.00 | 75.00 | 0.00 | 0.00 |")
    assert rest == ["", tables.LEGEND]


# ---- pass@N


def curve(counts: Sequence[int], n: int) -> dict[str, list[int]]:
    return {f"{i}": [1] * c + [0] * (n - c) for i, c in enumerate(counts)}


def test_pass_at_n_of_a_model_like_the_papers(tmp_path: Path) -> None:
    """28 of 30 problems are solved in most samples: as AIME24 in Figure S.1, 93.33 % from some N on, and no further."""
    like = result("aime24", curve([200] * 26 + [60] * 2 + [0] * 2, 256))
    late = result("aime25", curve([240] * 20 + [1] * 10, 256))
    found = pass_at_n.study([like, late], tmp_path / "study", beside=pass_at_n.figure_s1())
    points = {p["n"]: p for p in found["benchmarks"]["aime24"]["points"]}
    assert list(points) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert points[256]["mean"] == pytest.approx(28 / 30) == pytest.approx(points[64]["mean"], abs=1e-6)
    assert points[1]["mean"] == pytest.approx((26 * 200 + 120) / 256 / 30)
    assert all(p["low"] < p["mean"] < p["high"] for p in points.values())
    assert found["benchmarks"]["aime24"]["saturation"] == {
        "n": 4, "text": "saturated from N = 4 on (within 1/30 of pass@256)",
    }  # fmt: skip
    assert found["benchmarks"]["aime25"]["saturation"]["n"] is None
    assert found["benchmarks"]["aime25"]["saturation"]["text"].startswith("not saturated")
    assert {"n": 256, "mean": pytest.approx(0.9667)} in found["benchmarks"]["aime25"]["published"]
    assert json.loads((tmp_path / "study" / "pass_at_n.json").read_text()) == found
    picture = (tmp_path / "study" / "pass_at_n.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_saturation_of_the_published_points() -> None:
    found = {
        name: pass_at_n.saturation(list(points.items()), 30) for name, points in pass_at_n.figure_s1().items()
    }
    assert found == {"aime24": 16, "aime25": None}  # 90.00 to 96.67 at the last doubling: two problems


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1, 0.5)], None),
        ([(1, 0.5), (2, 0.6)], 1),
        ([(1, 0.5), (2, 0.59), (4, 0.7)], None),
        ([(1, 0.1), (2, 0.6), (4, 0.7)], 2),
    ],
)
def test_saturation(points: list[tuple[int, float]], expected: int | None) -> None:
    assert pass_at_n.saturation(points, 10) == expected


def test_pass_at_n_needs_equal_numbers_of_samples(tmp_path: Path) -> None:
    broken = result("gsm8k", {"p": [1, 0], "q": [1, 1]})
    broken["problems"]["p"]["right"] = [1]
    with pytest.raises(ValueError, match="gsm8k: its problems have 1 and 2 samples"):
        pass_at_n.study([broken], tmp_path)
