"""The page of a run, from the facts of `facts.collect`: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from hpcgrpo.report import charts, cost, plots, showcase
from hpcgrpo.report.header import header
from hpcgrpo.report.markup import Html, duration, finite, join, moment, number, tag
from hpcgrpo.report.tables import table

Facts = Mapping[str, Any]

DIRECT = {
    "steps": "steps",
    "elapsed_seconds": "elapsed, seconds",
    "held_seconds": "devices held, what was lost included, seconds",
    "peak_memory_gb": "peak memory, GB (10⁹ bytes)",
    "samples_per_second": "samples/s, as Appendix D counts them",
    "completions_per_second": "completions/s, drafts included",
    "trained_completions_per_second": "completions trained on per second",
    "tokens_per_second_per_device": "tokens/s of each reserved device",
    "devices": "devices reserved",
    "learner_flops_per_second": "learner's FLOP/s of each device",
    "mfu": "learner's model FLOP utilisation",
    "hfu": "the same, recomputation counted",
    "decode_bytes_per_second": "bytes/s that decoding reads",
    "mbu": "decoding's bandwidth utilisation",
    "gpu_hours": "GPU-hours",
    "cpu_rank_hours": "hours of all ranks (CPU)",
}
RESULTS = (  # metric, what it is
    ("reward", "reward"),
    ("drafts/reward", "reward of the drafts"),
    ("drafts/best_reward", "reward of each group's best draft"),
    ("eval/accuracy", "held-out accuracy, one pass"),
    ("eval/two_pass/accuracy", "held-out accuracy, second pass"),
    ("eval/reward", "held-out reward, one pass"),
    ("eval/two_pass/reward", "held-out reward, second pass"),
    ("completions/mean_length", "completion length, tokens"),
    ("completions/clipped_ratio", "share cut off at the length limit"),
    ("frac_reward_zero_std", "share of groups without variance"),
    ("entropy", "entropy, nats a token"),
    ("kl", "KL to the reference, nats a token"),
    ("grad_norm", "gradient norm"),
    ("sampling/sampling_logp_difference/mean", "|log-prob difference| generator to learner, mean"),
)


def render(facts: Facts, *, characters: int) -> str:
    """The whole file. `characters`: what the samples' texts were cut to, as the page says."""
    style, script = _data("report.css"), _data("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{facts['name']}: report"),
        tag("style", Html(style)),
    )
    sections = [(i, title, body) for i, title, body in _sections(facts, characters) if body]
    nav = tag("nav", *(tag("a", title, href=f"#{i}") for i, title, _ in sections), aria_label="Sections")
    main = (tag("section", tag("h2", title), body, id=i) for i, title, body in sections)
    body = tag("body", header(facts), nav, tag("main", *main), _footer(facts), tag("script", Html(script)))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _sections(facts: Facts, characters: int) -> list[tuple[str, str, Html | None]]:
    return [
        ("numbers", "Results", tag("div", _results(facts), _profile(facts), class_="tables")),
        ("curves", "Curves", plots.curves(facts)),
        ("figures", "The iGRPO paper's figures", plots.figures(facts)),
        ("time", "Time", cost.phases(facts)),
        ("cost", "Memory and throughput", cost.beside(facts)),
        ("evaluations", "Evaluations", join(_evaluations(facts), _rolling(facts))),
        ("samples", "Rollouts", showcase.samples(facts["samples"], characters)),
        ("starts", "Starts", _starts(facts)),
        ("metrics", "All metrics", _metrics(facts)),
        ("config", "Configuration", _config(facts)),
        ("versions", "Versions", _versions(facts)),
    ]


def _data(name: str) -> str:
    return (resources.files("hpcgrpo") / "data" / name).read_text(encoding="utf-8")


def _results(facts: Facts) -> Html | None:
    metrics = facts["metrics"]
    rows = []
    for name, what in RESULTS:
        one = metrics.get(name)
        if not one or not one["count"] or (name.endswith("/reward") and f"{name[:-6]}accuracy" in metrics):
            continue
        keys = ("first", "last", "last_mean", "min", "max")
        rows.append([what, *(number(one[key], f"{name}:{key}") for key in keys)])
    if not rows:
        return tag("p", "No step was finished, so there is nothing to show yet.")
    questions = facts["held_out_questions"]
    asked = f" Held-out questions: {questions}." if questions else ""
    caption = f"What training came to, by step.{asked}"
    return table(caption, ("", "first", "last", "last 10, mean", "smallest", "largest"), rows)


def _profile(facts: Facts) -> Html | None:
    profile, totals = facts["profile"], facts["totals"]
    rows = [[DIRECT[k], number(profile[k], f"profile:{k}")] for k in DIRECT if finite(profile.get(k))]
    known = (*DIRECT, "phase_seconds", "part_seconds")
    rows += [
        [k.replace("_", " "), number(v, f"profile:{k}")]
        for k, v in profile.items()
        if k not in known and finite(v)
    ]
    said = {"sampled": "completions sampled", "kept": "completions trained on"}
    rows += [[said[k], number(v, f"totals:{k}")] for k, v in totals.items() if v]
    tokens = facts["metrics"].get("num_tokens", {}).get("last")
    rows += [["tokens, prompts included", number(tokens, "num_tokens:last")]] if finite(tokens) else []
    if not rows:
        return None
    device = f" on {profile['device']}" if profile.get("device") else ""
    return table(
        f"What it took{device}, over all starts (Appendix D of the iGRPO paper)", ("", "measured"), rows
    )


# ---- evaluations


