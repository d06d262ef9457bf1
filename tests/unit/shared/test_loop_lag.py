"""The event loop measures how late it is."""

import asyncio
import time

from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.service.run import LoopLag

HELD_S = 0.2


def _sum_s(metrics: Metrics) -> float:
    total = metrics.registry.get_sample_value("tokenmesh:event_loop_lag_seconds_sum")
    assert total is not None
    return total


async def test_a_loop_that_is_held_is_late_by_as_much() -> None:
    metrics = Metrics()
    lag = LoopLag(metrics, 0.01)
    await asyncio.sleep(0.1)
    before_s = _sum_s(metrics)
    time.sleep(HELD_S)  # noqa: ASYNC251
    await asyncio.sleep(0.05)
    assert _sum_s(metrics) - before_s > HELD_S - 0.02
    lag.stop()
    last_s = _sum_s(metrics)
    await asyncio.sleep(0.05)
    assert _sum_s(metrics) == last_s
