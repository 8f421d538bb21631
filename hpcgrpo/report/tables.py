"""Tables that everyone can read: a caption, heads with their scope, and room to scroll."""

from __future__ import annotations

from collections.abc import Sequence

from hpcgrpo.report.markup import Html, tag


def table(caption: str, heads: Sequence[object], rows: Sequence[Sequence[object]], *, wide: str = "") -> Html:
    """A table with a caption; the first cell of a row is its head. `wide`: further classes."""
    head = tag("tr", *(tag("th", h, scope="col") for h in heads))
    body = (tag("tr", tag("th", row[0], scope="row"), *(tag("td", c) for c in row[1:])) for row in rows)
    found = tag("table", captioned(caption), tag("thead", head), tag("tbody", *body), class_=wide or None)
    return scrolling(found, caption)


def captioned(said: str) -> Html:
    """A table's caption, no wider than the page even where the table is."""
    return tag("caption", tag("span", said))


def scrolling(content: Html, label: str) -> Html:
    """What is wider than the page scrolls by itself, with the keyboard too."""
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)
