"""KV that is elsewhere: first tokens of a prompt that is computed, hit, filled or read.

`python -m benchmarks.bench_kv --model DIR_OR_GGUF` loads the model twice in this process: the first
engine computes a prompt of `--tokens`, the second one gets its images by their transfer processes.
All numbers are of one run, in turns; ratios are of the best of `--rounds`. Prints JSON: seconds to
the first token, their ratios, and for each transport GB/s and the CPU time of both transfer
processes a GB. Messages between workers are not in it.

`--turns N --disk DIR` measures a conversation of N turns instead, by one worker that keeps KV in
DIR: the first token of a further turn when it is computed and after the pool was emptied, and which
share of the tokens that were hit before a restart is hit after it.

`--unused` measures what a host tier costs where nothing is used again: output and prompt tokens a
second of one engine with it and one without it, in turns. `--trace FILE` counts instead of
measuring: the share of prompt tokens of a trace in Mooncake's format that one worker finds, whose
pool holds 3,000 blocks of 512 tokens, without and with a host tier of five times as many.
"""

import argparse
import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import msgspec

from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.sim import SimRunner, SimVocabulary
from tokenmesh.engine.exec.build import build_runner
from tokenmesh.engine.exec.loaded_model import RunnableModel
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import RequestSpec, StreamKey
from tokenmesh.engine.runner import HostImages
from tokenmesh.services.worker_svc.kv.child import TransferProcess
from tokenmesh.shared.config.kv import KvSettings, KvTransport
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.sampling import SamplingParams

TOKEN = b"b" * 32
_TICKS = os.sysconf("SC_CLK_TCK")


