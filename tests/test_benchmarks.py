"""The table of benchmarks: what is read from where, what a preset gives, and what is told when something is amiss."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from evaluation.benchmarks import (
    ALIASES,
    BENCHMARKS,
    LETTERS,
    Problem,
    Protocol,
    resolve,
)
from evaluation.config import EvaluationConfig, parse
from evaluation.presets import PRESETS, prompt, protocol, recipe
from evaluation.problems import load
from hpcgrpo.rewards.numbers import decimal_value
from hpcgrpo.tasks import SYSTEM_PROMPTS

DATA = Path(__file__).parent / "data" / "benchmarks"
SHARED = Path(__file__).parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="the sets are not beside this checkout")
# The numbers of problems that the papers and the data sets' cards give.
SIZES = {
    "gsm8k": 1319,
    "math500": 500,
    "math": 5000,
    "aime24": 30,
    "aime25": 30,
    "amc23": 40,
    "amc_2022_2023": 83,
    "minerva": 272,
    "olympiadbench": 675,
}


def config(**keys: Any) -> EvaluationConfig:
    return parse({"benchmarks": "gsm8k", **keys})


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def own(path: Path, name: str = "own") -> list[Problem]:
    return load(resolve([f"{name}={path}"])[0])


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("math-500", "math500"),
        ("MATH-500", "math500"),
        ("aime_2024", "aime24"),
        ("AIME25", "aime25"),
        ("gpqa", "gpqa_diamond"),
        ("olympiad", "olympiadbench"),
        ("mmlu-pro", "mmlu_pro"),
        ("minerva_math", "minerva"),
        ("amc-2022-23", "amc_2022_2023"),
    ],
)
def test_other_names_of_a_benchmark(name: str, meant: str) -> None:
    assert [b.name for b in resolve([name])] == [meant]


def test_names_keep_their_order_and_aliases_lead_somewhere() -> None:
    assert [b.name for b in resolve(["mmlu_pro", "gsm8k", "addition"])] == ["mmlu_pro", "gsm8k", "addition"]
    assert set(ALIASES.values()) <= set(BENCHMARKS)
    assert not set(ALIASES) & set(BENCHMARKS)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["gms8k"], "did you mean gsm8k"),
        (["olympiads"], "did you mean olympiadbench"),
        (["nonsense"], r"known: gsm8k, math500.*your own: NAME=FILE.jsonl"),
        (["gsm8k", "gsm_8k"], "'gsm8k' stands there twice"),
        (["=x.jsonl"], "no NAME=FILE.jsonl"),
        (["a/b=x.jsonl"], "no NAME=FILE.jsonl"),
        (["own="], "no NAME=FILE.jsonl"),
        (["chain=x.jsonl"], "another name"),
        (["chain:digits"], "key=number"),
    ],
)
def test_a_name_that_is_none(names: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        resolve(names)


# --- data -------------------------------------------------------------------------------------------------


@needs_shared
@pytest.mark.parametrize("name", SIZES)
def test_the_sets_have_the_published_sizes(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        problems = load(BENCHMARKS[name], data_dir=SHARED)
    assert len(problems) == SIZES[name] == BENCHMARKS[name].size
    assert len({p.id for p in problems}) == len(problems)
    assert not caplog.records
    assert all(p.question and p.gold for p in problems)


@needs_shared
def test_numbers_of_minerva_say_what_their_text_does() -> None:
    """So the text alone is graded against: the numeric column holds nothing more."""
    golds = {p.id: p.gold for p in load(BENCHMARKS["minerva"], data_dir=SHARED)}
    rows = [json.loads(line) for line in (SHARED / "minerva_math.jsonl").open(encoding="utf-8")]
    numeric = [row for row in rows if "answer_numeric" in row]
    assert len(numeric) == 187
    for row in numeric:
        value = decimal_value(golds[row["id"]])
        assert value is not None and float(value[0]) == row["answer_numeric"]


@pytest.mark.parametrize(
    ("name", "ids", "golds"),
    [
        ("gsm8k", ["gsm8k-0", "gsm8k-1", "gsm8k-2"], ["39", "1350", "-5"]),
        ("math", ["math-0", "math-1"], ["56", r"\frac{5}{2}"]),
        ("amc_2022_2023", ["amc_2022_2023-0", "amc_2022_2023-1"], ["97.0", "12.0"]),
        ("mmlu_pro", ["11", "12"], ["D", "J"]),
    ],
)
def test_each_published_format_is_read(name: str, ids: list[str], golds: list[str]) -> None:
    problems = load(BENCHMARKS[name], data_dir=DATA)
    assert [p.id for p in problems] == ids
    assert [p.gold for p in problems] == golds


def test_ids_of_math_500_are_its_own() -> None:
    first = load(BENCHMARKS["math500"], data_dir=DATA)[0]
    assert first.id == "test/own/1.json"
    assert first.gold == r"\frac{3}{4}"


def test_padding_of_mmlu_pro_is_no_choice() -> None:
    first, second = load(BENCHMARKS["mmlu_pro"], data_dir=DATA)
    assert first.choices == ("2.4 m", "17 m", "60 m", "600 m")
    assert len(second.choices) == 10


def test_choices_of_gpqa_stand_in_an_order_of_their_own() -> None:
    problems = load(BENCHMARKS["gpqa_diamond"], data_dir=DATA)
    assert [p.id for p in problems] == [f"own{i}" for i in range(6)]
    right = [p.choices[LETTERS.index(p.gold)] for p in problems]
    assert right == ["Mercury", "newton", "6", "carbon dioxide", "32", "blue"]
    assert sorted(problems[0].choices) == ["Earth", "Mars", "Mercury", "Venus"]
    assert len({p.gold for p in problems}) > 1


def test_the_order_of_choices_hangs_on_the_id_alone(tmp_path: Path) -> None:
    import csv

    whole = {p.id: p for p in load(BENCHMARKS["gpqa_diamond"], data_dir=DATA)}
    with (DATA / "gpqa_diamond.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    write(tmp_path / "gpqa_diamond.jsonl", list(reversed(rows))[:3])
    part = load(BENCHMARKS["gpqa_diamond"], data_dir=tmp_path)
    assert len(part) == 3
    assert all(p == whole[p.id] for p in part)


def test_what_olympiadbench_says_of_an_answer() -> None:
    problems = load(BENCHMARKS["olympiadbench"], data_dir=DATA)
    assert [p.multiple for p in problems] == [True, True, False, False, False, True, True]
    assert (problems[4].gold, problems[4].unit, problems[4].tolerance) == ("4.2", "%", (0.1,))
    assert problems[3].unit == "$cm^2$"
    assert problems[0].tolerance == ()


def test_olympiadbench_as_published(tmp_path: Path) -> None:
    row = {"id": 9, "question": "q", "final_answer": ["$1.5$,$2$"], "is_multiple_answer": True, "unit": None}
    write(tmp_path / "olympiadbench.jsonl", [row | {"error": "1e-2,", "answer_type": "Numerical"}])
    expected = Problem("9", "q", "$1.5$,$2$", "olympiad", (), True, "Numerical", "", (0.01, None))
    assert load(BENCHMARKS["olympiadbench"], data_dir=tmp_path) == [expected]


def test_a_subset_is_random_by_seed_and_a_smaller_one_lies_in_it() -> None:
    benchmark = BENCHMARKS["gpqa_diamond"]
    whole = load(benchmark, data_dir=DATA)
    four = load(benchmark, data_dir=DATA, max_problems=4, seed=1)
    two = load(benchmark, data_dir=DATA, max_problems=2, seed=1)
    assert len(four) == 4 and len(two) == 2
    assert [p for p in whole if p in four] == four
    assert all(p in four for p in two)
    subsets = {tuple(p.id for p in load(benchmark, data_dir=DATA, max_problems=3, seed=s)) for s in range(8)}
    assert len(subsets) > 1
    assert load(benchmark, data_dir=DATA, max_problems=99) == whole


def test_another_number_of_rows_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(BENCHMARKS["gsm8k"], data_dir=DATA)
    assert "gsm8k has 3 problems, published are 1319" in caplog.text


def test_generated_tasks_are_held_out_and_take_options() -> None:
    chain, addition, short = resolve(["chain", "addition", "chain:digits=3:size=5"])
    assert len(load(chain)) == len(load(addition)) == 256
    problems = load(short)
    assert short.name == "chain-digits-3-size-5" and len(problems) == 5
    for problem in problems:
        assert problem.gold == str(sum(map(int, problem.question)) % 10)
    assert [p.id for p in problems] == [f"{short.name}-{i}" for i in range(5)]
    assert load(resolve(["chain:size=5:digits=3"])[0]) == problems
    with pytest.raises(ValueError, match="no option 'length'"):
        load(resolve(["chain:length=3"])[0])


@pytest.mark.parametrize("column", ["problem", "question", "prompt"])
def test_a_file_of_the_users(tmp_path: Path, column: str, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "x.jsonl", [{column: "1+1?", "answer": 2, "solution": "no box"}])
    assert own(path) == [Problem("own-0", "1+1?", "2")]
    assert not caplog.records


def test_a_file_of_the_users_under_a_known_name_has_its_rules(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [{"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}])
    assert own(path, "GSM8K") == [Problem("gsm8k-0", "1+1?", "2")]


def test_ids_that_repeat_are_refused(tmp_path: Path) -> None:
    rows = [{"id": i, "problem": "p", "answer": "1"} for i in ("a", "b", "a")]
    with pytest.raises(ValueError, match=r"x\.jsonl: lines 1 and 3 have the same id 'a'"):
        own(write(tmp_path / "x.jsonl", rows))


def test_blank_lines_of_a_file_are_left_out(tmp_path: Path) -> None:
    """They change neither a problem's id, which counts rows, nor the number of the line that an error names."""
    path = tmp_path / "x.jsonl"
    path.write_text('\n{"problem": "p", "answer": "1"}\n \t\r\n{"problem": "q", "answer": "2"}\n\n')
    assert own(path) == [Problem("own-0", "p", "1"), Problem("own-1", "q", "2")]
    path.write_text('\n{"problem": "p", "answer": "1"}\n\n{"problem": "q", "answer": NaN}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 4: column 'answer' is NaN"):
        own(path)
    path.write_text(
        '\n{"id": 7, "problem": "p", "answer": "1"}\n\n{"id": 7, "problem": "q", "answer": "2"}\n'
    )
    with pytest.raises(ValueError, match="lines 2 and 4 have the same id"):
        own(path)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"text": "p", "answer": "1"}], "no column for the question, 'question' or 'problem' or 'prompt'"),
        ([{"problem": "p"}], r"no column for the answer.*columns: problem"),
        (
            [{"problem": "p", "answer": "1"}, {"problem": "p", "answer": ""}],
            r"line 2: column 'answer' is empty; every row needs an answer to grade against$",
        ),
        (
            [{"problem": "p", "answer": "1"}, {"problem": "p", "answer": None}],
            "every row needs an answer to grade against$",
        ),
        (
            [{"problem": "p", "answer": "1"}, {"question": "p", "answer": "1"}],
            r"line 2: no column 'problem' \(columns: question, answer\); every row is to have 'problem' and 'answer'$",
        ),
        (
            [{"problem": "p", "answer": "1"}, {"problem": "p"}],
            r"line 2: no column 'answer' \(columns: problem\); every row is to have 'problem' and 'answer'$",
        ),
        (
            [
                {
                    "problem": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
                    "answer": "1",
                }
            ],
            "chat",
        ),
    ],
)
def test_rows_that_cannot_be_used(tmp_path: Path, rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        own(write(tmp_path / "x.jsonl", rows))


def test_a_generated_task_of_no_problems_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"benchmarks: chain:digits=3:size=0: size is 0; .* at least 1 problem$"
    ):
        resolve(["chain:digits=3:size=0"])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"options": ["x"], "answer": "A"}, "list of 2 to 26"),
        ({"options": ["x", "y"], "answer": "C"}, "'C' is none of the 2 options"),
        ({"options": ["x", "y"], "answer": "x"}, "'x' is none of the 2 options"),
        ({"options": ["x", "y"], "answer": "A", "answer_index": 1}, "disagree"),
    ],
)
def test_choices_that_cannot_be_used(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    path = write(tmp_path / "x.jsonl", [{"question": "q", **row}])
    with pytest.raises(ValueError, match=f"line 1: .*{said}"):
        own(path, "mmlu_pro")


def test_a_csv_without_an_answer(tmp_path: Path) -> None:
    text = (DATA / "gpqa_diamond.csv").read_text(encoding="utf-8").replace("newton", "")
    (tmp_path / "gpqa_diamond.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="row 2: column 'Correct Answer' is empty"):
        load(BENCHMARKS["gpqa_diamond"], data_dir=tmp_path)
    text = (DATA / "gpqa_diamond.csv").read_text(encoding="utf-8").replace("pascal", "")
    (tmp_path / "gpqa_diamond.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="row 2: column 'Incorrect Answer 3' is empty"):
        load(BENCHMARKS["gpqa_diamond"], data_dir=tmp_path)


def test_a_missing_file_says_what_was_looked_for_and_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        load(BENCHMARKS["gsm8k"], data_dir=tmp_path)
    said = str(error.value)
    assert all(name in said for name in (str(tmp_path), *BENCHMARKS["gsm8k"].files))
    assert "load_dataset('openai/gsm8k', 'main', split='test')" in said
    with pytest.raises(
        ValueError, match=r"authors ask that no example be posted.*'Idavidrein/gpqa', 'gpqa_diamond'"
    ):
        load(BENCHMARKS["gpqa_diamond"], data_dir=tmp_path / "none")
    with pytest.raises(ValueError, match="no such file"):
        own(tmp_path / "none.jsonl")


def test_the_hub_out_of_reach() -> None:
    pytest.importorskip("datasets")
    way_out = r"data_dir=FOLDER, in which aime25\.jsonl lies, or name the file: benchmarks=aime25=FILE\.jsonl"
    with pytest.raises(ValueError, match=rf"no data_dir.*'math-ai/aime25'.*HF_HUB_OFFLINE.*{way_out}"):
        load(BENCHMARKS["aime25"])


def test_no_network_is_told_at_once() -> None:
    """Where nothing says that there is none: datasets would ask six times over half a minute."""
    pytest.importorskip("datasets")
    code = (
        "from evaluation.problems import load\n"
        "from evaluation.benchmarks import BENCHMARKS\n"
        "load(BENCHMARKS['gsm8k'])"
    )
    nowhere = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **nowhere},
    )
    assert "127.0.0.1:9 cannot be reached" in done.stderr and "data_dir=FOLDER" in done.stderr
    assert "Retrying" not in done.stderr


def test_what_datasets_writes_is_read(tmp_path: Path) -> None:
    """A folder saved by it, and the file that the command of the error message leaves."""
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in (DATA / "mmlu_pro.jsonl").open(encoding="utf-8")]
    data = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"test": data}).save_to_disk(tmp_path / "folder" / "mmlu_pro")
    data.to_json(tmp_path / "mmlu_pro.jsonl")
    expected = load(BENCHMARKS["mmlu_pro"], data_dir=DATA)
    assert load(BENCHMARKS["mmlu_pro"], data_dir=tmp_path / "folder") == expected
    assert load(BENCHMARKS["mmlu_pro"], data_dir=tmp_path) == expected


