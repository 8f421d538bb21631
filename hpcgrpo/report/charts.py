"""Line, stacked-bar and interval charts as inline SVG; colours are the page's, by class."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcgrpo.report.markup import Html, join, number, shown, tag
from hpcgrpo.report.tables import captioned, scrolling

WIDTH, HEIGHT = 440, 240
LEFT, RIGHT, TOP, BOTTOM = 70, 22, 10, 38  # of the plot within the picture
SHARE = "share of the run"  # an axis from 0 to 1, written in percent
MAX_SERIES = 8
TABLE_ROWS = 9
PLAIN = ("this run", "actor", "groups")  # labels that a single curve does not need
MARKS_UP_TO = 40  # points, so that single ones are seen

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Series:
    """One line: its points, and a smoother one that is drawn over it."""

    key: str  # the metric
    label: str
    points: Sequence[Point]
    smoothed: Sequence[Point] = ()
    dots: bool = False  # single values, not joined: published ones
    slot: int = field(default=0)  # its colour


@dataclass(frozen=True)
class Scale:
    """From values to places along one axis."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def lines(
    title: str, series: Sequence[Series], *, identity: str, x_label: str = "step", note: str = ""
) -> Html | None:
    """A figure of curves; None where no series has a value."""
    kept = [s for s in series if any(v is not None for _, v in s.points)][:MAX_SERIES]
    if not kept:
        return None
    x, y = _scales(kept)
    body = [*_grid(x, y, x_label)]
    for s in kept:
        body += _drawn(s, x, y)
    return _figure(
        title, identity, _picture(body, title, _described(kept, x_label), identity), kept, x_label, note
    )


def _figure(
    title: str, identity: str, picture: Html, series: Sequence[Series], x_label: str, note: str
) -> Html:
    return tag(
        "figure",
        tag(
            "figcaption",
            tag("h3", title),
            _legend(series) if len(series) > 1 or series[0].label not in PLAIN else None,
        ),
        picture,
        tag("p", note, class_="note") if note else None,
        _numbers(title, series, x_label),
        class_="chart",
        id=identity,
    )


def _picture(
    body: Sequence[Html], title: str, description: str, identity: str, height: float = HEIGHT
) -> Html:
    return tag(
        "svg",
        tag("title", title, id=f"{identity}-title"),
        tag("desc", description, id=f"{identity}-desc"),
        *body,
        viewbox=f"0 0 {WIDTH} {height:g}",
        role="img",
        aria_labelledby=f"{identity}-title {identity}-desc",
    )


def _described(series: Sequence[Series], x_label: str) -> str:
    """The chart in words, for those who don't see it."""
    said = []
    for s in series:
        kept = [(x, v) for x, v in s.points if v is not None]
        values = [v for _, v in kept]
        said.append(
            f"{s.label}: {shown(values[0])} at {x_label} {shown(kept[0][0])}, {shown(values[-1])} at"
            f" {shown(kept[-1][0])}, between {shown(min(values))} and {shown(max(values))}."
        )
    return " ".join(said)


def _scales(series: Sequence[Series]) -> tuple[Scale, Scale]:
    xs = [float(x) for s in series for x, _ in s.points]
    ys = [v for s in series for _, v in s.points if v is not None]
    left, right = min(xs), max(xs)
    if left == right:
        left, right = left - 0.5, right + 0.5
    low, high = _range(min(ys), max(ys))
    return Scale(left, right, LEFT, WIDTH - RIGHT), Scale(low, high, HEIGHT - BOTTOM, TOP)


