"""The journal against a real JetStream: fencing, reading, limits, restarts."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.servers import Server, bus_settings_of
from tokenmesh.shared.bus.jetstream import JetStreamJournal, StreamSpec
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.bus.requests import RawReply
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import Conflict, DeadlineExceeded, PayloadTooLarge, Unavailable

Start = Callable[[], Server]


def spec_of(name: str) -> StreamSpec:
    return StreamSpec(
        name=name,
        subjects=f"{name}.>",
        max_age_s=60.0,
        max_bytes=8 * 1024 * 1024,
        setting="responses.max_total_bytes",
        max_entry_bytes=64 * 1024,
    )


def times(timeout_s: float, patience_s: float, mute_s: float) -> ResponseSettings:
    return ResponseSettings(
        journal_timeout_s=timeout_s, journal_patience_s=patience_s, journal_mute_s=mute_s
    )


def journal_of(bus: MessageBus, spec: StreamSpec) -> JetStreamJournal:
    return JetStreamJournal(bus, spec, times(5.0, 15.0, 15.0))


@pytest.fixture
async def journal(bus: MessageBus) -> AsyncIterator[JetStreamJournal]:
    spec = spec_of(f"t{secrets.token_hex(4)}")
    yield journal_of(bus, spec)
    await bus.raw.request(f"$JS.API.STREAM.DELETE.{spec.name}", b"", deadline_s=2e9)


def key_of(journal: JetStreamJournal, name: str = "a") -> str:
    return journal.spec.subjects.replace(">", name)


async def fill(journal: JetStreamJournal, key: str, count: int, after: int = 0) -> int:
    for number in range(count):
        after = await journal.append(key, b"entry %d" % number, after)
    return after


async def test_entries_are_read_in_order_from_any_number_on(journal: JetStreamJournal) -> None:
    key, other = key_of(journal), key_of(journal, "b")
    for_key = for_other = 0
    for number in range(20):
        for_key = await journal.append(key, b"%d" % number, for_key)
        for_other = await journal.append(other, b"other", for_other)
    entries = await journal.read(key, 0, 100)
    assert [int(each.data) for each in entries] == list(range(20))
    assert await journal.read(key, entries[7].sequence, 100) == entries[8:]
    assert await journal.read(key, 0, 5) == entries[:5]
    assert await journal.read(key, entries[-1].sequence, 5) == []
    assert await journal.last(key) == entries[-1]


async def test_what_does_not_exist_is_empty(journal: JetStreamJournal) -> None:
    key = key_of(journal)
    assert await journal.keys(key) == []
    await journal.purge(key)
    assert await journal.last(key) is None
    assert await journal.read(key, 0, 5) == []


async def test_of_two_writers_only_one_goes_on(journal: JetStreamJournal) -> None:
    key = key_of(journal)
    last = await fill(journal, key, 3)
    outcomes = await asyncio.gather(
        *(journal.append(key, b"writer %d" % each, last) for each in range(8)),
        return_exceptions=True,
    )
    won = [each for each in outcomes if isinstance(each, int)]
    assert len(won) == 1
    assert sum(isinstance(each, Conflict) for each in outcomes) == 7
    assert len(await journal.read(key, 0, 100)) == 4


async def test_a_writer_of_a_purged_log_meets_a_conflict(journal: JetStreamJournal) -> None:
    key = key_of(journal)
    last = await fill(journal, key, 3)
    await journal.purge(key)
    assert await journal.read(key, 0, 100) == []
    with pytest.raises(Conflict):
        await journal.append(key, b"late", last)


async def test_keys_are_listed_by_pattern(journal: JetStreamJournal) -> None:
    names = [f"open.g{number % 2}.r{number}" for number in range(6)]
    for name in names:
        await journal.append(key_of(journal, name), b"", 0)
    found = await journal.keys(key_of(journal, "open.g1.*"))
    assert sorted(found) == sorted(key_of(journal, name) for name in names[1::2])


async def test_an_entry_over_the_limit_is_refused(journal: JetStreamJournal) -> None:
    with pytest.raises(PayloadTooLarge):
        await journal.append(key_of(journal), bytes(100_000), 0)


async def test_a_large_log_is_read_whole_in_batches(journal: JetStreamJournal) -> None:
    key, last = key_of(journal), 0
    for _ in range(60):
        last = await journal.append(key, bytes(60_000), last)
    sizes, after = [], 0
    while entries := await journal.read(key, after, 256):
        sizes.append(len(entries))
        after = entries[-1].sequence
    assert sum(sizes) == 60


async def test_a_watcher_is_notified_of_appends(journal: JetStreamJournal) -> None:
    key, notified = key_of(journal), asyncio.Event()
    await fill(journal, key, 1)
    subscription = await journal.watch(key, notified.set)
    await journal.append(key, b"next", (await journal.read(key, 0, 9))[-1].sequence)
    async with asyncio.timeout(15):
        await notified.wait()
    await subscription.stop()


async def test_the_oldest_entries_go_when_the_space_is_used_up(bus: MessageBus) -> None:
    spec = replace(spec_of(f"t{secrets.token_hex(4)}"), max_bytes=128 * 1024)
    journal = journal_of(bus, spec)
    for number in range(4):
        await journal.append(key_of(journal, f"r{number}"), bytes(60_000), 0)
    left = await journal.keys(key_of(journal, "*"))
    assert key_of(journal, "r3") in left
    assert key_of(journal, "r0") not in left


async def test_another_limit_changes_the_stream(journal: JetStreamJournal, bus: MessageBus) -> None:
    await fill(journal, key_of(journal), 1)
    larger = journal_of(bus, replace(journal.spec, max_entry_bytes=256 * 1024))
    await larger.prepare()
    await larger.append(key_of(journal, "b"), bytes(200_000), 0)


async def test_an_append_outlives_a_restart_of_the_server(start_nats: Start) -> None:
    server = start_nats()
    bus = await connect(bus_settings_of(server), "test")
    journal = journal_of(bus, spec_of("restarts"))
    key = key_of(journal)
    last = await fill(journal, key, 5)
    server.stop()
    appending = asyncio.create_task(journal.append(key, b"meanwhile", last))
    await asyncio.sleep(0.2)
    server.start()
    last = await appending
    await journal.append(key, b"afterwards", last)
    entries = await journal.read(key, 0, 100)
    assert [each.data for each in entries[5:]] == [b"meanwhile", b"afterwards"]
    await bus.close()


async def test_an_append_whose_answer_was_lost_is_not_done_twice(
    journal: JetStreamJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_of(journal)
    last = await fill(journal, key, 2)
    ask, asked = journal.bus.raw.request, []

    async def lose_first(*args: object, **options: object) -> object:
        reply = await ask(*args, **options)  # type: ignore[arg-type]
        asked.append(reply)
        if len(asked) == 1:
            raise Unavailable("the answer is lost")
        return reply

    monkeypatch.setattr(journal.bus.raw, "request", lose_first)
    number = await journal.append(key, b"once", last)
    monkeypatch.undo()
    entries = await journal.read(key, 0, 100)
    assert [each.data for each in entries[2:]] == [b"once"]
    assert entries[-1].sequence == number


@pytest.mark.parametrize("dropped", [{0}, {1}, {0, 1, 2, 3}, {3}])
async def test_a_read_never_passes_over_what_was_dropped_on_the_way(
    journal: JetStreamJournal, monkeypatch: pytest.MonkeyPatch, dropped: set[int]
) -> None:
    key = key_of(journal)
    await fill(journal, key, 4)
    gather, is_first = journal.bus.raw.gather, iter([True])

    async def drop_some(*args: object, **options: object) -> object:
        replies, end = await gather(*args, **options)  # type: ignore[arg-type]
        gone = dropped if next(is_first, False) else set()
        return [each for number, each in enumerate(replies) if number not in gone], end

    monkeypatch.setattr(journal.bus.raw, "gather", drop_some)
    read: list[bytes] = []
    after = 0
    while entries := await journal.read(key, after, 100):
        read += [each.data for each in entries]
        after = entries[-1].sequence
    assert read == [b"entry %d" % number for number in range(4)]


async def test_a_read_waits_for_a_nats_that_comes_back(start_nats: Start) -> None:
    server = start_nats()
    bus = await connect(bus_settings_of(server), "test")
    journal = JetStreamJournal(bus, spec_of("patient"), times(0.2, 15.0, 15.0))
    key = key_of(journal)
    last = await fill(journal, key, 3)
    server.stop()
    fresh = JetStreamJournal(bus, spec_of("patient"), times(0.2, 15.0, 15.0))
    asked = asyncio.gather(journal.read(key, 0, 5), journal.last(key), fresh.prepare())
    await asyncio.sleep(0.5)
    assert not asked.done()
    server.start()
    entries, newest, _ = await asked
    assert [each.data for each in entries] == [b"entry 0", b"entry 1", b"entry 2"]
    assert newest is not None
    assert newest.sequence == last
    await bus.close()


async def set_acks(journal: JetStreamJournal, *, is_mute: bool) -> None:
    """With `no_ack` JetStream says nothing to appends, as it does when its disk is full."""
    config = msgspec.json.encode({**journal.spec.config(), "no_ack": is_mute})
    subject = f"$JS.API.STREAM.UPDATE.{journal.spec.name}"
    reply = await journal.bus.raw.request(subject, config, deadline_s=2e9)
    assert b"error" not in reply.data


async def test_appends_without_an_answer_are_given_up_early(
    bus: MessageBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(f"t{secrets.token_hex(4)}")
    journal = JetStreamJournal(bus, spec, times(0.1, 60.0, 0.5))
    last = await fill(journal, key_of(journal), 1)
    await set_acks(journal, is_mute=True)
    async with asyncio.timeout(15):
        with pytest.raises(Unavailable, match="no entry stored"):
            await journal.append(key_of(journal, "b"), b"x", 0)
        # What is known by then is not learned again: one attempt is enough.
        attempts: list[str] = []
        request = bus.raw.request

        async def count(subject: str, data: bytes, **options: Any) -> RawReply:
            attempts.append(subject)
            return await request(subject, data, **options)

        monkeypatch.setattr(bus.raw, "request", count)
        with pytest.raises(Unavailable, match="no entry stored"):
            await journal.append(key_of(journal, "c"), b"x", 0)
        assert attempts.count(key_of(journal, "c")) == 1
    monkeypatch.undo()
    await set_acks(journal, is_mute=False)
    assert await journal.append(key_of(journal), b"y", last) > last
    assert await journal.append(key_of(journal, "d"), b"x", 0) > last
    await bus.raw.request(f"$JS.API.STREAM.DELETE.{spec.name}", b"", deadline_s=2e9)


async def test_a_small_entry_that_fits_does_not_hide_that_the_disk_is_full(
    bus: MessageBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(f"t{secrets.token_hex(4)}")
    journal = JetStreamJournal(bus, spec, times(0.1, 60.0, 1.0))
    last = await fill(journal, key_of(journal), 1)
    ask = bus.raw.request

    async def ask_with_little_room(
        subject: str, data: bytes, *, deadline_s: float, headers: dict[str, str] | None = None
    ) -> RawReply:
        if subject.startswith(spec.subjects.removesuffix(">")) and len(data) > 100:
            await asyncio.sleep(deadline_s - now_s())
            raise DeadlineExceeded("no acknowledgement")
        return await ask(subject, data, headers=headers, deadline_s=deadline_s)

    async def try_to_keep(name: str) -> float:
        began_s = now_s()
        # A small entry is kept, and one that follows another entry than the last is refused.
        await journal.append(key_of(journal, f"small-{name}"), b"", 0)
        with pytest.raises(Conflict):
            await journal.append(key_of(journal), b"late", last + 1000)
        with pytest.raises(Unavailable, match="no entry stored"):
            await journal.append(key_of(journal, name), bytes(1000), 0)
        return now_s() - began_s

    monkeypatch.setattr(bus.raw, "request", ask_with_little_room)
    async with asyncio.timeout(15):
        assert await try_to_keep("first") >= 1.0
        assert await try_to_keep("second") < 0.8
    monkeypatch.undo()
    await journal.append(key_of(journal, "third"), bytes(1000), 0)
    monkeypatch.setattr(bus.raw, "request", ask_with_little_room)
    assert await try_to_keep("fourth") >= 1.0
    monkeypatch.undo()
    await bus.raw.request(f"$JS.API.STREAM.DELETE.{spec.name}", b"", deadline_s=2e9)
