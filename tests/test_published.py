"""The papers' numbers are copied without a slip: what can be recomputed of them is, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
STUDIES = ROOT / "configs" / "studies"
PUBLISHED: dict[str, Any] = yaml.safe_load((ROOT / "hpcgrpo" / "data" / "published.yaml").read_text())


def published(key: str) -> dict[str, dict[str, float | None]]:
    table = PUBLISHED[key]
    return {row: dict(zip(table["columns"], cells, strict=True)) for row, cells in table["rows"].items()}


def numbers(row: dict[str, float | None], *columns: str) -> list[float]:
    found = [row[column] for column in columns]
    assert None not in found
    return [value for value in found if value is not None]


@pytest.mark.parametrize("key", PUBLISHED)
def test_a_published_table_is_whole(key: str) -> None:
    table = PUBLISHED[key]
    assert set(table) <= {"source", "columns", "rows", "remarks"} and table["source"]
    for cells in table["rows"].values():
        assert len(cells) == len(table["columns"])
        assert all(cell is None or isinstance(cell, int | float) for cell in cells)


TYPOS = {("igrpo_table_1", "DeepSeek-R1-Distill-Qwen-7B")}  # printed 61.93, ALGORITHMS.md 11 number 4
ROUNDED = {"igrpo_figure_2": 0.05}  # printed to one decimal


def test_printed_means_are_the_means_of_their_rows() -> None:
    """Within 0.01, as two rows are cut instead of rounded. The one typo is wrong by what its remark says."""
    wrong = {}
    for key, table in PUBLISHED.items():
        if table["columns"][-1] != "Avg":
            continue
        for label, (*cells, mean) in table["rows"].items():
            if not cells or mean is None or None in cells or label.startswith("Printed"):
                continue
            if abs(sum(cells) / len(cells) - mean) > ROUNDED.get(key, 0.01) + 1e-9:
                wrong[key, label] = sum(cells) / len(cells)
    assert set(wrong) == TYPOS
    assert round(wrong["igrpo_table_1", "DeepSeek-R1-Distill-Qwen-7B"], 2) == 67.82


def test_the_14b_row_that_repeats_the_7b_row() -> None:
    table = published("igrpo_table_1")
    small, large = table["OpenMath-Nemotron-7B"], table["OpenMath-Nemotron-14B"]
    assert [column for column in small if small[column] != large[column]] == ["GSM8K", "Avg"]
    assert any("repeats five" in remark for remark in PUBLISHED["igrpo_table_1"]["remarks"])


def test_printed_differences_are_differences() -> None:
    for row in published("igrpo_table_2").values():
        alone, wrapped, difference = numbers(row, "Avg", "With iGRPO", "Difference")
        assert wrapped - alone == pytest.approx(difference, abs=0.005)
    judge = published("igrpo_table_3")
    assert numbers(judge["iGRPO with a judge"], "Avg")[0] - 69.87 == pytest.approx(0.94, abs=0.005)
    before, after, printed = published("igrpo_figure_2").values()
    for column, gain in printed.items():
        if gain is not None:
            (a,), (b,) = numbers(before, column), numbers(after, column)
            assert b - a == pytest.approx(gain, abs=0.1)  # both are rounded to 0.1
    cppo, small = published("cppo_gsm8k_v2"), published("codistill_qwen")
    assert numbers(cppo["P 0.875"], "Accuracy")[0] - 77.38 == pytest.approx(2.63, abs=0.005)
    best = numbers(small["Qwen2.5-Math-1.5B + CoDistill, best of each benchmark"], "Minerva")[0]
    assert best - numbers(small["Qwen2.5-Math-1.5B"], "Minerva")[0] == pytest.approx(11.6, abs=0.05)
    assert best - numbers(small["Qwen2.5-Math-1.5B + GRPO"], "Minerva")[0] == pytest.approx(6.1, abs=0.05)


def test_printed_speed_ups_are_ratios_of_the_times() -> None:
    found = 0
    for key, table in PUBLISHED.items():
        if {"Seconds", "Speed-up"} <= set(table["columns"]):
            rows = published(key)
            (baseline,) = numbers(rows["GRPO"], "Seconds")
            for row in rows.values():
                if row["Seconds"] is not None:
                    seconds, speed_up = numbers(row, "Seconds", "Speed-up")
                    assert baseline / seconds == pytest.approx(speed_up, abs=0.005)
                    found += 1
    assert found == 21
    cost = published("igrpo_table_s3")
    grpo, igrpo = (numbers(cost[a], *PUBLISHED["igrpo_table_s3"]["columns"]) for a in ("GRPO", "iGRPO"))
    assert igrpo[0] - grpo[0] == pytest.approx(0.0063) and igrpo[2] / grpo[2] == pytest.approx(
        1.13, abs=0.005
    )


def test_two_tables_that_report_one_run_agree() -> None:
    table_1, judge = published("igrpo_table_1"), published("igrpo_table_3")
    assert judge["iGRPO with rules"] == table_1["DeepSeek-R1-Distill-Qwen-7B + iGRPO"]
    beta, total = published("igrpo_table_s4_beta"), published("igrpo_table_s4_completions")
    assert beta["0"] == total["8"] == {"Avg": table_1["DeepSeek-R1-Distill-Qwen-7B + iGRPO"]["Avg"]}
    passes = published("igrpo_figure_s1")
    scaled = published("igrpo_table_s1")["OpenMath-Nemotron-14B + iGRPO"]
    assert [passes[name]["1"] for name in ("AIME25", "AIME24")] == [scaled["AIME25"], scaled["AIME24"]]


def test_studies_repeat_published_numbers_exactly() -> None:
    """Every number beside a study stands in published.yaml, in the table, row and column that it claims."""
    tables = {
        "igrpo_beta": ["igrpo_table_s4_beta"],
        "igrpo_completions": ["igrpo_table_s4_completions"],
        "igrpo_entropy": ["igrpo_figure_3"],
        "cppo_gsm8k": ["cppo_gsm8k_v2", "cppo_gsm8k_v1"],
        "cppo_math": ["cppo_math_v2", "cppo_math_v1"],
        "cppo_metrics": ["cppo_table_4"],
        "cppo_allocation": ["cppo_table_5"],
    }
    other = {"GRPO 8": "GRPO", "iGRPO 4 + 4": "iGRPO"}
    for name, keys in tables.items():
        shown = yaml.safe_load((STUDIES / f"{name}.yaml").read_text())["published"]
        for table, key in zip(shown, keys, strict=True):
            for label, cells in table["rows"].items():
                row = published(key)[other.get(label, label)]
                assert {column: row[column] for column in cells} == cells, (name, label)
    wrapper = yaml.safe_load((STUDIES / "igrpo_wrapper.yaml").read_text())["published"][0]["rows"]
    table_1, table_2 = published("igrpo_table_1"), published("igrpo_table_2")
    model = "DeepSeek-R1-Distill-Qwen-7B + "
    assert [wrapper[a]["Avg"] for a in ("GRPO", "iGRPO")] == [
        table_1[model + a]["Avg"] for a in ("GRPO", "iGRPO")
    ]
    for base in ("DAPO", "GSPO"):
        assert wrapper[base]["Avg"] == table_2[base]["Avg"]
        assert wrapper[f"iGRPO over {base}"]["Avg"] == table_2[base]["With iGRPO"]