# --- presets ----------------------------------------------------------------------------------------------

# (samples, temperature, top-p, top-k, tokens), typed from the papers' evaluation sections.
PUBLISHED = {
    ("igrpo", "aime24"): (64, 0.6, 0.95, 0, 65000),
    ("igrpo", "aime25"): (64, 0.6, 0.95, 0, 65000),
    ("igrpo", "math500"): (8, 0.6, 0.95, 0, 65000),
    ("igrpo", "amc23"): (8, 0.6, 0.95, 0, 65000),
    ("igrpo", "gsm8k"): (8, 0.6, 0.95, 0, 65000),
    ("igrpo", "minerva"): (8, 0.6, 0.95, 0, 65000),
    ("igrpo", "gpqa_diamond"): (8, 0.6, 0.95, 0, 65000),
    ("igrpo", "mmlu_pro"): (8, 0.6, 0.95, 0, 65000),
    ("cppo", "gsm8k"): (1, 0, 1, 0, 1024),
    ("cppo", "math"): (1, 0, 1, 0, 1024),
    ("cppo", "math500"): (1, 0, 1, 0, 1024),
    ("cppo", "amc23"): (4, 0.6, 0.95, 0, 3072),
    ("cppo", "aime24"): (4, 0.6, 0.95, 0, 3072),
    ("codistill", "minerva"): (5, 0.6, 0.95, 0, 3072),
    ("codistill", "math500"): (5, 0.6, 0.95, 0, 3072),
    ("codistill", "olympiadbench"): (5, 0.6, 0.95, 0, 3072),
}


