"""KvParts: what a worker that exchanges KV has: desk, fetcher, transfer process and metrics."""

from collections.abc import Callable, Coroutine, Iterable

import msgspec

from tokenmesh.engine.core.outputs import StepOutput
from tokenmesh.engine.kv.shared_arena import SharedKv
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import StreamKey
from tokenmesh.services.worker_svc.kv.child import TransferProcess
from tokenmesh.services.worker_svc.kv.desk import KvDesk
from tokenmesh.services.worker_svc.kv.fetcher import KvFetcher
from tokenmesh.services.worker_svc.thread import EngineHost
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages.beat import WorkerLoad
from tokenmesh.shared.metrics import Metrics


class KvParts:
    def __init__(
        self,
        settings: WorkerSettings,
        shared: SharedKv,
        host: EngineHost,
        process: TransferProcess,
        bus: Bus,
        worker_id: WorkerId,
        begin: Callable[[Request], Coroutine[object, object, None]],
        cancel: Callable[[StreamKey], None],
        meters: "KvMetrics",
    ) -> None:
        """begin, cancel: see `KvDesk`."""
        self.process = process
        self.desk = KvDesk(settings.kv, shared, host, process, begin, cancel)
        self.fetcher = KvFetcher(settings, shared, host, process, bus, worker_id, meters.note_read)
        meters.watch(self.desk, process)

    def note(self, outputs: Iterable[StepOutput]) -> None:
        for output in outputs:
            self.desk.note(output)
        self.fetcher.note()

    def describe(self, load: WorkerLoad) -> WorkerLoad:
        """The load with what schedulers must know of it."""
        return msgspec.structs.replace(
            load, kv_tokens_per_s=self.fetcher.tokens_per_s, kv_leases=self.desk.num_leases
        )

    async def settle(self) -> None:
        """Return when no image is lent and none is loaded."""
        await self.desk.end_all()
        await self.fetcher.settle()

    async def stop(self) -> None:
        await self.process.stop()


class KvMetrics:
    """Names that vLLM has mean what they mean there."""

    def __init__(self, metrics: Metrics, labels: dict[str, str]) -> None:
        self._metrics = metrics
        self._labels = labels

    def note_read(self, transport: str, num_bytes: int, seconds: float, reason: str) -> None:
        """A read has ended; reason: why some images did not come."""
        if num_bytes:
            by = {**self._labels, "transport": transport}
            self._metrics.counter("kv_transfer_bytes", **by).inc(num_bytes)
            self._metrics.histogram("kv_transfer_seconds", **by).observe(seconds)
        if reason:
            self._metrics.counter("kv_load_failures", **self._labels, reason=reason).inc()

    def watch(self, desk: KvDesk, process: TransferProcess) -> None:
        """Export what these count; they are read at each scrape."""
        gauge = self._metrics.gauge_of
        gauge("kv_leases", lambda: desk.num_leases, **self._labels)
        gauge("kv_leases_expired", lambda: desk.num_expired, **self._labels)
        gauge("kv_transfer_restarts", lambda: process.num_restarts, **self._labels)
