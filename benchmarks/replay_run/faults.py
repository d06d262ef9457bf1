"""Faults at given times of the trace: a worker killed, or frozen for a while."""

import asyncio
import signal
from dataclasses import dataclass
from typing import Final

from benchmarks.chaos_run.child import Child

_KINDS: Final = ("kill", "stop")


@dataclass(frozen=True, slots=True)
class Fault:
    """`kill`: it comes back after `seconds`. `stop`: it stands still for so long."""

    at_s: float
    kind: str
    worker: int
    """Counted from 1."""
    seconds: float


def parse_fault(text: str) -> Fault:
    """SECONDS:kill|stop:WORKER[:FOR_SECONDS], in the trace's time. Raises ValueError."""
    parts = text.split(":")
    if len(parts) not in (3, 4) or parts[1] not in _KINDS:
        raise ValueError(f"{text!r} is not SECONDS:kill|stop:WORKER[:FOR_SECONDS]")
    seconds = float(parts[3]) if len(parts) == 4 else 0.0
    return Fault(float(parts[0]), parts[1], int(parts[2]), seconds)


def parse_slow(text: str) -> tuple[int, float]:
    """WORKER:FACTOR. Raises ValueError."""
    worker, colon, factor = text.partition(":")
    if not colon or float(factor) <= 0:
        raise ValueError(f"{text!r} is not WORKER:FACTOR")
    return int(worker), float(factor)


async def carry_out(fault: Fault, workers: list[Child], speed: float) -> None:
    """Wait for its time, hurt the worker, and mend it again."""
    await asyncio.sleep(fault.at_s / speed)
    child = workers[fault.worker - 1]
    if fault.kind == "stop":
        child.send(signal.SIGSTOP)
        await asyncio.sleep(fault.seconds / speed)
        child.send(signal.SIGCONT)
        return
    child.send(signal.SIGKILL)
    await child.wait_end(5.0)
    await asyncio.sleep(fault.seconds / speed)
    await child.start()
    await child.wait_ready()
