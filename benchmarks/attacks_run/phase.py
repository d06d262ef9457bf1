"""Some seconds in which everything that others notice is collected."""

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from benchmarks.attacks_run.lag import LagBuckets, lag_buckets
from benchmarks.attacks_run.requests import bare, post
from benchmarks.attacks_run.score import Noticed
from benchmarks.serve.memory import MemoryWatch, Trail

NUM_STREAMS: Final = 8
_PROBE_S: Final = 0.05
_PROBE_LIMIT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Target:
    """The gateway, the key of its innocent tenant, and one that may read metrics."""

    port: int
    key: str
    admin_key: str
    tls: ssl.SSLContext | None = None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection."""
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self.tls)

    async def ask(self, path: str, key: str | None = None) -> bytes:
        """The whole answer to a GET, without a key or with one."""
        reader, writer = await self.connect()
        try:
            request = bare("GET", path, key)
            writer.write(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            return await reader.read(-1)
        finally:
            writer.transport.abort()


class Phase:
    """One, with an attack or without."""

    def __init__(self, target: Target, model: str, watch: MemoryWatch) -> None:
        self._target = target
        self._model = model
        self._watch = watch
        self.livez_s: list[float] = []
        self.gaps_s: list[float] = []
        self.num_errors = 0

    async def run(self, seconds: float) -> Noticed:
        """Watch for so many seconds."""
        for trail in self._watch.trails:
            trail.times_s.clear()
            trail.rss_mib.clear()
            trail.cpu_s.clear()
        before, waited_s = await self._lag(), self._waited_s()
        began_s, own_s, busy_s = time.perf_counter(), time.process_time(), _busy_s()
        streams = [self._always(self._stream) for _ in range(NUM_STREAMS)]
        sampling = self._watch.run(0.0, seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(self._always(self._probe), sampling, *streams)
        elapsed_s = time.perf_counter() - began_s
        cores = {_name(each): round(each.cpu_share(), 3) for each in self._watch.trails}
        cores["this benchmark"] = round((time.process_time() - own_s) / elapsed_s, 3)
        cores["whole machine"] = round((_busy_s() - busy_s) / elapsed_s, 3)
        waits = {
            name: round((now_s - waited_s[name]) / elapsed_s, 3)
            for name, now_s in self._waited_s().items()
        }
        lag = (await self._lag()).since(before)
        rss = {_name(each): max(each.rss_mib) for each in self._watch.trails if each.rss_mib}
        return Noticed(self.livez_s, self.gaps_s, rss, self.num_errors, lag.at(0.99), cores, waits)

    def _waited_s(self) -> dict[str, float]:
        return {_name(each): _run_delay_s(each.pid) for each in self._watch.trails}

    async def _lag(self) -> LagBuckets:
        return lag_buckets((await self._target.ask("/metrics", self._target.admin_key)).decode())

    async def _always(self, once: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await once()
            except OSError:
                self.num_errors += 1
                await asyncio.sleep(_PROBE_S)

    async def _probe(self) -> None:
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(_PROBE_LIMIT_S):
                answer = await self._target.ask("/livez")
            self.num_errors += b" 200 " not in answer[:20]
        finally:
            self.livez_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(_PROBE_S)

    async def _stream(self) -> None:
        messages = [{"role": "user", "content": "Tell me a long story."}]
        body = {"model": self._model, "messages": messages, "stream": True, "max_tokens": 400}
        data = json.dumps({**body, "ignore_eos": True}).encode()
        reader, writer = await self._target.connect()
        last_s = time.perf_counter()
        try:
            writer.write(post("/v1/chat/completions", data, self._target.key))
            while part := await reader.read(65536):
                now = time.perf_counter()
                self.gaps_s.append(now - last_s)
                last_s = now
                if b"[DONE]" in part:
                    return
            self.num_errors += 1
        finally:
            # A silence that the phase's end cuts off counts, too.
            self.gaps_s.append(time.perf_counter() - last_s)
            writer.transport.abort()


def _name(trail: Trail) -> str:
    return f"{trail.name} {trail.pid}"


def _run_delay_s(pid: int) -> float:
    """Return how long a process's first thread was ready to run and had no core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def _busy_s() -> float:
    """Return the busy seconds of all cores of the machine."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
