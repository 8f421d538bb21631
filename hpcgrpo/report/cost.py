"""What a run took: seconds by phase, and memory and throughput beside the prediction and the published ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcgrpo.report import charts
from hpcgrpo.report.markup import Html, finite, join, number, tag
from hpcgrpo.report.tables import table

Facts = Mapping[str, Any]

COMPARED = (  # measured in profile.json, predicted, published column, what it is
    ("peak_memory_gb", ("memory", "peak_memory_gb"), 0, "peak memory, GB"),
    ("samples_per_second", ("time", "samples_per_second"), 1, "samples/s (Appendix D)"),
    ("completions_per_second", ("time", "completions_per_second"), None, "completions/s"),
    ("gpu_hours", ("time", "gpu_hours"), 2, "GPU-hours"),
    ("cpu_rank_hours", ("time", "cpu_rank_hours"), None, "hours of all ranks (CPU)"),
)


def phases(facts: Facts) -> Html | None:
    """The picture of a step's phases over the run, and their table; None before the first step."""
    found = facts["phases"]
    if found["step_seconds_sum"] is None:
        return None
    figure = charts.bars("Seconds a step, by phase", found["bars"], found["outer"], identity="phases")
    predicted = ((facts["predicted"] or {}).get("time") or {}).get("phase_seconds") or {}
    covered = found["covered"]
    said = "Seconds by phase" + (f"; they cover {100 * covered:.1f} % of the steps' time" if covered else "")
    heads = ["phase", "median step, s", "all starts, s", "share", *(["predicted, s"] if predicted else [])]
    rows = list(_phase_rows(found, predicted))
    beside = tag("div", table(said, heads, rows), class_="beside")
    return tag("div", figure, beside, class_="time")


def _phase_rows(found: Mapping[str, Any], predicted: Mapping[str, Any]) -> Iterator[list[object]]:
    """A phase and its parts, then what lies in several phases, what came before the steps, and the step."""
    sums = found["total_seconds"]
    whole = max(found["step_seconds_sum"], sum(sums.get(n, 0.0) for n in found["outer"]))
    parts = {n: [p for p in found["inner"] if p.startswith(f"{n}/")] for n in found["outer"]}
    apart = [n for n in found["inner"] if not any(n in ps for ps in parts.values())]
    for name, kind in [
        *((n, k) for outer in found["outer"] for n, k in ((outer, ""), *((p, "part") for p in parts[outer]))),
        *((n, "within others") for n in apart),
        *((n, "outside the steps") for n in found["beside"]),
    ]:
        share = sums[name] / whole if name in sums and whole and kind != "outside the steps" else None
        yield [
            join(name, tag("span", f" ({kind})", class_="muted")) if kind else name,
            number(found["median_seconds"].get(name), f"median:{name}"),
            number(sums.get(name), f"phase:{name}"),
            f"{100 * share:.1f} %" if share is not None else "–",
            *([number(predicted.get(name), f"predicted:{name}")] if predicted else []),
        ]
    step = [
        number(found["step_seconds_median"], "median:step"),
        number(found["step_seconds_sum"], "sum:step"),
    ]
    yield ["the step", *step, "", *([""] if predicted else [])]


def beside(facts: Facts) -> Html | None:
    """Measured beside predicted and beside the paper's Table S.3."""
    profile, predicted = facts["profile"], facts["predicted"] or {}
    published = facts["published"]["igrpo_table_s3"]
    rows = []
    for key, (part, name), column, what in COMPARED:
        known = predicted.get(part) or {}
        guess = known.get(name)
        if profile.get(key) is None and guess is None and column is None:
            continue
        beside = [
            number(r[column], f"published:{name}") if column is not None else ""
            for r in published["rows"].values()
        ]
        rows.append(
            [
                what,
                number(profile.get(key), f"profile:{key}"),
                *_guess(known, name, profile.get(key)),
                *beside,
            ]
        )
    step = predicted.get("time") or {}
    measured = facts["phases"]["step_seconds_median"]
    if measured is not None or step:
        median = number(measured, "median:step")
        rows.append(["a step, s (median)", median, *_guess(step, "step_seconds", measured), "", ""])
    heads = (
        "",
        "measured",
        "predicted",
        "predicted / measured",
        *(f"{n}, published" for n in published["rows"]),
    )
    caption = f"This run, what hpcgrpo plan says of it, and (another model and machine) {published['source']}"
    return join(table(caption, heads, rows), _why(facts), _memory_parts(predicted))


def _guess(known: Mapping[str, Any], name: str, measured: Any) -> list[Html]:
    """The predicted value with its interval, and its ratio to what was measured."""
    guess, interval = known.get(name), known.get(f"{name}_interval")
    said = number(guess, f"predicted:{name}")
    if isinstance(interval, Sequence) and len(interval) == 2 and all(map(finite, interval)):
        low, high = (number(v, f"predicted:{name}_interval") for v in interval)
        said = join(said, tag("span", " (", low, " to ", high, ")", class_="muted"))
    ratio = guess / measured if finite(guess) and finite(measured) and measured else None
    return [said, number(ratio, f"ratio:{name}")]


def _why(facts: Facts) -> Html | None:
    predicted = facts["predicted"]
    if predicted is None:
        return tag(
            "p",
            "Nothing is predicted: there is no configuration that this version reads, or no planner.",
            class_="note",
        )
    if "why_not" in predicted:
        return tag("p", f"Nothing is predicted: {predicted['why_not']}", class_="note")
    hardware = predicted["hardware"]
    lines = [
        f"Predicted for {hardware['title']} ({hardware['why']}).",
        f"Times: {predicted['efficiencies']}.",
    ]
    if facts["profile"].get("device") == "cpu":
        lines.append("Memory on a CPU: measured is the whole process, predicted the learner's tensors alone.")
    lines += [str(line) for line in (*predicted["assumptions"], *predicted["notes"])]
    return tag(
        "details", tag("summary", "What the prediction assumes"), tag("ul", *(tag("li", s) for s in lines))
    )


def _memory_parts(predicted: Mapping[str, Any]) -> Html | None:
    parts = (predicted.get("memory") or {}).get("learner")
    if not isinstance(parts, Mapping):
        return None
    rows = [
        [k.replace("_", " "), number(v / 1e9, f"predicted:memory/{k}")]
        for k, v in parts.items()
        if finite(v) and v
    ]
    return tag(
        "details",
        tag("summary", "Predicted memory by part"),
        table("Learner's memory by part, GB", ("part", "GB"), rows),
    )
