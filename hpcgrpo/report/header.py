"""The top of the page: what the run is, how far it came, and what went wrong."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hpcgrpo.report.markup import Html, duration, finite, join, moment, number, tag, text

Facts = Mapping[str, Any]

STATES = {  # what the doctor says -> (what stands in the page, its colour)
    "finished": "good",
    "running": "good",
    "queued": "good",
    "queued again": "good",
    "saved": "good",
    "failed": "bad",
    "lost": "bad",
}


def header(facts: Facts) -> Html:
    """Name, state, the doctor's finding, what the run is, and what of its folder is missing or damaged."""
    state = facts["state"]["state"]
    badge = tag("span", state, class_=f"badge {STATES.get(state, 'plain')}")
    return tag(
        "header",
        tag("p", "hpcgrpo run", class_="kicker"),
        tag("h1", facts["name"], " ", badge),
        _finding(facts["state"]),
        tag("dl", *(join(tag("dt", k), tag("dd", v)) for k, v in _about(facts) if v), class_="about"),
        _notes(facts["notes"]),
    )


def _about(facts: Facts) -> list[tuple[str, Any]]:
    about, dates, steps, state = facts["about"], facts["dates"], facts["steps"], facts["state"]
    planned = join(" of ", number(steps["planned"], "steps/planned")) if finite(steps["planned"]) else ""
    lasted = (dates["last_moved"] or 0) - (dates["began"] or 0)
    return [
        ("model", about["model_name_or_path"]),
        ("algorithm", _nesting(about["algorithm"])),
        ("rewards", _rewards(about["rewards"])),
        ("data", _short(about["data"], ("preset", "path", "name", "split", "max_samples", "options"))),
        ("the other policy", _short(about["peer"], ("model_name_or_path",))),
        ("steps", join(number(steps["done"], "steps/done"), planned)),
        ("began", moment(dates["began"])),
        ("last moved", join(moment(dates["last_moved"]), f" ({duration(lasted)} later)" if lasted else "")),
        ("starts", text(state["num_starts"]) if state["num_starts"] else ""),
        ("newest checkpoint", f"step {state['checkpoint_step']}" if state["checkpoint_step"] else ""),
        ("seed", about["seed"] if about["seed"] is None else str(about["seed"])),
    ]


def _nesting(algorithm: Sequence[Any]) -> Html | str:
    """igrpo(drafts 4) over cppo(...) over grpo(...), the outermost first."""
    parts = []
    for name, own in algorithm:
        options = ", ".join(f"{k} {v}" for k, v in own.items() if not isinstance(v, str) or len(v) < 40)
        parts.append(join(tag("b", name), f" ({options})" if options else ""))
    return join(*(p if not i else join(" over ", p) for i, p in enumerate(parts)))


def _rewards(rewards: Any) -> str:
    if not isinstance(rewards, Mapping):
        return ""
    said = []
    for name, value in rewards.items():
        weight = value.get("weight", 1.0) if isinstance(value, Mapping) else value
        said.append(f"{name} × {weight}")
    return ", ".join(said)


def _short(section: Any, keys: Sequence[str]) -> str:
    """The keys of a section that are set."""
    if not isinstance(section, Mapping):
        return ""
    kept = {k: section[k] for k in keys if section.get(k) not in (None, {}, "")}
    return ", ".join(f"{k} {_short(v, list(v)) if isinstance(v, Mapping) else v}" for k, v in kept.items())


def _finding(state: Mapping[str, Any]) -> Html | None:
    """What the doctor found, where something went wrong."""
    failure = state["failure"]
    if failure is None:
        return None
    at = failure.get("time")
    first = f"{failure['process']}{', ' + time.strftime('%H:%M:%S', time.localtime(at)) if at else ''}"
    place = f"{failure.get('file')}" + (f", line {failure['line']}" if failure.get("line") else "")
    rows = [
        ("first", f"{first} ({place})" if failure["process"] else None),
        ("error", failure["error"]),
        ("cause", failure["cause"]),
        ("way out", failure["way_out"]),
        ("after it", ", ".join(failure.get("followed_by") or ())),
    ]
    listed = (join(tag("dt", k), tag("dd", tag("bdi", v))) for k, v in rows if v)
    return tag("div", tag("h2", "What went wrong"), tag("dl", *listed), class_="finding", role="note")


def _notes(notes: Sequence[str]) -> Html | None:
    if not notes:
        return None
    return tag(
        "ul", *(tag("li", note) for note in notes), class_="notes", aria_label="What is missing or damaged"
    )
