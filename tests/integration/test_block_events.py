"""Block events of a whole mesh, seen by the guide's subscriber in a process of its own."""

import asyncio
import json
import sys
from ast import literal_eval
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.fakes.block_follower import GUIDE, follow
from tests.fakes.guide_code import source_of
from tests.fakes.small_mesh import SmallMesh
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import NoResponders
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages import BlocksRead, ReadBlocks

EVENTS = {"enabled": True, "heartbeat_s": 0.2}
PROMPT = " ".join(f"word{number}" for number in range(40))


@pytest.fixture
async def mesh(
    tmp_path: Path, bus_settings: BusSettings, redis_settings: RedisSettings
) -> AsyncIterator[SmallMesh]:
    small = SmallMesh(tmp_path, bus_settings, redis_settings, block_events=EVENTS)
    async with small:
        yield small


@asynccontextmanager
async def subscriber(folder: Path, bus: BusSettings) -> AsyncIterator[asyncio.StreamReader]:
    """The guide's program; what it prints."""
    script = folder / "follow.py"
    script.write_text(source_of(GUIDE))
    assert bus.password is not None
    url = bus.url.replace("//", f"//{bus.user}:{bus.password.get_secret_value()}@")
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        process.kill()
        _, errors = await process.communicate()
        assert errors == b""


async def until_counted(lines: asyncio.StreamReader, worker: str, count: int | None) -> None:
    """Return when the program says that the worker holds so many blocks; None: is not there."""
    async with asyncio.timeout(15):
        while True:
            counts = literal_eval((await lines.readline()).decode())
            if counts.get(worker) == count:
                return


async def read_blocks(mesh: SmallMesh, bus: MessageBus) -> BlocksRead:
    subject = subjects.worker_blocks(WorkerId(mesh.workers[0].instance_id))
    answer = await bus.request(subject, ReadBlocks(), deadline_s=now_s() + 8)
    assert isinstance(answer, BlocksRead)
    return answer


async def test_the_guides_program_follows_a_mesh(
    mesh: SmallMesh, bus: MessageBus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    worker = mesh.workers[0].instance_id
    assert (await mesh.complete(prompt=PROMPT)).status_code == 200
    async with subscriber(tmp_path, bus_settings) as lines:
        # it came late: the first heartbeat tells it what to ask for
        held = await read_blocks(mesh, bus)
        assert held.num_blocks > 1
        await until_counted(lines, worker, held.num_blocks)
        assert (await mesh.complete(prompt="else " + PROMPT)).status_code == 200
        more = await read_blocks(mesh, bus)
        assert more.num_blocks > held.num_blocks
        await until_counted(lines, worker, more.num_blocks)
        assert (await mesh.client.post("/sleep")).status_code == 200
        await until_counted(lines, worker, 0)


async def test_an_outside_router_finds_what_the_engine_will_find(
    mesh: SmallMesh, bus: MessageBus
) -> None:
    tokens = (await tokenized(mesh, PROMPT))["tokens"]
    await mesh.complete(prompt=PROMPT)
    reader = follow.Worker(epoch=0)
    events = (await read_blocks(mesh, bus)).blocks
    for event in events:
        as_decoded = {
            "block_hashes": event.block_hashes,
            "parent_block_hash": event.parent_block_hash,
            "token_ids": event.token_ids,
            "block_size": event.block_size,
        }
        reader.store(as_decoded)
    block_size = mesh.settings.worker.block_size
    found = reader.cached_tokens(tokens, block_size)
    assert found == len(tokens) // block_size * block_size > 0
    usage = (await mesh.complete(prompt=PROMPT)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (
        found if found < len(tokens) else found - block_size
    )
    assert reader.cached_tokens([1, *tokens], block_size) == 0


async def tokenized(mesh: SmallMesh, prompt: str) -> dict[str, list[int]]:
    answer: httpx.Response = await mesh.client.post(
        "/tokenize", json={"model": mesh.model, "prompt": prompt}
    )
    assert answer.status_code == 200, answer.text
    shown: dict[str, list[int]] = json.loads(answer.text)
    return shown


async def test_without_the_setting_nothing_is_said(
    tmp_path: Path, bus_settings: BusSettings, redis_settings: RedisSettings, bus: MessageBus
) -> None:
    heard: list[bytes] = []

    async def hear(_subject: str, data: bytes) -> None:
        heard.append(data)

    async with SmallMesh(tmp_path, bus_settings, redis_settings) as mesh:
        worker = WorkerId(mesh.workers[0].instance_id)
        await bus.subscribe_raw(subjects.block_events(mesh.model, worker), hear)
        await bus.flush()
        assert (await mesh.complete(prompt=PROMPT)).status_code == 200
        with pytest.raises(NoResponders):
            await read_blocks(mesh, bus)
    await bus.flush()
    assert heard == []
