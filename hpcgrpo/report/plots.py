"""Which curves a run's page has, and the iGRPO paper's figures of the same kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpcgrpo.report.charts import MAX_SERIES, SHARE, Series, joined, lines, share_of, with_slots
from hpcgrpo.report.markup import Html

Facts = Mapping[str, Any]

SMOOTHED = "Faint: each step. Strong: mean of the last 10."

# Title, [(metric, label)]; a pattern with * stands for every metric of that form, its label what the * took.
CURVES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Reward",
        (
            ("reward", "trained on"),
            ("drafts/reward", "drafts"),
            ("drafts/best_reward", "best draft of a group"),
        ),
    ),
    ("Parts of the reward", (("rewards/*/mean", ""),)),
    (
        "Outcomes of grading, shares",
        tuple((f"rewards/*/{o}", o) for o in ("right", "wrong", "unparsed", "timeout", "error")),
    ),
    (
        "Held-out accuracy",
        (
            ("eval/accuracy", "one pass"),
            ("eval/two_pass/accuracy", "after its own draft"),
            ("eval/empty_draft/accuracy", "after an empty draft"),
            ("eval/spoilt_draft/accuracy", "after a spoilt draft"),
            ("eval/peer/accuracy", "the other policy"),
        ),
    ),
    (
        "Held-out reward",
        (
            ("eval/reward", "one pass"),
            ("eval/two_pass/reward", "after its own draft"),
            ("eval/empty_draft/reward", "after an empty draft"),
            ("eval/spoilt_draft/reward", "after a spoilt draft"),
            ("eval/peer/reward", "the other policy"),
        ),
    ),
    (
        "Completion length, tokens",
        (
            ("completions/mean_length", "mean"),
            ("completions/mean_terminated_length", "mean of those that ended"),
            ("completions/max_length", "longest"),
            ("drafts/mean_length", "drafts, mean"),
            ("drafts/prompt_length", "prompt of the second stage"),
        ),
    ),
    ("Share cut off at the length limit", (("completions/clipped_ratio", "completions"),)),
    ("Groups without variance, share", (("frac_reward_zero_std", "groups"),)),
    ("Spread of rewards within a group", (("reward_std", "standard deviation"),)),
    ("Entropy, nats a token", (("entropy", "actor"), ("peer/entropy", "the other policy"))),
    ("KL to the reference, nats a token", (("kl", "actor"), ("peer/kl", "the other policy"))),
    (
        "Clipped tokens, share",
        (
            ("clip_ratio/low_mean", "at the lower bound"),
            ("clip_ratio/high_mean", "at the upper bound"),
            ("clip_ratio/region_mean", "either"),
        ),
    ),
    ("Loss", (("loss", "actor"), ("peer/loss", "the other policy"))),
    ("Gradient norm", (("grad_norm", "actor"), ("peer/grad_norm", "the other policy"))),
    ("Learning rate", (("learning_rate", "actor"), ("peer/learning_rate", "the other policy"))),
    (
        "|log-prob difference| of generator and learner, nats",
        (
            ("sampling/sampling_logp_difference/mean", "mean"),
            ("sampling/sampling_logp_difference/max", "largest"),
        ),
    ),
    (
        "Importance ratio, learner over generator",
        tuple((f"sampling/importance_sampling_ratio/{k}", k) for k in ("mean", "min", "max")),
    ),
    ("Distillation reward", (("kd/*", ""),)),
    ("Completions a second", (("perf/completions_per_second", "drafts included"),)),
    ("Tokens a second of each reserved device", (("perf/tokens_per_second_per_device", "prompts included"),)),
    (
        "Utilisation of the devices",
        (
            ("perf/mfu", "learner, model FLOPs"),
            ("perf/hfu", "learner, recomputation counted"),
            ("perf/mbu", "decoding, bandwidth"),
        ),
    ),
    ("Peak memory, GB", (("perf/peak_memory_gb", "largest of all ranks"),)),
)


def curves(facts: Facts) -> Html:
    """Every chart of CURVES that has a value; the held-out reward only where it isn't the accuracy again."""
    figures = []
    for i, (title, wanted) in enumerate(CURVES):
        if title == "Held-out reward" and _same(facts, "eval/accuracy", "eval/reward"):
            continue
        series = list(_series(facts["curves"], wanted))
        figures.append(lines(title, with_slots(series), identity=f"curve-{i}", note=_note(facts, series)))
    return joined(figures)


