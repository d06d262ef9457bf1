"""A worker that keeps KV on disk, before and after its restart."""

import os
import signal
from pathlib import Path

import pytest

from tests.fakes.kv_workers import BLOCKS, PROMPT, SIZE, KvWorkers, Pair
from tests.fakes.models import make_model
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import ConfigError

IMAGE = 4096
"""Bytes of the tiny model."""
OTHER = [token + 1 for token in PROMPT]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(directory)
    return directory


@pytest.fixture
def workers(
    checkpoint: Path,
    bus: MessageBus,
    bus_settings: BusSettings,
    redis_settings: RedisSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> KvWorkers:
    return KvWorkers(checkpoint, bus, bus_settings, redis_settings, monkeypatch)


async def talk(p: Pair, turns: int) -> tuple[list[list[int]], int, int]:
    """Answers of a conversation, how many tokens of its prompts were cached, and of how many."""
    prompt, answers, found, total = list(PROMPT), [], 0, 0
    for turn in range(turns):
        tokens, cached = await p.run(p.reader, prompt)
        answers.append(tokens)
        found, total = found + cached, total + len(prompt)
        prompt += [*tokens, 5 + turn, 6, 7]
    return answers, found, total


async def test_a_restart_keeps_nine_tenths_of_the_hits_of_a_conversation(
    workers: KvWorkers, tmp_path: Path
) -> None:
    kv = {"disk_dir": str(tmp_path), "disk_size": 0.01}
    async with workers.sides(1, kv) as p:
        answers, before, _ = await talk(p, 5)
        again, hits, total = await talk(p, 5)
        assert again == answers
        assert before < hits
    async with workers.sides(1, kv) as p:
        after, found, _ = await talk(p, 5)
        assert after == answers
        assert 0.9 * hits <= found <= total
        # nothing was exchanged with other workers
        assert p.reader.parts.desk is None
        assert p.reader.parts.process.addresses == {}


def damage(directory: Path, number: int) -> None:
    """Change one bit of the image that was written with this number."""
    (images,) = directory.glob("*/0/images")
    data = bytearray(images.read_bytes())
    data[number * IMAGE + 100] ^= 1
    images.write_bytes(data)


async def test_damaged_files_are_computed_anew_and_the_tokens_are_the_same(
    workers: KvWorkers, tmp_path: Path
) -> None:
    kv = {"disk_dir": str(tmp_path), "disk_size": 0.01}
    async with workers.sides(1, kv) as p:
        expected, _ = await p.run(p.reader, PROMPT)
    damage(tmp_path, 4)
    async with workers.sides(1, kv) as p:
        tokens, cached = await p.run(p.reader, PROMPT)
        assert tokens == expected
        assert 0 < cached < BLOCKS * SIZE


async def test_a_disk_that_stands_still_delays_a_prompt_and_nothing_else(
    workers: KvWorkers, tmp_path: Path
) -> None:
    kv = {"disk_dir": str(tmp_path), "disk_size": 0.01}
    async with workers.sides(1, kv) as p:
        expected, _ = await p.run(p.reader, PROMPT, cache_salt="alone")
        parts = p.reader.parts
        assert parts.reader is not None
        parts.process._settings = parts.process._settings.model_copy(update={"transfer_s": 0.1})
        pid = parts.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert (await p.run(p.reader, PROMPT))[0] == expected
        # the process was ended for it, and another one was started
        assert (await p.run(p.reader, OTHER))[0]


async def test_what_left_the_host_tier_comes_from_disk_and_from_there_to_other_workers(
    workers: KvWorkers, tmp_path: Path
) -> None:
    kv = {"role": "both", "disk_dir": str(tmp_path), "disk_size": 0.01}
    # the host tier holds 40 blocks of 4 KiB, of which half may be loading
    async with workers.sides(2, kv, kv_offloading_size=40 * IMAGE / (1 << 30)) as p:
        expected, _ = await p.run(p.source, PROMPT)
        for salt in ("b", "c", "d"):
            await p.run(p.source, OTHER, cache_salt=salt)
        before = p.source.computed
        tokens, cached = await p.run(p.source, PROMPT)
        assert (tokens, cached) == (expected, BLOCKS * SIZE)
        assert p.source.computed - before == len(PROMPT) - BLOCKS * SIZE
        origin = p.source.origin(computes=False)
        assert await p.run(p.reader, PROMPT, kv=origin) == (expected, BLOCKS * SIZE)


@pytest.mark.parametrize(
    ("kv", "worker", "words"),
    [
        ({"disk_dir": "/proc/nothing"}, {}, "KV cannot be kept in /proc/nothing"),
        ({"disk_size": 1e9}, {}, "are free on this disk"),
        ({}, {"kv_offloading_size": 0}, "need a host tier"),
    ],
)
async def test_a_disk_that_cannot_be_is_named_at_the_start(
    workers: KvWorkers,
    tmp_path: Path,
    kv: dict[str, object],
    worker: dict[str, float],
    words: str,
) -> None:
    with pytest.raises(ConfigError, match=words):
        async with workers.sides(1, {"disk_dir": str(tmp_path), **kv}, **worker):
            pass
