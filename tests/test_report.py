"""`hpcgrpo report`: one page that needs nothing else, whose numbers are the run's, whatever the run left behind."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser import browser, chromium

from hpcgrpo.config_file import ConfigError
from hpcgrpo.report import command, facts, measured, samples
from hpcgrpo.report.charts import Series, lines, picked, ticks
from hpcgrpo.report.markup import number, shown, tag, text, visible

CONFIG = """
name: demo
model_name_or_path: nobody/tiny-0.1B
algorithm: {name: igrpo, drafts: 2, base: {name: cppo, pruning_rate: 0.5, base: {name: grpo, num_generations: 2}}}
rewards: {accuracy: 1.0, format: 0.5}
data: {preset: chain, options: {digits: 4}}
train: {train_batch_size: 4, max_steps: 20}
"""
HOSTILE = (
    '<script>alert(1)</script></pre><img src=x onerror=alert(2)> \u202etxet\x1b[31m\x00 "quoted" & \ud800'
)


MODEL = {"name": "base", "path": "logs/base/checkpoints/checkpoint-8", "step": 8}  # an evaluation's


# ---- a run's folder, made by hand


def metric(step: int) -> dict[str, Any]:
    """A step's line; every value differs from the others, so that none can stand for another."""
    share = step / 20
    line = {
        "step": step,
        "reward": 0.31 + share / 2,
        "drafts/reward": 0.21 + share / 2,
        "drafts/best_reward": 0.41 + share / 2,
        "rewards/accuracy/mean": 0.25 + share / 2,
        "rewards/accuracy/right": 0.27 + share / 2,
        "frac_reward_zero_std": 0.5 - share / 9,
        "completions/mean_length": 700.5 - step,
        "completions/clipped_ratio": 0.0625,
        "completions/sampled": 8.0,
        "completions/kept": 4.0,
        "num_tokens": 1000.0 * step,
        "entropy": 2.25 * math.exp(-step / 7),
        "kl": 0.0012345 * step,
        "clip_ratio/low_mean": 0.001,
        "clip_ratio/high_mean": 0.002,
        "grad_norm": 0.7 + 0.01 * step,
        "learning_rate": 1e-6 * (1 - share),
        "sampling/sampling_logp_difference/mean": 2.5e-7,
        "timing_s/explore": 3.0,
        "timing_s/generate": 2.75,
        "timing_s/update": 1.5,
        "timing_s/sync": 0.25,
        "step_time": 5.0,
        "epoch": share,
        "perf/completions_per_second": 1.6,
    }
    held_out = {"eval/accuracy": 0.5 + share / 4, "eval/two_pass/accuracy": 0.55 + share / 4}
    return line | held_out if step % 5 == 0 else line


def rollout(group: int, stage: str, reward: float, **more: Any) -> dict[str, Any]:
    draft: dict[str, Any] = {
        "stage": stage,
        "prompt": f"question {group}",
        "completion": f"draft {group} of {reward}",
    }
    if stage == "sample":
        draft |= {"prompt": f"question {group} seen: draft {group} of 1.0", "completion": f"better {group}"}
        draft |= {"advantage": reward - 0.5, "kept": reward > 0}
    return {
        "position": group,
        "row": 7 * group,
        "reward": reward,
        "rewards": {"accuracy": reward},
        "outcomes": {"accuracy": "right" if reward else "wrong"},
        "answer": f"gold {group}",
        "finish_reason": "stop",
        "token_ids": [1, 2, 3],
        **draft,
        **more,
    }


def group(number: int, drafts: tuple[float, ...], rewards: tuple[float, ...]) -> list[dict[str, Any]]:
    return [rollout(number, "draft", r) for r in drafts] + [rollout(number, "sample", r) for r in rewards]


GROUPS = [
    *group(0, (0.0, 1.0), (1.0, 1.0)),  # level at the top
    *group(1, (0.0, 1.0), (0.0, 1.0, 1.0)),  # the best that teaches
    *group(2, (0.0, 1.0), (0.0, 0.0, 1.0)),  # the worst that teaches
    *group(3, (0.0, 1.0), (0.0, 0.0)),  # level at the bottom
]


