"""Gaps between tokens of 16 streams while an adapter is loaded, through a whole mesh.

    python -m benchmarks.mesh_adapters --quantization int8

Starts `tokenmesh up` on random weights in Qwen2.5-0.5B's shape. In turns of some seconds nothing
else happens, or `/v1/load_lora_adapter` loads one adapter after the other. A gap is the time from
one piece of a stream to the next, as the client sees it, in the turn in which it ends.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Final

import httpx

from benchmarks.bench_adapters import quantile, write_adapters
from benchmarks.random_model import SHAPES, write_checkpoint
from benchmarks.serve.own_mesh import own_mesh

_WARM_S: Final = 3.0
_TOKENS: Final = 1500
_KEY: Final = "of-a-benchmark"
_KINDS: Final = ("alone", "during loads")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="mesh_adapters", formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--shape", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    add("--quantization")
    add("--streams", type=int, default=16)
    add("--rank", type=int, default=16)
    add("--turns", type=int, default=8, help="half of them with loads")
    add("--turn-s", type=float, default=8.0)
    return parser.parse_args(arguments)


class Run:
    """What is measured in one mesh."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.kind: str | None = None
        """Of the turn; None: nothing counts."""
        self.gaps: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        self.loads_s: list[float] = []

    async def stream(self, model: str, number: int) -> None:
        """One stream; a new one follows when it has ended."""
        body = {"model": model, "prompt": [2100 + number] * 32, "max_tokens": _TOKENS}
        body |= {"ignore_eos": True, "temperature": 0, "stream": True}
        while True:
            last = None
            async with self._client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for _ in answer.aiter_bytes():
                    now = time.perf_counter()
                    if last is not None and self.kind is not None:
                        self.gaps[self.kind].append(now - last)
                    last = now

    async def turn(self, kind: str, seconds: float, paths: Sequence[Path]) -> None:
        """Count gaps for a while; in every other turn during loads."""
        self.kind = kind
        until = time.perf_counter() + seconds
        while (now := time.perf_counter()) < until:
            if kind == _KINDS[0]:
                await asyncio.sleep(until - now)
                continue
            name = {"lora_name": "a", "load_inplace": True}
            path = paths[len(self.loads_s) % len(paths)]
            answer = await self._client.post(
                "/v1/load_lora_adapter", json={**name, "lora_path": str(path)}
            )
            answer.raise_for_status()
            self.loads_s.append(time.perf_counter() - now)
        self.kind = None


async def measure(options: argparse.Namespace, root: Path) -> Run:
    """All turns in one mesh."""
    write_checkpoint(SHAPES[options.shape], root)
    paths = write_adapters(root, SimpleNamespace(adapters=4, rank=options.rank))  # type: ignore[arg-type]
    up = [str(root), "--enable-lora", "--max-lora-rank", str(max(16, options.rank))]
    up += ["--lora-allowed-dirs", str(root), "--enable-admin-routes", "--api-key", _KEY]
    up += ["--quantization", options.quantization] if options.quantization else []
    headers = {"authorization": f"Bearer {_KEY}"}
    async with (
        own_mesh(up, {}, root / "mesh.log") as url,
        httpx.AsyncClient(base_url=url, timeout=60.0, headers=headers) as client,
    ):
        models = (await client.get("/v1/models")).json()["data"]
        run = Run(client)
        streams = [
            asyncio.create_task(run.stream(models[0]["id"], number))
            for number in range(options.streams)
        ]
        await asyncio.sleep(_WARM_S)
        for turn in range(options.turns):
            kind = _KINDS[turn % 2]
            await run.turn(kind, options.turn_s, paths)
        for each in streams:
            each.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        run = asyncio.run(measure(options, Path(folder)))
    for kind, gaps in run.gaps.items():
        at = [f"{100 * share:g} % {1e3 * quantile(gaps, share):.1f}" for share in (0.9, 0.99)]
        print(
            f"{options.streams} streams {kind:13} {len(gaps)} gaps: median "
            f"{1e3 * median(gaps):.1f} ms, {', '.join(at)}, longest {1e3 * max(gaps):.1f}"
        )
    print(f"{len(run.loads_s)} loads, each {median(run.loads_s):.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