def _series(known: Mapping[str, Any], wanted: Iterable[tuple[str, str]]) -> Iterable[Series]:
    for pattern, label in wanted:
        for name in _matching(known, pattern):
            took = name[len(pattern.partition("*")[0]) :].removesuffix(pattern.partition("*")[2])
            said = label if "*" not in pattern else f"{took}: {label}" if label else took
            yield Series(name, said, known[name]["points"], known[name]["smoothed"])


def _matching(known: Mapping[str, Any], pattern: str) -> list[str]:
    before, star, after = pattern.partition("*")
    if not star:
        return [pattern] if pattern in known else []
    fits = [
        n for n in known if n.startswith(before) and n.endswith(after) and len(n) > len(before) + len(after)
    ]
    return [n for n in fits if "/" not in n[len(before) : len(n) - len(after)]]


def _same(facts: Facts, one: str, other: str) -> bool:
    points = [facts["curves"].get(name, {}).get("points") for name in (one, other)]
    return points[0] is not None and points[0] == points[1]


def _note(facts: Facts, series: Sequence[Series]) -> str:
    """What the reader must know of a chart: smoothing, values that are none, lines that are left out."""
    said = []
    if any(s.smoothed for s in series):
        said.append(SMOOTHED)
    for s in series:
        missing = facts["metrics"][s.key]["not_finite"]
        if missing:
            said.append(f"{s.label}: {missing} steps have NaN or infinity.")
    if len(series) > MAX_SERIES:
        said.append(f"{len(series) - MAX_SERIES} more are in the table of all metrics.")
    return " ".join(said)


# ---- the papers' figures


def figures(facts: Facts) -> Html:
    """Figure 3 (entropy) and Figure S.2 (reward and length), over the share of the run."""
    planned = facts["steps"]["planned"] or facts["steps"]["done"]
    if not planned:
        return joined([])
    published = facts["published"]["igrpo_figure_3"]
    shares = [float(c.removesuffix(" %")) / 100 for c in published["columns"]]
    beside = [
        Series(f"published:{name}", f"{name}, published", list(zip(shares, row, strict=True)), dots=True)
        for name, row in published["rows"].items()
    ]
    own = _over_run(facts, "entropy", "this run", planned)
    entropy = (
        lines(
            "Figure 3: entropy, nats a token",
            with_slots([*own, *beside]),
            identity="figure-3",
            x_label=SHARE,
            note=f"Circles: values read from {published['source'].partition(',')[0]}, another model and task.",
        )
        if own
        else None
    )
    reward = _over_run(facts, "reward", "this run", planned)
    length = _over_run(facts, "completions/mean_length", "this run", planned)
    told = (
        SMOOTHED if any(s.smoothed for s in reward) else ""
    ) + " The paper prints no numbers of this figure."
    left = lines(
        "Figure S.2: reward", with_slots(reward), identity="figure-s2-reward", x_label=SHARE, note=told
    )
    right = lines(
        "Figure S.2: response length, tokens", with_slots(length), identity="figure-s2-length", x_label=SHARE
    )
    return joined([entropy, left, right])


def _over_run(facts: Facts, name: str, label: str, planned: float) -> list[Series]:
    found = facts["curves"].get(name)
    if found is None or not any(v is not None for _, v in found["points"]):
        return []
    return [Series(name, label, share_of(found["points"], planned), share_of(found["smoothed"], planned))]


def rolling(found: Mapping[str, Any], names: Sequence[str]) -> Html | None:
    """Scores of checkpoints over steps."""
    series = [
        Series(f"rolling:{n}", n, [(int(s), e["scores"][n]) for s, e in found.items() if n in e["scores"]])
        for n in names
    ]
    return lines("Scores of checkpoints", with_slots(series), identity="rolling")
