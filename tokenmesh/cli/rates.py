"""MeshRates: what the mesh does per second, from counters that are read again and again."""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

WINDOW_S: Final = 10.0
"""Over which rates and percentiles are taken."""
HISTORY: Final = 40
"""Values of the sparkline."""
_BARS: Final = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_SAMPLE: Final = re.compile(r"^\w++:(\w++)\{(.*)\} (\S+)$", re.MULTILINE)
"""A line of Prometheus' text format: name without its prefix, labels, value."""
_LABEL: Final = re.compile(r'(?<!\w)(\w++)="([^"]*+)"')
_TTFT: Final = "time_to_first_token_seconds_bucket"
_HTTP: Final = "http_requests_total"


@dataclass(frozen=True)
class Counts:
    """Counters at one moment."""

    at_s: float
    decode_tokens: int
    prefill_tokens: int
    requests: float | None = None
    """Requests of the gateway that was read, as the two below; None: its metrics cannot be read."""
    errors: float = 0.0
    ttft: tuple[tuple[float, float], ...] = ()
    """Upper border in seconds and requests up to it, by border."""


def read_counts(at_s: float, mesh: Mapping[str, Any], metrics: str | None) -> Counts:
    """`mesh`: the answer of GET /mesh; `metrics`: that of GET /metrics, None without access."""
    loads = [each["load"] or {} for each in mesh["processes"]]
    decode = sum(int(load.get("decode_tokens", 0)) for load in loads)
    prefill = sum(int(load.get("prefill_tokens", 0)) for load in loads)
    if metrics is None:
        return Counts(at_s, decode, prefill)
    requests = errors = 0.0
    ttft: dict[float, float] = {}
    for name, texts, value in _SAMPLE.findall(metrics):
        labels = dict(_LABEL.findall(texts))
        if name == _TTFT:
            border = float(labels["le"])
            ttft[border] = ttft.get(border, 0.0) + float(value)
        elif name == _HTTP and labels["method"] == "POST":  # others read, as `top` itself does
            requests += float(value)
            errors += float(value) if labels["status"].startswith("5") else 0.0
    return Counts(at_s, decode, prefill, requests, errors, tuple(sorted(ttft.items())))


class MeshRates:
    """Keeps the counts of the last seconds and compares the newest with the oldest."""

    def __init__(self) -> None:
        self._counts: deque[Counts] = deque()
        self._history: deque[float] = deque(maxlen=HISTORY)

    def add(self, counts: Counts) -> None:
        """Take in the counters of now. Smaller ones than before mean that a process has left."""
        if self._counts:
            before = self._counts[-1]
            if counts.decode_tokens < before.decode_tokens or (counts.requests or 0.0) < (
                before.requests or 0.0
            ):
                self._counts.clear()
            else:
                seconds = max(counts.at_s - before.at_s, 1e-9)
                self._history.append((counts.decode_tokens - before.decode_tokens) / seconds)
        self._counts.append(counts)
        while counts.at_s - self._counts[0].at_s > WINDOW_S:
            self._counts.popleft()

    def summary(self) -> str:
        """One line for the head of the screen; empty before two counts are there."""
        if len(self._counts) < 2:
            return ""
        first, last = self._counts[0], self._counts[-1]
        seconds = last.at_s - first.at_s
        decode = (last.decode_tokens - first.decode_tokens) / seconds
        prefill = (last.prefill_tokens - first.prefill_tokens) / seconds
        parts = [
            f"{decode:.0f} tokens/s {sparkline(self._history)}",
            f"{prefill:.0f} prompt tokens/s",
        ]
        if last.requests is None or first.requests is None:
            return "   ".join(parts)
        parts.append(f"{(last.requests - first.requests) / seconds:.1f} requests/s")
        before = dict(first.ttft)
        added = [(border, count - before.get(border, 0.0)) for border, count in last.ttft]
        shown = [f"p{share * 100:.0f} {_ms(quantile(added, share))}" for share in (0.5, 0.95)]
        parts.append(f"TTFT {' '.join(shown)}")
        parts.append(f"{last.errors - first.errors:.0f} errors")
        return "   ".join(parts)


def quantile(buckets: list[tuple[float, float]], share: float) -> float | None:
    """By linear interpolation within a bucket, as Prometheus does; None: nothing was counted.

    `buckets`: upper border and count up to it, by border, the last one infinite.
    """
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    wanted = share * total
    for (low, below), (high, count) in pairwise([(0.0, 0.0), *buckets]):
        if count >= wanted:
            if high == float("inf"):
                return low
            return low + (high - low) * (wanted - below) / max(count - below, 1e-9)
    return None


def sparkline(values: "deque[float] | list[float]") -> str:
    """A bar for each value; the largest one has the full height."""
    top = max(values, default=0.0)
    if top <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(int(value / top * len(_BARS)), len(_BARS) - 1)] for value in values)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"
