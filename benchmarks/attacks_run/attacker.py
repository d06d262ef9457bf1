"""The attacker: a process of its own, so that what it does is not measured as the gateway's."""

import argparse
import asyncio
import contextlib
import json
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Final

from benchmarks.attacks_run.requests import NAMES, SILENT_TLS, STORED, post, request

_ANSWER_S: Final = 30.0
_FIRST_BYTES: Final = 4096
_ID: Final = re.compile(rb"resp_[A-Za-z0-9]{1,64}")
_SILENT_EACH: Final = 375
"""Connections that each of the attacker's eight keeps open: 3,000 together."""

_Again = Callable[[], Coroutine[object, object, None]]


async def attack(again: _Again, connections: int, seconds: float) -> None:
    """Run so many loops at a time, for so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(again() for _ in range(connections)))


class Requests:
    """Send the same request again and again."""

    def __init__(self, port: int, data: bytes) -> None:
        self.num_answered = 0
        self._port = port
        self._data = data

    async def again(self) -> None:
        """One connection after the other."""
        while True:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    self.num_answered += await self._once()
            except (OSError, TimeoutError):
                await asyncio.sleep(0.01)

    async def _once(self) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(self._data)
            return bool(await reader.read(_FIRST_BYTES))
        finally:
            writer.transport.abort()


async def stored_id(port: int, model: str, key: str | None) -> bytes:
    """A response that is stored with this key, as soon as its limits allow one."""
    path, make = STORED
    data = post(path, make(model), key).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    async with asyncio.timeout(2 * _ANSWER_S):
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            found = _ID.search(await reader.read(-1))
            writer.transport.abort()
            if found is not None:
                return found[0]
            await asyncio.sleep(1.0)


class SilentConnections:
    """Open connections and send nothing; the oldest makes room for a new one."""

    def __init__(self, port: int) -> None:
        self.num_answered = 0
        """Connections that were opened."""
        self._port = port

    async def again(self) -> None:
        """Keep `_SILENT_EACH` open."""
        opened: deque[asyncio.StreamWriter] = deque()
        try:
            while True:
                if len(opened) == _SILENT_EACH:
                    opened.popleft().transport.abort()
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                    self.num_answered += 1
                    opened.append(writer)
        finally:
            for each in opened:
                each.transport.abort()


def main() -> int:
    """Attack; prints how many requests were answered, and the CPU that it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--key")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    attacker: Requests | SilentConnections
    if options.name == SILENT_TLS:
        attacker = SilentConnections(options.port)
    else:
        data = request(options.name, options.model, options.key)
        if b"{id}" in data:
            found = asyncio.run(stored_id(options.port, options.model, options.key))
            data = data.replace(b"{id}", found)
        attacker = Requests(options.port, data)
    asyncio.run(attack(attacker.again, options.connections, options.seconds))
    print(json.dumps({"answered": attacker.num_answered, "cpu_s": time.process_time()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
