"""When an embedded mesh is ready: every process beats and the gateway says yes."""

import asyncio
from collections.abc import Callable, Mapping

import httpx

from tokenmesh.cli.embedded.plan import Plan
from tokenmesh.shared.bus.nats import connect
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.membership import Members, MembershipView

OnProgress = Callable[[Mapping[str, int]], None]
"""Called with the number of processes that beat, by service."""

_ANYWHERE = ("0.0.0.0", "::", "")
_PROBE_TIMEOUT_S = 2.0


def base_url(settings: GatewaySettings) -> str:
    """Where a client on this machine finds the gateway."""
    host = "127.0.0.1" if settings.host in _ANYWHERE else settings.host
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


async def wait_ready(plan: Plan, on_progress: OnProgress) -> None:
    """Return when the mesh answers requests; the caller bounds the wait."""
    settings = plan.settings
    limits = settings.service
    bus = await connect(settings.bus, "up")
    members = Members(MembershipView(limits.missed_beats, limits.max_members))
    await members.start(bus)
    try:
        async with httpx.AsyncClient(
            base_url=base_url(settings.gateway), timeout=_PROBE_TIMEOUT_S, trust_env=False
        ) as client:
            while True:
                if _all_beat(plan, members, on_progress) and await _says_ready(client):
                    return
                await asyncio.sleep(settings.up.poll_s)
    finally:
        await members.stop()
        await bus.close()


def _all_beat(plan: Plan, members: Members, on_progress: OnProgress) -> bool:
    counts = {service: len(members.service(service)) for service in plan.counts}
    on_progress(counts)
    return all(counts[service] >= wanted for service, wanted in plan.counts.items())


async def _says_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
