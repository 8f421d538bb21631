"""The benchmarks, one table row each: where the data is, what is asked and how it is graded; and the papers' protocols.

Data come from JSONL (GPQA also CSV) files in `data_dir`, from folders saved by `datasets` there, or from the hub.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hpcgrpo.tasks import GENERATED

logger = logging.getLogger(__name__)

Kind = Literal["math", "minerva", "olympiad", "choice"]  # what judging.KINDS has a function for
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a benchmark is sampled. `temperature` 0 is greedy, `top_k` 0 means all tokens."""

    num_samples: int  # completions of each problem
    temperature: float
    top_p: float
    top_k: int
    max_completion_length: int  # tokens


@dataclass(frozen=True, slots=True)
class Problem:
    """One question of a benchmark with its reference."""

    id: str  # unique in the benchmark, the same in every run
    question: str
    gold: str  # choice: the letter of the right one
    kind: Kind = "math"
    choices: tuple[str, ...] = ()  # in the order in which they are shown
    multiple: bool = False  # several answers, in any order
    answer_type: str = ""  # OlympiadBench: Numerical, Expression, Tuple, Interval
    unit: str = ""
    tolerance: tuple[float | None, ...] = ()  # absolute; of each answer, or one for all; None: exact


@dataclass(frozen=True, slots=True)
class Hub:
    """A data set on the Hugging Face hub."""

    name: str
    split: str
    question: str  # column
    answer: str  # a column that every row must have, of text or numbers
    config: str | None = None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One row of the table."""

    name: str
    title: str
    kind: Kind
    size: int  # problems, as published; 0: not known
    template: str  # of the user's message, with {problem}
    protocol: Protocol  # without a preset
    source: str
    files: tuple[str, ...] = ()  # names to look for in data_dir, in this order
    hub: Hub | None = None
    questions: tuple[str, ...] = ("question", "problem", "prompt")  # the first column that a file has
    answers: tuple[str, ...] = ("answer", "solution")
    ids: tuple[str, ...] = ("id", "unique_id", "question_id", "Record ID")
    require_box_or_tag: bool = True
    path: str | None = None  # a file of the user's
    task: str | None = None  # of GENERATED
    options: Mapping[str, Any] = field(default_factory=dict)  # of the task
    note: str = ""  # what one should know before getting the data


# --- prompts ----------------------------------------------------------------------------------------------

BARE = "{problem}"
BOXED = "{problem}\n\nReason step by step, and put the final answer inside \\boxed{}."
BOXED_ALL = BOXED + " If there are several answers, put all of them into one box, separated by commas."
BOXED_LETTER = (
    "{problem}\n\nReason step by step, and put the letter of the right choice alone inside \\boxed{}."
)

# --- the table --------------------------------------------------------------------------------------------

# Defaults of this project: enough samples for a small set to tell models apart, the usual sampling for reasoning.
_FEW = Protocol(num_samples=16, temperature=0.6, top_p=0.95, top_k=0, max_completion_length=32_768)
_SOME = replace(_FEW, num_samples=4)
_MANY = replace(_FEW, num_samples=1)
_TRIAL = Protocol(num_samples=1, temperature=0.0, top_p=1.0, top_k=0, max_completion_length=256)
GENERATED_SIZE = 256  # problems of a generated task, from its held-out split

_ROWS = (
    Benchmark(
        "gsm8k",
        title="GSM8K",
        kind="math",
        size=1319,
        template=BOXED,
        protocol=_MANY,
        source="Cobbe et al. 2021, arXiv 2110.14168; github.com/openai/grade-school-math",
        files=("gsm8k_test.jsonl", "gsm8k/test.jsonl", "gsm8k.jsonl"),
        hub=Hub("openai/gsm8k", "test", "question", "answer", config="main"),
    ),
    Benchmark(
        "math500",
        title="MATH-500",
        kind="math",
        size=500,
        template=BOXED,
        protocol=_SOME,
        source="Lightman et al. 2023, arXiv 2305.20050; a subset of MATH's test split",
        files=("math500.jsonl", "math500/test.jsonl", "MATH-500/test.jsonl"),
        hub=Hub("HuggingFaceH4/MATH-500", "test", "problem", "answer"),
    ),
    Benchmark(
        "math",
        title="MATH",
        kind="math",
        size=5000,
        template=BOXED,
        protocol=_MANY,
        source="Hendrycks et al. 2021, arXiv 2103.03874; the test split",
        files=("math_test.jsonl", "math/test.jsonl", "MATH/test.jsonl"),
        hub=Hub("DigitalLearningGmbH/MATH-lighteval", "test", "problem", "solution"),
    ),
    Benchmark(
        "aime24",
        title="AIME 2024",
        kind="math",
        size=30,
        template=BOXED,
        protocol=_FEW,
        source="AIME I and II of 2024",
        files=("aime24.jsonl", "aime24/test.jsonl", "aime_2024.jsonl"),
        hub=Hub("HuggingFaceH4/aime_2024", "train", "problem", "answer"),
    ),
    Benchmark(
        "aime25",
        title="AIME 2025",
        kind="math",
        size=30,
        template=BOXED,
        protocol=_FEW,
        source="AIME I and II of 2025",
        files=("aime25.jsonl", "aime25/test.jsonl", "aime_2025.jsonl"),
        hub=Hub("math-ai/aime25", "test", "problem", "answer"),
    ),
    Benchmark(
        "amc23",
        title="AMC 2023",
        kind="math",
        size=40,
        template=BOXED,
        protocol=_FEW,
        source="those of AMC 12 A and B of 2023 that have an integer answer",
        files=("amc23.jsonl", "amc23/test.jsonl"),
        hub=Hub("math-ai/amc23", "test", "question", "answer"),
    ),
    Benchmark(
        "amc_2022_2023",
        title="AMC 2022-23",
        kind="math",
        size=83,
        template=BOXED,
        protocol=_FEW,
        source="AMC 12 A and B of 2022 and 2023; what some papers call AMC",
        files=("amc_2022_2023.jsonl", "aimo-validation-amc.jsonl"),
        hub=Hub("AI-MO/aimo-validation-amc", "train", "problem", "answer"),
        ids=(),  # its copies count the problems of each year afresh
    ),
    Benchmark(
        "minerva",
        title="Minerva",
        kind="minerva",
        size=272,
        template=BOXED,
        protocol=_SOME,
        source="Lewkowycz et al. 2022, arXiv 2206.14858, OCWCourses",
        files=("minerva_math.jsonl", "minerva_math/test.jsonl", "minerva.jsonl"),
        hub=Hub("math-ai/minervamath", "test", "question", "answer"),
    ),
    Benchmark(
        "olympiadbench",
        title="OlympiadBench",
        kind="olympiad",
        size=675,
        template=BOXED_ALL,
        protocol=_SOME,
        source="He et al. 2024, arXiv 2402.14008; mathematics, English, text only (OE_TO_maths_en_COMP)",
        files=("olympiadbench.jsonl", "olympiadbench/test.jsonl"),
        hub=Hub("Hothan/OlympiadBench", "train", "question", "id", config="OE_TO_maths_en_COMP"),
        answers=("answer", "id"),  # as published the answers are a list, final_answer
        note="the hub's copy, revised by its authors, may differ from the published 675 rows by one or so",
    ),
    Benchmark(
        "gpqa_diamond",
        title="GPQA-diamond",
        kind="choice",
        size=198,
        template=BOXED_LETTER,
        protocol=_SOME,
        source="Rein et al. 2023, arXiv 2311.12022",
        files=("gpqa_diamond.csv", "gpqa_diamond.jsonl", "gpqa/gpqa_diamond.csv", "gpqa.jsonl"),
        hub=Hub("Idavidrein/gpqa", "train", "Question", "Correct Answer", config="gpqa_diamond"),
        questions=("Question", "question"),
        answers=("Correct Answer", "answer", "answer_index"),
        require_box_or_tag=False,
        note="its authors ask that no example be posted anywhere: accept their terms on the hub and log in"
        " (hf auth login) first",
    ),
    Benchmark(
        "mmlu_pro",
        title="MMLU-Pro",
        kind="choice",
        size=12032,
        template=BOXED_LETTER,
        protocol=_MANY,
        source="Wang et al. 2024, arXiv 2406.01574; the test split",
        files=("mmlu_pro.jsonl", "mmlu_pro_test.jsonl", "mmlu_pro/test.jsonl"),
        hub=Hub("TIGER-Lab/MMLU-Pro", "test", "question", "answer"),
        answers=("answer", "answer_index"),
        require_box_or_tag=False,  # its authors take "the answer is (X)"
    ),
    *(
        Benchmark(
            name,
            title=f"{name}, generated",
            kind="math",
            size=GENERATED_SIZE,
            template=BARE,
            protocol=_TRIAL,
            source="hpcgrpo.tasks, held-out questions; for trying things out",
            require_box_or_tag=False,
            task=name,
        )
        for name in GENERATED
    ),
)
BENCHMARKS: dict[str, Benchmark] = {row.name: row for row in _ROWS}

ALIASES = {  # lower case, with underscores
    "gsm_8k": "gsm8k",
    "math_500": "math500",
    "hendrycks_math": "math",
    "math_test": "math",
    "aime_24": "aime24",
    "aime2024": "aime24",
    "aime_2024": "aime24",
    "aime_25": "aime25",
    "aime2025": "aime25",
    "aime_2025": "aime25",
    "amc_23": "amc23",
    "amc2023": "amc23",
    "amc_2023": "amc23",
    "amc_2022_23": "amc_2022_2023",
    "amc22_23": "amc_2022_2023",
    "minerva_math": "minerva",
    "minervamath": "minerva",
    "olympiad": "olympiadbench",
    "olympiad_bench": "olympiadbench",
    "gpqa": "gpqa_diamond",
    "mmlupro": "mmlu_pro",
}

# --- names ------------------------------------------------------------------------------------------------


def resolve(names: Sequence[str]) -> list[Benchmark]:
    """The benchmarks of `names`, in their order.

    A name is one of BENCHMARKS or ALIASES, `NAME=FILE.jsonl` (a file of the user's; under a known name that
    benchmark's own rules hold for it), or a generated task with options, `chain:digits=5:size=64`.
    Raises ValueError for an unknown name, with the nearest one, and for a name given twice.
    """
    found: dict[str, Benchmark] = {}
    for name in names:
        benchmark = _resolve(name.strip())
        if benchmark.name in found:
            raise ValueError(f"benchmarks: {benchmark.name!r} stands there twice ({', '.join(names)})")
        found[benchmark.name] = benchmark
    return list(found.values())


def _resolve(name: str) -> Benchmark:
    head, colon, options = name.partition(":")
    if colon and _plain(head) in GENERATED:
        return _generated(_plain(head), options)
    head, equals, path = name.partition("=")
    if not equals:
        return _known(name)
    if not path or not re.fullmatch(r"\w[\w.-]*", head):
        raise ValueError(
            f"benchmarks: {name!r} is no NAME=FILE.jsonl: a name has letters, digits, '.', '_' and '-'"
        )
    known = BENCHMARKS.get(ALIASES.get(_plain(head), _plain(head)))
    if known and known.task is None:
        return replace(known, path=path)
    if known:
        raise ValueError(f"benchmarks: {head!r} is a generated task; give {path!r} another name")
    return Benchmark(
        head, title=head, kind="math", size=0, template=BOXED, protocol=_SOME, source=path, path=path
    )


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _known(name: str) -> Benchmark:
    plain = _plain(name)
    if plain in BENCHMARKS or plain in ALIASES:
        return BENCHMARKS[ALIASES.get(plain, plain)]
    near = difflib.get_close_matches(plain, [*BENCHMARKS, *ALIASES], 1, 0.5)
    hint = f"; did you mean {ALIASES.get(near[0], near[0])}?" if near else ""
    raise ValueError(
        f"benchmarks: none is called {name!r}{hint} (known: {', '.join(BENCHMARKS)}; your own: NAME=FILE.jsonl)"
    )


def _generated(task: str, text: str) -> Benchmark:
    """`digits=5:size=64` of a generated task. Its name tells the options, since results are filed under it."""
    options: dict[str, int] = {}
    for item in text.split(":"):
        key, _, value = item.partition("=")
        if not key or not re.fullmatch(r"\d+", value):
            raise ValueError(
                f"benchmarks: {task}:{text}: options have the form key=number, e.g. {task}:size=64"
            )
        options[key] = int(value)
    if options.get("size") == 0:
        raise ValueError(f"benchmarks: {task}:{text}: size is 0; a benchmark has at least 1 problem")
    name = "-".join((task, *(f"{k}-{v}" for k, v in sorted(options.items()))))
    size = options.pop("size", GENERATED_SIZE)
    return replace(BENCHMARKS[task], name=name, size=size, options=options)
