"""Reads how late the gateway's event loop was from its metrics before and after."""

import re
from dataclasses import dataclass
from math import inf
from typing import Final

_BUCKET: Final = re.compile(
    r'^tokenmesh:event_loop_lag_seconds_bucket\{le="([^"]{1,32})"\} ([0-9.e+]{1,32})$', re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class LagBuckets:
    """Observations up to each bound, in seconds."""

    counts: dict[float, float]

    def since(self, before: "LagBuckets") -> "LagBuckets":
        """Return the counts that were added since another reading."""
        return LagBuckets({le: num - before.counts.get(le, 0.0) for le, num in self.counts.items()})

    def at(self, share: float) -> float:
        """The least bound that this share of the observations is within; 0 of none."""
        wanted = share * self.counts.get(inf, 0.0)
        return min((le for le, num in self.counts.items() if num >= wanted > 0), default=0.0)


def lag_buckets(metrics: str) -> LagBuckets:
    """Read the buckets of a gateway's `/metrics`. Raises ValueError where it has none."""
    found = {float(le): float(num) for le, num in _BUCKET.findall(metrics)}
    if not found:
        raise ValueError("the gateway's metrics have no event_loop_lag_seconds")
    return LagBuckets(found)
