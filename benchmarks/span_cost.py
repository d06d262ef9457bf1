"""What tracing costs in CPU time: making a span, encoding it, and storing it in a gateway.

`python -m benchmarks.span_cost` prints microseconds of CPU for each kind of span.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from tokenmesh.services.gateway.core.operations.traces import TraceStore
from tokenmesh.shared.config.mesh import TelemetrySettings
from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.telemetry import Event, record_span, span, start_telemetry
from tokenmesh.shared.telemetry.recorder import Attributes

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
ATTRIBUTES: Attributes = {
    "tokenmesh.request_id": "chatcmpl-5f0c5f0c5f0c5f0c",
    "tokenmesh.model": "demo",
    **{f"tokenmesh.number_{index}": index * 100 for index in range(6)},
}
NUM_STEPS = 128
BATCH_SIZE = 16
"""Streams that share the events of their steps."""


class Wire:
    """A bus that keeps what is published."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    async def publish_raw(self, _subject: str, data: bytes) -> None:
        """Keep what a bus would send."""
        self.sent.append(data)


def live(count: int) -> None:
    """Spans around work."""
    for _ in range(count):
        with span("place", ATTRIBUTES, parent=PARENT):
            pass


def past(count: int) -> None:
    """Spans after the fact."""
    for _ in range(count):
        record_span("worker.prefill", 10**18, 10**18 + 5, PARENT, ATTRIBUTES)


def decode(count: int) -> None:
    """Spans with 128 events, as a worker makes them for the streams of a batch."""
    for number in range(count):
        if number % BATCH_SIZE == 0:
            facts: Attributes = {"batch_size": BATCH_SIZE, "tokens": number, "kv_used": 300}
            steps = [Event("step", 10**18 + at, facts) for at in range(NUM_STEPS)]
        record_span("worker.decode", 10**18, 10**18 + 5, PARENT, ATTRIBUTES, steps)


def take_in(store: TraceStore, messages: list[bytes]) -> None:
    """The work of a gateway with what arrives from the bus."""
    for message in messages:
        store.add(message)


def cpu_us(work: Callable[[], object], count: int) -> float:
    """CPU microseconds of each of `count` items of `work`."""
    began = time.process_time()
    work()
    return (time.process_time() - began) / count * 1e6


async def measure(settings: TelemetrySettings) -> list[str]:
    """One line for each kind of span."""
    lines = [f"{'span':<22}{'off':>8}{'make':>8}{'encode':>8}{'store':>8}   us of CPU, bytes"]
    for name, make, count in (
        ("live, 8 attributes", live, 5000),
        ("past, 8 attributes", past, 5000),
        ("past, 128 events", decode, 300),
    ):
        off = cpu_us(partial(make, count), count)
        wire = Wire()
        telemetry = start_telemetry("worker", InstanceId("worker-1"), settings, wire)  # type: ignore[arg-type]
        made = cpu_us(partial(make, count), count)
        began = time.process_time()
        await telemetry.stop()
        encoded = (time.process_time() - began) / count * 1e6
        store = TraceStore(settings)
        stored = cpu_us(partial(take_in, store, wire.sent), count)
        size = sum(map(len, wire.sent)) // count
        lines.append(f"{name:<22}{off:>8.1f}{made:>8.1f}{encoded:>8.1f}{stored:>8.1f}{size:>8}")
    return lines


def main() -> None:
    """Print the table."""
    settings = TelemetrySettings(max_queued_spans=10_000, max_trace_spans=10_000)
    print("\n".join(asyncio.run(measure(settings))))


if __name__ == "__main__":
    main()
