"""Profiles on demand: one at a time, bounded, and never lost or written twice."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tokenmesh.services.worker_svc.profiling import SUFFIX, Profiling
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import Conflict, InvalidInput, TokenMeshError
from tokenmesh.shared.ids import WorkerId

WORKER = WorkerId("worker-1")


class FakeTrace:
    """Writes a line; counts what happens to it."""

    started = 0
    written = 0
    error: OSError | None = None
    gate = threading.Event()

    def start(self) -> None:
        assert FakeTrace.gate.wait(5)
        FakeTrace.started += 1

    def write(self, path: Path) -> None:
        FakeTrace.written += 1
        if FakeTrace.error is not None:
            raise FakeTrace.error
        path.write_text("trace")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    FakeTrace.started = FakeTrace.written = 0
    FakeTrace.error = None
    FakeTrace.gate.set()


def profiling(folder: Path | None, **settings: Any) -> Profiling:
    where = None if folder is None else str(folder)
    limits = WorkerSettings.model_validate({"profiler_dir": where, **settings})
    return Profiling(limits, WORKER, FakeTrace)


def written(folder: Path) -> list[str]:
    """The traces in a folder, oldest first."""
    return sorted(str(path) for path in folder.iterdir() if path.read_text() == "trace")


async def test_a_profile_is_written_where_the_settings_say(tmp_path: Path) -> None:
    mine = profiling(tmp_path / "new" / "folder")
    await mine.start()
    mine.note_steps(2)
    mine.note_steps(3)
    profiled = await mine.stop()
    path = Path(profiled.path)
    assert path.parent == tmp_path / "new" / "folder"
    assert path.name.startswith(WORKER)
    assert path.name.endswith(SUFFIX)
    assert written(tmp_path / "new" / "folder") == [profiled.path]
    assert (profiled.num_steps, profiled.ended_by) == (5, "asked")
    await asyncio.sleep(0)
    assert "profile" not in {task.get_name() for task in asyncio.all_tasks()}
    assert 0 < profiled.seconds < 10


async def test_a_second_start_and_a_second_stop_are_conflicts(tmp_path: Path) -> None:
    mine = profiling(tmp_path)
    with pytest.raises(Conflict, match="start_profile"):
        await mine.stop()
    await mine.start()
    with pytest.raises(Conflict, match="stop_profile"):
        await mine.start()
    await mine.stop()
    with pytest.raises(Conflict):
        await mine.stop()
    assert (FakeTrace.started, FakeTrace.written) == (1, 1)
    await mine.start()
    await mine.stop()
    assert len(written(tmp_path)) == 2


async def test_two_starts_at_a_time_are_one_profile(tmp_path: Path) -> None:
    FakeTrace.gate.clear()
    mine = profiling(tmp_path)
    both = [asyncio.create_task(mine.start()) for _ in range(2)]
    await asyncio.sleep(0.05)
    FakeTrace.gate.set()
    outcomes = await asyncio.gather(*both, return_exceptions=True)
    assert [type(each) for each in outcomes] == [type(None), Conflict]
    await mine.close()


async def test_it_ends_by_itself_after_enough_steps_and_tells_of_it_once(tmp_path: Path) -> None:
    mine = profiling(tmp_path, profiler_max_steps=3)
    await mine.start()
    mine.note_steps(2)
    await asyncio.sleep(0.02)
    assert FakeTrace.written == 0
    mine.note_steps(1)
    await until_written(1)
    profiled = await mine.stop()
    assert (profiled.ended_by, profiled.num_steps) == ("steps", 3)
    assert written(tmp_path) == [profiled.path]
    with pytest.raises(Conflict):
        await mine.stop()
    await mine.start()
    mine.note_steps(1)
    await asyncio.sleep(0.02)
    assert FakeTrace.written == 1
    await mine.close()


async def test_a_profile_does_not_end_with_the_one_before_it(tmp_path: Path) -> None:
    mine = profiling(tmp_path, profiler_max_steps=3)
    await mine.start()
    # the end by steps comes third in line
    both = [asyncio.create_task(mine.stop()), asyncio.create_task(mine.start())]
    mine.note_steps(3)
    await asyncio.gather(*both)
    await asyncio.sleep(0.05)
    assert FakeTrace.written == 1
    assert (await mine.stop()).ended_by == "asked"


async def test_it_ends_by_itself_after_its_time(tmp_path: Path) -> None:
    mine = profiling(tmp_path, profiler_max_s=0.05)
    await mine.start()
    await until_written(1)
    assert (await mine.stop()).ended_by == "time"
    # steps of before count no more
    mine.note_steps(10_000)
    await mine.start()
    assert FakeTrace.written == 1
    assert (await mine.stop()).num_steps == 0


async def until_written(count: int) -> None:
    async with asyncio.timeout(15):
        while FakeTrace.written < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_new_profile_replaces_one_that_was_not_read(tmp_path: Path) -> None:
    mine = profiling(tmp_path, profiler_max_s=0.02)
    await mine.start()
    await until_written(1)
    await mine.start()
    await until_written(2)
    profiled = await mine.stop()
    assert len(written(tmp_path)) == 2
    assert profiled.path == written(tmp_path)[1]
    with pytest.raises(Conflict):
        await mine.stop()


async def test_an_asker_who_gives_up_does_not_stop_what_it_began(tmp_path: Path) -> None:
    FakeTrace.gate.clear()
    mine = profiling(tmp_path)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(mine.start(), 0.05)
    FakeTrace.gate.set()
    assert (await mine.stop()).ended_by == "asked"
    assert (FakeTrace.started, FakeTrace.written) == (1, 1)


async def test_off_and_nothing_to_profile_are_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--profiler-dir"):
        await profiling(None).start()
    limits = WorkerSettings(profiler_dir=str(tmp_path))
    with pytest.raises(InvalidInput, match="simulated"):
        await Profiling(limits, WORKER, None).start()


async def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="file") as error:
        await profiling(tmp_path / "file").start()
    assert error.value.param == "profiler_dir"
    with pytest.raises(InvalidInput, match="file/below"):
        await profiling(tmp_path / "file" / "below").start()
    assert FakeTrace.started == 0


async def test_a_disk_that_is_full_ends_the_profile_all_the_same(tmp_path: Path) -> None:
    mine = profiling(tmp_path, profiler_max_steps=1)
    FakeTrace.error = OSError(28, "No space left on device")
    await mine.start()
    with pytest.raises(TokenMeshError, match="No space left"):
        await mine.stop()
    await mine.start()
    mine.note_steps(1)
    await until_written(2)
    with pytest.raises(TokenMeshError, match="No space left"):
        await mine.stop()
    FakeTrace.error = None
    await mine.start()
    profiled = await mine.stop()
    assert written(tmp_path) == [profiled.path]


async def test_a_worker_that_leaves_writes_what_it_has(tmp_path: Path) -> None:
    mine = profiling(tmp_path)
    await mine.close()
    await mine.start()
    await mine.close()
    assert len(written(tmp_path)) == 1


async def test_a_worker_leaves_although_it_cannot_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = profiling(tmp_path)
    await mine.start()
    FakeTrace.error = OSError(28, "No space left on device")
    await mine.close()
    assert "No space left" in caplog.text
