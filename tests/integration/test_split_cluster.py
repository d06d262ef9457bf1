"""A NATS cluster of three splits: no stored response counts as deleted, and none is lost."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes.cut_link import CutLink
from tests.servers import MAX_PAYLOAD_BYTES, Server, bus_settings_of, free_port, make_nats
from tokenmesh.services.gateway.apis.responses.records import (
    Flushed,
    ResponseBegun,
    ResponseEnded,
    encode_record,
    join_records,
)
from tokenmesh.services.gateway.apis.responses.response_logs import ResponseLogs, open_journal
from tokenmesh.shared.bus.message_bus import connect
from tokenmesh.shared.clock import wall_s
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.ids import GatewayId, ModelName, ResponseId
from tokenmesh.shared.subjects import response_log

SPLIT_S = 15.0
NUM_RESPONSES = 200
NUM_FRAMES = 3
NAMES = "abc"


@dataclass
class Cluster:
    """Three servers; `links` are the routes of the last one to the others."""

    servers: list[Server]
    links: list[CutLink]


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    """Each pair has one route, which the first of the two opens, through a link of its own."""
    servers = [make_nats(folder) for _ in NAMES]
    routes = [free_port() for _ in NAMES]
    links: dict[tuple[int, int], CutLink] = {}
    async with AsyncExitStack() as stack:
        for first, second in ((0, 1), (0, 2), (1, 2)):
            links[first, second] = await stack.enter_async_context(CutLink.to(routes[second]))
        for index, server in enumerate(servers):
            own = [link.port for (first, _), link in links.items() if first == index]
            # JetStream wants a route where a server opens none, even to where nothing listens
            configure(server, folder, NAMES[index], routes[index], own or [free_port()])
        # the one that opens no route first
        for server in reversed(servers):
            # a blocking wait would hold the links
            await asyncio.to_thread(server.start)
            stack.callback(server.stop)
        yield Cluster(servers, [links[0, 2], links[1, 2]])


def configure(server: Server, folder: Path, name: str, port: int, routes: list[int]) -> None:
    """`port` takes routes of others; `routes` are those that it opens."""
    urls = ", ".join(f'"nats-route://127.0.0.1:{each}"' for each in routes)
    Path(server.command[-1]).write_text(
        f'server_name: {name}\nlisten: "127.0.0.1:{server.port}"\n'
        f"max_payload: {MAX_PAYLOAD_BYTES}\nping_interval: 1s\nping_max: 2\n"
        f'authorization {{ user: tokenmesh, password: "{server.password}" }}\n'
        f'jetstream {{ store_dir: "{folder / name}" }}\n'
        # what servers say of each other's addresses must not go around the links
        f"cluster {{ name: split, listen: 127.0.0.1:{port}, no_advertise: true, "
        f'advertise: "127.0.0.1:{free_port()}", routes: [{urls}] }}\n'
    )


@asynccontextmanager
async def logs_at(server: Server, settings: ResponseSettings) -> AsyncIterator[ResponseLogs]:
    bus = await connect(bus_settings_of(server), "gateway-test")
    try:
        yield ResponseLogs(open_journal(bus, settings), settings)
    finally:
        await bus.close()


async def write(logs: ResponseLogs, response_id: ResponseId, has_begun: asyncio.Event) -> None:
    """A response that is generated within a second."""
    begun = ResponseBegun(
        id=response_id,
        owner=GatewayId("g"),
        model=ModelName("m"),
        body=b"{}",
        created_s=wall_s(),
        deadline_s=wall_s() + 60,
        seed=1,
    )
    records: list[Any] = [begun, *(Flushed(frames=[frame(n)]) for n in range(NUM_FRAMES))]
    last = 0
    for record in (*records, ResponseEnded(status="completed", response=b"{}")):
        data = join_records((encode_record(record),))
        last = await logs.journal.append(response_log(response_id), data, last)
        has_begun.set()
        await asyncio.sleep(0.1)


def frame(number: int) -> bytes:
    return b"data: %d\n\n" % number


async def read(logs: ResponseLogs, response_id: ResponseId, has_begun: asyncio.Event) -> bytes:
    await has_begun.wait()
    return b"".join([frames async for frames in logs.follow(response_id, 0)])


async def has_stream(logs: ResponseLogs) -> bool:
    bus: Any = logs.journal.bus  # type: ignore[attr-defined]
    info = await bus.raw.request("$JS.API.STREAM.INFO.tm-responses", b"", deadline_s=wall_s() + 2)
    replicas = (msgspec.json.decode(info.data).get("cluster") or {}).get("replicas") or ()
    return len(replicas) == 2 and all(each["current"] for each in replicas)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_responses_survive_a_split_of_the_cluster(tmp_path: Path) -> None:
    settings = ResponseSettings(replicas=3, max_total_bytes=64 << 20)
    async with cluster(tmp_path) as nats, AsyncExitStack() as stack:
        all_logs = [
            await stack.enter_async_context(logs_at(server, settings)) for server in nats.servers
        ]
        async with asyncio.timeout(60):
            await all_logs[0].journal.prepare()
            while not await has_stream(all_logs[0]):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        ids = [ResponseId(f"resp_{secrets.token_hex(8)}") for _ in range(NUM_RESPONSES)]
        tasks: list[asyncio.Task[Any]] = []
        for link in nats.links:
            link.cut()
        for response_id in ids:
            has_begun = asyncio.Event()
            tasks.append(asyncio.create_task(write(all_logs[0], response_id, has_begun)))
            tasks.extend(
                asyncio.create_task(read(logs, response_id, has_begun)) for logs in all_logs
            )
            await asyncio.sleep(SPLIT_S / NUM_RESPONSES)
        for link in nats.links:
            link.repair()
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        whole = b"".join(map(frame, range(NUM_FRAMES)))
        failed = [each for each in outcomes if each not in (None, whole)]
        assert failed == []
