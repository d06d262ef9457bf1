"""Metrics: the metrics of one process, in a registry of their own.

There is no global one: whoever measures is given a `Metrics`, and a test makes its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
from prometheus_client.registry import Collector

from tokenmesh.shared.metrics.table import METRICS, PREFIX, Metric

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

_METRIC_BY_NAME: Final = {metric.name: metric for metric in METRICS}


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
        self._made: dict[str, Counter | Gauge | Histogram] = {}

    def counter(self, name: str, **labels: str) -> Counter:
        """Goes up: `.inc(3)`."""
        made = self._get(name)
        assert isinstance(made, Counter), f"{name} is no counter"
        return made.labels(**labels) if labels else made

    def gauge(self, name: str, **labels: str) -> Gauge:
        """Goes up and down: `.set(3)`."""
        made = self._get(name)
        assert isinstance(made, Gauge), f"{name} is no gauge"
        return made.labels(**labels) if labels else made

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Counts in buckets: `.observe(0.3)`."""
        made = self._get(name)
        assert isinstance(made, Histogram), f"{name} is no histogram"
        return made.labels(**labels) if labels else made

    def forget(self, name: str, **labels: str) -> None:
        """Show what was made with these labels no more: whom it told of is gone."""
        self._get(name).remove(*(labels[label] for label in _METRIC_BY_NAME[name].labels))

    def gauge_of(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """A gauge that is read when it is scraped."""
        self.gauge(name, **labels).set_function(read)

    def watch(self, names: tuple[str, ...], read: Callable[[], Iterable[Sample]]) -> None:
        """Gauges and counters whose label values come and go: asked for at each scrape."""
        self.registry.register(_Watched(self.prefix, names, read))

    def watch_process(self) -> None:
        """Add memory, CPU and garbage collection of this process."""
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def families(self, name: str) -> Iterable[Family]:
        """What was measured of one metric; nothing before it is made. Not for `watch`ed ones."""
        made = self._made.get(name)
        return () if made is None else made.collect()

    def render(self) -> bytes:
        """The text that Prometheus scrapes; its media type is `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def _get(self, name: str) -> Counter | Gauge | Histogram:
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self._make(_METRIC_BY_NAME[name])
        return made

    def _make(self, metric: Metric) -> Counter | Gauge | Histogram:
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
    """What `Metrics.watch` adds."""

    def __init__(
        self, prefix: str, names: tuple[str, ...], read: Callable[[], Iterable[Sample]]
    ) -> None:
        self._prefix = prefix
        self._metrics = [_METRIC_BY_NAME[name] for name in names]
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """See prometheus_client."""
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
