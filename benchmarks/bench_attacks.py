"""Attacks on one gateway of a real `tokenmesh up --engine sim`, and what others notice of them.

`python -m benchmarks.bench_attacks --seconds 60`. Each attack runs from 8 connections, without a
key and with that of a tenant of 60 requests a minute; meanwhile `/livez` is asked and another
tenant has 8 streams. Exits 1 where a bar of `attacks_run/score.py` is not held.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.attacks_run.requests import NAMES, post
from benchmarks.attacks_run.score import Noticed, Score, score, table
from benchmarks.options import add_out
from benchmarks.serve.memory import MemoryWatch, mesh_processes
from benchmarks.serve.own_mesh import own_mesh

INNOCENT, ATTACKER = "innocent-key", "attacker-key"
NUM_STREAMS = 8
_PROBE_S = 0.05
_PROBE_LIMIT_S = 30.0
_SETTLE_S = 1.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each attack")
    parser.add_argument("--connections", type=int, default=8, help="of the attacker")
    parser.add_argument("--attack", action="append", choices=NAMES, help="default: all")
    add_out(parser)
    return parser.parse_args(arguments)


class Phase:
    """Some seconds in which everything that others notice is collected."""

    def __init__(self, port: int, model: str, watch: MemoryWatch) -> None:
        self._port = port
        self._model = model
        self._watch = watch
        self.livez_s: list[float] = []
        self.gaps_s: list[float] = []
        self.num_errors = 0

    async def run(self, seconds: float) -> Noticed:
        """What was noticed."""
        for trail in self._watch.trails:
            trail.rss_mib.clear()
        streams = [self._always(self._stream) for _ in range(NUM_STREAMS)]
        sampling = self._watch.run(0.0, seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(self._always(self._probe), sampling, *streams)
        rss = {
            f"{each.name} {each.pid}": max(each.rss_mib)
            for each in self._watch.trails
            if each.rss_mib
        }
        return Noticed(self.livez_s, self.gaps_s, rss, self.num_errors)

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
                answer = await self._ask(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            self.num_errors += b" 200 " not in answer[:20]
        finally:
            self.livez_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(_PROBE_S)

    async def _ask(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(data)
            return await reader.read(4096)
        finally:
            writer.transport.abort()

    async def _stream(self) -> None:
        messages = [{"role": "user", "content": "Tell me a long story."}]
        body = {"model": self._model, "messages": messages, "stream": True, "max_tokens": 400}
        data = json.dumps({**body, "ignore_eos": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        last_s = time.perf_counter()
        try:
            writer.write(post("/v1/chat/completions", data, INNOCENT))
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


async def attacked(options: argparse.Namespace, name: str, port: int, model: str, key: str) -> int:
    """Run the attacker; how many of its requests were answered."""
    command = [sys.executable, "-m", "benchmarks.attacks_run.attacker", name]
    command += ["--port", str(port), "--model", model, "--seconds", str(options.seconds)]
    command += ["--connections", str(options.connections), *(["--key", key] if key else [])]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return int(output or 0)


async def run(options: argparse.Namespace) -> tuple[list[Score], dict[str, object]]:
    """All attacks on one mesh, after a phase without any."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text(_keys())
        log = Path(folder) / "mesh.log"
        arguments = ["--engine", "sim", "--keys-file", str(keys)]
        async with own_mesh(arguments, {}, log) as url:
            port = urlsplit(url).port
            assert port is not None
            model = await _model(port)
            watch = MemoryWatch(mesh_processes(port))
            await Phase(port, model, watch).run(_SETTLE_S)
            quiet = await Phase(port, model, watch).run(options.seconds)
            scores = [score("none", quiet, quiet, 0)]
            print(table(scores), flush=True)
            for name in options.attack or NAMES:
                for key in ("", ATTACKER):
                    scores.append(await _one(options, name, key, port, model, watch, quiet))
                    print(table(scores[-1:]).splitlines()[1], flush=True)
    return scores, {"quiet": quiet.rss_mib}


async def _one(
    options: argparse.Namespace,
    name: str,
    key: str,
    port: int,
    model: str,
    watch: MemoryWatch,
    quiet: Noticed,
) -> Score:
    attack = asyncio.create_task(attacked(options, name, port, model, key))
    noticed = await Phase(port, model, watch).run(options.seconds + _SETTLE_S)
    return score(f"{name}, {'key' if key else 'no key'}", quiet, noticed, await attack)


def _keys() -> str:
    lines = ["[tenants.innocent]", "[tenants.attacker]", "requests_per_minute = 60"]
    for tenant, key in (("innocent", INNOCENT), ("attacker", ATTACKER)):
        digest = hashlib.sha256(key.encode()).hexdigest()
        lines += ["[[keys]]", f'sha256 = "{digest}"', f'tenant = "{tenant}"']
    return "\n".join(lines)


async def _model(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Authorization: Bearer %s\r\n\r\n" % INNOCENT.encode()
    )
    answer = await reader.read()
    writer.close()
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["data"][0]["id"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack, print and save; 1 where a bar is not held."""
    options = parse(arguments)
    scores, facts = asyncio.run(run(options))
    print(table(scores))
    if options.out:
        rows = [each.as_json() for each in scores]
        saved = {"seconds": options.seconds, "scores": rows, **facts}
        options.out.write_text(json.dumps(saved, indent=1))
    return 1 if any(each.failures() for each in scores) else 0


if __name__ == "__main__":
    sys.exit(main())
