"""When a silent worker is pinged, and how long the answer may take."""

from tokenmesh.services.gateway.mesh.liveness import LivenessTracker
from tokenmesh.services.gateway.mesh.watch_times import WatchTimes

TIMES = WatchTimes(
    silence_s=0.05,
    silence_factor=4.0,
    silence_max_s=1.0,
    ping_timeout_s=0.2,
    ping_factor=4.0,
    ping_timeout_max_s=2.0,
    lag_factor=10.0,
    stall_s=1.0,
)


def beating(interval_s: float) -> tuple[LivenessTracker, float]:
    """A worker that has sent at an interval for a while, and the time."""
    pulse, now = LivenessTracker(TIMES, 0.0), 0.0
    for _ in range(100):
        now += interval_s
        pulse.hear(now)
    return pulse, now


def test_a_silent_worker_is_pinged_once() -> None:
    pulse, now = beating(0.001)
    assert not pulse.wants_ping(now + 0.04)
    assert pulse.wants_ping(now + 0.06)
    assert not pulse.wants_ping(now + 0.5)


def test_a_slow_worker_is_given_more_time() -> None:
    pulse, now = beating(0.1)
    assert not pulse.wants_ping(now + 0.3)
    assert pulse.wants_ping(now + 0.5)


def test_no_worker_is_given_for_ever() -> None:
    pulse, now = beating(10.0)
    assert not pulse.wants_ping(now + 0.9)
    assert pulse.wants_ping(now + 1.1)


def test_an_answer_counts_as_a_sign_of_life() -> None:
    pulse, now = beating(0.001)
    assert pulse.wants_ping(now + 0.06)
    pulse.answered(now + 0.1, 0.01)
    assert not pulse.wants_ping(now + 0.14)
    assert pulse.wants_ping(now + 0.2)


def test_patience_follows_the_slowest_recent_answer() -> None:
    pulse, now = beating(0.001)
    assert pulse.patience_s(0.0) == 0.2
    pulse.answered(now, 0.3)
    assert pulse.patience_s(0.0) == 1.2
    for _ in range(100):
        pulse.answered(now, 0.001)
    assert pulse.patience_s(0.0) == 0.2


def test_patience_follows_the_lag_of_the_machine_up_to_a_bound() -> None:
    pulse, _ = beating(0.001)
    assert pulse.patience_s(0.1) == 1.0
    assert pulse.patience_s(100.0) == 2.0


def test_an_excuse_starts_the_silence_anew() -> None:
    pulse, now = beating(0.001)
    assert pulse.wants_ping(now + 0.06)
    pulse.excuse(now + 1.0)
    assert not pulse.wants_ping(now + 1.04)
    assert pulse.wants_ping(now + 1.06)


def test_a_sign_of_life_after_a_ping_was_sent_is_known() -> None:
    pulse, now = beating(0.001)
    assert not pulse.has_been_heard(now)
    pulse.hear(now + 0.1)
    assert pulse.has_been_heard(now)


def test_a_silence_after_late_tokens_is_asked_about_anew() -> None:
    pulse, now = beating(0.001)
    assert pulse.wants_ping(now + 0.06)
    pulse.hear(now + 0.07)
    assert not pulse.wants_ping(now + 0.1)
    assert pulse.wants_ping(now + 0.15)
