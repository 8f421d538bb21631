"""`hpcgrpo grade`: verdicts in the order of the rows, and where two graders disagree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import hpcgrpo

from evaluation import audit, grade

SHARED = Path(__file__).parents[2] / "shared" / "grader"
ROWS: list[tuple[dict[str, Any], str]] = [
    ({"id": "a", "gold": "1/2", "prediction": r"so \boxed{0.5}"}, "right"),
    ({"id": 2, "gold": "8.7e8", "prediction": r"8.7 \times 10^8"}, "right"),
    ({"gold": "870000000", "prediction": "8.7e8"}, "right"),
    ({"gold": "40_6", "prediction": r"<answer>$40_9$</answer>"}, "wrong"),
    ({"gold": "7", "prediction": ""}, "unparsed"),
    ({"gold": r"we get \boxed{x^2+1}", "prediction": "The answer is $1+x^2$."}, "right"),
    ({"gold": "7", "prediction": r"\boxed{9^{9^{9^{9}}}}"}, "wrong"),
    ({"gold": 12, "prediction": "12"}, "right"),
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def graded(
    path: Path, capsys: pytest.CaptureFixture[str], **options: Any
) -> tuple[list[dict[str, Any]], str]:
    given: dict[str, Any] = {"as_json": True, "processes": 2, "time_limit_seconds": 2.0}
    assert grade.run(path, **(given | options)) == 0
    said = capsys.readouterr()
    return [json.loads(line) for line in said.out.splitlines()], said.err


def test_one_object_a_row_in_their_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, error = graded(write(tmp_path / "rows.jsonl", [row for row, _ in ROWS]), capsys)
    for (row, expected), said in zip(ROWS, found, strict=True):
        allowed = {expected, "timeout"} if "9^{9" in str(row["prediction"]) else {expected}
        assert said["outcome"] in allowed, row
        assert said["verdict"] is (said["outcome"] == "right") and said.get("id") == row.get("id")
    assert "8 rows" in error and "5 right" in error


def test_a_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"gold": "7", "prediction": "\\boxed{\x1b[31m" + "9" * 300 + "}"},
        {"gold": "é\ud800", "prediction": ""},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    assert grade.run(path, as_json=False, processes=1, time_limit_seconds=2.0) == 0
    said = capsys.readouterr()
    header, first, second, summary = said.out.splitlines()
    assert header.split() == ["line", "outcome", "reference", "answer"] and said.err == ""
    assert first.split()[:3] == ["1", "wrong", "7"] and len(first) < 110 and "\x1b" not in first
    assert second.split()[:2] == ["2", "unparsed"] and second.endswith("(none)")
    assert summary == "2 rows: 0.0% right (1 wrong, 1 unparsed)"


def test_verdicts_come_while_rows_still_do() -> None:
    """Through a pipe that stays open, longer than one chunk, from standard input."""
    count = grade.CHUNK_ROWS + 10
    lines = "".join(
        json.dumps({"id": i, "gold": str(i), "prediction": str(i - i % 2)}) + "\n" for i in range(count)
    )
    command = [sys.executable, "-m", "hpcgrpo.cli", "grade", "-", "--json", "--processes", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(lines)
        process.stdin.flush()
        first = json.loads(process.stdout.readline())  # the input has not ended
        process.stdin.close()
        rest = [json.loads(line) for line in process.stdout]
    assert process.returncode == 0
    found = [first, *rest]
    assert [f["id"] for f in found] == list(range(count))
    assert [f["verdict"] for f in found] == [i % 2 == 0 for i in range(count)]


# From a small process: the kernel's figure for a program begins with what the process held that started it.
PEAK = (
    "import resource, subprocess, sys; subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True);"
    " print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
)


def test_a_long_file_takes_no_more_memory_than_a_short_one(tmp_path: Path) -> None:
    def peak_bytes(count: int) -> int:
        rows = [{"gold": str(i), "prediction": f"so \\boxed{{{i + 1}}}" + " " * 500} for i in range(count)]
        path = write(tmp_path / f"{count}.jsonl", rows)
        command = [
            sys.executable,
            "-c",
            PEAK,
            sys.executable,
            "-m",
            "hpcgrpo.cli",
            "grade",
            str(path),
            "--json",
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        return int(done.stdout) * 1024

    assert peak_bytes(20_000) - peak_bytes(1_000) < 5_000_000  # the rows are 11 MB


def test_strict_wants_a_box_or_a_tag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"gold": "7", "prediction": "7"}, {"gold": "7", "prediction": r"\boxed{7}"}]
    found, _ = graded(write(tmp_path / "rows.jsonl", rows), capsys, strict=True)
    assert [f["outcome"] for f in found] == ["unparsed", "right"]
    named = [{"reference": "7", "said": "7"}]
    found, _ = graded(
        write(tmp_path / "rows.jsonl", named), capsys, gold_column="reference", prediction_column="said"
    )
    assert found[0]["verdict"] is True


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no rows; each line holds one, e.g. {"),
        (["{not json"], "line 1"),
        ([{"gold": "7", "prediction": "7"}, {"gold": "7", "answer": "7"}], "line 2: no key 'prediction'"),
        ([[1, 2]], "line 1: holds a list, not an object"),
        (["null"], "line 1: holds null, not an object"),
        ([{"gold": True, "prediction": "7"}], "line 1: 'gold' is true or false"),
        ([{"gold": "7", "prediction": [7]}], "line 1: 'prediction' is a list"),
        ([{"a": "7", "b": "7"}] * 3, "line 1: no key 'gold'; there are: 'a', 'b'"),
    ],
)
def test_rows_that_cannot_be_read_are_named(tmp_path: Path, rows: list[Any], words: str) -> None:
    done = hpcgrpo("grade", str(write(tmp_path / "rows.jsonl", rows)), "--json")
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"gold": "", "prediction": "7"}], "line 1: 'gold' is empty"),
        ([{"gold": " \n", "prediction": "7"}], "line 1: 'gold' is empty"),
        (['{"gold": NaN, "prediction": "7"}'], "line 1: 'gold' is NaN"),
        ([{"gold": "nan", "prediction": "7"}], "line 1: 'gold' is NaN"),
        ([{"gold": None, "prediction": "7"}], "line 1: 'gold' is null"),
        ([{"gold": "6 + 1 ####", "prediction": "7"}], "line 1: 'gold' holds no answer ('6 + 1 ####')"),
        ([{"gold": r"\boxed{}", "prediction": "7"}], "line 1: 'gold' holds no answer"),
    ],
)
def test_a_reference_that_is_none_is_told_and_no_fault_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Any], words: str
) -> None:
    (found,), error = graded(write(tmp_path / "rows.jsonl", rows), capsys)
    assert found["outcome"] == "error" and words in error
    assert error.splitlines()[-1] == "1 row, none of which could be graded"


def test_rows_that_cannot_be_graded_cost_the_others_nothing(tmp_path: Path) -> None:
    """Each is told with its line, blank ones counted; the rest are graded, and the exit code tells."""
    rows = ["", {"gold": "7", "prediction": "7"}, "{", {"gold": "", "prediction": "7", "id": 5}, "  "]
    rows += [{"gold": "1/2", "prediction": "0.5", "id": "x"}, {"gold": "7"}, '{"gold": 8, "prediction": NaN}']
    path = write(tmp_path / "rows.jsonl", rows)
    done = hpcgrpo("grade", str(path), "--json")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    reasons = {one["line"]: one.pop("error") for one in found if "error" in one}
    assert done.returncode == 2
    assert found == [
        {"line": 2, "verdict": True, "outcome": "right"},
        {"line": 3, "verdict": False, "outcome": "error"},
        {"line": 4, "id": 5, "verdict": False, "outcome": "error"},
        {"line": 6, "id": "x", "verdict": True, "outcome": "right"},
        {"line": 7, "verdict": False, "outcome": "error"},
        {"line": 8, "verdict": False, "outcome": "unparsed"},
    ]
    *told, summary, last = done.stderr.splitlines()
    assert told == [f"hpcgrpo: error: {path}, line {line}: {why}" for line, why in reasons.items()]
    assert [why.split(";")[0].split(":")[0] for why in reasons.values()] == [
        "malformed JSON",
        "'gold' is empty",
        "no key 'prediction'",
    ]
    assert (
        summary == "6 rows, 3 of which could not be graded; of the other 3: 66.7% right (2 right, 1 unparsed)"
    )
    assert last == f"hpcgrpo: error: {path}: 2 of 6 rows could not be read; mend or remove them"
    table = hpcgrpo("grade", str(path))
    assert table.returncode == 2 and table.stdout.splitlines()[2].split() == ["3", "error", "(not", "graded)"]


def test_a_row_without_a_reference_is_an_outcome_among_others(tmp_path: Path) -> None:
    rows = [{"gold": "7", "prediction": "7"}, {"gold": "", "prediction": "7"}]
    done = hpcgrpo("grade", str(write(tmp_path / "rows.jsonl", rows)), "--json")
    assert done.returncode == 0 and "line 2: 'gold' is empty; a row needs a reference" in done.stderr
    assert [json.loads(line)["outcome"] for line in done.stdout.splitlines()] == ["right", "error"]
    assert done.stderr.endswith(
        "2 rows, 1 of which could not be graded; of the other 1: 100.0% right (1 right)\n"
    )


def test_a_wrong_name_of_a_column_is_told_once(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"reference": "7", "prediction": "7"}] * 1000)
    done = hpcgrpo("grade", str(path))
    assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1
    assert "name yours with --gold-column" in done.stderr and "all 512 rows read so far" in done.stderr


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01\n")
    for path in (tmp_path / "nothing.jsonl", tmp_path / "binary", tmp_path):
        done = hpcgrpo("grade", str(path))
        assert done.returncode == 2 and done.stderr.startswith("hpcgrpo: error: "), done.stderr


def test_an_audit_lists_where_two_graders_disagree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "rollouts"
    folder.mkdir(parents=True)
    rows = [("7", r"\boxed{7}")] * 3 + [("40_6", r"\boxed{40_9}")] * 2 + [("7", r"\boxed{8}")]
    for step in (3, 7):
        write(folder / f"step-{step:06d}.jsonl", [{"answer": g, "completion": c} for g, c in rows])
    assert audit.audit(tmp_path / "run", as_json=True, processes=2, limit=10) == 0
    said = json.loads(capsys.readouterr().out)
    (apart,) = said["disagreements"]  # math-verify reads past the base
    assert (apart["gold"], apart["answer"], apart["hpcgrpo"], apart["math-verify"]) == (
        "40_6",
        "40_9",
        "wrong",
        "right",
    )
    assert apart["count"] == 4 and apart["steps"] == [3, 7]
    assert (said["pairs"], said["rollouts"], said["agreement"]) == (3, 12, 1 - 1 / 3)
    assert said["kappa"] == pytest.approx(
        (2 / 3 - 4 / 9) / (1 - 4 / 9)
    )  # by hand: p_o 2/3, p_e 1/3*2/3 + 2/3*1/3


def test_the_second_grader_of_an_audit_can_be_named(tmp_path: Path) -> None:
    """By its text 1+x is not x+1; the pair was sampled twice but is one pair."""
    rows = [("x+1", r"\boxed{1+x}")] * 2 + [("7", r"\boxed{7}")]
    path = write(tmp_path / "rows.jsonl", [{"answer": g, "completion": c} for g, c in rows])
    done = hpcgrpo("grade", str(path), "--audit", "--judge", "text")
    header, apart, summary = done.stdout.splitlines()
    assert done.returncode == 0 and header.split() == [
        "times",
        "steps",
        "hpcgrpo",
        "text",
        "reference",
        "answer",
    ]
    assert apart.split() == ["2", "right", "wrong", "x+1", "1+x"]
    assert summary == (
        "2 distinct pairs of 3 rollouts: 50.0% agreement, kappa 0.000; of the distinct pairs 2 are right by hpcgrpo, "
        "1 by text"
    )
    for judge in ("hpcgrpo", "gpt"):
        done = hpcgrpo("grade", str(path), "--audit", "--judge", judge)
        assert (
            done.returncode == 2
            and f"--judge {judge}: the second grader is one of math-verify, text" in done.stderr
        )
    done = hpcgrpo("grade", str(path), "--judge", "text")
    assert done.returncode == 2 and "--judge text: names the second grader of --audit" in done.stderr


@pytest.mark.skipif(not SHARED.exists(), reason="the collection of grader cases is not beside this checkout")
def test_the_collection_of_cases(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [json.loads(line) for line in (SHARED / "cases.jsonl").read_text().splitlines()]
    found, _ = graded(SHARED / "cases.jsonl", capsys)
    settled = [(c, f) for c, f in zip(cases, found, strict=True) if not c["disputed"]]
    wrong = [c["id"] for c, f in settled if f["verdict"] != c["expected"]]
    false_positives = [c["id"] for c, f in settled if f["verdict"] and not c["expected"]]
    assert len(settled) == 469 and len(wrong) <= 4, wrong
    assert len(false_positives) <= 0.01 * sum(not c["expected"] for c, _ in settled), false_positives


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_time_limit_is_a_number_of_seconds(tmp_path: Path, seconds: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"gold": "1", "prediction": "1"}])
    with pytest.raises(ValueError, match=f"^--time-limit {seconds}: must be a number of seconds above 0"):
        grade.run(path, as_json=True, processes=1, time_limit_seconds=float(seconds))
