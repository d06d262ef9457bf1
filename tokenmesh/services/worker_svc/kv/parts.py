"""KvParts: what a worker has whose KV is elsewhere as well: a transfer process, desk and fetcher
for other workers, reader and writer for stores, and metrics."""

from collections.abc import Callable, Coroutine, Iterable

import msgspec

from tokenmesh.engine.core.outputs import StepOutput
from tokenmesh.engine.kv.shared_arena import SharedKv
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import StreamKey
from tokenmesh.services.worker_svc.kv.arrivals import KvArrivals
from tokenmesh.services.worker_svc.kv.child import TransferProcess
from tokenmesh.services.worker_svc.kv.desk import KvDesk
from tokenmesh.services.worker_svc.kv.fetcher import SETTLE_S, KvFetcher
from tokenmesh.services.worker_svc.kv.store_reader import StoreReader
from tokenmesh.services.worker_svc.kv.store_writer import StoreWriter
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
        is_awake: Callable[[], bool],
    ) -> None:
        """begin, cancel: see `KvDesk`; is_awake: see `StoreWriter`."""
        own = (shared, host, process)
        self.process = process
        self._num_saved = 0
        self.desk: KvDesk | None = None
        """None: nothing is exchanged with other workers."""
        self.fetcher: KvFetcher | None = None
        self.reader: StoreReader | None = None
        """None: there are no stores."""
        self.writer: StoreWriter | None = None
        if settings.kv.role is not None:
            self.desk = KvDesk(settings.kv, *own, begin, cancel)
            self.fetcher = KvFetcher(settings, *own, bus, worker_id, meters.note_read)
        if settings.kv.has_stores:
            self.reader = StoreReader(settings.kv, *own, meters.note_restored)
            self.writer = StoreWriter(*own, is_awake, meters.note_written)
        self.arrivals = KvArrivals(host, self.fetcher, self.reader)
        meters.watch(self.desk, process)

    def note(self, outputs: Iterable[StepOutput]) -> None:
        """Steps have ended. Who waits for images looks again only where one was saved or a stream
        has ended: each look is an output itself."""
        news = [output for output in outputs if self._is_news(output)]
        if not news:
            return
        for output in news:
            if self.desk is not None:
                self.desk.note(output)
            if self.writer is not None:
                self.writer.note(output)
        if self.fetcher is not None:
            self.fetcher.note()
        if self.reader is not None:
            self.reader.note()

    def _is_news(self, output: StepOutput) -> bool:
        host = output.stats.host
        num_saved = 0 if host is None else host.saved
        is_same, self._num_saved = num_saved == self._num_saved, num_saved
        return bool(output.ended) or not is_same

    def describe(self, load: WorkerLoad) -> WorkerLoad:
        """The load with what schedulers must know of it."""
        if self.fetcher is None or self.desk is None:
            return load
        return msgspec.structs.replace(
            load, kv_tokens_per_s=self.fetcher.tokens_per_s, kv_leases=self.desk.num_leases
        )

    async def settle(self) -> None:
        """Return when no image is lent, written or loaded; the process is ended for those that do
        not come to an end."""
        if self.desk is not None:
            await self.desk.end_all()
        if self.fetcher is not None:
            await self.fetcher.settle()
        for part in (self.reader, self.writer):
            if part is not None and not await part.settle(SETTLE_S):
                self.process.kill()
                await part.settle(SETTLE_S)

    async def stop(self) -> None:
        """Write what is not in stores yet, as far as that is soon done."""
        await self.settle()
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

    def note_restored(self, store: str, num_bytes: int, seconds: float, reason: str) -> None:
        """A read of stores has ended."""
        self._note_stored("read", num_bytes, seconds)
        if reason:
            self._metrics.counter("kv_load_failures", **self._labels, reason=reason).inc()

    def note_written(self, num_bytes: int, seconds: float) -> None:
        """Images were written to stores."""
        self._note_stored("write", num_bytes, seconds)

    def _note_stored(self, direction: str, num_bytes: int, seconds: float) -> None:
        if num_bytes:
            by = {**self._labels, "direction": direction}
            self._metrics.counter("kv_store_bytes", **by).inc(num_bytes)
            self._metrics.histogram("kv_store_seconds", **by).observe(seconds)

    def watch(self, desk: KvDesk | None, process: TransferProcess) -> None:
        """Export what these count; they are read at each scrape."""
        gauge = self._metrics.gauge_of
        if desk is not None:
            gauge("kv_leases", lambda: desk.num_leases, **self._labels)
            gauge("kv_leases_expired", lambda: desk.num_expired, **self._labels)
        gauge("kv_transfer_restarts", lambda: process.num_restarts, **self._labels)