def _range(low: float, high: float) -> tuple[float, float]:
    """The span of an axis: from 0 where that is near, with a little air."""
    if low == high:
        room = abs(low) * 0.1 or 0.5
        return (max(0.0, low - room) if low >= 0 else low - room), high + room
    air = 0.05 * (high - low)
    bottom = 0.0 if 0 <= low <= 0.5 * high else low - air
    return bottom, high + air


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values between low and high: multiples of 1, 2 or 5 times a power of ten."""
    assert low < high
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9)), 10 * power)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [(first + i) * step + 0.0 for i in range(max(0, count))]


def _grid(x: Scale, y: Scale, x_label: str) -> Iterator[Html]:
    for value in ticks(y.low, y.high):
        at = f"{y(value):.1f}"
        yield tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid")
        yield tag("text", _tick(value), x=LEFT - 6, y=at, dy="0.35em", text_anchor="end")
    for value in ticks(x.low, x.high):
        if x_label == "step" and value != int(value):
            continue
        label = f"{100 * value:g} %" if x_label == SHARE else _tick(value)
        yield tag("text", label, x=f"{x(value):.1f}", y=HEIGHT - BOTTOM + 16, text_anchor="middle")
    yield tag("text", x_label, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 5, text_anchor="middle")
    yield tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, class_="axis")


def _tick(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:,.6g}"


def _drawn(series: Series, x: Scale, y: Scale) -> Iterator[Html]:
    color = f"s{series.slot}"
    few = len(series.points) <= MARKS_UP_TO
    if not series.dots:
        yield tag(
            "path", d=_path(series.points, x, y), class_=f"line {color}{' faint' if series.smoothed else ''}"
        )
        if series.smoothed:
            yield tag("path", d=_path(series.smoothed, x, y), class_=f"line {color}")
    if few or series.dots:
        kind = f"mark {color}{' open' if series.dots else ''}"
        for at, value in series.points:
            if value is not None:
                said = tag("title", f"{series.label}: {shown(value)} at {shown(at)}")
                yield tag(
                    "circle",
                    said,
                    cx=f"{x(at):.1f}",
                    cy=f"{y(value):.1f}",
                    r=4 if series.dots else 2.5,
                    class_=kind,
                )


def _path(points: Sequence[Point], x: Scale, y: Scale) -> str:
    """The line through the points, broken where a value is none."""
    said, pen = [], "M"
    for at, value in points:
        if value is None:
            pen = "M"
            continue
        said.append(f"{pen}{x(at):.1f} {y(value):.1f}")
        pen = "L"
    return "".join(said)


def _legend(series: Sequence[Series]) -> Html:
    return tag("ul", *(tag("li", _swatch(s), s.label) for s in series), class_="legend")


def _swatch(series: Series) -> Html:
    if series.dots:
        body = tag("circle", cx=13, cy=6, r=4, class_=f"mark open s{series.slot}")
    else:
        body = tag("line", x1=0, x2=26, y1=6, y2=6, class_=f"line s{series.slot}")
    return tag("svg", body, viewbox="0 0 26 12", class_="swatch", aria_hidden="true")


def _numbers(title: str, series: Sequence[Series], x_label: str) -> Html:
    """Some of the points as a table, the ends among them."""
    places = sorted({x for s in series for x, v in s.points if v is not None})
    rows = picked(places, TABLE_ROWS)
    values = [dict(s.points) for s in series]
    where = "share " if x_label == SHARE else ""
    body = [
        tag(
            "tr",
            tag("th", f"{100 * x:.3g} %" if x_label == SHARE else shown(x), scope="row"),
            *(
                tag("td", number(v.get(x), f"{s.key}@{where}{x:g}"))
                for s, v in zip(series, values, strict=True)
            ),
        )
        for x in rows
    ]
    head = tag("tr", tag("th", x_label, scope="col"), *(tag("th", s.label, scope="col") for s in series))
    caption = captioned(f"{title}: {len(rows)} of {len(places)} values that are drawn")
    table = tag("table", caption, tag("thead", head), tag("tbody", *body))
    return tag("details", tag("summary", "Numbers"), scrolling(table, f"Numbers of {title}"))


def picked(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


# ---- bars and intervals


def bars(title: str, found: Sequence[dict[str, Any]], names: Sequence[str], *, identity: str) -> Html | None:
    """Seconds a step by phase, stacked, over the run; what no phase covers is the last part."""
    if not found:
        return None
    most = max(max(b["step_seconds"], sum(b["phase_seconds"].values())) for b in found)
    if not most > 0:
        return None
    first, last = found[0]["first_step"], found[-1]["last_step"]
    x = Scale(first - 0.5, last + 0.5, LEFT, WIDTH - RIGHT)
    y = Scale(0.0, most * 1.05, HEIGHT - BOTTOM, TOP)
    body = [*_grid(x, y, "step"), *(part for bar in found for part in _stacked(bar, names, x, y))]
    told = f"A step's seconds by phase, from step {first} to {last}; the table beside it has the totals."
    entries = [(n, f"fill s{i % 10}") for i, n in enumerate(names)]
    if any(b["step_seconds"] - sum(b["phase_seconds"].values()) > 0.01 * b["step_seconds"] for b in found):
        entries.append(("in no phase", "fill other"))
    legend = tag("ul", *(tag("li", _box(kind), label) for label, kind in entries), class_="legend")
    picture = _picture(body, title, told, identity)
    return tag("figure", tag("figcaption", tag("h3", title), legend), picture, class_="chart", id=identity)


def _stacked(bar: dict[str, Any], names: Sequence[str], x: Scale, y: Scale) -> Iterator[Html]:
    left, right = x(bar["first_step"] - 0.5), x(bar["last_step"] + 0.5)
    width = max(0.5, right - left - (0.5 if right - left > 3 else 0.0))
    parts = [(bar["phase_seconds"][n], f"fill s{i % 10}") for i, n in enumerate(names)]
    rest = max(0.0, bar["step_seconds"] - sum(v for v, _ in parts))
    bottom = 0.0
    for value, kind in [*parts, (rest, "fill other")]:
        top, height = y(bottom + value), y(bottom) - y(bottom + value)
        bottom += value
        if height > 0.05:
            place = {
                "x": f"{left:.1f}",
                "y": f"{top:.1f}",
                "width": f"{width:.1f}",
                "height": f"{height:.1f}",
            }
            yield tag("rect", **place, class_=kind)


def _box(kind: str) -> Html:
    body = tag("rect", x=1, y=1, width=10, height=10, class_=kind)
    return tag("svg", body, viewbox="0 0 12 12", class_="box", aria_hidden="true")


def intervals(title: str, rows: Sequence[tuple[str, float, float, float]], *, identity: str) -> Html | None:
    """(label, mean, low, high) of scores in [0, 1], a line each."""
    if not rows:
        return None
    height = 26 * len(rows) + 34
    x = Scale(0.0, 1.0, 130, WIDTH - 20)
    body = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = f"{x(value):.1f}"
        body.append(tag("line", x1=at, x2=at, y1=4, y2=height - 26, class_="grid"))
        body.append(tag("text", f"{100 * value:g} %", x=at, y=height - 10, text_anchor="middle"))
    for i, (label, mean, low, high) in enumerate(rows):
        y = 17 + 26 * i
        short = label if len(label) <= 17 else label[:16] + "…"
        body.append(tag("text", short, x=122, y=y, dy="0.35em", text_anchor="end"))
        low, high = max(0.0, low), min(1.0, high)
        body.append(tag("line", x1=f"{x(low):.1f}", x2=f"{x(high):.1f}", y1=y, y2=y, class_="line s0"))
        body.append(tag("circle", cx=f"{x(mean):.1f}", cy=y, r=4.5, class_="mark s0"))
    told = " ".join(
        f"{label}: {100 * mean:.2f} %, interval {100 * low:.2f} to {100 * high:.2f} %."
        for label, mean, low, high in rows
    )
    picture = _picture(body, title, told, identity, height)
    return tag("figure", tag("figcaption", tag("h3", title)), picture, class_="chart", id=identity)


def with_slots(series: Sequence[Series]) -> list[Series]:
    """The same with a colour each, in order."""
    return [Series(s.key, s.label, s.points, s.smoothed, s.dots, i % 10) for i, s in enumerate(series)]


def share_of(points: Sequence[Point], planned: float) -> list[Point]:
    """Points over the share of the run that lies behind them."""
    return [(step / planned, value) for step, value in points]


def joined(figures: Sequence[Html | None]) -> Html:
    """Figures in a grid, those that there are."""
    kept = [f for f in figures if f is not None]
    return tag("div", join(*kept), class_="charts") if kept else Html("")
