"""A gateway that has just started waits for the first heartbeats before it refuses a model."""

import asyncio

import httpx
from websockets.asyncio.client import connect as connect_socket

from tests.fakes.back_end import BackEnd
from tokenmesh.services.gateway.app import make_app
from tokenmesh.services.gateway.core.http.server import Server
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.shared.bus.message_bus import connect
from tokenmesh.shared.ids import GatewayId, new_instance_id
from tokenmesh.shared.membership import Members, MembershipView
from tokenmesh.shared.metrics import Metrics


async def test_realtime_messages_and_models_wait_for_the_first_beats(mesh: BackEnd) -> None:
    bus = await connect(mesh.settings.bus, "new")
    members, metrics = Members(MembershipView(4, 100)), Metrics()
    gateway = Gateway(
        GatewayId(new_instance_id("gateway")),
        bus,
        mesh.blobs,
        members,
        mesh.settings,
        metrics=metrics,
    )
    await gateway.start()
    server = Server(make_app(gateway), mesh.settings.gateway, metrics)
    running = [asyncio.create_task(work) for work in (server.run(), gateway.run())]
    address = f"127.0.0.1:{server.port}"
    body = {
        "model": mesh.model,
        "max_tokens": 32,
        "messages": [{"role": "user", "content": "Hi"}],
        "thinking": {"type": "enabled", "budget_tokens": 8},
    }
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=10) as client:
        asked = [
            asyncio.create_task(client.post("/v1/messages", json=body)),
            asyncio.create_task(client.get(f"/v1/models/{mesh.model}")),
        ]
        socket = asyncio.create_task(_first_event(f"ws://{address}/v1/realtime?model={mesh.model}"))
        await asyncio.sleep(0.3)
        assert not any(each.done() for each in (*asked, socket))
        await members.start(bus)
        assert [each.status_code for each in await asyncio.gather(*asked)] == [200, 200]
        assert "session.created" in await socket
    gateway.core.draining.set()
    server.stop(0.0)
    await running[0]
    running[1].cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await gateway.stop()
    await bus.close()


async def _first_event(address: str) -> str:
    async with connect_socket(address) as client:
        return str(await client.recv())
