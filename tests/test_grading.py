"""The pool of killable processes, and the verdicts it gives."""

from __future__ import annotations

import cmath
import json
import math
import operator
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcgrpo.rewards import expressions, grading
from hpcgrpo.rewards.answers import extract_answer, last_box, settle, tidy
from hpcgrpo.rewards.grading import Grader, precheck

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[2] / "shared" / "grader"
DATASETS = SHARED.parent / "data"
HARD = r"\int_0^1 \frac{1}{x^{13}+x^{7}+x+5} dx"  # never ends
EXPRESSION = ("x+1", "1+x")  # needs a process


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(num_processes=2) as pool:
        yield pool


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]  # a text may hold U+2028


def running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 60.0) -> list[int]:
    end = time.monotonic() + seconds
    while any(map(running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return [pid for pid in pids if running(pid)]


# ------------------------------------------------------------------------------------------------ verdicts


def verdicts(grader: Grader, cases: list[tuple[str, str]]) -> list[bool]:
    answers = [extract_answer(completion) for _, completion in cases]
    outcomes = iter(
        grader.grade([(gold, a) for (gold, _), a in zip(cases, answers, strict=True) if a is not None])
    )
    return [a is not None and next(outcomes) == "right" for a in answers]


def test_verdicts_of_the_fixture(grader: Grader) -> None:
    cases = rows(DATA / "answers.jsonl")
    found = verdicts(grader, [(c["reference"], c["completion"]) for c in cases])
    assert [c for c, v in zip(cases, found, strict=True) if v != c["right"]] == []


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="the collection of grader cases is not beside this checkout")
def test_share_of_right_verdicts_over_the_collection(grader: Grader) -> None:
    cases = [c for c in rows(SHARED / "cases.jsonl") if not c["disputed"]]
    found = verdicts(grader, [(c["gold"], c["prediction"]) for c in cases])
    wrong = [
        (c["gold"], c["prediction"])
        for c, v in zip(cases, found, strict=True)
        if v != c["expected_boxed_only"]
    ]
    assert len(wrong) <= 0.01 * len(cases), wrong


@pytest.mark.parametrize(
    ("gold", "prediction", "verdict"),
    [
        ("18", "18", True),
        ("1,234", "1234.0", True),
        ("18", "17", False),
        ("1/3", "2/6", True),
        ("0.1", "0.10000001", False),  # two decimals are compared exactly
        ("1/3", "0.333333", True),  # six digits, rightly rounded
        ("1/3", "0.33333", False),
        ("2/3", "0.666666", False),  # not rounded
        ("1e-7", "2e-7", False),
        ("50%", "0.5", True),
        ("7", "", False),
        ("7", "7" * 50_000, False),
        ("x+1", "1+x", None),
        (r"\sqrt{4}", "2", None),
    ],
)
def test_what_is_settled_without_a_process(gold: str, prediction: str, verdict: bool | None) -> None:
    assert precheck(gold, prediction) is verdict
    assert precheck(prediction, gold) is verdict or not prediction


def test_plain_answers_start_no_process() -> None:
    with Grader(num_processes=2) as pool:
        assert pool.grade([("18", "18"), ("18", "19"), ("1/2", "0.5")]) == ["right", "wrong", "right"]
        assert pool.pids() == []


def test_equal_pairs_are_judged_once(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[grading.Question] = []
    send = grading._send

    def watched(line: socket.socket, pair: grading.Question) -> bool:
        sent.append(pair)
        return send(line, pair)

    monkeypatch.setattr(grading, "_send", watched)
    assert grader.grade([EXPRESSION, ("x+1", "x+2")] * 50) == ["right", "wrong"] * 50
    assert sorted(sent) == [(*EXPRESSION, None), ("x+1", "x+2", None)]


def test_verdicts_do_not_depend_on_what_was_judged_before() -> None:
    cases = [(c["reference"], extract_answer(c["completion"]) or "") for c in rows(DATA / "answers.jsonl")][
        ::8
    ]
    with Grader(num_processes=1) as one, Grader(num_processes=2) as two:
        assert one.grade(cases) == two.grade(cases[::-1])[::-1]


def test_tidy_is_idempotent_and_settle_symmetric() -> None:
    for case in rows(DATA / "answers.jsonl"):
        gold, answer = tidy(case["reference"]), tidy(extract_answer(case["completion"]) or "")
        assert (tidy(gold), tidy(answer)) == (gold, answer)
        assert settle(gold, answer) == settle(answer, gold)


def spelt_otherwise(reference: str) -> set[str]:
    """The same answer with more space, where TeX does not mind it, and with the other commands for a fraction."""
    plain = reference.replace(r"\dfrac", r"\frac")
    spaced = re.sub(r"([=+<>])", r" \1 ", reference.replace(" ", "  "))
    return {reference, spaced, plain, plain.replace(r"\frac", r"\dfrac"), plain.replace(r"\frac", r"\tfrac")}


def not_equal_to_themselves(grader: Grader, references: list[str]) -> list[tuple[str, str]]:
    pairs = [(r, other) for r in dict.fromkeys(references) for other in spelt_otherwise(r)]
    outcomes = grader.grade(pairs)
    return [pair for pair, outcome in zip(pairs, outcomes, strict=True) if outcome != "right"]


def test_references_equal_themselves_however_they_are_spaced(grader: Grader) -> None:
    answers = rows(DATA / "answers.jsonl")
    references = [c["reference"] for c in answers if c["right"] and extract_answer(c["completion"])]
    references += [last_box(c["solution"]) or "" for c in rows(DATA / "boxed_solutions.jsonl")]
    references = [reference for reference in references if reference]
    assert len(references) > 400
    assert not_equal_to_themselves(grader, references) == []


@pytest.mark.slow
@pytest.mark.skipif(not DATASETS.exists(), reason="the data sets are not beside this checkout")
def test_references_of_every_data_set_equal_themselves(grader: Grader) -> None:
    files = sorted(DATASETS.glob("*.jsonl"))
    assert len(files) >= 10
    references = [str(row["answer"]) for path in files for row in rows(path)]
    assert not_equal_to_themselves(grader, references) == []


# ---------------------------------------------------------------------------------------------- tolerances


@pytest.mark.parametrize(
    ("gold", "prediction", "tolerance", "verdict"),
    [
        ("8.1", "8.15", 0.1, True),
        ("8.1", "8.2", 0.1, True),  # at most, in exact decimals: 0.1 is no binary fraction
        ("8.1", "8.21", 0.1, False),
        ("8.1", "8.15", None, False),
        ("8.1", "8.1", 0.0, True),
        ("8.7e8", r"8.71 \times 10^8", 1e6, True),
        ("8.7e8", r"8.72 \times 10^8", 1e6, False),
        (r"\pi", "3.14", 0.01, True),
        (r"\pi", "3.1", 0.01, False),
        ("(1,2)", "(1.01, 2)", 0.1, True),
        ("(1,2)", "(2, 1.01)", 0.1, False),
        ("1,2", "2.01, 1", 0.1, True),
        ("1,2", "2.01", 0.1, False),
        ("x = 2.5", "2.49", 0.1, True),
        ("2.5 m", r"2.49\text{ m}", 0.1, True),
        ("x+1", "x+1.01", 0.1, False),  # only numbers are near each other
        ("7", "", 10.0, False),
        ("7", "9^{9^{9^9}}", 10.0, False),
    ],
)
def test_within_a_tolerance(
    grader: Grader, gold: str, prediction: str, tolerance: float | None, verdict: bool
) -> None:
    assert grader.grade([(gold, prediction)], [tolerance]) == ["right" if verdict else "wrong"]


def test_one_pair_may_be_asked_with_several_tolerances(grader: Grader) -> None:
    assert grader.grade([("7", "7.5")] * 3, [None, 0.5, 0.1]) == ["wrong", "right", "wrong"]


@pytest.mark.parametrize(("tolerances", "words"), [([-0.1], "-0.1"), ([float("nan")], "nan"), ([], "0 tol")])
def test_tolerances_that_make_no_sense(grader: Grader, tolerances: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        grader.grade([EXPRESSION], tolerances)


# --------------------------------------------------------------------------- formulas read without a parser

OPERATORS = {"+": operator.add, "-": operator.sub, r"\cdot ": operator.mul}


def random_formula(draw: random.Random, depth: int) -> tuple[str, Any]:
    """LaTeX of a formula in x and y, and a function of them that computes it in floats."""
    kind = draw.choice(("leaf", "chain", "frac", "power", "root", "function", "run")) if depth else "leaf"
    if kind == "leaf":
        return leaf(draw)
    (a, f), (b, g) = random_formula(draw, depth - 1), random_formula(draw, depth - 1)
    if kind == "chain":
        sign = draw.choice(list(OPERATORS))
        return f"({a}){sign}({b})", lambda x, y: OPERATORS[sign](f(x, y), g(x, y))
    if kind == "frac":
        return rf"\frac{{{a}}}{{1+({b})^2}}", lambda x, y: f(x, y) / (1 + g(x, y) ** 2)
    if kind == "power":
        return rf"({a})^{{3}}", lambda x, y: f(x, y) ** 3
    if kind == "root":
        return rf"\sqrt{{2+({a})^{{2}}}}", lambda x, y: cmath.sqrt(2 + f(x, y) ** 2)
    if kind == "function":
        return rf"\sin({a})", lambda x, y: cmath.sin(f(x, y))
    return f"3({a})({b})", lambda x, y: 3 * f(x, y) * g(x, y)


def leaf(draw: random.Random) -> tuple[str, Any]:
    text = draw.choice(("x", "y", "2", "0.5", r"\pi", r"\frac12", "2x", "i"))
    values = {"2": 2, "0.5": 0.5, r"\pi": math.pi, r"\frac12": 0.5, "i": 1j}
    if text in values:
        return text, lambda x, y: values[text]
    return text, {"x": lambda x, y: x, "y": lambda x, y: y, "2x": lambda x, y: 2 * x}[text]


def test_formulas_have_the_value_that_floats_give() -> None:
    draw = random.Random(0)
    for _ in range(300):
        text, compute = random_formula(draw, 3)
        node = expressions.read(text)
        assert node is not None, text
        x, y = draw.uniform(0.3, 1.5), draw.uniform(0.3, 1.5)
        try:
            expected = complex(compute(x, y))
        except (OverflowError, ZeroDivisionError):
            continue
        found = complex(expressions._number(expressions.evaluate(node, {"x": x, "y": y})))
        assert abs(found - expected) <= 1e-9 * max(1.0, abs(expected)), text


@pytest.mark.parametrize(
    "text",
    ["1/2x", r"\sin x/2", "f(x)", r"\sin(x)^2", "2 3", "x 2", r"\int x dx", "1,2", "", "(", "x+", r"\foo"],
)
def test_what_is_ambiguous_or_foreign_is_not_read(text: str) -> None:
    assert expressions.read(text) is None


@pytest.mark.parametrize(
    ("gold", "prediction", "verdict"),
    [
        ("2^{2007}", "2^{2007}-1", False),  # exact, where 50 digits would not tell them apart
        (r"\sqrt{2}^2-2", "0", True),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}", False),
        ("10^{-40}", "2 \\cdot 10^{-40}", False),
        ("9^{9^{9}}", "9^{9^{9}}+1", False),  # not computed
        ("1/0", "1/0", False),
        (r"2\frac{1}{2}", "2.5", True),
        ("x^2-x^2", "0", True),
        (r"\sqrt{1/n}", r"1/\sqrt{n}", True),
        (r"\sqrt{a}\sqrt{b}", r"\sqrt{ab}", True),
        (r"\sqrt{x^2}", "x", False),
        (r"\sqrt[3]{-8}", "-2", True),
    ],
)
def test_values_are_compared_exactly(gold: str, prediction: str, verdict: bool) -> None:
    assert expressions.same_value(gold, prediction) is verdict
    assert expressions.same_value(prediction, gold) is verdict


def test_text_checks_are_linear_on_hostile_text() -> None:
    for unit in ("aaaa", "7 aaaa", "{", "}", " ", "\\boxed{", "<answer>", "%", ",", "1,", "\\text{"):
        start = time.process_time()
        text = extract_answer(unit * (200_000 // len(unit)) + "\\boxed{" + unit * 200 + "}") or ""
        precheck("7", text[:4000])
        assert time.process_time() - start < 2, unit


@pytest.mark.parametrize(
    ("head", "repeated", "times", "tail"),
    [
        ("7", r"\text{m}^2 ", 80, "7"),
        ("7 ", "answer is ", 90, "{"),
        ("7 ", "AM^2  ", 150, "R"),
        ("7 m", "-2", 400, "?"),
        ("7 (m ", "perper", 150, "?"),
        ("{", "~", 980, "option "),
        ("{", "~€", 490, "option "),
        ("", r"\begin{cases}&", 70, ""),
        ("7 ", "million ", 120, "?"),
    ],
)
def test_what_looks_like_a_unit_is_read_in_bounded_time(
    head: str, repeated: str, times: int, tail: str
) -> None:
    """In this process, which nothing kills: one that tried every way to part the text would never end."""
    start = time.process_time()
    assert precheck("7", head + repeated * times + tail) is not True
    assert time.process_time() - start < 1


# ----------------------------------------------------------------------------------------- hostile answers


def hostile_text(row: dict[str, Any]) -> str:
    text = row.get("completion", row.get("prediction"))
    return text if text is not None else "\\boxed{" + row["unit"] * row["times"] + "}"


def test_hostile_answers_cost_little_and_are_wrong() -> None:
    texts = [hostile_text(r) for r in rows(DATA / "hostile.jsonl")]
    with Grader(num_processes=2, time_limit_seconds=0.5) as pool:
        outcomes = pool.grade([("7", extract_answer(t) or "") for t in texts])
        assert "right" not in outcomes
        assert pool.grade([EXPRESSION]) == ["right"]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of processes that run."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def hostile_pairs(path: Path) -> list[tuple[str, str]]:
    return [(r.get("gold", "7"), extract_answer(hostile_text(r)) or "") for r in rows(path)]


def hostile_cases() -> list[Any]:
    """The fixture's, and the collection's where it is there."""
    absent = pytest.mark.skipif(not SHARED.exists(), reason="the collection of hostile answers is not beside")
    collection = pytest.param(SHARED / "hostile.jsonl", marks=[absent, pytest.mark.slow], id="collection")
    return [pytest.param(DATA / "hostile.jsonl", id="fixture"), collection]


@pytest.mark.parametrize("path", hostile_cases())
def test_each_hostile_answer_costs_little(path: Path) -> None:
    """CPU time, since other work may share the cores: of this process and of the one that grades."""
    with Grader(num_processes=1) as pool:
        pool.grade([EXPRESSION])
        before, threads = resident_bytes(os.getpid()), set(threading.enumerate())
        for gold, answer in hostile_pairs(path):
            began, there = time.process_time(), cpu_seconds(pool.pids()[1:])
            outcome = pool.grade([(gold, answer)])[0]
            pool.grade([EXPRESSION])  # a process that died of it is replaced
            here, pids = time.process_time() - began, pool.pids()[1:]
            assert here < 0.5, answer[:80]
            assert outcome == "timeout" or cpu_seconds(pids) - there < 2.5, answer[:80]
        assert resident_bytes(os.getpid()) - before < 50_000_000
        assert not set(threading.enumerate()) - threads
        pids = pool.pids()
    assert wait_until_gone(pids) == []


@pytest.mark.slow
@pytest.mark.parametrize("path", hostile_cases())
def test_a_batch_with_hostile_answers_takes_at_most_twice_as_long(path: Path) -> None:
    """5 % of 1,024, in turns with the batch without them; the least disturbed turn counts."""
    cases = [(c["reference"], extract_answer(c["completion"]) or "") for c in rows(DATA / "answers.jsonl")]
    cases = list(dict.fromkeys(cases))[:1024]
    assert len(cases) == 1024
    mixed, hostile = list(cases), hostile_pairs(path)
    for n, i in enumerate(random.Random(0).sample(range(1024), 51)):
        mixed[i] = hostile[n % len(hostile)]
    with Grader(num_processes=2) as pool:
        pool.grade([EXPRESSION, ("x+2", "2+x")])
        seconds: list[list[float]] = []
        while not seconds or (len(seconds) < 8 and not undisturbed(seconds)):
            seconds.append([])
            for batch in (cases, mixed, cases):
                began = time.monotonic()
                pool.grade(batch)
                seconds[-1].append(time.monotonic() - began)
    assert undisturbed(seconds), seconds


def undisturbed(seconds: list[list[float]]) -> bool:
    """Whether some turn (before, hostile, after) kept to twice the time, and the next batch was as fast as before."""
    return any(hostile <= 2 * before and after <= 1.25 * before for before, hostile, after in seconds)


def test_hostile_answers_are_wrong_unless_they_say_so(grader: Grader) -> None:
    if not SHARED.exists():
        pytest.skip("the collection of hostile answers is not beside this checkout")
    cases = rows(SHARED / "hostile.jsonl")
    found = verdicts(grader, [(c["gold"], c["prediction"]) for c in cases])
    right = {c["name"] for c, v in zip(cases, found, strict=True) if v}
    # those that do say 7; odd characters around it or another script's digit may count either way
    assert right >= {"boxed seq 1e4", "100kB spaces", "tab", "boxed nest 1e3"}
    either = {"NUL bytes", "RTL override", "devanagari digit", "arabic-indic", "surrogate", "ansi", "html"}
    assert right - either == {"boxed seq 1e4", "100kB spaces", "tab", "boxed nest 1e3"}


def test_a_hung_grading_costs_that_pair_alone() -> None:
    pairs = [EXPRESSION, ("7", HARD), ("y+2", "2+y"), ("y+3", "3+y"), ("7", HARD + "+1"), ("y+4", "5+y")]
    with Grader(num_processes=2, time_limit_seconds=0.4) as pool:
        assert pool.grade(pairs) == ["right", "timeout", "right", "right", "timeout", "wrong"]


def test_a_killed_grader_costs_at_most_its_pair() -> None:
    with Grader(num_processes=2, time_limit_seconds=30) as pool:
        pool.grade([EXPRESSION, ("x+2", "2+x")])
        hung = threading.Thread(target=lambda: outcomes.extend(pool.grade([("7", HARD), ("x+3", "3+x")])))
        outcomes: list[str] = []
        began = cpu_seconds(pool.pids()[1:])
        hung.start()
        while cpu_seconds(pool.pids()[1:]) < began + 0.5:  # by then the other pair was graded long ago
            time.sleep(0.05)
        for pid in pool.pids()[1:]:  # the idle one as well
            os.kill(pid, signal.SIGKILL)
        hung.join(60)
        assert outcomes == ["error", "right"]
        assert pool.grade([EXPRESSION, ("x+2", "2+x")]) == ["right", "right"]


def test_a_killed_template_is_started_again() -> None:
    with Grader(num_processes=2) as pool:
        pool.grade([EXPRESSION])
        old = pool.pids()
        os.kill(old[0], signal.SIGKILL)
        assert wait_until_gone(old[1:]) == []
        assert pool.grade([EXPRESSION, ("x+2", "x+3")]) == ["right", "wrong"]
        assert set(old).isdisjoint(pool.pids())


def test_memory_is_bounded() -> None:
    """The limit holds in the process, and what runs into it costs no other pair."""
    with Grader(num_processes=1, memory_limit_bytes=1 << 29) as pool:
        pool.grade([EXPRESSION])
        limits = Path(f"/proc/{pool.pids()[1]}/limits").read_text()
        (line,) = [text for text in limits.splitlines() if text.startswith("Max address space")]
        assert line.split()[3:5] == [str(1 << 29)] * 2
        outcomes = pool.grade([("7", r"(1+x)^{" + "9" * 5 + r"}"), EXPRESSION])
        assert outcomes[0] in ("wrong", "error", "timeout") and outcomes[1] == "right"


def test_a_pair_that_raises_or_exhausts_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcgrpo.rewards import equivalence

    for failure in (MemoryError(), RecursionError(), ValueError("odd")):

        def fail(gold: str, prediction: str, tolerance: float | None, failure: Exception = failure) -> bool:
            raise failure

        monkeypatch.setattr(equivalence, "equal", fail)
        assert grading._answer("7", "x") == "error"


def test_signals_that_slurm_sends_leave_the_processes_alone(grader: Grader) -> None:
    grader.grade([EXPRESSION])
    pids = grader.pids()
    for pid in pids:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            os.kill(pid, number)
    assert grader.grade([EXPRESSION, ("z+1", "1+z")]) == ["right", "right"]
    assert grader.pids()[: len(pids)] == pids


def test_close_ends_every_process() -> None:
    pool = Grader(num_processes=2, time_limit_seconds=60)
    pool.grade([EXPRESSION, ("x+2", "2+x")])
    pids = pool.pids()
    assert len(pids) >= 2
    pool.close()
    assert wait_until_gone(pids) == []
    assert pool.grade([EXPRESSION]) == ["right"]  # and it starts again when needed
    pool.close()


SCRIPT = """
import threading, time
from hpcgrpo.rewards.grading import Grader
pool = Grader(num_processes=2, time_limit_seconds=60)
assert pool.grade([("x+1", "1+x"), ("x+2", "2+x")]) == ["right", "right"]
threading.Thread(target=pool.grade, args=([("7", {hard!r}), ("7", {hard!r} + "+1")],), daemon=True).start()
while len(pool.pids()) < 3:
    time.sleep(0.05)
time.sleep(0.5)
print(*pool.pids(), flush=True)
time.sleep(600)
"""


def test_processes_die_with_their_parent_however_it_dies(tmp_path: Path) -> None:
    """From a plain script without a main guard, killed while two gradings are hung for a minute."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(hard=HARD))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(p) for p in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 3
    assert wait_until_gone(pids) == []


def test_main_is_not_imported_again_and_torch_not_at_all(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        print("imported")
        from hpcgrpo.rewards.grading import Grader
        with Grader(num_processes=2) as pool:
            print(pool.grade([("x+1", "1+x"), ("x+1", "2+x")]))
        print(sorted({"torch", "sympy", "math_verify"} & set(sys.modules)))
        """)
    )
    output = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert output.stdout.splitlines() == ["imported", "['right', 'wrong']", "[]"]


def test_a_template_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Grader(num_processes=1) as pool, pytest.raises(RuntimeError, match="grading process did not start"):
        pool.grade([EXPRESSION])
