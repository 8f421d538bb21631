"""Learning rates by hand."""

from __future__ import annotations

import math

import pytest

from hpcgrpo.config import SCHEDULES
from hpcgrpo.learning.schedule import schedule


def factors(name: str, total: int, warmup: int, min_lr_rate: float | None = None) -> list[float]:
    at = schedule(name, total=total, warmup=warmup, min_lr_rate=min_lr_rate, kwargs={})
    return [at(u) for u in range(total)]


def test_cosine_with_min_lr_warms_up_and_ends_at_its_minimum() -> None:
    """iGRPO Table S.2: warm-up over 10 % of the steps, then cosine to 0.1 of the base, reached at the last step."""
    found = factors("cosine_with_min_lr", 100, 10, 0.1)
    assert found[:10] == pytest.approx([(u + 1) / 11 for u in range(10)])
    assert found[10] == 1.0
    assert found[99] == pytest.approx(0.1)
    middle = 10 + (99 - 10) / 2  # half of the way down the cosine
    assert found[54] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * (54 - 10) / 89)) / 2)
    assert (found[54] + found[55]) / 2 == pytest.approx(0.55, abs=1e-3) and middle == 54.5


def test_linear_falls_by_equal_steps_and_the_last_one_still_moves() -> None:
    assert factors("linear", 5, 0) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_constant_and_a_single_step() -> None:
    assert factors("constant", 3, 0) == [1.0, 1.0, 1.0]
    assert factors("linear", 1, 0) == [1.0]
    assert factors("cosine_with_min_lr", 1, 0, 0.1)[0] > 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_wastes_no_step_and_stays_in_bounds(name: str) -> None:
    found = factors(name, 40, 4)
    assert all(0 < f <= 1 + 1e-9 for f in found), found
    assert found[0] == pytest.approx(1 / 5) or name == "constant"
