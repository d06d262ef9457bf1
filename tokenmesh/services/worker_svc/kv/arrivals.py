"""KvArrivals: what a request waits for before it is submitted: images of stores, then those of
another worker."""

from concurrent.futures import Future
from dataclasses import dataclass

from tokenmesh.engine.request.request import Request
from tokenmesh.services.worker_svc.kv.fetcher import KvFetcher
from tokenmesh.services.worker_svc.kv.store_reader import StoreReader
from tokenmesh.services.worker_svc.streams import WorkerStream
from tokenmesh.services.worker_svc.thread import Consult, EngineHost
from tokenmesh.shared.messages.generate import Generate


@dataclass(frozen=True, slots=True)
class KvArrivals:
    host: EngineHost
    fetcher: KvFetcher | None
    """None: nothing comes from other workers."""
    reader: StoreReader | None
    """None: nothing comes from stores."""

    def may_come(self, generate: Generate | None) -> bool:
        """Return whether there is anything to wait for."""
        comes = generate is not None and generate.kv is not None and self.fetcher is not None
        return comes or self.reader is not None

    async def bring(
        self, request: Request, stream: WorkerStream, generate: Generate | None
    ) -> None:
        """Return when nothing more comes. Raises KvSourceFailed."""
        if self.reader is not None:
            await self.reader.restore(request, stream)
        if self.fetcher is not None and generate is not None and generate.kv is not None:
            await self.fetcher.fetch(request, stream, generate)

    def let_go(self, request: Request) -> None:
        """The request does not enter the engine: nothing is kept for it."""
        self.host.submit(Consult(lambda engine: engine.exchange.let_go(request), Future()))
