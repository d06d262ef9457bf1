"""Process entry of the gateway."""

import asyncio
import logging
import sys
from collections.abc import Mapping
from functools import partial

from tokenmesh.services.gateway.app import make_app, open_journals
from tokenmesh.services.gateway.core.http.event_loop import SWITCH_S
from tokenmesh.services.gateway.core.http.server import Server
from tokenmesh.services.gateway.core.mesh.unused_placements import UnusedPlacements
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.shared.actor.actor import BackgroundTasks
from tokenmesh.shared.allocator import give_back_freed_memory
from tokenmesh.shared.config import Settings
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.ids import GatewayId
from tokenmesh.shared.journal import Journal
from tokenmesh.shared.service import Mesh, run_service

logger = logging.getLogger(__name__)


async def check_journals(journals: Mapping[str, Journal]) -> None:
    """Log why something cannot be stored, before the first request finds it."""
    for journal in journals.values():
        try:
            await journal.prepare()
        except TokenMeshError as error:
            logger.error("nothing can be stored: %s", error.message)


async def build(mesh: Mesh) -> None:
    """Start the gateway and its HTTP server."""
    journals = open_journals(mesh.bus, mesh.settings)
    gateway = Gateway(
        GatewayId(mesh.instance_id),
        mesh.bus,
        mesh.blobs,
        mesh.members,
        mesh.settings,
        metrics=mesh.metrics,
        redis=mesh.redis,
        journals=journals,
        count_losses=lambda: mesh.bus.counts.get("disconnected", 0),
    )
    mesh.bus.on_late = UnusedPlacements(mesh.redis, mesh.members, mesh.metrics).take
    await gateway.start()
    server = Server(make_app(gateway), mesh.settings.gateway, mesh.metrics)
    background = BackgroundTasks(lambda _name: mesh.crashed.set(), mesh.settings.service)
    # After a crash, or a start that fails, there is no drain.
    mesh.on_leave(background.stop)
    background.spawn(gateway.run, "gateway", is_fatal=True)
    background.spawn(partial(check_journals, journals), "journals")
    is_served = asyncio.Event()

    async def serve() -> None:
        await server.run()
        is_served.set()

    background.spawn(serve, "http", is_fatal=True)

    async def drain(grace_s: float) -> None:
        gateway.core.draining.set()
        server.stop(grace_s)
        await is_served.wait()
        await gateway.stop()
        await background.stop()

    mesh.on_drain(drain)
    sys.setswitchinterval(SWITCH_S)
    give_back_freed_memory()


def run(settings: Settings) -> int:
    """Run until a signal. Returns the exit code."""
    return run_service("gateway", settings, build)
