"""Prometheus metrics: one table of all names, and one registry for each process."""

from tokenmesh.shared.metrics.registry import Metrics, Sample, join_samples, sample_lines
from tokenmesh.shared.metrics.table import ENGINE_METRICS, METRICS, Metric

__all__ = [
    "ENGINE_METRICS",
    "METRICS",
    "Metric",
    "Metrics",
    "Sample",
    "join_samples",
    "sample_lines",
]
