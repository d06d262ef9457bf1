"""Files: streamed into JetStream and back, listed, deleted with their content, swept."""

import secrets
from collections.abc import AsyncIterator

import openai
import pytest

from tests.fakes.back_end import BackEnd
from tokenmesh.services.gateway.core.files import uploads
from tokenmesh.services.gateway.core.files.contents import CHUNK_BYTES, PARTS, FileContents
from tokenmesh.services.gateway.core.files.sweeper import FileSweeper
from tokenmesh.services.gateway.core.files.uploads import data_key
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

SIZES = (1, CHUNK_BYTES, 3 * CHUNK_BYTES + 17)


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    async with BackEnd(bus_settings, redis_settings) as mesh:
        yield mesh


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="x", max_retries=0) as client:
        yield client


async def contents_of(mesh: BackEnd) -> set[str]:
    """Ids of the files that have content in JetStream."""
    contents: FileContents = mesh.gateway.core.uploads.contents
    return {each for part in PARTS for each in await contents.ids(part)}


async def test_a_file_comes_back_byte_for_byte_and_leaves_nothing(
    mesh: BackEnd, client: openai.AsyncOpenAI
) -> None:
    for size in SIZES:
        await round_trip(mesh, client, size)
    limit = mesh.settings.gateway.max_media_bytes
    with pytest.raises(openai.APIStatusError) as caught:
        await client.files.create(file=("a.png", bytes(limit + 1)), purpose="vision")
    assert caught.value.status_code == 413


async def round_trip(mesh: BackEnd, client: openai.AsyncOpenAI, size: int) -> None:
    data = secrets.token_bytes(size)
    file = await client.files.create(file=("lines.jsonl", data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (size, "lines.jsonl", "batch")
    assert file.status == "processed"
    assert (await client.files.content(file.id)).content == data
    assert not await mesh.blobs.exists(data_key(file.id))
    assert file.id in await contents_of(mesh)
    assert (await client.files.delete(file.id)).deleted
    assert file.id not in await contents_of(mesh)
    with pytest.raises(openai.NotFoundError):
        await client.files.content(file.id)


@pytest.mark.parametrize("num_scanned", [1, 1000])
async def test_files_are_listed_in_pages_by_purpose(
    client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, num_scanned: int
) -> None:
    monkeypatch.setattr(uploads, "_SCANNED", num_scanned)
    made = [
        (await client.files.create(file=("a", b"x"), purpose=purpose)).id
        for purpose in ("batch", "vision", "batch")
    ]
    batches = [each.id async for each in client.files.list(purpose="batch", limit=1)]
    assert {made[0], made[2]} <= set(batches)
    assert made[1] not in batches
    first = await client.files.list(limit=1)
    assert len(first.data) == 1
    assert first.has_more
    with pytest.raises(openai.NotFoundError):
        await client.files.list(after="file-0")
    for each in made:
        await client.files.delete(each)


async def test_content_without_a_description_is_deleted_by_the_second_look(
    mesh: BackEnd, client: openai.AsyncOpenAI
) -> None:
    contents: FileContents = mesh.gateway.core.uploads.contents
    kept = await client.files.create(file=("a", b"kept"), purpose="batch")

    async def parts() -> AsyncIterator[bytes]:
        yield b"orphan"

    orphan = f"file-{secrets.token_hex(16)}"
    await contents.write(orphan, parts())
    sweeper = FileSweeper(mesh.gateway.core.uploads, contents, mesh.settings.gateway, mesh.metrics)
    await sweeper.look()
    assert orphan in await contents_of(mesh)
    await sweeper.look()
    assert orphan not in await contents_of(mesh)
    assert kept.id in await contents_of(mesh)


async def test_a_file_whose_content_is_lost_is_not_found(
    mesh: BackEnd, client: openai.AsyncOpenAI
) -> None:
    file = await client.files.create(file=("a", b"data"), purpose="batch")
    await mesh.gateway.core.uploads.contents.remove(file.id)
    with pytest.raises(openai.NotFoundError, match="is lost"):
        await client.files.content(file.id)
