"""The section of index.json."""

from collections.abc import Iterator
from typing import Final

from benchmarks.index_results import IndexResult, Microseconds
from benchmarks.page.table import number, origin, table

_MAX_PLACEMENT_US: Final = 150.0


def index_section(result: IndexResult) -> Iterator[str]:
    """One placement with reservation, and what of it is the way to Redis and back."""
    config = result.config
    yield "## Placement by the prefix index"
    yield ""
    yield origin(result.environment, result.load_average_end)
    yield (
        "Longest prefix of every worker, cost and reservation from Python, one after the other: "
        f"{config['workers']} workers of {int(str(config['blocks'])):,} blocks, prompts of "
        f"{int(str(config['prompt_blocks'])):,} blocks. Bar: {_MAX_PLACEMENT_US:.0f} us at p50. "
        "`python -m benchmarks.bench_index`."
    )
    yield ""
    rows = (
        ("a script that does nothing", result.round_trip_us),
        ("the same, given the prompt's hashes", result.round_trip_prompt_us),
        ("placement", result.alone_us),
        (f"placement during {result.updates_per_s:,} updates/s", result.during_updates_us),
    )
    yield from table(["us", "p50", "p90", "p99"], (_row(*row) for row in rows))
    yield ""
    holds = result.alone_us["p50"] <= _MAX_PLACEMENT_US
    yield f"The bar is {'reached' if holds else '**not reached**'}."


def _row(name: str, took: Microseconds) -> list[str]:
    return [name, number(took["p50"], 0), number(took["p90"], 0), number(took["p99"], 0)]
