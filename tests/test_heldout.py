"""Held-out answers after other drafts, and the warning where skill does not move between the prompt's two forms."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from runs import hpcgrpo, write_config

from hpcgrpo.heldout import spoilt, transfer_warning


def test_a_spoilt_draft_is_wrong_from_one_digit_on() -> None:
    """`1471=1` with a slip of 3 at its second digit: 4 -> 7, 7 -> 0, 1 -> 4, 1 -> 4."""
    texts = {spoilt("1471=1", seed) for seed in range(45)}
    assert "1704=4" in texts
    assert len(texts) == 45  # five places, nine slips
    for text in texts:
        assert text[-1] != "1"  # the answer is among what is carried on
        assert [c for c in text if not c.isdigit()] == ["="]
    assert spoilt("no digit", 3) == "no d"


def metrics(single: float, empty: float, spoilt: float) -> dict[str, float]:
    forms = {"empty_draft": empty, "spoilt_draft": spoilt}
    return {"eval/reward": single, **{f"eval/{form}/reward": value for form, value in forms.items()}}


def test_it_warns_where_skill_does_not_move() -> None:
    said = transfer_warning(metrics(0.59, 0.13, 0.58), 256)
    assert (
        said is not None
        and "0.590" in said
        and "0.130 after an empty draft" in said
        and "train_drafts" in said
    )
    said = transfer_warning(metrics(0.59, 0.58, 0.10), 256)
    assert said is not None and "0.100 after a spoilt draft" in said and "copies its draft" in said


@pytest.mark.parametrize(
    ("values", "questions"),
    [
        ((0.58, 0.58, 0.57), 256),  # it moves
        ((0.58, 0.47, 0.57), 256),  # 0.47 is 0.81 of it
        ((0.50, 0.25, 0.50), 8),  # within two standard errors: 0.25 against 2 * sqrt(2 * 0.25 / 8) = 0.5
        ((0.0, 0.0, 0.0), 256),  # nothing to move yet
    ],
)
def test_it_does_not_warn_without_cause(values: tuple[float, float, float], questions: int) -> None:
    assert transfer_warning(metrics(*values), questions) is None
    assert transfer_warning({"eval/reward": values[0]}, questions) is None


@pytest.mark.slow
def test_a_run_reports_the_forms_first_and_last(tmp_path: Path) -> None:
    """An iGRPO run with a second pass asks every held-out question in four forms, at its first and last step."""
    config = write_config(tmp_path)
    held_out = (
        "eval={data: {preset: chain, split: test, max_samples: 8, options: {digits: 4}}, num_samples: 8,"
    )
    done = hpcgrpo(
        "train", str(config), f"output_dir={tmp_path}/logs", "train.max_steps=2",
        held_out + " two_pass: true, every_steps: 1}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "logs" / "run"
    lines = {m["step"]: m for m in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    for step, forms in ((0, True), (1, False), (2, True)):
        assert "eval/two_pass/accuracy" in lines[step]
        assert ("eval/empty_draft/accuracy" in lines[step]) == forms
        assert ("eval/spoilt_draft/accuracy" in lines[step]) == forms
    rows = [json.loads(line) for line in (run / "rollouts/eval-000000.jsonl").read_text().splitlines()]
    by_stage = {stage: [r for r in rows if r["stage"] == stage] for stage in {r["stage"] for r in rows}}
    assert {stage: len(found) for stage, found in by_stage.items()} == {
        "eval": 8,
        "eval/two_pass": 8,
        "eval/empty_draft": 8,
        "eval/spoilt_draft": 8,
    }
    own = {r["row"]: r["completion"] for r in by_stage["eval"]}
    for row in by_stage["eval/empty_draft"]:
        assert re.search(r"(\d{4})##\1", row["prompt"])
    for row in by_stage["eval/spoilt_draft"]:
        draft = re.search(r"\d{4}#(.*)#\d{4}", row["prompt"])
        assert draft is not None and draft[1] != own[row["row"]]
