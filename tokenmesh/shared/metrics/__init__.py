"""Prometheus metrics: one table of all names, and one registry for each process."""

from tokenmesh.shared.metrics.registry import Metrics, Sample
from tokenmesh.shared.metrics.table import METRICS, Metric

__all__ = ["METRICS", "Metric", "Metrics", "Sample"]
