"""Deadlines follow a clock that is never set; people see the one that is."""

import time

import pytest

from tokenmesh.shared.clock import now_s, wall_s


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_setting_the_clock_moves_no_deadline(
    monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    deadline_s, shown_s, right = now_s() + 30.0, wall_s(), time.time
    monkeypatch.setattr(time, "time", lambda: right() + step_s)
    assert 0 <= 30.0 - (deadline_s - now_s()) < 20.0
    assert 0 <= wall_s() - shown_s - step_s < 20.0


def test_at_first_both_say_the_same() -> None:
    assert now_s() == pytest.approx(wall_s(), abs=60.0)