def _evaluations(facts: Facts) -> Html | None:
    found = facts["evaluations"]
    if not found:
        return None
    scores = [(r["title"], *(r["avg@k"][k] for k in ("mean", "low", "high"))) for r in found]
    rows = []
    for r in found:
        score, name = r["avg@k"], r["benchmark"]
        low, high = (number(score[k], f"{name}:{k}", percent=True) for k in ("low", "high"))
        error = score["standard_error"]
        rows.append(
            [
                r["title"],
                f"{r['num_problems']} × {r['num_samples']}",
                number(score["mean"], f"{name}:mean", percent=True),
                join(low, " to ", high),
                number(error, f"{name}:standard_error", percent=True) if error is not None else "–",
                *(_at_k(r[kind], f"{name}:{kind}") for kind in ("pass@k", "maj@k")),
                *(number(r["shares"].get(k), f"{name}:{k}", percent=True) for k in ("truncated", "unparsed")),
                number(r["completion_tokens"].get("mean"), f"{name}:completion_tokens"),
            ]
        )
    heads = ["benchmark", "problems × samples", "avg@k", "95 % interval", "standard error"]
    heads += ["pass@k", "maj@k", "truncated", "unparsed", "tokens"]
    models = ", ".join(dict.fromkeys(r["model"] for r in found))
    caption = (
        f"Benchmarks of {models}; intervals by a bootstrap over problems (Wilson's where all score the same)"
    )
    figure = charts.intervals("avg@k with 95 % intervals", scores, identity="scores")
    return join(charts.joined([figure]), table(caption, heads, rows))


def _at_k(estimate: Mapping[str, Any] | None, key: str) -> object:
    if estimate is None:
        return "–"
    return join(
        number(estimate["mean"], key, percent=True), tag("span", f" (k {estimate['k']})", class_="muted")
    )


def _rolling(facts: Facts) -> Html | None:
    found = facts["rolling"]
    if not found:
        return None
    names = sorted({name for e in found.values() for name in e["scores"]})
    shown = charts.picked(list(found), 40)
    rows = [
        [
            step,
            *(number(found[step]["scores"].get(n), f"rolling:{n}@{step}", percent=True) for n in names),
            tag("bdi", f"{found[step]['state']} {found[step]['why']}".strip()),
        ]
        for step in shown
    ]
    caption = f"Checkpoints evaluated as they appeared: {len(shown)} of {len(found)}"
    return join(
        charts.joined([plots.rolling(found, names)]),
        table(caption, ("step", *names, tag("bdi", "state")), rows),
    )


# ---- the rest


def _starts(facts: Facts) -> Html | None:
    state = facts["state"]
    starts = state["starts"]
    if not starts:
        said = "No job's start was recorded: the run was started on this machine, by hpcgrpo train."
        return tag("p", said)
    rows = [
        [
            s["start"],
            s["state"],
            moment(s["began"]),
            duration((s["ended"] or 0) - (s["began"] or 0)),
            f"{s['first_step']} to {s['last_step']}" if s["last_step"] is not None else "–",
            "yes" if s["requeued"] else "no",
            tag("bdi", (s["failure"] or {}).get("error") or s["reason"] or ""),
        ]
        for s in starts
    ]
    waited = state["seconds_between_starts"]
    left_out = (
        f"; the last {len(starts)} of {state['num_starts']}" if state["num_starts"] > len(starts) else ""
    )
    caption = f"Every start of the run, {duration(waited)} between them{left_out}"
    return table(
        caption, ("start", "state", "began", "lasted", "steps", "requeued", tag("bdi", "why it ended")), rows
    )


def _metrics(facts: Facts) -> Html | None:
    metrics = facts["metrics"]
    if not metrics:
        return None
    rows = []
    for name, one in list(metrics.items())[:400]:
        keys = ("first", "last", "min", "max", "mean")
        values = [number(one.get(key), f"{name}:{key}") for key in keys]
        rows.append([name, one["count"], *values, one["not_finite"] or ""])
    more = f" (the first 400 of {len(metrics)})" if len(metrics) > 400 else ""
    heads = ("metric", "steps", "first", "last", "smallest", "largest", "mean", "NaN or infinite")
    body = table(f"Every metric of metrics.jsonl{more}", heads, rows)
    return tag("details", tag("summary", f"{len(metrics)} metrics"), body)


def _config(facts: Facts) -> Html | None:
    if not facts["config_text"]:
        return None
    button = tag("button", "Copy", type="button", data_copy="config-text", hidden=True)
    return tag(
        "details",
        tag("summary", "config.yaml, resolved: running it again is the same run"),
        button,
        tag("pre", tag("code", facts["config_text"]), id="config-text", tabindex="0"),
    )


def _versions(facts: Facts) -> Html:
    versions = facts["versions"]
    said = "What the run was made with, by rank 0 of its newest start"
    rows = [[k, tag("bdi", v)] for k, v in versions["run"].items()]
    own = table(said, ("what", "version"), rows) if rows else None
    changes = [[c["step"], c["what"], c["from"] or "–", c["to"] or "–"] for c in versions["changed"]]
    heads = ("going on from step", "what", "before", "then")
    changed = table("What changed between starts", heads, changes) if changes else None
    report = [[k, v] for k, v in versions["report"].items()]
    caption = "Where this report was made, which need not be where the run was"
    return join(own, changed, table(caption, ("what", "version"), report))


def _footer(facts: Facts) -> Html:
    thin = [n for n, c in facts["curves"].items() if c["count"] > len(c["points"])]
    said = (
        "Curves of more than 400 steps are drawn by the smallest and largest value of each stretch. "
        if thin
        else ""
    )
    return tag(
        "footer", tag("p", said, "Made ", moment(facts["made"]), " from ", tag("code", facts["run"]), ".")
    )