@pytest.mark.parametrize(("preset", "name"), PUBLISHED)
def test_a_preset_is_the_papers_protocol(preset: str, name: str) -> None:
    (benchmark,) = resolve([name])
    assert astuple(protocol(benchmark, config(), preset)) == PUBLISHED[preset, name]
    assert protocol(benchmark, config(preset=preset)) == protocol(benchmark, config(), preset)


# Table 1 of iGRPO, the README of CPPO, the figures known of CoDistill: (problems, samples, decimals, percentages).
FIGURES = [
    ("igrpo", "math500", 2, [92.80, 93.25, 93.50, 93.80, 95.55, 96.00, 94.00, 96.70]),
    ("cppo", "amc23", 2, [25.62, 46.88, 53.12, 49.38, 46.25, 45.00]),
    ("cppo", "aime24", 2, [5.00, 5.83, 10.00, 6.67, 8.33]),
    ("cppo", "math500", 2, [55.20, 75.20, 77.20, 72.80]),
    ("codistill", "minerva", 2, [25.88, 31.99, 38.75]),
    ("codistill", "math500", 2, [54.92, 72.12, 75.04, 80.12]),
    ("codistill", "olympiadbench", 2, [35.05, 36.39, 42.73]),
]


def reachable(percentage: float, graded: int, decimals: int) -> bool:
    right = round(percentage / 100 * graded)
    return any(
        abs(100 * r / graded - percentage) <= 0.5 * 10**-decimals + 1e-9
        for r in (right - 1, right, right + 1)
    )