class Run:
    """A run's folder, written file by file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("config.yaml", CONFIG)

    def write(self, name: str, content: str | bytes | dict[str, Any]) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        said = json.dumps(content) if isinstance(content, dict) else content
        path.write_bytes(said if isinstance(said, bytes) else said.encode())
        return path

    def steps(self, count: int, change: Callable[[dict[str, Any]], None] = lambda line: None) -> None:
        found = [metric(step) for step in range(1, count + 1)]
        for line in found:
            change(line)
        self.write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in found))

    def rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        self.write(f"rollouts/step-{step:06d}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def profile(self, **more: Any) -> None:
        said: dict[str, Any] = {
            "steps": 20,
            "elapsed_seconds": 100.5,
            "peak_memory_gb": 54.9286,
            "samples_per_second": 0.41,
        }
        phases = {"explore": 60.0, "generate": 55.0, "update": 30.0, "sync": 5.0}
        said |= {"gpu_hours": 83.3, "device": "cuda", "devices": 16, "phase_seconds": phases}
        self.write("profile.json", said | more)

    def evaluation(self, name: str, mean: float, low: float, high: float) -> None:
        whole = {"mean": mean, "low": low, "high": high, "standard_error": 0.0123, "interval": "bootstrap"}
        at = {"1": whole, "4": whole | {"mean": mean + 0.01}}
        counts = {"truncated": 0.03125, "unparsed": 0.015625}
        summary = {
            "num_problems": 30,
            "num_samples": 4,
            "avg@k": {"k": 4, **whole},
            "pass@k": at,
            "maj@k": at,
        }
        summary |= {"shares": counts, "completion_tokens": {"mean": 812.5, "median": 800.0}}
        self.write(
            f"eval/{name}.json", {"benchmark": name, "title": name, "model": MODEL, "summary": summary}
        )

    def whole(self) -> None:
        """Everything that a run can leave."""
        self.steps(20)
        self.rollouts(1, GROUPS)
        self.rollouts(20, GROUPS)
        self.profile()
        self.evaluation("aime24", 0.5625, 0.4, 0.71)
        self.evaluation("gsm8k", 0.9215, 0.9001, 0.9399)
        done = {"state": "done", "scores": {"gsm8k": 0.875}}
        later = {"state": "incomplete", "why": "2 samples are missing", "scores": {"gsm8k": 0.9215}}
        self.write("eval/rolling.json", {"checkpoints": {"10": done, "20": later}, "curve": {}})
        self.write("eval/summary.json", {"results": {}})
        self.start("71.0", 75, "the time limit", requeued=True, last_step=9)
        self.start("71.1", 1, "rank 3 ended with code 1", requeued=False, last_step=20)
        failed = {
            "time": 1_760_000_600.0,
            "rank": 3,
            "type": "RuntimeError",
            "message": "CUDA out of memory. <b>",
        }
        self.write("slurm/71.1/rank-3.error.json", failed | {"traceback": ""})

    def start(self, name: str, code: int, reason: str, **more: Any) -> None:
        began = 1_760_000_000.0 + 1000 * int(name[-1])
        said = {"job": "71", "attempt": name, "code": code, "reason": reason, "first_step": 0, **more}
        self.write(f"slurm/{name}/ended.json", said | {"began": began, "ended": began + 700})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return Run(tmp_path / "demo")


# ---- a page, read back

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class Page(HTMLParser):
    """Elements with their attributes, `data` elements with their text, each section's text; nesting is checked."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.numbers: list[tuple[str, float, str]] = []  # key, exact value, as it is shown
        self.data: tuple[str, float] | None = None
        self.text: dict[str, list[str]] = {}
        self.section = ""
        self.feed(source)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        assert len(found) == len(attributes), f"an attribute twice: {name} {attributes}"
        self.elements.append((name, found))
        if name == "data":
            self.data = (str(found["data-key"]), float(str(found["value"])))
        if name == "section":
            self.section = str(found["id"])
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))

    def handle_endtag(self, name: str) -> None:
        assert self.open and self.open.pop() == name, f"</{name}> at {self.getpos()}"

    def handle_data(self, said: str) -> None:
        self.text.setdefault(self.section, []).append(said)
        if self.data is not None:
            self.numbers.append((*self.data, said))
            self.data = None

    def said(self, section: str) -> str:
        return "".join(self.text.get(section, []))

    def values(self) -> dict[str, float]:
        return {key: value for key, value, _ in self.numbers}

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for element, attributes in self.elements if element == name]


def page_of(run: Run) -> Page:
    return Page(command.render(run.folder))


def in_number(said: str) -> float:
    """A shown number as a value."""
    plain = said.replace(",", "")
    return float(plain.removesuffix(" %")) / 100 if plain.endswith(" %") else float(plain)


# ---- the numbers


