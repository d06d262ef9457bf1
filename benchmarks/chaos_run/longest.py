"""The longest silences: of which stream, during which faults, and the trace of each."""

import json
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final, TypedDict

from benchmarks.chaos_run.accounts import ADMIN
from benchmarks.chaos_run.faults import Fault
from benchmarks.chaos_run.received import ReceivedResponse
from tokenmesh.cli.bench.client import Target

_COUNT: Final = 20


class Silence(TypedDict):
    """A choice's gap; `at_s` and `meanwhile` count from the first request."""

    ms: float
    kind: str
    response_id: str
    at_s: float
    meanwhile: list[str]


def longest_silences(
    received: Sequence[ReceivedResponse], faults: Sequence[Fault]
) -> list[Silence]:
    """The longest first."""
    began_s = min((each.began_s for each in received), default=0.0)
    found = [
        Silence(
            ms=round(1000 * (gap.end_s - gap.start_s), 1),
            kind=each.kind,
            response_id=each.response_id,
            at_s=round(gap.start_s - began_s, 2),
            meanwhile=[
                f"{fault.label} {fault.began_s - began_s:.2f} to {fault.healed_s - began_s:.2f}"
                for fault in faults
                if fault.began_s <= gap.end_s and fault.healed_s >= gap.start_s
            ],
        )
        for each in received
        for choice in each.choices
        for gap in choice.gaps
    ]
    return sorted(found, key=itemgetter("ms"), reverse=True)[:_COUNT]


async def write_traces(urls: Sequence[str], silences: Sequence[Silence], folder: Path) -> None:
    """Write what the gateways still know of each, as `trace-ID.json`."""
    for response_id in {each["response_id"] for each in silences}:
        for url in urls:
            try:
                trace = await Target(url, ADMIN).fetch("GET", f"/traces/{response_id}")
            except (OSError, ValueError):
                continue
            if json.loads(trace).get("spans"):
                (folder / f"trace-{response_id}.json").write_bytes(trace)
                break
