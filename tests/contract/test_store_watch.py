"""A NATS whose disk was full is started again once there is room, and not before."""

import asyncio
import shutil
import subprocess
from collections import namedtuple
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.servers import Server, bus_settings_of, make_nats
from tokenmesh.cli.embedded.watch import StoreWatch
from tokenmesh.services.gateway.apis.responses.response_logs import open_journal
from tokenmesh.shared.bus.jetstream import JetStreamJournal
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.config.up import UpSettings
from tokenmesh.shared.errors import Unavailable

DISK_MIB = 24
LIMITS = UpSettings(store_probe_s=0.1, store_min_free_bytes=8 * 1024**2)
QUICK = ResponseSettings(journal_timeout_s=0.2, journal_mute_s=0.5)
Usage = namedtuple("Usage", "total used free")
IN_NAMESPACE = ("unshare", "--mount", "--user", "--map-root-user")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Server]:
    """A NATS that alone sees a small disk at its folder of streams."""
    if subprocess.run([*IN_NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("this machine has no mount namespaces for its users")
    server = make_nats(tmp_path)
    config = Path(server.command[-1])
    config.write_text(config.read_text().replace("{ store_dir", "{ max_file_store: 1G, store_dir"))
    store = tmp_path / f"jetstream-{server.port}"
    store.mkdir()
    mount = f'mount -t tmpfs -o size={DISK_MIB}m tmpfs "{store}" && exec "$@"'
    server.command = [*IN_NAMESPACE, "sh", "-c", mount, "sh", *server.command]
    server.start()
    yield server
    server.stop()


@dataclass
class Disk:
    """The disk of a server, as it sees it."""

    server: Server
    store: Path

    @property
    def seen(self) -> Path:
        assert self.server.process is not None
        return Path(f"/proc/{self.server.process.pid}/root{self.store}")

    def fill(self) -> None:
        with suppress(OSError), (self.seen / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        (self.seen / "filler").unlink()


@dataclass
class Watched:
    """A store watch over a server, and what it asked for."""

    disk: Disk
    bus: MessageBus
    journal: JetStreamJournal
    restarts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    async def store(self, name: str) -> None:
        await self.journal.append(f"tm.response.log.{name}", bytes(5000), 0)

    async def until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.fixture
async def watched(small_disk: Server, tmp_path: Path) -> AsyncIterator[Watched]:
    bus = await connect(bus_settings_of(small_disk), "test")
    disk = Disk(small_disk, tmp_path / f"jetstream-{small_disk.port}")
    watched = Watched(disk, bus, open_journal(bus, QUICK))
    watch = StoreWatch(
        bus,
        disk.seen,
        LIMITS,
        restart=watched.restarts.append,
        warn=watched.warnings.append,
    )
    watching = asyncio.create_task(watch.run())
    yield watched
    watching.cancel()
    await asyncio.wait((watching,))
    await bus.close()


async def test_nats_is_restarted_when_its_disk_has_room_again(watched: Watched) -> None:
    await watched.store("before")
    watched.disk.fill()
    with pytest.raises(Unavailable):
        await watched.store("full")
    await watched.until(lambda: bool(watched.warnings))
    await asyncio.sleep(0.5)
    assert watched.restarts == []
    assert len(watched.warnings) == 1
    watched.disk.free()
    await watched.until(lambda: bool(watched.restarts))
    assert "no space left on device" in watched.restarts[0]


async def test_a_store_that_works_is_left_alone_and_unchanged(watched: Watched) -> None:
    await asyncio.sleep(3 * LIMITS.store_probe_s)
    await watched.store("one")
    before = await watched.journal.last("tm.response.log.one")
    await asyncio.sleep(3 * LIMITS.store_probe_s)
    assert await watched.journal.last("tm.response.log.one") == before
    assert (watched.restarts, watched.warnings) == ([], [])


async def test_restarts_that_do_not_help_become_rarer(
    start_nats: Callable[[], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(bus_settings_of(start_nats()), "test")
    restarts: list[str] = []
    watch = StoreWatch(bus, tmp_path, LIMITS, restart=restarts.append, warn=pytest.fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1024**3, 0, 1024**3))
    counts = []
    for _ in range(30):
        watch._judge("broken")
        counts.append(len(restarts))
    assert [counts.index(number) + 1 for number in (1, 2, 3, 4)] == [2, 6, 14, 30]
    await bus.close()
