"""When an embedded mesh is ready: every process sends heartbeats and the gateways report ready."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping

import httpx

from tokenmesh.cli.embedded.child import ChildSpec
from tokenmesh.cli.embedded.plan import MeshPlan
from tokenmesh.shared.bus.message_bus import connect
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.membership import Members, MembershipView
from tokenmesh.shared.messages.beat import ModelCard

OnProgress = Callable[[Mapping[str, int]], None]
"""Called with the number of processes that send heartbeats, by service."""

_ANYWHERE = ("0.0.0.0", "::", "")
_PROBE_TIMEOUT_S = 2.0
_PROBES_PER_GATEWAY = 8
"""The kernel gives a connection to any gateway: so many reach all of 8 in 99.8 % of the rounds."""


def base_url(settings: GatewaySettings) -> str:
    """Where a client on this machine finds the gateway."""
    if settings.uds is not None:
        return "http://localhost"
    scheme = "https" if settings.ssl_certfile else "http"
    host = "127.0.0.1" if settings.host in _ANYWHERE else settings.host
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{settings.port}"


def _probe(settings: GatewaySettings) -> httpx.AsyncClient:
    """A client for /readyz. It is our own gateway on this machine: its certificate may have any
    name and issuer. Each request opens a connection, which may reach another gateway."""
    uds = None if settings.uds is None else str(settings.uds)
    no_pool = httpx.Limits(max_keepalive_connections=0)
    transport = httpx.AsyncHTTPTransport(verify=False, uds=uds, limits=no_pool)
    return httpx.AsyncClient(
        base_url=base_url(settings), timeout=_PROBE_TIMEOUT_S, transport=transport
    )


async def wait_ready(
    plan: MeshPlan, on_progress: OnProgress, failed: Collection[ChildSpec] = ()
) -> ModelCard | None:
    """Return when the mesh answers requests, with a card of the first model; None: it has none.

    The caller bounds the wait. failed: processes that will not come, more of them in time.
    """
    settings = plan.settings
    limits = settings.service
    bus = await connect(settings.bus, "up")
    members = Members(MembershipView(limits.missed_beats, limits.max_members))
    await members.start(bus)
    try:
        async with _probe(settings.gateway) as client:
            while True:
                # a gateway that requires client certificates would refuse the probe
                is_closed = settings.gateway.ssl_ca_certs is not None
                if _all_alive(plan, members, on_progress, failed) and (
                    is_closed or await _all_ready(client, plan.counts["gateway"])
                ):
                    names = (ModelName(each.name) for each in settings.models)
                    workers = (each for name in names for each in members.workers(name))
                    return next((each.beat.models[0] for each in workers), None)
                await asyncio.sleep(settings.up.poll_s)
    finally:
        await members.stop()
        await bus.close()


def _all_alive(
    plan: MeshPlan, members: Members, on_progress: OnProgress, failed: Collection[ChildSpec]
) -> bool:
    counts = {service: len(members.service(service)) for service in plan.counts}
    on_progress(counts)
    gone = Counter(spec.service for spec in failed)
    return all(counts[service] >= wanted - gone[service] for service, wanted in plan.counts.items())


async def _all_ready(client: httpx.AsyncClient, num_gateways: int) -> bool:
    """Return whether so many gateways are ready; the kernel distributes the probes."""
    ready: set[str] = set()
    for _ in range(_PROBES_PER_GATEWAY * num_gateways):
        gateway = await _probe_once(client)
        if gateway is None:
            return False
        ready.add(gateway)
        if len(ready) >= num_gateways:
            return True
    return False


async def _probe_once(client: httpx.AsyncClient) -> str | None:
    """The id of the gateway that answered, if it is ready."""
    try:
        answer = await client.get("/readyz")
    except httpx.TransportError:
        return None
    return str(answer.json()["gateway"]) if answer.status_code == httpx.codes.OK else None
