"""Images on disk: what is read is what was written under that key, or it is a miss."""

import asyncio
import errno
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.rounds import rounds
from tokenmesh.engine.kv.shared_arena import SharedArena
from tokenmesh.services.worker_svc.kv.child import TransferProcess
from tokenmesh.services.worker_svc.kv.stores import folder
from tokenmesh.services.worker_svc.kv.stores.disk import DiskStore
from tokenmesh.services.worker_svc.kv.stores.store import CannotOpen
from tokenmesh.services.worker_svc.kv.transports.transport import MappedArena
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.kv import KvSettings
from tokenmesh.shared.errors import ConfigError

IMAGE = 4096
SCOPE = bytes(16)
ROOM = 4 * (IMAGE + 64)
"""Bytes of four images."""


def image_of(key: bytes) -> bytes:
    return Random(key).randbytes(IMAGE)


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


class Disk:
    """A store, opened again and again as workers restart, and an arena of two slots."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.memory = bytearray(2 * IMAGE)
        self.given = {"scope": SCOPE, "num_bytes": ROOM, **settings}
        self.store = self.open()

    def open(self, **settings: Any) -> DiskStore:
        arena = MappedArena(-1, memoryview(self.memory), 2, IMAGE)
        store = DiskStore(arena, str(self.root), **{**self.given, **settings})
        store.open()
        return store

    def restart(self, **settings: Any) -> None:
        self.close()
        self.store = self.open(**settings)

    def close(self) -> None:
        """As the end of its process would."""
        for number in os.listdir("/proc/self/fd"):
            try:
                place = os.readlink(f"/proc/self/fd/{number}")
            except OSError:
                continue
            if place.startswith(str(self.root)):
                os.close(int(number))

    def put(self, *keys: bytes) -> int:
        count = 0
        for key in keys:
            self.memory[:IMAGE] = image_of(key)
            count += self.store.put([key], [0], monotonic_s() + 60)
        return count

    def has(self, key: bytes) -> bool:
        """Return whether it is read; then it must be right."""
        self.memory[IMAGE:] = bytes(IMAGE)
        (is_good,) = self.store.get([key], [1], monotonic_s() + 60)
        assert not is_good or self.memory[IMAGE:] == image_of(key), "a wrong image is good"
        return is_good

    def file(self, name: str) -> Path:
        return self.root / SCOPE.hex() / "0" / name


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Disk]:
    found = Disk(tmp_path / "kv")
    yield found
    found.close()


A, B, C, D, E = map(key_of, range(5))


def test_images_survive_a_restart_and_the_least_recently_used_gives_way(on_disk: Disk) -> None:
    assert on_disk.put(A, B, C, D) == 4
    assert on_disk.put(A) == 0
    assert on_disk.store.find([A, B, E, C]) == 2
    on_disk.restart()
    assert all(map(on_disk.has, (A, B, C, D)))
    assert on_disk.has(A)
    assert on_disk.put(E) == 1
    assert [on_disk.has(key) for key in (A, B, C, D, E)] == [True, False, True, True, True]
    on_disk.restart(num_bytes=2 * (IMAGE + 64))
    assert sum(map(on_disk.has, (A, B, C, D, E))) == 2
    assert on_disk.file("images").stat().st_size == 2 * IMAGE
    assert on_disk.file("images").stat().st_mode & 0o777 == 0o600


def damage(path: Path, dice: Random) -> None:
    data = bytearray(path.read_bytes())
    if dice.random() < 0.3:
        path.write_bytes(data[: dice.randrange(len(data) + 1)])
    elif data:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)


@rounds("seed", 30, 1000)
def test_whatever_happens_to_the_files_an_image_is_right_or_a_miss(
    tmp_path: Path, seed: int
) -> None:
    dice, on_disk = Random(seed), Disk(tmp_path)
    for _ in range(40):
        what = dice.random()
        if what < 0.4:
            on_disk.put(key_of(dice.randrange(7)))
        elif what < 0.8:
            on_disk.has(key_of(dice.randrange(7)))
        elif what < 0.9:
            damage(on_disk.file(dice.choice(["images", "index"])), dice)
        else:
            on_disk.restart(num_bytes=dice.randrange(1, 6) * (IMAGE + 64))
    # one that is found to be damaged is written anew
    if not on_disk.has(E):
        assert on_disk.put(E) == 1
    assert on_disk.has(E)
    on_disk.close()


def test_a_folder_of_another_format_is_written_anew(
    on_disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    on_disk.put(A)
    on_disk.file("index").write_bytes(b"of another program" * 100)
    on_disk.restart()
    assert "another format" in caplog.text
    assert not on_disk.has(A)
    assert on_disk.put(A)
    assert on_disk.has(A)


def fail_writes(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have files that would grow fail, or any, with an error."""
    write = os.pwrite

    def fail(file: int, data: Any, offset: int) -> int:
        if number != errno.ENOSPC or offset >= os.fstat(file).st_size:
            raise OSError(number, os.strerror(number))
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", fail)