def test_every_number_is_rounded_from_the_value_that_it_carries(run: Run) -> None:
    run.whole()
    numbers = page_of(run).numbers
    assert len(numbers) > 300
    for key, value, said in numbers:
        step = 0.5e-4 if said.endswith("%") else max(5.001e-4 * abs(value), 1e-15)
        assert abs(in_number(said) - value) <= step * 1.001, (key, value, said)


def test_numbers_are_those_of_metrics_and_profile(run: Run) -> None:
    run.whole()
    values = page_of(run).values()
    first, last = metric(1), metric(20)
    for name in ("reward", "entropy", "kl", "completions/mean_length", "grad_norm", "learning_rate"):
        assert values[f"{name}:first"] == first[name]
        assert values[f"{name}:last"] == last[name]
    assert values["eval/accuracy:first"] == metric(5)["eval/accuracy"] == 0.5625
    assert values["eval/two_pass/accuracy:last"] == pytest.approx(0.8)
    assert values["reward:last_mean"] == pytest.approx(0.31 + 15.5 / 40)  # steps 11 to 20
    assert {k: values[f"profile:{k}"] for k in ("peak_memory_gb", "samples_per_second", "gpu_hours")} == {
        "peak_memory_gb": 54.9286,
        "samples_per_second": 0.41,
        "gpu_hours": 83.3,
    }
    assert values["totals:sampled"] == 160
    assert values["totals:kept"] == 80


def test_the_chart_tables_hold_points_of_the_curve(run: Run) -> None:
    run.whole()
    points = [
        (key, value)
        for key, value, _ in page_of(run).numbers
        if re.fullmatch(r"(reward|entropy|kl)@\d+", key)
    ]
    assert len(points) >= 3 * 9
    for key, value in points:
        name, _, step = key.partition("@")
        assert value == metric(int(step))[name]


def test_published_numbers_stand_beside_the_measured_ones(run: Run) -> None:
    run.whole()
    said = page_of(run).said("cost")
    for value in ("54.93", "0.41", "0.34", "83.3", "94.1"):
        assert value in said


def test_a_curve_passes_through_its_points() -> None:
    found = lines("t", [Series("a", "a", [(0, 0.0), (5, 1.0), (10, 0.5)])], identity="i")
    path = re.search(r' d="([^"]*)"', str(found))
    assert path is not None
    pairs = re.findall(r"[ML]([\d.]+) ([\d.]+)", path[1])
    (x0, y0), (x1, y1), (x2, y2) = [(float(x), float(y)) for x, y in pairs]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y0 - y1 == pytest.approx(2 * (y2 - y1), abs=0.21)  # downwards is less


def test_a_curve_is_broken_where_a_value_is_none() -> None:
    found = lines("t", [Series("a", "a", [(0, 1.0), (1, None), (2, 3.0), (3, 2.0)])], identity="i")
    path = re.search(r' d="([^"]*)"', str(found))
    assert path is not None
    assert re.sub(r"[\d. ]", "", path[1]) == "MML"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-3.0, 11.0, [0, 5, 10]),
        (0.0, 4e-7, [0, 1e-7, 2e-7, 3e-7, 4e-7]),
    ],
)
def test_ticks_are_round_numbers_within_the_axis(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_thinning_keeps_the_ends_and_every_spike() -> None:
    points: list[measured.Point] = [(i, 0.5) for i in range(100_000)]
    points[61_803], points[61_804], points[7] = (61_803, 9.0), (61_804, -9.0), (7, None)
    kept = measured.thinned(points)
    assert len(kept) <= measured.MAX_POINTS
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert {(61_803, 9.0), (61_804, -9.0)} <= set(kept)
    assert [p[0] for p in kept] == sorted(p[0] for p in kept)


def test_the_running_mean_is_of_the_last_ten() -> None:
    points: list[measured.Point] = [(i, float(i)) for i in range(1, 31)]
    mean = measured.running_mean(points)
    assert mean[0] == (1, 1.0)
    assert mean[29] == (30, 25.5)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.53125, "0.5312"),
        (19200.0, "19,200"),
        (2.85e-7, "2.85e-7"),
        (12345.6, "12,346"),
        (0.0, "0"),
        (1.0, "1"),
    ],
)
def test_numbers_as_they_are_shown(value: float, said: str) -> None:
    assert shown(value) == said


# ---- phases


def test_phases_within_others_are_not_counted_twice(run: Run) -> None:
    run.whole()
    found = facts.collect(run.folder)["phases"]
    assert found["outer"] == ["explore", "update", "sync"]
    assert found["inner"] == ["generate"]
    assert found["covered"] == pytest.approx(4.75 / 5)
    assert found["step_seconds_sum"] == 100


