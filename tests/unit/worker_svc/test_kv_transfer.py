"""Transfer processes: real ones, and what must hold of every transport between them."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec

import msgspec
import pytest

from tokenmesh.engine.kv.shared_arena import SharedArena
from tokenmesh.services.worker_svc.kv import child
from tokenmesh.services.worker_svc.kv.child import TransferProcess
from tokenmesh.services.worker_svc.kv.orders import SUM_BYTES, Ended
from tokenmesh.shared.config.kv import KvSettings, KvTransport
from tokenmesh.shared.errors import ConfigError, Unavailable

HAS_NIXL = find_spec("nixl_cu12") is not None
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="nixl is not installed")
HAS_MOONCAKE = find_spec("mooncake") is not None
needs_mooncake = pytest.mark.skipif(not HAS_MOONCAKE, reason="mooncake is not installed")
ALL = [
    *("shm", "tcp"),
    pytest.param("nixl", marks=needs_nixl),
    pytest.param("mooncake", marks=needs_mooncake),
]
IMAGE = 4096 + 8
TOKEN = b"t" * 32
LEASE = 3


class End:
    """One worker's arena and process."""

    def __init__(self, transport: KvTransport, num_slots: int, **settings: object) -> None:
        self.arena = SharedArena(num_slots, IMAGE)
        given = KvSettings(role="both", transports=(transport,)).model_copy(update=settings)
        self.process = TransferProcess(self.arena, given)

    def write(self, slot: int, seed: int) -> bytes:
        image = (seed.to_bytes(4, "little") * (IMAGE // 4))[:IMAGE]
        self.arena.memory[slot * IMAGE : (slot + 1) * IMAGE] = image
        return image

    def image(self, slot: int) -> bytes:
        return self.arena.memory[slot * IMAGE : (slot + 1) * IMAGE]


@asynccontextmanager
async def pair(
    transport: KvTransport, num_slots: int = 8, **settings: object
) -> AsyncIterator[tuple[End, End]]:
    """A source and a reader."""
    source, reader = End(transport, num_slots), End(transport, num_slots, **settings)
    await asyncio.gather(source.process.start(), reader.process.start())
    try:
        yield source, reader
    finally:
        await asyncio.gather(source.process.stop(), reader.process.stop())


async def read(
    source: End,
    reader: End,
    remote: list[int],
    slots: list[int],
    sums: bytes,
    *,
    token: bytes = TOKEN,
) -> Ended:
    addresses = source.process.addresses
    return await reader.process.read(addresses, LEASE, token, remote, slots, sums)


async def restarted(process: TransferProcess, times: int = 1) -> None:
    async with asyncio.timeout(15):
        while process.num_restarts < times:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("transport", ALL)
async def test_images_arrive_whole_and_only_those_of_the_lease(transport: KvTransport) -> None:
    async with pair(transport) as (source, reader):
        images = [source.write(slot, 100 + slot) for slot in range(8)]
        sums = await source.process.serve(LEASE, TOKEN, [5, 6, 2])
        ended = await read(source, reader, [5, 6, 2], [0, 4, 1], sums)
        assert (ended.are_good, ended.transport, ended.reason) == ([True] * 3, transport, "")
        assert [reader.image(slot) for slot in (0, 4, 1)] == [images[slot] for slot in (5, 6, 2)]
        # a lease may grow
        more = await source.process.serve(LEASE, TOKEN, [7])
        assert (await read(source, reader, [7], [2], more)).are_good == [True]
        for remote, token in (([5, 0], TOKEN), ([5], b"x" * 32), ([5], b"")):
            ended = await read(source, reader, remote, [3] * len(remote), sums, token=token)
            assert (any(ended.are_good), ended.reason) == (False, "refused")
        assert reader.image(3) == bytes(IMAGE)
        await source.process.revoke(LEASE)
        assert (await read(source, reader, [5], [3], sums)).reason == "refused"


@pytest.mark.parametrize("transport", ALL)
async def test_an_image_that_has_changed_is_bad_and_the_others_are_good(
    transport: KvTransport,
) -> None:
    async with pair(transport) as (source, reader):
        for slot in range(3):
            source.write(slot, slot)
        sums = await source.process.serve(LEASE, TOKEN, [0, 1, 2])
        source.write(1, 77)
        ended = await read(source, reader, [0, 1, 2], [0, 1, 2], sums)
        assert (ended.are_good, ended.reason) == ([True, False, True], "checksum")
        short = await read(source, reader, [0, 1], [0, 1], sums[:SUM_BYTES])
        assert short.are_good == [True, False]


@pytest.mark.parametrize("transport", ALL)
async def test_thousands_of_slots_and_two_readers_at_a_time(transport: KvTransport) -> None:
    count = 4096
    async with pair(transport, count) as (source, reader):
        other = End(transport, count)
        await other.process.start()
        images = [source.write(slot, slot) for slot in range(count)]
        slots = list(range(count))
        sums = await source.process.serve(LEASE, TOKEN, slots)
        turned = slots[::-1]
        done = await asyncio.gather(
            read(source, reader, slots, turned, sums), read(source, other, slots, slots, sums)
        )
        assert all(all(each.are_good) for each in done)
        assert [reader.image(slot) for slot in turned] == images
        assert [other.image(slot) for slot in slots] == images
        await other.process.stop()


@pytest.mark.parametrize("transport", ALL)
async def test_a_source_that_is_killed_ends_reads_and_serves_again_after_its_restart(
    transport: KvTransport,
) -> None:
    async with pair(transport) as (source, reader):
        source.write(0, 1)
        sums = await source.process.serve(LEASE, TOKEN, [0])
        before = dict(source.process.addresses)
        assert source.process.pid is not None
        os.kill(source.process.pid, signal.SIGKILL)
        ended = await reader.process.read(before, LEASE, TOKEN, [0], [0], sums)
        assert (ended.are_good, ended.reason) == ([False], "lost")
        await restarted(source.process)
        sums = await source.process.serve(LEASE, TOKEN, [0])
        assert (await read(source, reader, [0], [0], sums)).are_good == [True]


@pytest.mark.parametrize("transport", ALL)
async def test_a_source_that_stands_still_ends_a_read_at_its_deadline(
    transport: KvTransport,
) -> None:
    # NIXL connects while it reads
    limit_s = 0.3 if transport in ("shm", "tcp") else 2.0
    async with pair(transport, transfer_s=limit_s) as (source, reader):
        source.write(0, 1)
        sums = await source.process.serve(LEASE, TOKEN, [0])
        assert source.process.pid is not None
        os.kill(source.process.pid, signal.SIGSTOP)
        ended = await read(source, reader, [0], [0], sums)
        assert (ended.are_good, ended.reason) == ([False], "timeout")
        os.kill(source.process.pid, signal.SIGCONT)
        assert (await read(source, reader, [0], [0], sums)).are_good == [True]


async def test_a_read_that_its_process_does_not_end_is_ended_with_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child, "_GRACE_S", 0.2)
    async with pair("shm", transfer_s=0.2) as (source, reader):
        source.write(0, 1)
        sums = await source.process.serve(LEASE, TOKEN, [0])
        stuck = reader.process.pid
        assert stuck is not None
        os.kill(stuck, signal.SIGSTOP)
        ended = await read(source, reader, [0], [0], sums)
        assert (ended.are_good, ended.reason) == ([False], "process")
        # gone, not only asked to go: it can write to no slot any more
        with pytest.raises(ProcessLookupError):
            os.kill(stuck, 0)
        await restarted(reader.process)
        assert (await read(source, reader, [0], [0], sums)).are_good == [True]


async def test_a_process_that_ends_again_and_again_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child, "_MOST_STARTS", 1)
    async with pair("shm") as (source, _):
        assert source.process.pid is not None
        for times in range(2):
            await restarted(source.process, times)
            os.kill(source.process.pid, signal.SIGKILL)
            while source.process.is_able:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(Unavailable):
            await source.process.serve(LEASE, TOKEN, [0])


