"""Reads how long event loops were held, as each process measures it itself."""

import asyncio
import re
from collections.abc import Mapping
from typing import Final

from tokenmesh.cli.bench.client import Target

HELD_S: Final = 0.1
_ANSWER_S: Final = 10.0
_SAMPLE: Final = re.compile(
    rb"^tokenmesh:event_loop_lag_seconds_(bucket|count)(?:\{([^}]*)\})? ([0-9.e+]+)", re.MULTILINE
)
_BOUND: Final = re.compile(rb'le="([^"]+)"')


def count_held(metrics: bytes) -> int | None:
    """Observations over `HELD_S` in the text of /metrics; None where there are none at all."""
    total, below, found = 0.0, 0.0, False
    for kind, labels, value in _SAMPLE.findall(metrics):
        bound = _BOUND.search(labels)
        if kind == b"count":
            total, found = total + float(value), True
        elif bound is not None and bound[1] != b"+Inf" and float(bound[1]) == HELD_S:
            below += float(value)
    return round(total - below) if found else None


async def read_held(endpoints: Mapping[str, Target]) -> dict[str, int | None]:
    """By process; None for one that does not answer or does not export it."""
    counts = await asyncio.gather(*map(_read, endpoints.values()))
    return dict(zip(endpoints, counts, strict=True))


async def _read(endpoint: Target) -> int | None:
    try:
        async with asyncio.timeout(_ANSWER_S):
            return count_held(await endpoint.fetch("GET", "/metrics"))
    except (TimeoutError, OSError, ValueError):
        return None