@pytest.mark.parametrize(("preset", "name", "decimals", "percentages"), FIGURES)
def test_the_papers_figures_can_come_from_so_many_samples(
    preset: str, name: str, decimals: int, percentages: list[float]
) -> None:
    (benchmark,) = resolve([name])
    samples = protocol(benchmark, config(), preset).num_samples
    assert all(reachable(p, benchmark.size * samples, decimals) for p in percentages)


def test_fewer_samples_do_not_give_codistills_figures() -> None:
    """Its number of samples is not in the text; 54.92 % of MATH-500 takes a multiple of five."""
    assert [k for k in range(1, 6) if reachable(54.92, 500 * k, 2)] == [5]


def test_what_a_preset_asks_and_accepts() -> None:
    gsm8k, math500, aime24 = resolve(["gsm8k", "math500", "aime24"])
    assert [recipe(b, config(), "cppo").system_prompt for b in (gsm8k, math500, aime24)] == [
        "cppo_gsm8k",
        "cppo_math",
        "cppo_math",
    ]
    assert recipe(gsm8k, config(), "cppo").template == "{problem}"
    assert recipe(gsm8k, config(), "igrpo").template == gsm8k.template
    assert recipe(math500, config(), "codistill").system_prompt == "r1"
    assert recipe(math500, config()).system_prompt is None
    settings = [s for p in PRESETS.values() for s in (*p.settings.values(), p.rule) if s]
    assert {s.system_prompt for s in settings} <= set(SYSTEM_PROMPTS)