def test_phases_that_add_up_to_the_step_are_all_stacked(run: Run) -> None:
    run.steps(4, lambda line: line.update({"timing_s/explore": 0.5, "timing_s/generate/stage_1": 1.0}))
    found = facts.collect(run.folder)["phases"]
    assert found["outer"] == ["explore", "generate", "update", "sync"]
    assert found["inner"] == ["generate/stage_1"]
    assert found["covered"] == pytest.approx(1.0)


def test_parts_of_phases_and_what_lies_outside_the_steps_are_told_apart(run: Run) -> None:
    run.steps(4, lambda line: line.update({"timing_s/update/optimizer": 0.5}))
    run.profile(part_seconds={"update/optimizer": 10.5}, phase_seconds={"update": 30.25, "start": 7.125})
    page = page_of(run)
    values = page.values()
    assert (values["phase:update"], values["phase:update/optimizer"], values["phase:start"]) == (
        30.25,
        10.5,
        7.125,
    )
    assert "update/optimizer (part)" in page.said("time")
    assert "start (outside the steps)" in page.said("time")


# ---- rollouts


def test_examples_are_the_best_the_worst_and_those_without_variance(run: Run) -> None:
    run.whole()
    steps = facts.collect(run.folder)["samples"]
    assert [s["step"] for s in steps] == [1, 20]
    kinds = {e["kind"]: e["position"] for e in steps[0]["examples"]}
    assert list(kinds.values()) == [1, 2, 0, 3]
    assert kinds[samples.HIGHEST] == 1
    assert kinds[samples.LOWEST] == 2


def test_drafts_and_refinements_stand_side_by_side(run: Run) -> None:
    run.whole()
    example = facts.collect(run.folder)["samples"][0]["examples"][0]
    assert [d["shown_later"] for d in example["drafts"]] == [False, True]
    assert example["question"] == "question 1"
    assert example["second_prompt"] == "question 1 seen: draft 1 of 1.0"
    said = page_of(run).said("samples")
    for part in (
        "Draft that the second stage saw",
        "Refinement",
        "draft 1 of 1.0",
        "better 1",
        "gold 1",
        "right",
        "advantage",
    ):
        assert part in said


def test_one_stage_shows_a_good_and_a_bad_completion(run: Run) -> None:
    run.steps(2)
    rows = [{**rollout(0, "sample", r), "completion": f"said {r}", "prompt": "q"} for r in (0.0, 1.0, 0.0)]
    run.rollouts(2, rows)
    said = page_of(run).said("samples")
    assert "said 1.0" in said and "said 0.0" in said
    assert "Draft" not in said


def test_long_texts_are_folded_and_cut(run: Run) -> None:
    run.steps(2)
    run.rollouts(2, [rollout(0, "sample", 1.0, completion="begin" + "x" * 50_000 + "end")])
    page = page_of(run)
    said = page.said("samples")
    assert "begin" in said and "xend" in said
    assert re.search(r"46,008 characters left out", said)
    assert "x" * 4000 not in said


# ---- hostile texts


def test_nothing_that_a_model_wrote_becomes_markup(run: Run) -> None:
    run.whole()
    run.rollouts(
        20,
        [
            rollout(
                0,
                "sample",
                1.0,
                completion=HOSTILE,
                prompt=HOSTILE,
                answer=HOSTILE,
                outcomes={HOSTILE: HOSTILE},
            )
        ],
    )
    run.write("config.yaml", CONFIG.replace("name: demo", 'name: "</title><script>alert(3)</script>"'))
    run.evaluation("</script><svg onload=alert(4)>".replace("/", ""), 0.5, 0.4, 0.6)
    page = page_of(run)
    page.source.encode()  # no surrogate is left
    assert not page.all("img")
    assert [a for a in page.all("script") if a] == [] and len(page.all("script")) == 1
    assert not [k for _, attributes in page.elements for k in attributes if k.startswith("on")]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page.source)
    assert "alert(1)" in page.said("samples")
    assert "[U+202E]txet[U+001B][31m[U+0000]" in page.said("samples")


def test_texts_are_escaped_unless_they_are_markup() -> None:
    assert text("a<b>&\"'") == "a&lt;b&gt;&amp;&quot;&#x27;"
    assert tag("p", "<i>", tag("b", "x"), title='"><') == '<p title="&quot;&gt;&lt;">&lt;i&gt;<b>x</b></p>'
    assert visible("a\u2066b\r\nc\rd\te") == "a[U+2066]b\nc[U+000D]d\te"
    assert number(float("nan"), "k") == "–"


