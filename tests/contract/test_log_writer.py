"""LogWriter on a real JetStream: batches, fences, limits; and LateWriter on top of it."""

import asyncio
import secrets
from collections.abc import Callable

import pytest

from tests.servers import Server, bus_settings_of
from tokenmesh.services.gateway.apis.responses.event_log import EventLog, read_log
from tokenmesh.services.gateway.apis.responses.log_writer import LateWriter, LogWriter
from tokenmesh.services.gateway.apis.responses.records import (
    Adopted,
    Flushed,
    Record,
    ResponseBegun,
    ResponseEnded,
)
from tokenmesh.services.gateway.apis.responses.response_logs import ResponseLogs, open_journal
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import Conflict, PayloadTooLarge, TokenMeshError, Unavailable
from tokenmesh.shared.ids import GatewayId, ModelName, ResponseId
from tokenmesh.shared.subjects import response_log

ENDED = ResponseEnded(status="completed", response=b"{}", frames=[b"end"])


class Scene:
    """One response's log."""

    def __init__(self, bus: MessageBus, **limits: object) -> None:
        self.settings = ResponseSettings.model_validate({"max_waiting_records": 8, **limits})
        self.journal = open_journal(bus, self.settings)
        self.id = ResponseId(f"resp_{secrets.token_hex(8)}")
        self.key = response_log(self.id)
        self.logs = ResponseLogs(self.journal, self.settings)
        self.durable: list[Record] = []
        self.num_appends = 0

    def writer(self, log: EventLog | None = None) -> LogWriter:
        log = log or EventLog()

        def count(records: object) -> None:
            self.num_appends += 1
            self.durable.extend(records)  # type: ignore[arg-type]

        return LogWriter(
            self.journal,
            self.key,
            self.settings,
            count,
            after=log.last,
            num_bytes=log.num_bytes,
        )

    async def read(self) -> EventLog:
        return await read_log(self.journal, self.key, 16)


def flushed(number: int, size: int = 1) -> Flushed:
    return Flushed(frames=[b"%d" % number * size])


async def test_records_that_arrive_together_are_one_entry(bus: MessageBus) -> None:
    scene = Scene(bus)
    writer = scene.writer()
    records = [flushed(number) for number in range(200)]
    for record in records:
        await writer.put(record)
    await writer.settle()
    assert (await scene.read()).records == records
    assert scene.durable == records
    assert scene.num_appends < 100


async def test_large_records_are_several_entries(bus: MessageBus) -> None:
    scene = Scene(bus)
    limit = scene.journal.max_entry_bytes
    writer = scene.writer()
    records = [flushed(number, limit // 3) for number in range(7)]
    for record in records:
        await writer.put(record)
    await writer.settle()
    assert (await scene.read()).records == records


async def test_a_replaced_owner_cannot_append(bus: MessageBus) -> None:
    scene = Scene(bus)
    old = scene.writer()
    await old.put(flushed(0))
    await old.settle()
    adopter = scene.writer(await scene.read())
    await adopter.put(Adopted(owner=GatewayId("adopter"), reason="test"))
    await adopter.settle()
    await old.put(flushed(1))
    with pytest.raises(Conflict):
        await old.settle()
    with pytest.raises(Conflict):
        await old.put(flushed(2))
    await adopter.put(flushed(3))
    await adopter.settle()
    assert (await scene.read()).frames == [b"0", b"3"]


async def test_a_response_over_its_limit_can_still_be_ended(bus: MessageBus) -> None:
    scene = Scene(bus, max_response_bytes=64 * 1024)
    writer = scene.writer()
    await writer.put(flushed(1, 60_000))
    await writer.settle()
    await writer.put(flushed(2, 10_000))
    with pytest.raises(PayloadTooLarge):
        await writer.settle()
    ending = scene.writer(await scene.read())
    await ending.put(ENDED)
    await ending.settle()
    assert (await scene.read()).ended == ENDED


async def test_a_late_writer_stores_a_whole_response_or_nothing(bus: MessageBus) -> None:
    scene = Scene(bus)
    begun = ResponseBegun(
        id=scene.id,
        owner=GatewayId("g"),
        model=ModelName("m"),
        body=b"{}",
        created_s=0.0,
        deadline_s=0.0,
        seed=0,
    )
    reported: list[Record] = []
    lost: list[TokenMeshError] = []
    late = LateWriter(scene.writer(), begun, reported.extend, lost.append)
    await late.put(flushed(1))
    await late.settle()
    assert (await scene.read()).records == []
    await late.put(ENDED)
    await late.settle()
    assert (await scene.read()).records == [begun, flushed(1), ENDED]
    assert reported == [flushed(1), ENDED]
    assert not lost
    # A conflict with another writer does not fail the response.
    again = LateWriter(scene.writer(), begun, reported.extend, lost.append)
    await again.put(ENDED)
    await again.settle()
    assert [type(error) for error in lost] == [Conflict]


async def test_a_reader_follows_a_writer(bus: MessageBus) -> None:
    scene = Scene(bus)
    writer = scene.writer()

    async def read(first: int) -> bytes:
        return b",".join([data async for data in scene.logs.follow(scene.id, first)])

    await writer.put(flushed(0))
    await writer.settle()
    readers = [asyncio.create_task(read(first)) for first in (0, 1, 30)]
    for number in range(1, 50):
        await writer.put(flushed(number))
        await asyncio.sleep(0.002)
    await writer.put(ENDED)
    await writer.settle()
    all_of_it, *rest = [(await each).replace(b",", b"") for each in readers]
    assert all_of_it == b"".join(b"%d" % number for number in range(50)) + b"end"
    assert rest == [all_of_it[1:], all_of_it[all_of_it.index(b"30") :]]


async def test_expired_responses_are_gone(
    bus: MessageBus, start_nats: Callable[[], Server]
) -> None:
    own = await connect(bus_settings_of(start_nats()), "test")
    scene = Scene(own, retention_s=2.0)
    writer = scene.writer()
    await writer.put(ENDED)
    await writer.settle()
    assert (await scene.read()).ended is not None
    async with asyncio.timeout(10):
        while (await scene.read()).records:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await own.close()


async def test_without_jetstream_the_error_is_immediate(plain_nats: Server) -> None:
    bus = await connect(bus_settings_of(plain_nats), "test")
    scene = Scene(bus)
    async with asyncio.timeout(5):
        await scene.writer().put(flushed(0))
        with pytest.raises(Unavailable, match="JetStream"):
            await scene.logs.marks.set(GatewayId("g"), scene.id)
    await bus.close()
