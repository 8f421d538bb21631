"""Rollouts on the page: a question, its drafts and its refinements side by side, whatever a model wrote in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcgrpo.report.markup import Html, join, number, shown, tag, visible
from hpcgrpo.report.samples import LOWEST
from hpcgrpo.report.tables import captioned, scrolling

FOLDED_FROM = 600  # characters
SUMMARY_CHARACTERS = 160

Row = Mapping[str, Any]


def samples(steps: Sequence[Mapping[str, Any]], characters: int) -> Html:
    """Examples of the first and the last step; texts longer than `characters` were cut by the caller."""
    if not steps:
        return Html("")
    told = f"Texts of more than {characters:,} characters are shown by their beginning and end."
    return join(tag("p", told, class_="note"), *(_step(step) for step in steps))


def _step(step: Mapping[str, Any]) -> Html:
    head = tag("h3", f"Step {step['step']}", tag("span", f" {step['groups']} groups", class_="muted"))
    return join(head, *(_example(e) for e in step["examples"]))


def _example(example: Mapping[str, Any]) -> Html:
    drafts, refined = example["drafts"], example["samples"]
    second = example["second_prompt"]
    left = _first(drafts, "shown_later") or _best(drafts) or _best(refined)
    right = _worst(refined) if example["kind"] == LOWEST or not drafts else _best(refined)
    names = ("Draft", "Refinement") if drafts else ("Completion", "Another completion")
    if drafts and left and left["shown_later"]:
        names = ("Draft that the second stage saw", "Refinement")
    pair = [_completion(names[0], left)] if left else []
    pair += [_completion(names[1], right)] if right and right is not left else []
    answer = tag("p", "Answer: ", tag("bdi", example["answer"])) if example["answer"] else None
    return tag(
        "article",
        tag("h4", example["kind"][:1].upper() + example["kind"][1:]),
        tag("h5", "Question"),
        _folded(example["question"]),
        answer,
        tag("div", *pair, class_="pair"),
        _more("Prompt of the second stage", second) if second else None,
        _all(example),
        class_="example",
    )


def _completion(title: str, row: Row) -> Html:
    return tag("div", tag("h5", title), _scores(row), _folded(row["completion"]), class_="completion")


def _scores(row: Row) -> Html:
    """Reward with its parts and outcomes, advantage, length: on one line."""
    parts: list[object] = [join("reward ", _value(row["reward"]))]
    for name, value in row["rewards"].items():
        outcome = row["outcomes"].get(name)
        parts.append(join(f"{name} ", _value(value), f" ({outcome})" if outcome else ""))
    if row["advantage"] is not None:
        parts.append(join("advantage ", _value(row["advantage"])))
    if row["tokens"] is not None:
        parts.append(f"{row['tokens']} tokens")
    parts.append({"length": "cut off", "stop": "ended"}.get(row["finish_reason"], row["finish_reason"]))
    if row["kept"] is False:
        parts.append("not trained on")
    return tag("ul", *(tag("li", p) for p in parts), class_="scores")


def _all(example: Mapping[str, Any]) -> Html:
    """Every rollout of the group in a table."""
    rows = [_listed("draft", i, r) for i, r in enumerate(example["drafts"], 1)]
    rows += [
        _listed("refinement" if rows else "completion", i, r) for i, r in enumerate(example["samples"], 1)
    ]
    total = example["num_drafts"] + example["num_samples"]
    heads = ("", "reward", "outcome", "advantage", "tokens", "ended by", "trained on")
    head = tag("tr", *(tag("th", h, scope="col") for h in heads))
    caption = captioned(f"The group's rollouts: {len(rows)} of {total}")
    body = tag("table", caption, tag("thead", head), tag("tbody", *rows))
    return tag(
        "details",
        tag("summary", f"All {total} rollouts of the group"),
        scrolling(body, "The group's rollouts"),
    )


def _listed(kind: str, index: int, row: Row) -> Html:
    label = f"{kind} {index}" + (" (shown to the second stage)" if row["shown_later"] else "")
    trained = {True: "yes", False: "no", None: "–"}[row["kept"]]
    outcomes = ", ".join(row["outcomes"].values())
    tokens = "–" if row["tokens"] is None else str(row["tokens"])
    cells = (_value(row["reward"]), outcomes, _value(row["advantage"]), tokens, row["finish_reason"], trained)
    return tag("tr", tag("th", label, scope="row"), *(tag("td", c) for c in cells))


def _value(value: float | None) -> Html:
    return number(value, "rollout")


def _folded(text: str) -> Html:
    """A text as the model wrote it; a long one opens on demand."""
    body = tag("pre", tag("code", text, dir="auto"))
    if len(text) <= FOLDED_FROM:
        return body
    start = " ".join(visible(text[:SUMMARY_CHARACTERS]).split())
    return tag("details", tag("summary", tag("bdi", start), f" … ({shown(len(text))} characters)"), body)


def _more(title: str, text: str) -> Html:
    return tag("details", tag("summary", title), tag("pre", tag("code", text, dir="auto")))


def _first(rows: Sequence[Row], key: str) -> Row | None:
    return next((r for r in rows if r[key]), None)


def _best(rows: Sequence[Row]) -> Row | None:
    return max(rows, key=_reward, default=None)


def _worst(rows: Sequence[Row]) -> Row | None:
    return min(rows, key=_reward, default=None)


def _reward(row: Row) -> float:
    return float("-inf") if row["reward"] is None else float(row["reward"])
