"""Metrics: the metrics of one process, as text for Prometheus and for other processes.

There is no global registry: code that measures receives a `Metrics`, and a test makes its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from tokenmesh.shared.metrics.table import METRICS, PREFIX, Metric

_OPEN_METRICS: Final = "application/openmetrics-text"
_encode_open: Final = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
"""All our names are valid as they are; the default escaping replaces colons, in samples only."""
_END: Final = b"# EOF\n"
_METRIC_BY_NAME: Final = {metric.name: metric for metric in METRICS}

_Made = Counter | Gauge | Histogram
OtherMetrics = Callable[[bool], bytes]
"""Metrics of other processes as text; its argument: whether as OpenMetrics."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One number at the time of a scrape."""

    name: str
    labels: Mapping[str, str]
    value: float


class Metrics:
    """Counters, gauges and histograms by their name in the table, without the prefix.

    A name that is not in the table, or other labels than the table's, are a mistake in the code:
    KeyError or ValueError. Keep what `counter` and the others return where it is used often.
    """

    def __init__(self, prefix: str = PREFIX) -> None:
        """`prefix`: what names begin with, before a colon."""
        self.prefix = f"{prefix}:"
        self.registry = CollectorRegistry()
        self._made: dict[str, _Made] = {}
        self._series: dict[str, dict[tuple[tuple[str, str], ...], _Made]] = {}
        """By name and labels as they were given: finding a series in prometheus_client is slow."""

    def counter(self, name: str, **labels: str) -> Counter:
        made = self._find(name, labels)
        assert isinstance(made, Counter), f"{name} is not a counter"
        return made

    def gauge(self, name: str, **labels: str) -> Gauge:
        """Goes up and down: `.set(3)`."""
        made = self._find(name, labels)
        assert isinstance(made, Gauge), f"{name} is not a gauge"
        return made

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Counts in buckets: `.observe(0.3)`."""
        made = self._find(name, labels)
        assert isinstance(made, Histogram), f"{name} is not a histogram"
        return made

    def forget(self, name: str, **labels: str) -> None:
        """Remove the series with these labels: the instance is dead."""
        self._series.pop(name, None)
        self._get(name).remove(*(labels[label] for label in _METRIC_BY_NAME[name].labels))

    def gauge_of(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """A gauge that is read when it is scraped."""
        self.gauge(name, **labels).set_function(read)

    def watch(self, names: tuple[str, ...], read: Callable[[], Iterable[Sample]]) -> None:
        """Gauges and counters whose label values come and go: read at each scrape."""
        self.registry.register(_Watched(self.prefix, names, read))

    def watch_process(self) -> None:
        """Add memory, CPU and garbage collection of this process."""
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def families(self, name: str) -> Iterable[Family]:
        """Yield the measured values of one metric; nothing before it is made.

        Not for `watch`ed ones.
        """
        made = self._made.get(name)
        return () if made is None else made.collect()

    def render(self) -> bytes:
        """The text that Prometheus scrapes, without exemplars."""
        return generate_latest(self.registry)

    def render_with(self, others: OtherMetrics, accept: str) -> tuple[bytes, str]:
        """The text of this process and others, and its media type.

        `accept`: the header of the scrape. OpenMetrics has exemplars, Prometheus prefers it.
        """
        if _OPEN_METRICS not in accept:
            return self.render() + others(False), CONTENT_TYPE_PLAIN_0_0_4
        text: bytes = _encode_open(self.registry)
        return text.removesuffix(_END) + others(True) + _END, openmetrics.CONTENT_TYPE_LATEST

    def _find(self, name: str, labels: dict[str, str]) -> _Made:
        if not labels:
            return self._get(name)
        series, key = self._series.setdefault(name, {}), tuple(labels.items())
        found = series.get(key)
        if found is None:
            found = series[key] = self._get(name).labels(**labels)
        return found

    def _get(self, name: str) -> _Made:
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self._make(_METRIC_BY_NAME[name])
        return made

    def _make(self, metric: Metric) -> _Made:
        full_name = self.prefix + metric.name
        if metric.kind == "counter":
            return Counter(full_name, metric.help, metric.labels, registry=self.registry)
        if metric.kind == "gauge":
            return Gauge(full_name, metric.help, metric.labels, registry=self.registry)
        return Histogram(
            full_name,
            metric.help,
            metric.labels,
            registry=self.registry,
            buckets=metric.buckets,
        )


class _Watched(Collector):
    def __init__(
        self, prefix: str, names: tuple[str, ...], read: Callable[[], Iterable[Sample]]
    ) -> None:
        self._prefix = prefix
        self._metrics = [_METRIC_BY_NAME[name] for name in names]
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        families = {
            metric.name: (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
                self._prefix + metric.name, metric.help, labels=metric.labels
            )
            for metric in self._metrics
        }
        labels = {metric.name: metric.labels for metric in self._metrics}
        for sample in self._read():
            values = [sample.labels[label] for label in labels[sample.name]]
            families[sample.name].add_metric(values, sample.value)
        yield from families.values()


_CREATED: Final = "_created"
"""When a series began, a family of its own in this format; not needed from other processes."""


class _Families(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
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
    table: Iterable[Metric],
    sources: Iterable[Mapping[str, bytes]],
    prefix: str,
    is_open: bool = False,
) -> bytes:
    """Join the answers of several processes to one text, each metric with its head once.

    `is_open`: for OpenMetrics, where the head of a counter has no suffix.
    """
    known, suffix = list(sources), "" if is_open else "_total"
    return b"".join([part for metric in table for part in _family(metric, known, prefix, suffix)])


def _family(
    metric: Metric, sources: list[Mapping[str, bytes]], prefix: str, suffix: str
) -> Iterator[bytes]:
    blocks = [lines for source in sources if (lines := source.get(metric.name))]
    if not blocks:
        return
    name = f"{prefix}{metric.name}" + (suffix if metric.kind == "counter" else "")
    yield f"# HELP {name} {metric.help}\n# TYPE {name} {metric.kind}\n".encode()
    start = prefix.encode()
    for block in blocks:
        yield start + block.rstrip(b"\n").replace(b"\n", b"\n" + start) + b"\n"
