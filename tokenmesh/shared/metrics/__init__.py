"""Prometheus metrics: one table of all names, and one registry for each process."""

from tokenmesh.shared.metrics.registry import Metrics
from tokenmesh.shared.metrics.table import METRICS, Metric

__all__ = ["METRICS", "Metric", "Metrics"]
