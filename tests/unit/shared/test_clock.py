"""Deadlines follow a clock that nobody sets; people are told the one that is set."""

import time

import pytest

from tokenmesh.shared.clock import now_s, wall_s


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_setting_the_clock_moves_no_deadline(
    monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    deadline_s, told_s, right = now_s() + 30.0, wall_s(), time.time
    monkeypatch.setattr(time, "time", lambda: right() + step_s)
    assert 0 <= 30.0 - (deadline_s - now_s()) < 20.0
    assert 0 <= wall_s() - told_s - step_s < 20.0


def test_at_first_both_say_the_same() -> None:
    assert now_s() == pytest.approx(wall_s(), abs=60.0)
