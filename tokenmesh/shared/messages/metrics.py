"""The conversation about a process's metrics, for those who scrape only gateways."""

import msgspec


class ReadMetrics(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Answered with MetricsRead by the process's control actor."""


class MetricsRead(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The engine's metrics of one process."""

    lines: dict[str, bytes] = {}
    """By a metric's name in the table: its samples in Prometheus' text format, without the prefix
    of names and without comments."""
