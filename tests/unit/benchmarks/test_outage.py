"""When the hit rate is back after Redis was away."""

from collections.abc import Callable

from benchmarks.outage_run.recovery import Moments, Recovery, recovery_of
from benchmarks.replay_run.player import PlayedRequest

MOMENTS = Moments(left_s=20.0, back_s=40.0)
USUAL, LOW = 80, 20


def recovery(cached_at: Callable[[int], int]) -> Recovery:
    """Judge one request of 100 tokens a second, for 70 seconds."""
    return recovery_of(
        [
            PlayedRequest(due_s=float(second), prompt_tokens=100, cached_tokens=cached_at(second))
            for second in range(70)
        ],
        MOMENTS,
        0.95,
    )


def test_rates_that_rise_again_are_back_where_they_rise() -> None:
    found = recovery(lambda second: LOW if 20 <= second < 46 else USUAL)
    assert found["back_s"] == 6.0
    assert (found["hit_rate_before"], found["hit_rate_away"]) == (0.8, 0.2)


def test_one_poor_second_later_is_luck() -> None:
    assert recovery(lambda second: LOW if 20 <= second < 46 or second == 60 else USUAL)["back_s"]


def test_a_peak_before_all_is_back_does_not_count() -> None:
    found = recovery(lambda s: LOW if 20 <= s < 42 or 45 <= s < 55 else USUAL)
    assert found["back_s"] == 15.0


def test_a_rate_that_stays_low_is_never_back() -> None:
    assert recovery(lambda second: LOW if second >= 20 else USUAL)["back_s"] is None


def test_where_nothing_was_cached_before_nothing_comes_back() -> None:
    assert recovery(lambda _second: 0)["back_s"] is None
