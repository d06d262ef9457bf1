"""The NATS user for block events: it may do what the guide's subscriber does, and nothing else."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from tests.servers import Server
from tokenmesh.cli.embedded.plan import MeshPlan, make_plan
from tokenmesh.shared.config import load_settings


@pytest.fixture
def plan(tmp_path: Path) -> MeshPlan:
    settings = load_settings(overrides={"block_events": {"enabled": True}})
    return make_plan(settings, tmp_path, with_admin=True)


@pytest.fixture
def server(plan: MeshPlan, tmp_path: Path) -> Iterator[Server]:
    (spec,) = [each for each in plan.servers if each.name == "nats"]
    assert spec.port is not None
    started = Server(list(spec.command), spec.port, "", tmp_path / "nats.log")
    started.start()
    yield started
    started.stop()


class Outside:
    """A connection of that user, and what the server denied it."""

    def __init__(self) -> None:
        self.denied: list[str] = []

    async def note(self, error: Exception) -> None:
        self.denied.append(str(error))

    async def until_denied(self, act: Callable[[], Any]) -> None:
        self.denied.clear()
        await act()
        async with asyncio.timeout(15):
            while not self.denied:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert "permissions violation" in self.denied[0].lower()


@pytest.fixture
async def mesh(plan: MeshPlan, server: Server) -> AsyncIterator[Client]:
    bus = plan.settings.bus
    assert bus.password is not None
    client = await nats.connect(bus.url, user=bus.user, password=bus.password.get_secret_value())
    yield client
    await client.close()


async def test_it_hears_events_and_asks_for_them(plan: MeshPlan, mesh: Client) -> None:
    assert plan.events_url is not None
    url = plan.events_url.read_text().strip()
    outside = await nats.connect(url, inbox_prefix="_INBOX_EVENTS")
    try:
        heard = await outside.subscribe("tm.kv.>")
        answering = await mesh.subscribe("tm.worker.*.blocks")
        await outside.flush()
        await mesh.publish("tm.kv.m.w", b"event")
        assert (await heard.next_msg(timeout=8)).data == b"event"
        asking = asyncio.create_task(outside.request("tm.worker.w.blocks", b"?", timeout=8))
        await (await answering.next_msg(timeout=8)).respond(b"!")
        assert (await asking).data == b"!"
    finally:
        await outside.close()


async def test_it_neither_speaks_to_the_mesh_nor_listens_to_it(
    plan: MeshPlan, mesh: Client
) -> None:
    assert plan.events_url is not None
    outside = Outside()
    url = plan.events_url.read_text().strip()
    client = await nats.connect(url, error_cb=outside.note, inbox_prefix="_INBOX_EVENTS")
    try:
        for subject in ("tm.worker.w.control", "tm.gateway.g.tokens", "tm.kv.m.w", "tm.beat.a.b"):
            await outside.until_denied(partial(client.publish, subject, b"x"))
        for subject in ("_INBOX.>", "tm.>", "tm.tokenize.*", ">"):
            await outside.until_denied(partial(client.subscribe, subject))
    finally:
        await client.close()


def test_without_events_there_is_no_such_user(tmp_path: Path) -> None:
    plan = make_plan(load_settings(), tmp_path)
    assert plan.events_url is None
    assert "user: events" not in (tmp_path / "nats.conf").read_text()
