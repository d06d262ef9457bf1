"""The shape of `results/index.json`."""

from typing import TypedDict

import msgspec


class Microseconds(TypedDict):
    """Percentiles of many calls."""

    p50: float
    p90: float
    p99: float


class IndexResult(msgspec.Struct):
    """A run of bench_index."""

    config: dict[str, object]
    environment: dict[str, object]
    load_average_end: float
    round_trip_us: Microseconds
    """The round trip of a script that does nothing, over the same connection."""
    round_trip_prompt_us: Microseconds
    """The same with a prompt's hashes as its argument."""
    alone_us: Microseconds
    during_updates_us: Microseconds
    updates_per_s: int