class Side:
    """An engine with a host tier, and its transfer process."""

    def __init__(self, model: str, tokens: int, kv: KvSettings) -> None:
        self.settings = WorkerSettings(
            device="cpu",
            num_gpu_blocks_override=3 * (tokens // 16 + 2),
            kv_offloading_size=1.0,
            max_num_seqs=4,
            kv=kv,
        )
        loaded = build_runner(
            ModelSettings(model=model, max_model_len=tokens + 64),
            self.settings,
            lambda done, total: None,
        )
        self.model: RunnableModel = loaded
        self.engine = Engine(loaded.runner, self.settings)
        assert loaded.shared_kv is not None, "this model exchanges no KV"
        self.shared = loaded.shared_kv
        self.process = TransferProcess(self.shared.arena, kv, self.shared.scope)
        self._streams = 0

    def request(self, prompt: list[int], salt: str | None = None) -> Request:
        self._streams += 1
        spec = RequestSpec(
            StreamKey(GatewayId("g"), self._streams, 0),
            RequestId("r"),
            len(prompt),
            SamplingParams(seed=1, max_tokens=1, temperature=0.0, ignore_eos=True),
            cache_salt=salt,
        )
        return Request(spec, list(prompt))

    def first_token(self, request: Request) -> tuple[float, int]:
        """Return seconds, and the token."""
        began = perf_counter()
        self.engine.add(request)
        while self.engine.has_work:
            self.engine.step()
            self.engine.take_output()
        return perf_counter() - began, request.token_ids[-1]

    def empty_pool(self) -> None:
        self.engine.settle()
        self.engine._cache.pool.forget_all()

    def cpu_s(self) -> float:
        """Return the CPU time of its transfer process."""
        text = Path(f"/proc/{self.process.pid}/stat").read_text()
        fields = text.rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS


async def fetch(source: Side, reader: Side, prompt: list[int]) -> tuple[float, float, int]:
    """Read all images of the prompt, then draw: seconds, of these reading, and the token."""
    request = reader.request(prompt)
    began = perf_counter()
    wanted = reader.engine.exchange.expect(request)
    keys = source.engine.exchange.keys_of(source.request(prompt), wanted.num_blocks)
    lent = source.engine.exchange.lend(keys)
    assert len(lent) == len(wanted.slots) == len(keys), "the source does not have all of it"
    sums = await source.process.serve(1, TOKEN, lent)
    slots = [slot for slot in wanted.slots if slot is not None]
    ended = await reader.process.read(source.process.addresses, 1, TOKEN, lent, slots, sums)
    reader.engine.exchange.arrived(request, wanted.keys, ended.are_good)
    read_s = perf_counter() - began
    await source.process.revoke(1)
    source.engine.exchange.take_back(keys)
    assert all(ended.are_good), ended.reason
    seconds, token = reader.first_token(request)
    return read_s + seconds, read_s, token


async def measure(model: str, tokens: int, rounds: int, transport: KvTransport) -> dict[str, Any]:
    kv = KvSettings(role="both", transports=(transport,))
    source, reader = Side(model, tokens, kv), Side(model, tokens, kv)
    await asyncio.gather(source.process.start(), reader.process.start())
    best: dict[str, float] = {}

    def note(name: str, seconds: float) -> None:
        best[name] = min(seconds, best.get(name, seconds))

    dice, num_bytes, read_s, cpu_s = random.Random(1), 0, 0.0, 0.0
    try:
        for _ in range(rounds):
            prompt = [dice.randrange(3, 30_000) for _ in range(tokens)]
            seconds, token = source.first_token(source.request(prompt))
            note("computed", seconds)
            answers = [token]
            # the images of the last blocks are saved by a later step
            for name in ("hit", "filled"):
                if name == "filled":
                    source.empty_pool()
                seconds, token = source.first_token(source.request(prompt))
                note(name, seconds)
                answers.append(token)
            before = source.cpu_s() + reader.cpu_s()
            seconds, reading_s, token = await fetch(source, reader, prompt)
            note("remote", seconds)
            assert {*answers, token} == {token}, "the tokens differ"
            blocks = (tokens - 1) // source.settings.block_size
            num_bytes += blocks * source.shared.arena.image_bytes
            read_s += reading_s
            cpu_s += source.cpu_s() + reader.cpu_s() - before
    finally:
        await asyncio.gather(source.process.stop(), reader.process.stop())
    return {
        "first_token_s": best,
        "filled / computed": best["filled"] / best["computed"],
        "remote / computed": best["remote"] / best["computed"],
        "remote / hit": best["remote"] / best["hit"],
        "GB/s": num_bytes / read_s / 1e9,
        "CPU s/GB": cpu_s / (num_bytes / 1e9),
        "MB of a prompt": num_bytes / rounds / 1e6,
    }


_TURN: Final = 96
"""Tokens of a question and its answer."""


async def store(side: Side) -> None:
    """Write all images to disk."""
    while True:
        keys, slots = side.engine.exchange.lend_unstored(64)
        if not keys:
            return
        await side.process.put(keys, slots)
        side.engine.exchange.take_back(keys)


async def restore(side: Side, request: Request) -> None:
    """Read what the disk has of a prompt."""
    lacking = side.engine.exchange.lacks(request)
    count = await side.process.find(lacking.keys)
    wanted = side.engine.exchange.expect(request, count)
    pairs = [pair for pair in zip(wanted.keys, wanted.slots, strict=True) if pair[1] is not None]
    keys, slots = [key for key, _ in pairs], [slot for _, slot in pairs if slot is not None]
    ended = await side.process.get(keys, slots)
    side.engine.exchange.arrived(request, keys, ended.are_good, is_stored=True)


async def measure_turns(model: str, turns: int, rounds: int, directory: str) -> dict[str, Any]:
    tokens, dice = (turns + 1) * _TURN, random.Random(1)
    kv = KvSettings(disk_dir=directory, disk_size=2.0)
    prompt = [dice.randrange(3, 30_000) for _ in range(tokens)]
    side = Side(model, tokens, kv)
    await side.process.start()
    computed, filled, answers, hits = [], [], set(), 0
    try:
        for turn in range(1, turns + 1):
            request = side.request(prompt[: turn * _TURN])
            side.first_token(request)
            hits += request.place.num_cached or 0
        for number in range(rounds):
            seconds, token = side.first_token(side.request(prompt, f"computed {number}"))
            computed.append(seconds)
            side.empty_pool()
            seconds, again = side.first_token(side.request(prompt))
            filled.append(seconds)
            answers |= {token, again}
        assert len(answers) == 1, "the tokens differ"
        await store(side)
    finally:
        await side.process.stop()
    other, after, first_s = Side(model, tokens, kv), 0, 0.0
    await other.process.start()
    try:
        for turn in range(1, turns + 1):
            request = other.request(prompt[: turn * _TURN])
            began = perf_counter()
            await restore(other, request)
            other.first_token(request)
            first_s = perf_counter() - began
            after += request.place.num_cached or 0
            other.empty_pool()
    finally:
        await other.process.stop()
    return {
        "tokens": tokens,
        "computed_s": min(computed),
        "filled_s": min(filled),
        "filled / computed": min(filled) / min(computed),
        "last turn after the restart_s": first_s,
        "hits after / before the restart": after / hits,
    }


_STREAMS: Final = 8


def measure_unused(model: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Streams of fresh prompts; best of the rounds."""
    best = {"off": 0.0, "on": 0.0}
    loops = {}
    for name, size in (("off", 0.0), ("on", 1.0)):
        settings = WorkerSettings(
            device="cpu",
            num_gpu_blocks_override=2 * _STREAMS * (tokens // 8 + 2),
            kv_offloading_size=size,
            max_num_seqs=_STREAMS,
        )
        given = ModelSettings(model=model, max_model_len=2 * tokens + 64)
        loaded = build_runner(given, settings, lambda done, total: None)
        assert isinstance(loaded, RunnableModel)
        loops[name] = Engine(loaded.runner, settings)
    dice = random.Random(1)
    for number in range(rounds):
        for name in best if number % 2 else reversed(best):
            requests = [_fresh(dice, number * _STREAMS + at, tokens) for at in range(_STREAMS)]
            began = perf_counter()
            for request in requests:
                loops[name].add(request)
            while any(not request.ending() for request in requests):
                loops[name].step()
                loops[name].take_output()
            seconds = perf_counter() - began
            # blocks that are filled last are saved when it has nothing else to do
            while loops[name].has_work:
                loops[name].step()
            best[name] = max(best[name], 2 * _STREAMS * tokens / seconds)
    return {**best, "on / off": best["on"] / best["off"]}


def _fresh(dice: random.Random, number: int, tokens: int) -> Request:
    spec = RequestSpec(
        StreamKey(GatewayId("g"), number, 0),
        RequestId("r"),
        tokens,
        SamplingParams(seed=1, max_tokens=tokens, temperature=0.0, ignore_eos=True),
    )
    return Request(spec, [dice.randrange(3, 30_000) for _ in range(tokens)])


_TRACE_BLOCK: Final = 512
_TRACE_POOL: Final = 3000


def count_hits(trace: Path) -> dict[str, float]:
    """One request after the other, through the engine's own prefix cache and host tier."""
    entries = [msgspec.json.decode(line) for line in trace.read_bytes().splitlines()]
    return {
        f"cached share, host tier of {factor} pools": _cached_share(entries, factor)
        for factor in (0, 5)
    }


def _cached_share(entries: list[dict[str, Any]], factor: int) -> float:
    settings = WorkerSettings(
        engine="sim",
        sim_num_blocks=_TRACE_POOL + 1,
        sim_time_scale=0.0,
        block_size=_TRACE_BLOCK,
        max_num_batched_tokens=1 << 18,
        async_scheduling=False,
    )
    images = HostImages(factor * _TRACE_POOL, 1)
    runner = SimRunner(SimVocabulary(1000), settings, lambda _: None, images=images)
    engine, found, total = Engine(runner, settings), 0, 0
    for number, entry in enumerate(entries):
        ids = [each * _TRACE_BLOCK + at for each in entry["hash_ids"] for at in range(_TRACE_BLOCK)]
        request = _fresh(random.Random(0), number, 0)
        length = min(entry["input_length"], _TRACE_POOL * _TRACE_BLOCK // 2)
        spec = replace(request.spec, num_prompt=length, sampling=_ONE_TOKEN)
        request = Request(spec, ids[:length])
        engine.add(request)
        while engine.has_work:
            engine.step()
            engine.take_output()
        found, total = found + (request.place.num_cached or 0), total + length
    return found / total


_ONE_TOKEN: Final = SamplingParams(seed=1, max_tokens=1, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="a directory or a GGUF file")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--disk", default="", help="an empty folder, for --turns")
    parser.add_argument("--unused", action="store_true")
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    if options.trace is not None:
        show(count_hits(options.trace))
        return
    if options.unused:
        show(measure_unused(options.model, options.tokens, options.rounds))
        return
    if options.turns:
        turns = measure_turns(options.model, options.turns, options.rounds, options.disk)
        show(asyncio.run(turns))
        return
    found = {
        name: asyncio.run(measure(options.model, options.tokens, options.rounds, name))
        for name in ("shm", "tcp")
    }
    show(found)


def show(found: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())


if __name__ == "__main__":
    main()
