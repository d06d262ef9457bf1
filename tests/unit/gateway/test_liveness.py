"""When a silent worker is pinged, and how long the answer may take."""

from tokenmesh.services.gateway.core.mesh.liveness import LivenessTracker
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.recent_most import RecentMost

SETTINGS = GatewaySettings(
    silence_s=0.05,
    silence_factor=4.0,
    silence_max_s=1.0,
    ping_timeout_s=0.2,
    ping_factor=4.0,
    ping_timeout_max_s=2.0,
    lag_factor=10.0,
    stall_s=1.0,
)


def sending(interval_s: float) -> tuple[LivenessTracker, float]:
    """The tracker of a worker that has sent tokens at an interval for some time, and the time."""
    tracker, now = LivenessTracker(SETTINGS, 0.0, RecentMost()), 0.0
    for _ in range(100):
        now += interval_s
        tracker.on_tokens(now)
    return tracker, now


def test_a_silent_worker_is_pinged_once() -> None:
    tracker, now = sending(0.001)
    assert not tracker.needs_ping(now + 0.04)
    assert tracker.needs_ping(now + 0.06)
    assert not tracker.needs_ping(now + 0.5)


def test_a_slow_worker_is_given_more_time() -> None:
    tracker, now = sending(0.1)
    assert not tracker.needs_ping(now + 0.3)
    assert tracker.needs_ping(now + 0.5)


def test_the_time_of_any_worker_is_bounded() -> None:
    tracker, now = sending(10.0)
    assert not tracker.needs_ping(now + 0.9)
    assert tracker.needs_ping(now + 1.1)


def test_an_answer_ends_the_silence() -> None:
    tracker, now = sending(0.001)
    assert tracker.needs_ping(now + 0.06)
    tracker.on_answer(now + 0.1, 0.01)
    assert not tracker.needs_ping(now + 0.14)
    assert tracker.needs_ping(now + 0.2)


def test_the_timeout_follows_the_slowest_recent_answer() -> None:
    tracker, now = sending(0.001)
    assert tracker.ping_timeout_s(now, 0.0) == 0.2
    tracker.on_answer(now, 0.3)
    assert tracker.ping_timeout_s(now, 0.0) == 1.2
    for _ in range(100):
        tracker.on_answer(now, 0.001)
    assert tracker.ping_timeout_s(now, 0.0) == 1.2
    assert tracker.ping_timeout_s(now + 30.0, 0.0) == 0.2


def test_a_worker_that_was_idle_is_still_known_to_be_slow() -> None:
    answers = RecentMost()
    LivenessTracker(SETTINGS, 0.0, answers).on_answer(1.0, 0.3)
    again = LivenessTracker(SETTINGS, 2.0, answers)
    assert 0.9 < again.ping_timeout_s(2.0, 0.0) < 1.2


def test_the_timeout_follows_the_lag_of_the_machine_up_to_a_bound() -> None:
    tracker, now = sending(0.001)
    assert tracker.ping_timeout_s(now, 0.1) == 1.0
    assert tracker.ping_timeout_s(now, 100.0) == 2.0


def test_a_reset_starts_the_silence_again() -> None:
    tracker, now = sending(0.001)
    assert tracker.needs_ping(now + 0.06)
    tracker.reset_silence(now + 1.0)
    assert not tracker.needs_ping(now + 1.04)
    assert tracker.needs_ping(now + 1.06)


def test_tokens_after_a_ping_are_noticed() -> None:
    tracker, now = sending(0.001)
    assert not tracker.was_heard_after(now)
    tracker.on_tokens(now + 0.1)
    assert tracker.was_heard_after(now)


def test_a_silence_after_late_tokens_gets_another_ping() -> None:
    tracker, now = sending(0.001)
    assert tracker.needs_ping(now + 0.06)
    tracker.on_tokens(now + 0.07)
    assert not tracker.needs_ping(now + 0.1)
    assert tracker.needs_ping(now + 0.15)
