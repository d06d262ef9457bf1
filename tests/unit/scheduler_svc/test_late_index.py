"""A prefix index that is late once, on a busy machine, is not away."""

import asyncio
import logging
from typing import Any, cast

import pytest

from tests.unit.scheduler_svc.test_request_queue import request, worker
from tokenmesh.services.scheduler_svc.index.indexed_placement import IndexedPlacement
from tokenmesh.services.scheduler_svc.index.placement_index import CandidateScore
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.placement import PrefixIndexSettings, SchedulerSettings
from tokenmesh.shared.metrics import Metrics

SETTINGS = PrefixIndexSettings(lookup_timeout_s=0.1, retry_s=0.01)


class Index:
    """Answers after a time."""

    block_tokens = 64

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    async def place(self, *_: object) -> tuple[int, list[CandidateScore]]:
        await asyncio.sleep(self.delay_s)
        return 0, [CandidateScore(1, 0, 0, 0.1, True, 0.1)]


async def reasons(index: Index, count: int) -> list[str]:
    """The reasons of placements that follow one another."""
    settings = SchedulerSettings()
    placement = IndexedPlacement(settings, SETTINGS, cast("Any", index), Metrics())
    found = []
    for _ in range(count):
        decision = await placement.place(request(), [worker("w")], monotonic_s())
        found.append(decision.reason)
        await asyncio.sleep(2 * SETTINGS.retry_s)
    return found


async def test_the_next_lookup_has_longer(caplog: pytest.LogCaptureFixture) -> None:
    late, *then = await reasons(Index(0.2), 3)
    assert (late, then) == ("index away", ["prefix", "prefix"])
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


async def test_an_index_that_stays_silent_is_away(caplog: pytest.LogCaptureFixture) -> None:
    assert await reasons(Index(60.0), 3) == ["index away"] * 3
    (warning,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "the prefix index did not answer in time" in warning.getMessage()
