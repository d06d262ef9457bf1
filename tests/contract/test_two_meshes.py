"""Two meshes on one NATS server, each in its own account, share nothing."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.servers import Server, bus_settings_of, make_nats
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.bus.jetstream import JetStreamJournal, StreamSpec
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import NoResponders
from tokenmesh.shared.ids import ModelName, ResponseId
from tokenmesh.shared.messages import Done, Ping
from tokenmesh.shared.rights import RESPONSE_STREAM

PLACE = subjects.place(ModelName("llama"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A NATS with two accounts and a user of the same name in each."""
    server = make_nats(tmp_path)
    config = Path(server.command[-1])
    lines = [line for line in config.read_text().splitlines() if "authorization" not in line]
    lines.append("accounts {")
    for name in ("first", "second"):
        user = f'{{ user: {name}, password: "{server.password}" }}'
        lines.append(f"  {name} {{ jetstream: enabled, users: [{user}] }}")
    config.write_text("\n".join([*lines, "}"]) + "\n")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def meshes(server: Server) -> AsyncIterator[tuple[MessageBus, MessageBus]]:
    """A connection to each account."""
    settings = bus_settings_of(server)
    first = await connect(settings.model_copy(update={"user": "first"}), "gateway-1")
    second = await connect(settings.model_copy(update={"user": "second"}), "gateway-1")
    yield first, second
    await first.close()
    await second.close()


def journal_of(bus: MessageBus) -> JetStreamJournal:
    spec = StreamSpec(
        name=RESPONSE_STREAM,
        subjects=subjects.RESPONSES,
        max_age_s=60.0,
        max_bytes=1 << 20,
        setting="responses.max_total_bytes",
        max_entry_bytes=1 << 16,
    )
    return JetStreamJournal(bus, spec, ResponseSettings())


async def test_accounts_separate_requests_and_stored_responses(
    meshes: tuple[MessageBus, MessageBus],
) -> None:
    first, second = meshes

    async def answer(envelope: Envelope) -> None:
        await first.reply(envelope, Done())

    await first.subscribe(PLACE, answer, queue="scheduler")
    await first.flush()
    assert await first.request(PLACE, Ping(), deadline_s=now_s() + 8) == Done()
    with pytest.raises(NoResponders):
        await second.request(PLACE, Ping(), deadline_s=now_s() + 8)
    key = subjects.response_log(ResponseId("resp_1"))
    await journal_of(first).append(key, b"of the first", 0)
    assert await journal_of(second).read(key, 0, 5) == []
    await journal_of(second).append(key, b"of the second", 0)
    assert [entry.data for entry in await journal_of(first).read(key, 0, 5)] == [b"of the first"]
