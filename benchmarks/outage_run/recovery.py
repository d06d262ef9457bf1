"""The hit rate second by second, and when it is back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

from benchmarks.replay_run.player import PlayedRequest

_WINDOW: Final = 3
"""Seconds that are looked at together: one second has few requests."""


@dataclass(frozen=True, slots=True)
class Moments:
    """When Redis went and when it took connections again, seconds since the first request."""

    left_s: float
    back_s: float


class Recovery(TypedDict):
    """The hit rate before, during and after the outage."""

    hit_rate_before: float
    hit_rate_away: float
    hit_rate_after: float
    """From when it is back to the end; from Redis' return where it never is."""
    back_s: float | None
    """Seconds from Redis' return until it is back; None: never."""
    by_second: list[float | None]
    """None: no request in that second."""


def recovery_of(played: Sequence[PlayedRequest], moments: Moments, share: float) -> Recovery:
    """Back is the first window with `share` of the hit rate before, if all that follows has it too.

    Not each window that follows: of few requests one in three falls short by luck, before as well.
    Where nothing was hit before, nothing can come back.
    """
    before = hit_rate(played, moments.left_s / 2, moments.left_s) or 0.0
    end_s = max((each.due_s for each in played), default=0.0)
    back_s = None
    start_s = moments.back_s
    while before and back_s is None and start_s <= end_s - _WINDOW:
        rates = [hit_rate(played, start_s, until_s) for until_s in (start_s + _WINDOW, end_s + 1)]
        if all(rate is not None and rate >= share * before for rate in rates):
            back_s = start_s - moments.back_s
        start_s += 1
    rest = hit_rate(played, moments.back_s + (back_s or 0.0), end_s + 1)
    by_second = [hit_rate(played, second, second + 1) for second in range(int(end_s) + 1)]
    return Recovery(
        hit_rate_before=round(before, 4),
        hit_rate_away=round(hit_rate(played, moments.left_s, moments.back_s) or 0.0, 4),
        hit_rate_after=round(rest or 0.0, 4),
        back_s=None if back_s is None else round(back_s, 1),
        by_second=[None if rate is None else round(rate, 3) for rate in by_second],
    )


def hit_rate(played: Sequence[PlayedRequest], from_s: float, to_s: float) -> float | None:
    """Share of prompt tokens that were cached, of what was due in that time."""
    those = [each for each in played if from_s <= each.due_s < to_s and each.prompt_tokens]
    asked = sum(each.prompt_tokens for each in those)
    return sum(each.cached_tokens for each in those) / asked if asked else None