@pytest.mark.parametrize(
    ("preset", "name"), [("cppo", "minerva"), ("codistill", "gpqa"), ("cppo", "own=x.jsonl")]
)
def test_a_preset_refuses_what_its_paper_is_silent_on(preset: str, name: str) -> None:
    (benchmark,) = resolve([name])
    with pytest.raises(ValueError, match=f"preset {preset} .* says nothing of {benchmark.name}: it covers"):
        protocol(benchmark, config(preset=preset))


def test_amc_of_2024_is_codistills_by_name() -> None:
    assert protocol(resolve(["amc24=x.jsonl"])[0], config(preset="codistill")).num_samples == 5


def test_an_unknown_preset() -> None:
    with pytest.raises(ValueError, match="did you mean igrpo"):
        protocol(BENCHMARKS["gsm8k"], config(preset="grpo"))


def test_keys_beat_the_preset_and_null_leaves_it() -> None:
    keys = {"num_samples": 2, "temperature": 1.0, "top_p": 0.5, "top_k": 7, "max_completion_length": 10}
    assert protocol(BENCHMARKS["aime24"], config(preset="igrpo", **keys)) == Protocol(2, 1.0, 0.5, 7, 10)
    assert protocol(BENCHMARKS["aime24"], config(preset="igrpo", top_k=7)) == Protocol(
        64, 0.6, 0.95, 7, 65000
    )
    asked = recipe(BENCHMARKS["mmlu_pro"], config(system_prompt="r1", require_box_or_tag=True), "igrpo")
    assert (asked.system_prompt, asked.require_box_or_tag) == ("r1", True)
    assert not recipe(BENCHMARKS["mmlu_pro"], config(), "igrpo").require_box_or_tag
    assert recipe(BENCHMARKS["gsm8k"], config(system_prompt=""), "igrpo").system_prompt == ""


