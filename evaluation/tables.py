"""The table of an evaluation: on the terminal, and as Markdown for a paper or a summary. Scores in percent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Any

from evaluation import metrics
from evaluation.published import Side

if TYPE_CHECKING:
    from rich.table import Table

HEADS = (
    "benchmark",
    "problems x samples",
    "avg@k",
    "95 % interval",
    "pass@k",
    "maj@k",
    "truncated",
    "unparsed",
)
NARROW = {  # on the terminal, which is 80 columns wide
    "problems x samples": "problems\nx k",
    "95 % interval": "95 %\ninterval",
    "truncated": "trun-\ncated",
    "unparsed": "un-\nparsed",
    "published": "pub-\nlished",
}
LEGEND = (
    "In percent; k: the samples of each problem. ±: standard error clustered by problem; interval: bootstrap over "
    "problems (Wilson's where all score the same); the average resamples each benchmark's problems."
)
NOT_GRADED = {  # outcome -> why such a sample counts as wrong
    "unanswered": "got no completion",
    "timeout": "took the grader too long",
    "error": "broke the grader",
}


def result_table(
    results: Sequence[Mapping[str, Any]],
    *,
    published: Side | None = None,
) -> Table:
    """A rich table of result files' contents, a row a benchmark, and their average from two on.

    published: a row of the papers, shown in a column beside and named below.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    caption = "\n".join([LEGEND, *_source(published), *notes(results)])
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False, caption=caption, caption_justify="left")
    for head in _heads(published):
        table.add_column(
            NARROW.get(head, head), justify="left" if head == "benchmark" else "right", no_wrap=True
        )
    *rows, last = _rows(results, published)
    for row in rows:
        table.add_row(*row)
    if len(results) > 1:
        table.add_section()
    table.add_row(*last)
    return table


def to_markdown(
    results: Sequence[Mapping[str, Any]],
    *,
    published: Side | None = None,
) -> str:
    """The same as Markdown, legend and remarks below."""
    heads = _heads(published)
    marks = ["---", *["---:"] * (len(heads) - 1)]
    lines = [
        f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
        for row in (heads, marks, *_rows(results, published))
    ]
    below = [*_source(published), *notes(results)]
    return "\n".join([*lines, "", LEGEND, *(f"\n{note}" for note in below)]) + "\n"


def model_in_words(model: Mapping[str, Any]) -> str:
    """checkpoint-8 of base; a model that is no checkpoint by its name."""
    step = model.get("step")
    return str(model.get("name")) if step is None else f"checkpoint-{step} of {model.get('name')}"


def models_in_words(results: Sequence[Mapping[str, Any]]) -> str:
    """Which model each result is of, where they are of several; else nothing."""
    said = {result["benchmark"]: model_in_words(result["model"]) for result in results}
    if len(set(said.values())) < 2:
        return ""
    listed = "; ".join(f"{benchmark}: {model}" for benchmark, model in said.items())
    return f"\nOf several models, so the average is of no one model. {listed}.\n"


def notes(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Samples that count as wrong though nobody knows that they are, by benchmark."""
    found = []
    for result in results:
        counts = result["summary"]["counts"]
        for outcome, why in NOT_GRADED.items():
            if counts[outcome]:
                found.append(
                    f"{result['benchmark']}: {counts[outcome]} of {counts['samples']} samples {why} and count as wrong."
                )
    return found


def _source(published: Side | None) -> list[str]:
    """What the column of published scores is."""
    return [f"published: {published.name}; {published.notes[0]}."] if published else []


def _heads(published: Side | None) -> list[str]:
    return [*HEADS, *(["published"] if published else [])]


def _rows(results: Sequence[Mapping[str, Any]], published: Side | None) -> Iterator[list[str]]:
    assert results
    for result in results:
        row = list(_cells(result))
        yield [*row, _percent(published.scores.get(result["benchmark"]))] if published else row
    if len(results) > 1:
        scores = [published.scores.get(result["benchmark"]) for result in results] if published else []
        known = [score for score in scores if score is not None]
        beside = [_percent(fmean(known) if len(known) == len(results) else None)]
        yield [*_average(results), *(beside if published else [])]


def _cells(result: Mapping[str, Any]) -> Iterator[str]:
    summary = result["summary"]
    most = str(summary["num_samples"])
    yield str(result["benchmark"])
    yield f"{summary['num_problems']} x {most}"
    yield from _score(summary["avg@k"])
    yield _percent(summary["pass@k"][most]["mean"])
    yield _percent(summary["maj@k"][most]["mean"])
    yield _percent(summary["shares"]["truncated"])
    yield _percent(summary["shares"]["unparsed"])


def _average(results: Sequence[Mapping[str, Any]]) -> list[str]:
    values = [[fmean(p["right"]) for p in result["problems"].values()] for result in results]
    return [f"average of {len(results)}", "", *_score(asdict(metrics.average(values))), "", "", "", ""]


def _score(estimate: Mapping[str, Any]) -> list[str]:
    error = estimate["standard_error"]
    spread = "" if error is None else f"±{100 * error:.2f}"
    return [
        _percent(estimate["mean"]) + spread,
        f"{100 * estimate['low']:.2f}–{100 * estimate['high']:.2f}",
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"
