"""The pool of killable processes, and the verdicts it gives."""

from __future__ import annotations

import json
import os
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

from hpcgrpo.rewards import grading
from hpcgrpo.rewards.answers import extract_answer, settle, tidy
from hpcgrpo.rewards.grading import Grader, precheck

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[2] / "shared" / "grader"
HARD = r"\int_0^1 x^{x^{x^{x}}} dx"  # never ends
EXPRESSION = ("x+1", "1+x")  # needs a process


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(num_processes=2) as pool:
        yield pool


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 20.0) -> list[int]:
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
    sent: list[tuple[str, str]] = []
    send = grading._send

    def watched(line: socket.socket, pair: tuple[str, str]) -> bool:
        sent.append(pair)
        return send(line, pair)

    monkeypatch.setattr(grading, "_send", watched)
    assert grader.grade([EXPRESSION, ("x+1", "x+2")] * 50) == ["right", "wrong"] * 50
    assert sorted(sent) == [EXPRESSION, ("x+1", "x+2")]


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


def test_text_checks_are_linear_on_hostile_text() -> None:
    for unit in ("aaaa", "7 aaaa", "{", "}", " ", "\\boxed{", "<answer>", "%", ",", "1,", "\\text{"):
        start = time.process_time()
        text = extract_answer(unit * (200_000 // len(unit)) + "\\boxed{" + unit * 200 + "}") or ""
        precheck("7", text[:4000])
        assert time.process_time() - start < 2, unit


# ----------------------------------------------------------------------------------------- hostile answers


def hostile_text(row: dict[str, Any]) -> str:
    return row["completion"] if "completion" in row else "\\boxed{" + row["unit"] * row["times"] + "}"


def test_hostile_answers_cost_little_and_are_wrong() -> None:
    texts = [hostile_text(r) for r in rows(DATA / "hostile.jsonl")]
    with Grader(num_processes=2, time_limit_seconds=0.5) as pool:
        outcomes = pool.grade([("7", extract_answer(t) or "") for t in texts])
        assert "right" not in outcomes
        assert pool.grade([EXPRESSION]) == ["right"]


@pytest.mark.slow
@pytest.mark.skipif(
    not SHARED.exists(), reason="the collection of hostile answers is not beside this checkout"
)
def test_the_collection_of_hostile_answers(grader: Grader) -> None:
    cases = rows(SHARED / "hostile.jsonl")
    before = time.process_time()
    found = verdicts(grader, [(c["gold"], c["prediction"]) for c in cases])
    right = {c["name"] for c, v in zip(cases, found, strict=True) if v}
    # those that do say 7; odd characters around it or another script's digit may count either way
    assert right >= {"boxed seq 1e4", "100kB spaces", "tab", "boxed nest 1e3"}
    either = {"NUL bytes", "RTL override", "devanagari digit", "arabic-indic", "surrogate", "ansi", "html"}
    assert right - either == {"boxed seq 1e4", "100kB spaces", "tab", "boxed nest 1e3"}
    assert time.process_time() - before < 10  # here, where the trainer runs


def test_a_hung_grading_costs_that_pair_alone() -> None:
    pairs = [EXPRESSION, ("7", HARD), ("y+2", "2+y"), ("y+3", "3+y"), ("7", HARD + "+1"), ("y+4", "5+y")]
    with Grader(num_processes=2, time_limit_seconds=0.4) as pool:
        assert pool.grade(pairs) == ["right", "timeout", "right", "right", "timeout", "wrong"]


def test_a_killed_grader_costs_at_most_its_pair() -> None:
    with Grader(num_processes=2, time_limit_seconds=30) as pool:
        pool.grade([EXPRESSION, ("x+2", "2+x")])
        hung = threading.Thread(target=lambda: outcomes.extend(pool.grade([("7", HARD), ("x+3", "3+x")])))
        outcomes: list[str] = []
        hung.start()
        time.sleep(1.0)
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

        def fail(gold: str, prediction: str, failure: Exception = failure) -> bool:
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
time.sleep(0.5)
print(*pool.pids(), flush=True)
time.sleep(60)
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