# ---- the page as a file


def test_the_page_needs_nothing_else(run: Run) -> None:
    run.whole()
    page = page_of(run)
    for name, attributes in page.elements:
        for key in ("src", "href", "xlink:href", "action", "data", "poster", "srcset", "background"):
            if attributes.get(key) is not None and name != "data":
                assert str(attributes[key]).startswith("#"), (name, attributes)
    assert not {"link", "iframe", "object", "embed", "img", "base", "form"} & {n for n, _ in page.elements}
    assert not re.search(r"url\(|@import|https?:|//[a-z]+\.", page.source)
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in str(policy)


def test_the_page_can_be_read_by_everyone(run: Run) -> None:
    run.whole()
    page = page_of(run)
    assert page.all("html")[0]["lang"] == "en"
    names = [n for n, _ in page.elements]
    assert names.count("h1") == 1 and names.count("main") == 1
    assert names.count("table") == names.count("caption") > 10
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    pictures = [a for a in page.all("svg") if a.get("aria-hidden") != "true"]
    assert len(pictures) > 12
    for picture in pictures:
        assert picture["role"] == "img"
        assert set(str(picture["aria-labelledby"]).split()) <= set(ids)
    for link in page.all("a"):
        assert str(link["href"])[1:] in ids
    levels = [int(n[1]) for n in names if re.fullmatch(r"h[1-6]", n)]
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert all(a.get("scope") for a in page.all("th"))


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """WCAG 2.2's ratio."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_both_colour_schemes_have_contrast() -> None:
    style = (resources.files("hpcgrpo") / "data" / "report.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]
    assert "prefers-color-scheme: dark" in style and "color-scheme: light dark" in light
    for block in (light, dark):
        colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for name in ("text", "muted", "link"):
            assert contrast(colors[name], colors["card"]) >= 4.5, name
            assert contrast(colors[name], colors["plain-back"]) >= 4.5 or name == "link", name
        for name in ("good", "bad"):
            assert contrast(colors[name], colors[f"{name}-back"]) >= 4.5, name
        for i in range(10):
            assert contrast(colors[f"s{i}"], colors["card"]) >= 3, i
        assert len(colors) == 24


def test_a_long_run_stays_below_two_megabytes(run: Run) -> None:
    def add(line: dict[str, Any]) -> None:
        line |= {f"rewards/part_{i}/mean": 0.1 * i + line["reward"] for i in range(20)}
        line |= {f"extra/{i}": float(i) for i in range(400 if line["step"] > 1990 else 0)}

    run.whole()
    run.steps(2000, add)
    long = "<&\"'" * 30_000
    run.rollouts(2000, [{**row, "completion": long, "prompt": long} for row in GROUPS])
    page = page_of(run)
    assert len(page.source.encode()) <= command.MAX_BYTES
    assert "13 more are in the table of all metrics" in page.said("curves")
    assert "the first 400 of" in page.said("metrics")
    assert "Curves of more than 400 steps" in page.source


def test_texts_are_cut_further_where_the_page_is_too_large(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.steps(2)
    run.rollouts(2, [{**row, "completion": "x" * 3000} for row in GROUPS])
    monkeypatch.setattr(command, "MAX_BYTES", 1)
    said = page_of(run).said("samples")
    assert "Texts of more than 200 characters" in said and "2,800 characters left out" in said


# ---- what runs leave behind


def finished(folder: Path) -> Iterator[str]:
    """The page and the JSON of a folder, both whole."""
    page = Page(command.render(folder))
    yield page.source
    found = facts.collect(folder)
    yield json.dumps(found, allow_nan=False)


def test_a_failed_run_names_the_first_failure(run: Run) -> None:
    run.whole()
    page = page_of(run)
    assert "failed" in page.said("")
    assert "CUDA out of memory" in page.said("")
    assert "rank 3" in page.said("") and "way out" in page.said("")
    starts = page.said("starts")
    assert "71.0" in starts and "71.1" in starts and "the time limit" in starts
    assert "0 to 9" in starts and "300.0 s" in starts.replace("5.0 min", "300.0 s")


def test_evaluations_have_their_intervals(run: Run) -> None:
    run.whole()
    page = page_of(run)
    values = page.values()
    assert (values["aime24:mean"], values["aime24:low"], values["aime24:high"]) == (0.5625, 0.4, 0.71)
    assert "Benchmarks of checkpoint-8 of base; intervals" in page.said("evaluations")
    assert "56.25 %" in page.said("evaluations") and "40.00 %" in page.said("evaluations")
    assert values["gsm8k:pass@k"] == pytest.approx(0.9315)
    assert values["rolling:gsm8k@10"] == 0.875
    assert "2 samples are missing" in page.said("evaluations")


def test_a_run_without_a_step(run: Run) -> None:
    for made in finished(run.folder):
        assert "not started" in made or "running" in made
    said = page_of(run).said("")
    assert "metrics.jsonl is not there" in said and "profile.json is not there" in said


def test_only_an_evaluation_before_the_first_step(run: Run) -> None:
    run.write("metrics.jsonl", '{"step": 0, "eval/accuracy": 0.25}\n')
    assert page_of(run).values()["eval/accuracy:last"] == 0.25


def test_torn_lines_and_values_that_are_none(run: Run) -> None:
    def spoil(line: dict[str, Any]) -> None:
        if line["step"] in (3, 4):
            line["entropy"], line["kl"] = float("nan"), float("inf")

    run.steps(20, spoil)
    path = run.folder / "metrics.jsonl"
    whole = path.read_text()
    path.write_bytes((whole + '{"step": 21, "reward": 0.').encode() + b"\xff\xfe")
    run.write(
        "rollouts/step-000020.jsonl", json.dumps(GROUPS[0]) + "\nnull\n[]\n" + json.dumps(GROUPS[2])[:90]
    )
    for made in finished(run.folder):
        assert "1 of the lines of metrics.jsonl are cut off" in made
        assert "3 lines of rollouts/step-000020.jsonl" in made
    page = page_of(run)
    assert "2 steps have NaN or infinity" in page.said("curves")
    assert page.values()["entropy:last"] == metric(20)["entropy"]
    assert facts.collect(run.folder)["metrics"]["entropy"]["not_finite"] == 2


@pytest.mark.parametrize(
    "name", ["profile.json", "config.yaml", "eval/gsm8k.json", "eval/rolling.json", "metrics.jsonl"]
)
@pytest.mark.parametrize(
    "content", [b"", b"\x00\xff{", b'{"a": ', b"[1, 2]", b'{"summary": {"avg@k": 3}, "checkpoints": 5}']
)
def test_a_damaged_file_costs_its_part_alone(run: Run, name: str, content: bytes) -> None:
    run.whole()
    run.write(name, content)
    found = facts.collect(run.folder)
    page = page_of(run)
    of_another_form = content.startswith(b'{"s') and name == "profile.json"
    if not of_another_form and (name, content) != ("metrics.jsonl", b""):
        assert any(name.rpartition("/")[2].split(".")[0] in note for note in found["notes"]), found["notes"]
    assert name == "metrics.jsonl" or "reward:last" in page.values()


def test_a_configuration_of_another_version_is_shown_but_not_predicted_from(run: Run) -> None:
    run.steps(3)
    run.write("config.yaml", CONFIG + "no_such_key: 1\n")
    page = page_of(run)
    assert "no_such_key" in page.said("config")
    assert "not one that this version reads" in page.said("")


def test_an_outcome_that_a_step_does_not_name_has_a_share_of_zero(run: Run) -> None:
    run.steps(4, lambda line: line.update({"rewards/accuracy/timeout": 0.5} if line["step"] == 2 else {}))
    found = facts.collect(run.folder)
    assert found["curves"]["rewards/accuracy/timeout"]["points"] == [[1, 0.0], [2, 0.5], [3, 0.0], [4, 0.0]]
    assert found["metrics"]["rewards/accuracy/timeout"]["mean"] == 0.125


def test_steps_that_were_taken_twice_count_once(run: Run) -> None:
    run.steps(5)
    path = run.folder / "metrics.jsonl"
    path.write_text(path.read_text() + json.dumps(metric(4) | {"reward": 0.123}) + "\n")
    found = facts.collect(run.folder)
    assert found["metrics"]["reward"]["count"] == 5
    assert [v for s, v in found["curves"]["reward"]["points"] if s == 4] == [0.123]


def test_the_share_of_the_run_follows_from_epochs_where_no_steps_are_given(run: Run) -> None:
    run.steps(5)
    run.write("config.yaml", CONFIG.replace(", max_steps: 20", ", num_train_epochs: 2"))
    assert facts.collect(run.folder)["steps"] == {"done": 5, "planned": 40}


def test_a_prediction_stands_beside_what_was_measured(run: Run) -> None:
    run.steps(20)
    run.profile()
    served = "generation: {backend: vllm}\ncluster: {nodes: 2, vllm_nodes: 1, gpus_per_node: 2}\n"
    run.write("config.yaml", CONFIG.replace("nobody/tiny-0.1B", "Qwen/Qwen2.5-1.5B-Instruct") + served)
    found = facts.collect(run.folder)["predicted"]
    if found is None:
        pytest.skip("no planner is installed")
    values = page_of(run).values()
    assert values["predicted:peak_memory_gb"] == pytest.approx(found["memory"]["peak_memory_gb"])
    assert values["ratio:peak_memory_gb"] == pytest.approx(found["memory"]["peak_memory_gb"] / 54.9286)


def test_a_prediction_is_of_the_lengths_that_the_run_had(run: Run) -> None:
    """3 tokens a completion after prompts of 40; where a line is cut off, the assumed ones as without rollouts."""
    run.steps(20)
    run.profile()
    served = "generation: {backend: vllm}\ncluster: {nodes: 2, vllm_nodes: 1, gpus_per_node: 2}\n"
    run.write("config.yaml", CONFIG.replace("nobody/tiny-0.1B", "Qwen/Qwen2.5-1.5B-Instruct") + served)
    assumed = facts.collect(run.folder)["predicted"]
    run.rollouts(20, [row | {"prompt_length": 40} for row in GROUPS])
    found = facts.collect(run.folder)["predicted"]
    for stage in found["step"]["stages"]:
        assert (stage["prompt_tokens"], stage["completion_tokens"]) == (40, 3)
    assert assumed["step"]["stages"][0]["completion_tokens"] > 3
    run.write("rollouts/step-000020.jsonl", '{"stage": "sam')
    assert facts.collect(run.folder)["predicted"]["step"] == assumed["step"]


def test_a_calibration_is_used_and_named(run: Run) -> None:
    """Ten times the learner's rate: the run's own file, else the newest of its neighbours of the same device."""
    run.steps(20)
    served = "generation: {backend: vllm}\n"
    served += "cluster: {nodes: 2, vllm_nodes: 1, gpus_per_node: 2, slurm_constraint: h100}\n"
    run.write("config.yaml", CONFIG.replace("nobody/tiny-0.1B", "Qwen/Qwen2.5-1.5B-Instruct") + served)
    plain = facts.collect(run.folder)["predicted"]
    assert "fitted to no run" in plain["efficiencies"]
    fitted = "machine: {{name: {}}}\nruns: [logs/a]\nefficiencies: {{learner_flops: {}}}\n"
    for name, machine in (("other", "a100-80gb"), ("same", "h100")):
        neighbour = run.folder.parent / name / "efficiencies.yaml"
        neighbour.parent.mkdir()
        neighbour.write_text(fitted.format(machine, 4.0))
    found = facts.collect(run.folder)["predicted"]
    assert (
        str(run.folder.parent / "same") in found["efficiencies"]
        and "fitted to logs/a" in found["efficiencies"]
    )
    assert found["time"]["phase_seconds"]["update"] < plain["time"]["phase_seconds"]["update"]
    run.write("efficiencies.yaml", fitted.format("h100", 0.4))
    assert str(run.folder / "efficiencies.yaml") in facts.collect(run.folder)["predicted"]["efficiencies"]
    assert "by the calibration" in page_of(run).said("cost")
    run.write("efficiencies.yaml", "nothing")
    assert "has no mapping" in facts.collect(run.folder)["predicted"]["efficiencies"]


def test_what_the_run_was_made_with_is_shown_and_what_changed(run: Run) -> None:
    run.steps(3)
    first = {"time": 1.0, "step": 0, "torch": "2.13.0", "driver": None, "gpus": ["NVIDIA H100"] * 8,
             "git": {"commit": "abc", "dirty": False}}  # fmt: skip
    second = {**first, "step": 2, "torch": "2.13.1", "git": {"commit": "abd", "dirty": True}}
    run.write("versions.json", json.dumps([first, second]))
    found = facts.collect(run.folder)["versions"]
    assert found["run"] == {
        "torch": "2.13.1",
        "GPUs of rank 0's node": "8 x NVIDIA H100",
        "git commit": "abd, with changes that were not committed",
    }
    assert found["changed"] == [
        {"step": 2, "what": "torch", "from": "2.13.0", "to": "2.13.1"},
        {"step": 2, "what": "git commit", "from": "abc", "to": "abd, with changes that were not committed"},
    ]
    said = page_of(run).said("versions")
    assert "8 x NVIDIA H100" in said and "2.13.0" in said and "What changed between starts" in said


def test_a_prediction_that_cannot_be_made_says_why(run: Run) -> None:
    run.steps(20)
    run.profile()
    said = page_of(run).said("cost")
    assert "Nothing is predicted" in said
    assert "54.93" in said


# ---- the command


def test_the_command_writes_the_page_and_says_where(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.whole()
    assert command.run(run.folder, output=None, as_json=False) == 0
    assert f"wrote {run.folder / 'report.html'}" in capsys.readouterr().out
    page = Page((run.folder / "report.html").read_text(encoding="utf-8"))
    assert page.source.startswith('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">')
    other = run.folder.parent / "deeper" / "page.html"
    assert command.run(run.folder, output=other, as_json=False) == 0
    assert other.exists()


def test_json_prints_the_facts_and_writes_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.whole()
    before = sorted(run.folder.rglob("*"))
    assert command.run(run.folder, output=None, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["profile"]["peak_memory_gb"] == 54.9286
    assert found["curves"]["reward"]["points"][19] == [20, metric(20)["reward"]]
    assert [e["benchmark"] for e in found["evaluations"]] == ["aime24", "gsm8k"]
    assert found["about"]["algorithm"][1] == ["cppo", {"pruning_rate": 0.5}]
    assert sorted(run.folder.rglob("*")) == before


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        command.run(tmp_path, output=None, as_json=False)
    with pytest.raises(ConfigError, match="no such folder"):
        command.run(tmp_path / "nothing", output=None, as_json=True)


def test_a_page_that_cannot_be_written_is_a_clear_error(run: Run, tmp_path: Path) -> None:
    run.steps(2)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        command.run(run.folder, output=tmp_path / "file" / "report.html", as_json=False)
    (run.folder / "report.html").mkdir()
    with pytest.raises(ConfigError, match="--output FILE"):
        command.run(run.folder, output=None, as_json=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere and read everything")
def test_a_folder_without_permission(run: Run) -> None:
    run.whole()
    (run.folder / "metrics.jsonl").chmod(0)
    run.folder.chmod(0o500)
    try:
        assert "metrics.jsonl cannot be read" in page_of(run).said("")
        with pytest.raises(ConfigError, match="cannot be written"):
            command.run(run.folder, output=None, as_json=False)
    finally:
        run.folder.chmod(0o700)


def test_a_run_that_is_being_written_can_be_reported(run: Run) -> None:
    run.whole()
    over = threading.Event()

    def keep_writing() -> None:
        path = run.folder / "metrics.jsonl"
        for step in range(21, 100_000):
            with path.open("a") as file:
                file.write(json.dumps(metric(step))[: 40 if step % 3 else None] + "\n")
            if over.wait(0.001):
                return

    thread = threading.Thread(target=keep_writing)
    thread.start()
    try:
        for _ in range(3):
            page_of(run)
    finally:
        over.set()
        thread.join()


def test_picked_keeps_the_ends() -> None:
    assert picked(range(100), 4) == [0, 33, 66, 99]
    assert picked([1, 2], 9) == [1, 2]


# ---- in a browser


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")
def test_the_page_fits_phone_and_desktop_in_both_schemes(run: Run) -> None:
    run.whole()
    run.rollouts(20, [rollout(0, "sample", 1.0, completion=HOSTILE + "x" * 3000, prompt="y" * 3000)])
    command.run(run.folder, output=None, as_json=False)
    backgrounds = []
    for width, height, dark in ((360, 740, False), (390, 844, True), (1440, 900, False)):
        with browser() as page:
            page.open(run.folder / "report.html", width=width, height=height, dark=dark)
            page.value("document.querySelectorAll('details').forEach(d => { d.open = true })")
            assert page.value("document.documentElement.scrollWidth") <= width
            assert page.value("document.querySelectorAll('script').length") == 1
            assert page.value("document.querySelector('button').hidden") is False  # its script ran
            backgrounds.append(page.value("getComputedStyle(document.body).backgroundColor"))
            asked = [
                e["params"]["request"]["url"]
                for e in page.events
                if e.get("method") == "Network.requestWillBeSent"
            ]
            assert asked == [(run.folder / "report.html").resolve().as_uri()]
            wrong = ("Log.entryAdded", "Runtime.exceptionThrown", "Page.javascriptDialogOpening")
            assert not [e for e in page.events if e.get("method") in wrong]
    assert backgrounds[0] == backgrounds[2] != backgrounds[1]
