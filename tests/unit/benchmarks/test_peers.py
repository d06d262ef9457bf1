"""How bench_peers starts, freezes, asks and counts the engines that it compares."""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from benchmarks.engine_results import BoundLine
from benchmarks.peers import turns as turns_module
from benchmarks.peers.bus_round_trip import open_round_trip
from benchmarks.peers.child import start_child
from benchmarks.peers.http_peer import HttpPeer
from benchmarks.peers.results import ModelResult
from benchmarks.peers.roster import Setting
from benchmarks.peers.sample import Measure, Sample, decode_rate
from benchmarks.peers.session import probe_bound
from benchmarks.peers.turns import open_turns
from benchmarks.random_model import ModelShape
from benchmarks.serve.own_server import own_server
from tests.fakes.scripted_http import DONE, GOOD, piece, serving, stream, usage
from tokenmesh.cli.bench.client import Connection, Target
from tokenmesh.shared.config.loader import DEMO_MODEL

PROMPTS = [[1, 2, 3], [4, 5, 6]]
TINY = ModelShape("tiny", "Tiny", "Llama", {"vocab_size": 4000})


def test_the_decode_rate_starts_when_the_last_stream_has_its_first_token() -> None:
    # after 2.0 s: three tokens in two seconds
    assert decode_rate([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]) == 1.5
    assert decode_rate([[1.0]]) == 0.0
    assert decode_rate([]) == 0.0


def child(mode: str, log: Path, timeout_s: float = 15.0):  # type: ignore[no-untyped-def]
    return start_child("tests.fakes.echo_child", [mode], os.environ, log, timeout_s)


@pytest.mark.parametrize("mode", ["right", "noisy"])
async def test_a_child_answers_with_its_token_times(mode: str, tmp_path: Path) -> None:
    async with child(mode, tmp_path / "log") as running:
        sample = await running.measure(PROMPTS, 11)
    assert sample.decode_tokens_per_s == pytest.approx(2000.0, rel=1e-3)
    assert sample.tokens_per_s == pytest.approx(22 / 0.011, rel=0.3)
    assert 1.0 <= sample.ttft_p50_ms < 1000.0


async def test_a_child_is_frozen_unless_it_is_measured(tmp_path: Path) -> None:
    before = {each.pid for each in psutil.Process().children()}
    async with child("right", tmp_path / "log") as running:
        (process,) = (each for each in psutil.Process().children() if each.pid not in before)
        assert await status_of(process, psutil.STATUS_STOPPED)
        await running.measure(PROMPTS, 3)
        assert await status_of(process, psutil.STATUS_STOPPED)
    assert not process.is_running()


async def status_of(process: psutil.Process, wanted: str) -> bool:
    for _ in range(1500):
        if process.status() == wanted:
            return True
        await asyncio.sleep(0.01)
    return False


async def test_a_child_that_dies_says_why(tmp_path: Path) -> None:
    async with child("dead", tmp_path / "log") as running:
        with pytest.raises(RuntimeError, match="no such model"):
            await running.measure(PROMPTS, 3)


async def test_a_child_that_brings_too_few_tokens_has_no_number(tmp_path: Path) -> None:
    async with child("short", tmp_path / "log") as running:
        with pytest.raises(RuntimeError, match="not exactly 3 tokens"):
            await running.measure(PROMPTS, 3)


async def test_a_child_that_never_gets_ready_is_ended(tmp_path: Path) -> None:
    before = {each.pid for each in psutil.Process().children()}
    with pytest.raises(TimeoutError):
        async with child("mute", tmp_path / "log", timeout_s=0.2):
            pass
    assert {each.pid for each in psutil.Process().children()} <= before


async def test_a_server_is_measured_over_http() -> None:
    async with serving(lambda _path, _body: stream(GOOD)) as url:
        sample = await HttpPeer(url, 5.0).measure(PROMPTS, 3)
    assert sample.tokens_per_s > 0
    assert sample.ttft_p50_ms > 0


async def test_connections_are_there_before_the_clock_and_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected = []
    connect = Target.connect

    async def connect_noted(server: Target) -> Connection:
        connected.append(server)
        return await connect(server)

    monkeypatch.setattr(Target, "connect", connect_noted)
    async with serving(lambda _path, _body: stream(GOOD)) as url:
        peer = HttpPeer(url, 5.0)
        first = await peer.measure(PROMPTS, 3)
        assert len(connected) == len(PROMPTS)
        await peer.measure(PROMPTS, 3)
        assert len(connected) == len(PROMPTS)
    assert 0 < first.client_share <= 1


async def test_a_server_that_brings_too_few_tokens_has_no_number() -> None:
    few = stream([piece("a"), piece("b", "length"), usage(2), DONE])
    async with serving(lambda _path, _body: few) as url:
        with pytest.raises(RuntimeError, match="wrong_count"):
            await HttpPeer(url, 5.0).measure(PROMPTS, 3)


async def test_a_server_that_ends_at_once_shows_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(RuntimeError, match="no such model"):
        async with own_server(command, "/health", os.environ, tmp_path / "server.log"):
            pass