def test_greedy_is_one_sample() -> None:
    assert protocol(BENCHMARKS["aime24"], config(temperature=0)).num_samples == 1
    with pytest.raises(ValueError, match=r"^aime24: num_samples is 4 at temperature 0"):
        protocol(BENCHMARKS["aime24"], config(temperature=0, num_samples=4))


# --- prompts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_template_takes_the_problem_once(name: str) -> None:
    assert BENCHMARKS[name].template.count("{problem}") == 1


def test_braces_of_a_problem_stay() -> None:
    problem = Problem("x", "Is {problem} in $\\{1\\}$ or {0}?", "1")
    assert (
        prompt(BENCHMARKS["gsm8k"], problem, "<{problem}> {a}") == "<Is {problem} in $\\{1\\}$ or {0}?> {a}"
    )


def test_choices_stand_below_the_question() -> None:
    problem = Problem("x", "Which?", "B", "choice", ("no", "yes"))
    assert prompt(BENCHMARKS["mmlu_pro"], problem, "{problem}!") == "Which?\n\n(A) no\n(B) yes!"
    assert prompt(BENCHMARKS["mmlu_pro"], problem).startswith("Which?\n\n(A) no\n(B) yes\n\nReason")


def test_a_template_without_the_problem() -> None:
    with pytest.raises(ValueError, match=re.escape("lacks {problem}")):
        recipe(BENCHMARKS["gsm8k"], config(prompt_template="Solve: {question}"))
    with pytest.raises(ValueError, match=re.escape("lacks {problem}")):
        prompt(BENCHMARKS["gsm8k"], Problem("x", "q", "1"), "")