async def test_a_port_that_is_taken_is_named_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        end = End("tcp", 1, listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match="other workers cannot read KV"):
            await end.process.start()
        await end.process.stop()


async def test_whatever_connects_gets_nothing_without_a_question_that_decodes() -> None:
    async with pair("tcp") as (source, _):
        address = source.process.addresses["tcp"]
        host, port = msgspec.msgpack.decode(address)
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\x7f", b"\x04\x00\x00\x00junk"):
            got, writer = await asyncio.open_connection(host, port)
            writer.write(data)
            # a reset is an answer as well, also one that comes before the end of what is sent
            with suppress(OSError):
                writer.write_eof()
            with suppress(ConnectionError):
                async with asyncio.timeout(10):
                    assert await got.read() in (b"", b"\x00")
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


@needs_nixl
async def test_a_read_that_nixl_does_not_end_ends_with_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # otherwise it reads the memory of a process on the same machine without its help
    monkeypatch.setenv("UCX_TLS", "tcp")
    count = 16_000
    async with pair("nixl", count, transfer_s=0.2) as (source, reader):
        for slot in range(count):
            source.write(slot, slot + 1)
        slots = list(range(count))
        parts = [slots[at : at + 8000] for at in (0, 8000)]
        sums = [await source.process.serve(LEASE, TOKEN, part) for part in parts]
        task = asyncio.create_task(read(source, reader, parts[0], parts[0], sums[0]))
        async with asyncio.timeout(10):
            while not any(reader.image(0)):  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0)
        pid = source.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        ended = await task
        assert (any(ended.are_good), ended.reason) == (False, "process")
        os.kill(pid, signal.SIGCONT)
        await restarted(reader.process)
        # nothing is written by the read that is over
        before = bytes(reader.arena.memory)
        await asyncio.sleep(0.5)
        assert reader.arena.memory[:] == before


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("nixl", "pip install nixl-cu12"),
        ("mooncake", "pip install mooncake-transfer-engine-non-cuda"),
    ],
)
async def test_a_library_that_is_missing_is_named_with_how_to_install_it(
    library: KvTransport, words: str
) -> None:
    if find_spec({"nixl": "nixl_cu12"}.get(library, library)) is not None:
        pytest.skip(f"{library} is installed")
    end = End(library, 1)
    with pytest.raises(ConfigError, match=words) as caught:
        await end.process.start()
    assert caught.value.param == "worker.kv.transports"
    await end.process.stop()