def test_on_a_full_disk_the_slots_that_are_there_are_used_again(
    on_disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_disk.put(A, B)
    fail_writes(monkeypatch, errno.ENOSPC)
    assert on_disk.put(C) == 0
    assert "2 slots in use" not in caplog.text
    assert on_disk.put(C, D) == 2
    assert [on_disk.has(key) for key in (A, B, C, D)] == [False, False, True, True]
    assert caplog.text.count("not written to disk") == 1


def test_a_disk_that_fails_is_left_alone_and_what_it_has_is_read(
    on_disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_disk.put(A)
    fail_writes(monkeypatch, errno.EIO)
    assert on_disk.put(*map(key_of, range(10, 30))) == 0
    assert caplog.text.count("no more KV is written") == 1
    assert on_disk.has(A)


def test_two_workers_with_one_directory_have_a_folder_each(on_disk: Disk) -> None:
    on_disk.put(A)
    other = on_disk.open()
    assert other.find([A]) == 0
    assert on_disk.file("../1/lock").exists()


def test_folders_of_other_scopes_give_way_where_room_is_needed_unless_they_are_held(
    on_disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk.put(A)
    on_disk.open(scope=b"s" * 16)
    on_disk.close()
    held = on_disk.open(scope=b"t" * 16)
    free = iter([0, ROOM, ROOM])
    monkeypatch.setattr(folder, "_free", lambda root: next(free))
    on_disk.store = on_disk.open(scope=b"u" * 16)
    assert held.put([A], [0], monotonic_s() + 9) == 1
    left = {each.name for each in on_disk.root.iterdir()}
    # of the two that were left, the older one has gone
    assert left == {(b"s" * 16).hex(), (b"t" * 16).hex(), (b"u" * 16).hex()}


@pytest.mark.parametrize(
    ("settings", "words"), [({"num_bytes": 100}, "hold no image"), ({"num_bytes": 1 << 55}, "free")]
)
def test_a_size_that_cannot_be_is_named(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(CannotOpen, match=words):
        Disk(tmp_path, **settings)


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / SCOPE.hex()).mkdir()
    (tmp_path / SCOPE.hex()).chmod(0o777)
    with pytest.raises(CannotOpen, match="by others"):
        Disk(tmp_path)


class Worker:
    """The arena and the process of a worker that keeps KV on disk."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.arena = SharedArena(8, IMAGE)
        given = KvSettings(disk_dir=str(root), disk_size=1 / 1024).model_copy(update=settings)
        self.process = TransferProcess(self.arena, given, SCOPE)

    def write(self, slot: int, key: bytes) -> None:
        self.arena.memory[slot * IMAGE : (slot + 1) * IMAGE] = image_of(key)

    def image(self, slot: int) -> bytes:
        return self.arena.memory[slot * IMAGE : (slot + 1) * IMAGE]


async def test_a_worker_that_was_killed_leaves_what_it_has_written(tmp_path: Path) -> None:
    first = Worker(tmp_path)
    await first.process.start()
    assert first.process.is_able
    assert first.process.addresses == {}
    for slot, key in enumerate((A, B, C)):
        first.write(slot, key)
    assert (await first.process.put([A, B, C], [0, 1, 2])).num_written == 3
    assert first.process.pid is not None
    os.kill(first.process.pid, signal.SIGKILL)
    await first.process.stop()
    second = Worker(tmp_path)
    await second.process.start()
    assert await second.process.find([A, B, C, D]) == 3
    ended = await second.process.get([A, B, D], [4, 5, 6])
    assert (ended.are_good, ended.transport, ended.reason) == (
        [True, True, False],
        "disk",
        "missing",
    )
    assert [second.image(slot) for slot in (4, 5)] == [image_of(A), image_of(B)]
    await second.process.stop()


async def test_a_disk_without_room_ends_neither_the_process_nor_reads(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    await worker.process.start()
    pid = worker.process.pid
    assert pid is not None
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (2 * IMAGE, resource.RLIM_INFINITY))
    for slot, key in enumerate((A, B, C)):
        worker.write(slot, key)
    assert (await worker.process.put([A, B, C], [0, 1, 2])).num_written == 2
    assert (await worker.process.get([A, B, C], [4, 5, 6])).are_good == [True, True, False]
    assert worker.process.pid == pid
    await worker.process.stop()


async def test_a_disk_that_stands_still_is_not_waited_for_longer_than_its_deadline(
    tmp_path: Path,
) -> None:
    worker = Worker(tmp_path, transfer_s=0.1)
    await worker.process.start()
    assert worker.process.pid is not None
    os.kill(worker.process.pid, signal.SIGSTOP)
    found, ended = await asyncio.gather(worker.process.find([A]), worker.process.get([A], [0]))
    assert (found, ended.are_good, ended.reason) == (0, [False], "process")
    await worker.process.stop()


@pytest.mark.parametrize("place", ["file/kv", "/proc/kv"])
async def test_a_folder_that_cannot_be_written_to_is_named_at_the_start(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").touch()
    worker = Worker(tmp_path / place)
    with pytest.raises(ConfigError, match=r"KV cannot be kept in .*kv: ") as caught:
        await worker.process.start()
    assert caught.value.param == "worker.kv.disk_dir"
    await worker.process.stop()