async def test_a_server_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    before = {each.pid for each in psutil.Process().children()}
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(TimeoutError):
        async with own_server(command, "/health", os.environ, tmp_path / "server.log", 0.2):
            pass
    assert {each.pid for each in psutil.Process().children()} <= before


class Fakes:
    """Peers that note who was measured with how many streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: Sequence[str]) -> None:
        self.seen: list[tuple[str, int]] = []
        self.broken: set[str] = set()
        monkeypatch.setattr(turns_module, "PEERS", {name: self._open(name) for name in names})

    def _open(self, name: str):  # type: ignore[no-untyped-def]
        async def measure(prompts: list[list[int]], num_tokens: int) -> Sample:
            self.seen.append((name, len(prompts)))
            if name in self.broken:
                raise RuntimeError("it fell over")
            return Sample(float(len(self.seen)), float(num_tokens), float(len(prompts[0])))

        async def open_it(_setting: Setting, _stack: AsyncExitStack) -> Measure:
            if name == "absent":
                raise RuntimeError("not installed")
            return measure

        return open_it


SETTING = Setting(Path("nowhere"), 2, 5.0, None, None)


async def test_peers_take_turns_and_another_one_begins_each_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fakes = Fakes(monkeypatch, ["a", "b", "c"])
    result = ModelResult("tiny", "Tiny", 1000)
    async with open_turns(TINY, result, ["a", "b", "c"], SETTING, lambda _: None) as turns:
        fakes.seen.clear()
        for number in range(3):
            await turns.round([1, 8], (12, 6), number)
    assert fakes.seen == [
        *(("a", 1), ("b", 1), ("c", 1), ("a", 8), ("b", 8), ("c", 8)),
        *(("b", 1), ("c", 1), ("a", 1), ("b", 8), ("c", 8), ("a", 8)),
        *(("c", 1), ("a", 1), ("b", 1), ("c", 8), ("a", 8), ("b", 8)),
    ]
    assert {streams: {*by_peer} for streams, by_peer in result.rounds.items()} == {
        1: {"a", "b", "c"},
        8: {"a", "b", "c"},
    }
    assert all(len(samples) == 3 for by in result.rounds.values() for samples in by.values())
    sample = result.rounds[8]["b"][0]
    assert (sample.decode_tokens_per_s, sample.ttft_p50_ms) == (6.0, 12.0)
    assert result.missing == {}


async def test_a_peer_that_fails_is_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fakes = Fakes(monkeypatch, ["a", "absent", "b"])
    result = ModelResult("tiny", "Tiny", 1000)
    async with open_turns(TINY, result, ["a", "absent", "b"], SETTING, lambda _: None) as turns:
        await turns.round([1], (4, 2), 0)
        fakes.broken.add("a")
        await turns.round([1], (4, 2), 1)
        await turns.round([1], (4, 2), 2)
    assert result.missing == {
        "absent": "RuntimeError: not installed",
        "a": "RuntimeError: it fell over",
    }
    assert len(result.rounds[1]["a"]) == 1
    assert len(result.rounds[1]["b"]) == 3
    assert result.best(1, "b") == result.rounds[1]["b"][-1]
    assert result.best(1, "absent") is None


def test_the_bound_is_the_median_share_of_the_rounds() -> None:
    bounds = [BoundLine("m", 40.0, read_ms, "sum") for read_ms in (36.0, 20.0, 34.0)]
    assert ModelResult("m", "M", 10**9, bounds).bound_share == pytest.approx(0.85)
    assert ModelResult("m", "M", 10**9).bound_share is None


@pytest.mark.timeout(120)
async def test_the_bound_is_measured_in_a_process_of_its_own() -> None:
    line = await probe_bound(Setting(DEMO_MODEL, 1, 60.0, None, None))
    assert line.model == DEMO_MODEL.name
    assert line.step_ms > 0
    assert line.read_ms > 0


async def test_a_round_trip_over_a_bus_of_its_own() -> None:
    async with AsyncExitStack() as stack:
        measure = await open_round_trip(stack)
        sample = await measure([[1]], 1)
    assert 0 < sample.ttft_p50_ms < 5000


def test_the_mesh_is_held_against_its_engine_by_medians() -> None:
    def samples(*numbers: float) -> list[Sample]:
        return [Sample(speed, 0.0, 1000 / speed) for speed in numbers]

    result = ModelResult("m", "M", 1, rounds={1: {"mesh": samples(10, 20, 100)}})
    assert result.added_ttft_ms is None
    assert result.lost_throughput(32) is None
    result.rounds = {
        1: {"mesh": samples(10, 20, 100), "engine": samples(25, 25, 1)},
        32: {"mesh": samples(90, 95, 1), "engine": samples(100, 120, 100)},
    }
    assert result.added_ttft_ms == pytest.approx(50 - 40)
    assert result.lost_throughput(32) == pytest.approx(0.1)


def test_prompts_are_the_same_in_every_round() -> None:
    from benchmarks.random_model import random_prompts

    first, again = random_prompts(TINY, 4, 16), random_prompts(TINY, 4, 16)
    assert first == again
    assert all(one != other for one, other in pairwise(first))
    assert {token for prompt in first for token in prompt} <= {*range(2048, 4000)}
