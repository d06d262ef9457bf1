"""Messages to one process about itself: sleep, wake up, profile, metrics."""

from typing import Literal

import msgspec

SleepMode = Literal["abort", "wait", "idle"]
WakeTag = Literal["weights", "kv_cache"]
EndedBy = Literal["asked", "steps", "time"]


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Give memory back, take no streams until WakeUp. Answered with Slept or Failed."""

    level: int = 1
    """1: KV is freed and the weights leave the GPU. 2: the weights are freed everywhere."""
    mode: SleepMode = "abort"
    """Running streams are ended with an error (abort), or waited for. With idle, and while any runs
    or is awaited, the answer is Failed."""


class Slept(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The worker sleeps; a repeated Sleep has the same answer."""

    level: int
    """May be deeper than requested."""
    freed_bytes: int = 0
    """By this command, on the device."""


class WakeUp(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Bring back parts of a sleeping worker. Answered with Woken or Failed."""

    tags: list[WakeTag]
    """None of them: only the keep-alive is set."""
    keep_alive_s: float | None = None
    """As in Generate."""


class Woken(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The parts are back; with `level` 0 the worker takes streams."""

    level: int = 0
    seconds: float = 0.0


class StartProfile(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Begin to record a trace. Answered with Done or Failed."""


class StopProfile(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """End the trace and write it, or report one that has ended by itself."""


class Profiled(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A trace was written."""

    path: str
    """On the worker's machine: Chrome's trace format, gzip."""
    num_steps: int
    seconds: float
    ended_by: EndedBy = "asked"


class ReadMetrics(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Answered with MetricsRead by the process's control actor."""


class MetricsRead(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The engine's metrics of one process."""

    lines: dict[str, bytes] = {}
    """By a metric's name in the table: its samples in Prometheus' text format, without the prefix
    of names and without comments."""
