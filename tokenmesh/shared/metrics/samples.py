"""Samples of one process as text that another process puts into its own /metrics."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from tokenmesh.shared.metrics.registry import Metrics
from tokenmesh.shared.metrics.table import Metric

_CREATED: Final = "_created"
"""When a series began, a family of its own in this format; not needed from other processes."""


class _Families(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        """See prometheus_client."""
        return self._families


def sample_lines(metrics: Metrics, table: Iterable[Metric]) -> dict[str, bytes]:
    """By name: the samples of those metrics that were measured, without the prefix of names."""
    found = {}
    for metric in table:
        families = list(metrics.families(metric.name))
        for family in families:
            family.samples = [
                sample for sample in family.samples if not sample.name.endswith(_CREATED)
            ]
        lines = _lines(generate_latest(_Families(families)), metrics.prefix.encode())
        if lines:
            found[metric.name] = lines
    return found


def _lines(text: bytes, prefix: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    return b"".join([line.removeprefix(prefix) for line in lines if not line.startswith(b"#")])


def join_samples(
    table: Iterable[Metric], sources: Iterable[Mapping[str, bytes]], prefix: str
) -> bytes:
    """What several processes have answered as one text, each metric with its head once."""
    known = list(sources)
    return b"".join([part for metric in table for part in _family(metric, known, prefix)])


def _family(metric: Metric, sources: list[Mapping[str, bytes]], prefix: str) -> Iterator[bytes]:
    blocks = [lines for source in sources if (lines := source.get(metric.name))]
    if not blocks:
        return
    name = f"{prefix}{metric.name}" + ("_total" if metric.kind == "counter" else "")
    yield f"# HELP {name} {metric.help}\n# TYPE {name} {metric.kind}\n".encode()
    start = prefix.encode()
    for block in blocks:
        yield start + block.rstrip(b"\n").replace(b"\n", b"\n" + start) + b"\n"
