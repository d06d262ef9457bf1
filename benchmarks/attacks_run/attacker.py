"""The attacker: a process of its own, so that what it does is not measured as the gateway's."""

import argparse
import asyncio
import contextlib
import sys

from benchmarks.attacks_run.requests import NAMES, request

_ANSWER_S = 30.0
_FIRST_BYTES = 4096


async def attack(port: int, data: bytes, connections: int, seconds: float) -> int:
    """Send the request again and again; how many were answered."""
    counts = [0]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(_again(port, data, counts) for _ in range(connections)))
    return counts[0]


async def _again(port: int, data: bytes, counts: list[int]) -> None:
    while True:
        try:
            async with asyncio.timeout(_ANSWER_S):
                if await _once(port, data):
                    counts[0] += 1
        except (OSError, TimeoutError):
            await asyncio.sleep(0.01)


async def _once(port: int, data: bytes) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return bool(await reader.read(_FIRST_BYTES))
    finally:
        writer.transport.abort()


def main() -> int:
    """Attack; prints how many requests were answered."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--key")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    data = request(options.name, options.model, options.key)
    print(asyncio.run(attack(options.port, data, options.connections, options.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
