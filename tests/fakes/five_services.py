"""All five services, or some of them, in this process, on the test's real NATS and Redis."""

from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager

import httpx

from tests.fakes.service_mesh import running
from tokenmesh.services.gateway.main import build as build_gateway
from tokenmesh.services.mm_encoder_svc.main import build as build_encoder
from tokenmesh.services.scheduler_svc.main import build as build_scheduler
from tokenmesh.services.tokenizer_svc.main import build as build_tokenizer
from tokenmesh.services.worker_svc.main import build as build_worker
from tokenmesh.shared.config import Settings
from tokenmesh.shared.service import Mesh

_BUILDS = {
    "worker": build_worker,
    "encoder": build_encoder,
    "scheduler": build_scheduler,
    "tokenizer": build_tokenizer,
    "gateway": build_gateway,
}


@asynccontextmanager
async def five_services(
    settings: Settings, without: Collection[str] = ()
) -> AsyncIterator[tuple[dict[str, Mesh], httpx.AsyncClient]]:
    """The services by name, and a client of the gateway."""
    async with AsyncExitStack() as stack:
        services = {
            name: await stack.enter_async_context(running(name, settings, build))
            for name, build in _BUILDS.items()
            if name not in without
        }
        url = f"http://127.0.0.1:{settings.gateway.port}"
        yield services, await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30))
