"""KV in a Mooncake store, with its own master: skipped where Mooncake is not installed."""

import asyncio
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fakes.kv_workers import BLOCKS, PROMPT, SIZE, KvWorkers, Side
from tests.fakes.models import make_model
from tests.servers import free_port
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import ConfigError

HAS_MOONCAKE = find_spec("mooncake") is not None
needs_mooncake = pytest.mark.skipif(not HAS_MOONCAKE, reason="mooncake is not installed")


def accepts(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def master(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    spec = find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    program = Path(spec.submodule_search_locations[0]) / "mooncake_master"
    port = free_port()
    arguments = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}"]
    with (tmp_path / "master.log").open("wb") as log:
        process = subprocess.Popen([program, *arguments], stdout=log, stderr=log)
    try:
        while not accepts(port):
            assert process.poll() is None, "the master has ended"
            time.sleep(0.02)
        yield f"127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def workers(
    tmp_path: Path,
    bus: MessageBus,
    bus_settings: BusSettings,
    redis_settings: RedisSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> KvWorkers:
    make_model("llama").save_pretrained(tmp_path / "llama")
    return KvWorkers(tmp_path / "llama", bus, bus_settings, redis_settings, monkeypatch)


async def all_written(side: Side) -> None:
    """Return when the store has all images of a worker: they are written behind the steps."""
    writer, tier = side.parts.writer, side.actor._host._engine._cache.host  # type: ignore[attr-defined]
    assert writer is not None
    async with asyncio.timeout(10):
        while writer._task is not None or tier._unstored or tier.has_wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@needs_mooncake
async def test_what_one_worker_has_computed_comes_to_another_one_from_the_store(
    workers: KvWorkers, master: tuple[str, subprocess.Popen[bytes]]
) -> None:
    address, process = master
    kv = {"mooncake_master": address, "mooncake_size": 0.0625}
    other = [token + 1 for token in PROMPT]
    async with workers.sides(2, kv) as p:
        expected, _ = await p.run(p.source, PROMPT)
        alone, _ = await p.run(p.source, other, cache_salt="alone")
        await all_written(p.source)
        assert await p.run(p.reader, PROMPT) == (expected, BLOCKS * SIZE)
        assert p.reader.computed == len(PROMPT) - BLOCKS * SIZE
        assert p.reader.parts.process.num_restarts == 0
        # a store that is gone is a miss, and other KV is exchanged without it
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert await p.run(p.reader, other) == (alone, 0)


@needs_mooncake
async def test_a_master_that_is_not_there_is_named(workers: KvWorkers) -> None:
    kv = {"mooncake_master": f"127.0.0.1:{free_port()}"}
    with pytest.raises(ConfigError, match="no master of Mooncake answers"):
        async with workers.sides(1, kv):
            pass


@pytest.mark.skipif(HAS_MOONCAKE, reason="mooncake is installed")
async def test_a_library_that_is_missing_is_named_with_its_package(workers: KvWorkers) -> None:
    with pytest.raises(ConfigError, match="pip install mooncake-transfer-engine-non-cuda"):
        async with workers.sides(1, {"mooncake_master": f"127.0.0.1:{free_port()}"}):
            pass
