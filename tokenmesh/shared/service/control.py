"""ProcessControl: what any process of the mesh can be told, whatever its service."""

import asyncio
from collections.abc import Callable

from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.messages import Done, Drain, MetricsRead, ReadMetrics
from tokenmesh.shared.metrics import ENGINE_METRICS, Metrics, sample_lines


class ProcessControl(Actor):
    """Listens on the process's own control subject."""

    def __init__(self, drain: Callable[[], None], metrics: Metrics) -> None:
        super().__init__()
        self._drain = drain
        self._metrics = metrics

    @handles(Drain)
    async def drain(self, message: Drain, context: Context) -> Done:
        """Take nothing new, finish or hand over, leave for good."""
        self._drain()
        return Done()

    @handles(ReadMetrics)
    async def read_metrics(self, message: ReadMetrics, context: Context) -> MetricsRead:
        """What this process has measured of an engine; nothing where it has none."""
        lines = await asyncio.to_thread(sample_lines, self._metrics, ENGINE_METRICS)
        return MetricsRead(lines=lines)
