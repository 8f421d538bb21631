"""Verdicts: one rule for each kind of problem, and every reference right against itself."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from evaluation.benchmarks import BENCHMARKS, LETTERS, Kind, Problem
from evaluation.judging import KINDS, Verdict, _matched, judge
from evaluation.problems import load
from hpcgrpo.rewards.grading import Grader

DATA = Path(__file__).parent / "data" / "benchmarks"
SHARED = Path(__file__).parents[2] / "shared" / "data"
FIXTURES = (
    "gsm8k",
    "math500",
    "math",
    "amc_2022_2023",
    "minerva",
    "olympiadbench",
    "gpqa_diamond",
    "mmlu_pro",
)
SETS = ("gsm8k", "math500", "math", "aime24", "aime25", "amc23", "amc_2022_2023", "minerva", "olympiadbench")


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(num_processes=2) as pool:
        yield pool


def one(grader: Grader, problem: Problem, text: str, *, require: bool = True) -> Verdict:
    return judge([problem], [text], grader, require_box_or_tag=require)[0]


def outcomes(grader: Grader, problem: Problem, *answers: str) -> list[str]:
    """Of answers in a box."""
    texts = [f"So the answer is $\\boxed{{{answer}}}$." for answer in answers]
    return [v.outcome for v in judge([problem] * len(texts), texts, grader, require_box_or_tag=True)]


# --- every reference against itself -----------------------------------------------------------------------


def spaced(text: str) -> str:
    """Wider spacing where LaTeX does not care for it."""
    return re.sub(r"(?<![\\,])([=+])", r" \1 ", re.sub(r"\s", "  ", text))


SPELLINGS = {
    "as it stands": str,
    "spaced": spaced,
    "dfrac": lambda text: text.replace(r"\frac", r"\dfrac"),
}


def misjudged(grader: Grader, problems: list[Problem]) -> list[tuple[str, str, str]]:
    problems = [replace(p, tolerance=()) for p in problems]  # a reference is right without one too
    wrong = []
    for what, spell in SPELLINGS.items():
        texts = [f"It follows that $\\boxed{{{spell(p.gold)}}}$." for p in problems]
        verdicts = judge(problems, texts, grader, require_box_or_tag=True)
        wrong += [
            (what, p.id, p.gold) for p, v in zip(problems, verdicts, strict=True) if v.outcome != "right"
        ]
    return wrong


@pytest.mark.parametrize("name", FIXTURES)
def test_references_of_the_fixtures_are_right(grader: Grader, name: str) -> None:
    assert misjudged(grader, load(BENCHMARKS[name], data_dir=DATA)) == []


@pytest.mark.skipif(not SHARED.exists(), reason="the sets are not beside this checkout")
@pytest.mark.parametrize("name", SETS)
def test_references_of_the_sets_are_right(grader: Grader, name: str) -> None:
    assert misjudged(grader, load(BENCHMARKS[name], data_dir=SHARED)) == []


@pytest.mark.skipif(not SHARED.exists(), reason="the sets are not beside this checkout")
def test_a_reference_of_the_sets_is_wrong_for_the_next_problem(grader: Grader) -> None:
    """The oracle of the test above: a judge that finds everything right fails here."""
    problems = [replace(p, tolerance=()) for p in load(BENCHMARKS["olympiadbench"], data_dir=SHARED)[:60]]
    shifted = [f"\\boxed{{{p.gold}}}" for p in (*problems[1:], problems[0])]
    right = [
        (p.gold, t)
        for p, t, v in zip(
            problems, shifted, judge(problems, shifted, grader, require_box_or_tag=True), strict=True
        )
        if v.outcome == "right"
    ]
    assert len(right) < 5  # neighbours that happen to agree


# --- math -------------------------------------------------------------------------------------------------


def test_a_batch_of_all_kinds_is_judged_in_order(grader: Grader) -> None:
    problems = [
        Problem("a", "q", r"\frac{1}{2}"),
        Problem("b", "q", "B", "choice", ("1", "2")),
        Problem("c", "q", "3,4", "olympiad", multiple=True),
        Problem("d", "q", "8.7e8", "minerva"),
        Problem("e", "q", "5"),
    ]
    texts = [r"\boxed{0.5}", r"\boxed{A}", r"\boxed{4, 3}", r"\boxed{8.7 \times 10^8}", "no answer"]
    assert judge(problems, texts, grader, require_box_or_tag=True) == [
        Verdict("right", "0.5"),
        Verdict("wrong", "A"),
        Verdict("right", "4, 3"),
        Verdict("right", r"8.7 \times 10^8"),
        Verdict("unparsed", None),
    ]
    assert judge([], [], grader, require_box_or_tag=True) == []


def test_all_of_a_batch_goes_to_the_grader_at_once() -> None:
    class Counting(Grader):
        calls = 0

        def grade(self, pairs, *rest):  # type: ignore[no-untyped-def]
            self.calls += 1
            return super().grade(pairs, *rest)

    with Counting(num_processes=1) as counting:
        problem = Problem("c", "q", "x, y", "olympiad", multiple=True)
        judge([problem] * 3, [r"\boxed{1}", r"\boxed{2}", ""], counting, require_box_or_tag=True)
        assert counting.calls == 1


def test_the_last_number_counts_where_no_box_is_required(grader: Grader) -> None:
    problem = Problem("a", "q", "12")
    assert one(grader, problem, "First 5, then 12.", require=False) == Verdict("right", "12")
    assert one(grader, problem, "First 5, then 12.") == Verdict("unparsed", None)
    assert one(grader, problem, r"\boxed{5} and then 12.", require=False) == Verdict("wrong", "5")


def test_a_grading_without_end_is_a_timeout() -> None:
    with Grader(num_processes=1, time_limit_seconds=0.1) as pool:
        problems = [Problem("a", "q", "7"), Problem("b", "q", "7,8", "olympiad", multiple=True)]
        hard = r"\sum_{n=1}^{\infty} \frac{\sin(n^2)}{n^2}"
        texts = [rf"\boxed{{{hard}}}", rf"\boxed{{{hard}, 7}}"]
        found = [v.outcome for v in judge(problems, texts, pool, require_box_or_tag=True)]
    assert found == ["timeout", "timeout"]


# --- Minerva ----------------------------------------------------------------------------------------------


def test_powers_of_ten_in_every_spelling(grader: Grader) -> None:
    for gold in ("8.7e8", r"8.7 \times 10^8", "870000000"):
        problem = Problem("a", "q", gold, "minerva")
        spelt = (
            "8.7e8",
            r"8.7 \times 10^8",
            r"8.7 \times 10^{8}",
            "870000000",
            "870,000,000",
            r"8.7 \cdot 10^8",
        )
        assert outcomes(grader, problem, *spelt) == ["right"] * 6
        assert outcomes(grader, problem, "8.7e9", r"8.71 \times 10^8", "8.7") == ["wrong"] * 3


def test_no_tolerance_is_invented(grader: Grader) -> None:
    assert outcomes(grader, Problem("a", "q", "4.49", "minerva"), "4.49", "4.5", "4.4899") == [
        "right",
        "wrong",
        "wrong",
    ]


def test_references_in_python_are_read_as_mathematics(grader: Grader) -> None:
    arcsin = Problem("a", "q", "np.arcsin(3/7)", "minerva")
    assert outcomes(grader, arcsin, r"\arcsin\left(\frac{3}{7}\right)", r"\arcsin(3/8)") == ["right", "wrong"]
    third = Problem("a", "q", "-1./3", "minerva")
    assert outcomes(grader, third, r"-\frac{1}{3}", "-1/3", "1/3") == ["right", "right", "wrong"]


# --- OlympiadBench ----------------------------------------------------------------------------------------


def olympiad(gold: str, answer_type: str = "Numerical", **more: object) -> Problem:
    return Problem("a", "q", gold, "olympiad", answer_type=answer_type, **more)  # type: ignore[arg-type]


def test_several_answers_in_any_order_and_with_any_separator(grader: Grader) -> None:
    problem = olympiad("$69$,$84$", multiple=True)
    right = ("69, 84", "84,69", r"84 \text{ and } 69", "69; 84", r"\{84, 69\}", r"x = 84 \text{ or } x = 69")
    assert outcomes(grader, problem, *right) == ["right"] * 6
    assert outcomes(grader, problem, "69", "69, 84, 85", "69, 85", "6984", "69, 69") == ["wrong"] * 5


def test_each_of_several_answers_is_right_once(grader: Grader) -> None:
    problem = olympiad("16,3,1,1", multiple=True)
    assert outcomes(grader, problem, "1,16,1,3", "16,3,1,3", "16,3,1") == ["right", "wrong", "wrong"]


def test_a_box_for_each_answer(grader: Grader) -> None:
    problem = olympiad("3, 5", multiple=True)
    assert one(grader, problem, r"Thus $\boxed{5}$ and $\boxed{3}$.") == Verdict("right", "5; 3")
    assert one(grader, problem, r"<answer>\boxed{5} or \boxed{3}</answer>").outcome == "right"
    assert one(grader, problem, r"Thus $\boxed{5}$ and $\boxed{4}$.").outcome == "wrong"
    assert one(grader, problem, r"<think>\boxed{3}</think> It is $\boxed{5}$.") == Verdict("wrong", "5")
    assert one(grader, problem, r"First $\boxed{1}$, then $\boxed{3, 5}$.").outcome == "right"
    assert one(grader, olympiad("5"), r"Not $\boxed{3}$ but $\boxed{5}$.") == Verdict("right", "5")


def test_a_comma_separates_answers_or_thousands(grader: Grader) -> None:
    problem = olympiad("2500,7500", multiple=True)
    assert outcomes(grader, problem, "2500, 7500", r"7,500 \text{ and } 2,500", "2,500") == [
        "right",
        "right",
        "wrong",
    ]
    assert outcomes(grader, olympiad("$100,200$", multiple=True), "100200", "200, 100") == ["wrong", "right"]


def test_tuples_and_lists_of_tuples(grader: Grader) -> None:
    assert outcomes(grader, olympiad("$(2,4)$", "Tuple"), "(2, 4)", "(4, 2)", r"\left(2,4\right)") == [
        "right",
        "wrong",
        "right",
    ]
    several = olympiad("$(1,1), (3,2)$", "Tuple", multiple=True)
    assert outcomes(grader, several, "(3,2), (1,1)", r"(1,1) \text{ and } (3,2)", "(1,1), (2,3)") == [
        "right",
        "right",
        "wrong",
    ]


def test_intervals(grader: Grader) -> None:
    problem = olympiad("$t(0,4]$", "Interval")  # as one reference has it
    right = ("(0,4]", r"t \in (0, 4]", r"0 < t \leq 4", r"\left(0,4\right]")
    assert outcomes(grader, problem, *right) == ["right"] * 4
    assert outcomes(grader, problem, "(0,4)", "[0,4]", "4") == ["wrong"] * 3


def test_expressions_with_and_without_their_names(grader: Grader) -> None:
    problem = olympiad("$f(x)=x,f(x)=-x$", "Expression", multiple=True)
    assert outcomes(grader, problem, "x, -x", r"f(x)=-x \text{ or } f(x)=x", "x, 2x") == [
        "right",
        "right",
        "wrong",
    ]
    assert outcomes(grader, olympiad("$k=n+1$", "Expression"), "n+1", "1+n", "k=1+n", "n-1") == [
        "right",
        "right",
        "right",
        "wrong",
    ]


def test_values_that_are_alike_count_as_often_as_they_stand(grader: Grader) -> None:
    problem = olympiad(r"$\angle B E A_{1}=90$,$\angle A E B_{1}=90$", multiple=True, unit=r"^{\circ}")
    right = (r"90^\circ, 90^\circ", "90, 90", r"\angle BEA_1 = 90^\circ, \angle AEB_1 = 90^\circ")
    assert outcomes(grader, problem, *right) == ["right"] * 3
    assert outcomes(grader, problem, r"90^\circ", r"90^\circ, 60^\circ") == ["wrong"] * 2


@pytest.mark.parametrize(
    ("gold", "unit", "answers"),
    [
        ("$166$", "$cm^2$", ["166", r"166 \text{ cm}^2", r"166\,\mathrm{cm}^{2}", "166 cm^2"]),
        (r"$\frac{600}{7}$", "km/h", [r"\frac{600}{7}", r"\dfrac{600}{7}\ \text{km/h}"]),
        ("45", "minute", ["45", r"45 \text{ minutes}"]),
        ("12", r"\mathrm{furlong}", ["12", r"12 \text{ furlongs}"]),
        ("4.2", "%", ["4.2", r"4.2\%"]),
    ],
)
def test_a_unit_may_stand_or_not(grader: Grader, gold: str, unit: str, answers: list[str]) -> None:
    problem = olympiad(gold, unit=unit)
    assert outcomes(grader, problem, *answers) == ["right"] * len(answers)
    assert outcomes(grader, problem, "7", rf"7 \text{{ {unit} }}") == ["wrong"] * 2


def test_an_error_is_an_absolute_tolerance(grader: Grader) -> None:
    problem = olympiad("4.2", unit="%", tolerance=(0.1,))
    right = ("4.2", "4.25", "4.3", "4.1", r"4.15\%", r"\frac{17}{4}")
    assert outcomes(grader, problem, *right) == ["right"] * 6
    assert outcomes(grader, problem, "4.31", "4.09", "-4.2", "42", "x") == ["wrong"] * 5


def test_each_answer_has_its_own_tolerance(grader: Grader) -> None:
    problem = olympiad("1.5, 20", multiple=True, tolerance=(0.01, 1.0))
    assert outcomes(grader, problem, "1.5, 20.5", "19, 1.51", "1.6, 20", "1.5", "20.5, 20") == [
        "right",
        "right",
        "wrong",
        "wrong",
        "wrong",
    ]
    exact = olympiad("1.5, 20", multiple=True, tolerance=(None, 1.0))
    assert outcomes(grader, exact, "20.5, 1.5", "20, 1.51") == ["right", "wrong"]
    overlapping = olympiad("1, 2", multiple=True, tolerance=(1.0,))
    assert outcomes(grader, overlapping, "1.5, 0.5", "3, 1.5", "3, 3") == ["right", "right", "wrong"]


def test_tolerances_that_do_not_fit_the_answers(grader: Grader) -> None:
    with pytest.raises(ValueError, match="3 answers with 2 tolerances"):
        one(grader, olympiad("1,2,3", multiple=True, tolerance=(0.1, 0.1)), r"\boxed{1,2,3}")


def test_a_matching_is_found_where_there_is_one() -> None:
    for bits in range(1 << 9):
        right = [[bool(bits >> (3 * i + j) & 1) for j in range(3)] for i in range(3)]
        brute = any(all(right[i][order[i]] for i in range(3)) for order in permutations(range(3)))
        assert _matched(right) == brute


# --- multiple choice --------------------------------------------------------------------------------------

SPEEDS = Problem("a", "q", "B", "choice", ("3 m/s", "12 m/s", "0.5 m/s", "7 m/s"))


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{B}",
        r"\boxed{(B)}",
        r"\boxed{\text{B}}",
        r"\boxed{\text{(B)}}",
        r"\boxed{\mathbf{B}}",
        r"\boxed{\mathrm{(B)}}",
        r"\boxed{B.}",
        r"\boxed{B. 12 m/s}",
        r"\boxed{(B) 12 m/s}",
        r"\boxed{\text{B: } 12 \text{ m/s}}",
        r"\boxed{\textbf{(B)}\ 12}",
        r"\boxed{b}",
        r"\boxed{\text{Option B}}",
        r"\boxed{A}, no: \boxed{B}",
        "<answer>B</answer>",
        "<answer> (B) </answer>",
        r"<answer>\boxed{B}</answer>",
        "<answer>The answer is (B).</answer>",
        "<answer>The correct answer is option B</answer>",
        "<answer>**B**</answer>",
        r"\boxed{12 m/s}",
        r"\boxed{12 \text{ m/s}}",
    ],
)
def test_ways_to_name_a_choice(grader: Grader, text: str) -> None:
    assert one(grader, SPEEDS, text) == Verdict("right", "B")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{A}", "A"),
        (r"\boxed{(D)}", "D"),
        (r"\boxed{A. 12 m/s}", "A"),  # the letter was asked for
        (r"\boxed{7 m/s}", "D"),
        (r"\boxed{E}", "E"),
        (r"\boxed{J}", "J"),
        (r"\boxed{\text{B and C}}", r"\text{B and C}"),
        (r"\boxed{13 m/s}", "13 m/s"),
    ],
)
def test_other_choices_are_wrong(grader: Grader, text: str, answer: str) -> None:
    assert one(grader, SPEEDS, text) == Verdict("wrong", answer)


@pytest.mark.parametrize(
    "text",
    [
        "The answer is (B).",
        "So the correct answer is B.",
        "The answer is B because nothing else fits.",
        "**Answer: B**",
        "Answer: (B) 12 m/s",
        "The answer is A at first sight. But in the end the answer is (B)",
        "the correct option is **B**",
        r"The answer is $\text{B}$.",
        "The best choice is B, I think.",
        "<think>The answer is (C).</think>The answer is (B).",
        "The answer is (B). The answer is I think plain.",
        "B",
        "(B)",
        "B. 12 m/s",
    ],
)
def test_statements_count_where_no_box_is_required(grader: Grader, text: str) -> None:
    assert one(grader, SPEEDS, text, require=False) == Verdict("right", "B")
    assert one(grader, SPEEDS, text) == Verdict("unparsed", None)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("The answer is (C).", Verdict("wrong", "C")),
        ("The answer is (K).", Verdict("wrong", "K")),
        ("Answer: K.", Verdict("wrong", "K")),
        ("It could be (B) or (C).", Verdict("unparsed", None)),
        ("The answer is I think unclear", Verdict("unparsed", None)),
        ("The answer is Boron.", Verdict("unparsed", None)),
        ("", Verdict("unparsed", None)),
        (r"\boxed{A} The answer is (B).", Verdict("wrong", "A")),
    ],
)
def test_other_statements(grader: Grader, text: str, verdict: Verdict) -> None:
    assert one(grader, SPEEDS, text, require=False) == verdict


def test_the_text_of_a_choice_must_be_that_of_one(grader: Grader) -> None:
    halves = Problem("a", "q", "A", "choice", (r"\frac{1}{2}", "0.5", "3"))
    assert outcomes(grader, halves, r"\frac{2}{4}", "3", "4") == ["wrong", "wrong", "wrong"]
    fraction = Problem("a", "q", "A", "choice", (r"\frac{1}{2}", "0.25", "3"))
    assert one(grader, fraction, r"\boxed{0.5}") == Verdict("right", "A")
    assert one(grader, fraction, r"\boxed{\frac{1}{4}}") == Verdict("wrong", "B")


def test_a_choice_may_begin_with_a_letter_of_its_own(grader: Grader) -> None:
    worms = Problem("a", "q", "A", "choice", ("C. elegans", "E. coli", "D. melanogaster"))
    assert one(grader, worms, r"\boxed{C. elegans}") == Verdict("right", "A")
    assert one(grader, worms, r"\boxed{\text{E. coli}}") == Verdict("wrong", "B")
    assert one(grader, worms, r"\boxed{C}") == Verdict("wrong", "C")
    groups = Problem("a", "q", "C", "choice", ("B", "A", "O", "AB"))
    assert one(grader, groups, r"\boxed{C}") == Verdict("right", "C")
    assert one(grader, groups, r"\boxed{O}") == Verdict("right", "C")  # no letter of a choice, but one's text


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_unparsed_whatever_the_kind(grader: Grader, kind: Kind) -> None:
    problem = Problem("a", "q", "A", kind, ("x", "y"))
    assert one(grader, problem, "I do not know") == Verdict("unparsed", None)
    assert one(grader, problem, "I do not know", require=False) == Verdict("unparsed", None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "piece", [" ", "*", "answer: ", "answer is (", "\\boxed{", "{", ",", "1,000 and ", "B. ", "<answer>", "="]
)
def test_degenerate_texts_cost_little(grader: Grader, kind: Kind, piece: str) -> None:
    """What a model that repeats itself to its limit writes: as it stands, in a box, after `answer:`."""
    problem = Problem("a", "q", "1, 2", kind, ("x", "y"), multiple=True, answer_type="Numerical", unit="cm")
    run = piece * (100_000 // len(piece))
    texts = [run, f"\\boxed{{{run}}}", f"answer: {run}", f"<answer>{run}</answer>"]
    started = time.process_time()
    verdicts = judge([problem] * len(texts), texts, grader, require_box_or_tag=False)
    assert time.process_time() - started < 5
    assert "right" not in {v.outcome for v in verdicts}


def test_every_kind_of_the_table_is_judged() -> None:
    assert {b.kind for b in BENCHMARKS.values()} == set(KINDS)
    assert len(set(LETTERS)) == 26
