"""The shape of `results/peers.json` and `results/overhead.json`."""

from collections.abc import Callable
from statistics import median

import msgspec

from benchmarks.engine_results import BoundLine
from benchmarks.peers.sample import Sample


class ModelResult(msgspec.Struct):
    """One model, all peers, taken in turns."""

    name: str
    title: str
    weight_bytes: int
    """Read once for every decode step at least."""
    bounds: list[BoundLine] = []
    """One a round."""
    rounds: dict[int, dict[str, list[Sample]]] = {}
    """By number of streams, then by peer."""
    missing: dict[str, str] = {}
    """Peers that were asked for and could not be measured to the end, and why."""

    @property
    def bound_share(self) -> float | None:
        """The share of the memory's speed that a decode step reaches, median of the rounds."""
        return median(bound.share for bound in self.bounds) if self.bounds else None

    def best(self, streams: int, peer: str) -> Sample | None:
        """The round with the most tokens a second; None when the peer was not measured."""
        samples = self.rounds.get(streams, {}).get(peer)
        return max(samples, key=lambda sample: sample.tokens_per_s) if samples else None

    @property
    def added_ttft_ms(self) -> float | None:
        """Median time to the first token of one stream: the mesh's less its engine's."""
        both = self._medians(1, lambda sample: sample.ttft_p50_ms)
        return both and both[0] - both[1]

    @property
    def round_trip_ms(self) -> float | None:
        """Median of a bare round trip over NATS in the same run, all processes asleep before it."""
        return self._first_ms("bus")

    @property
    def warm_round_trip_ms(self) -> float | None:
        """Median of one right after others."""
        return self._first_ms("warm-bus")

    def client_share(self, streams: int) -> float:
        """Median share of all cores' time that the mesh's client took."""
        samples = self.rounds.get(streams, {}).get("mesh")
        return median(sample.client_share for sample in samples) if samples else 0.0

    def _first_ms(self, peer: str) -> float | None:
        samples = self.rounds.get(1, {}).get(peer)
        return median(sample.ttft_p50_ms for sample in samples) if samples else None

    def lost_throughput(self, streams: int) -> float | None:
        """Share of its engine's tokens a second that the mesh does not deliver, by medians."""
        both = self._medians(streams, lambda sample: sample.tokens_per_s)
        return both and 1 - both[0] / both[1]

    def _medians(
        self, streams: int, number: Callable[[Sample], float]
    ) -> tuple[float, float] | None:
        by_peer = self.rounds.get(streams, {})
        if "mesh" not in by_peer or "engine" not in by_peer:
            return None
        mesh, engine = (median(map(number, by_peer[name])) for name in ("mesh", "engine"))
        return mesh, engine


class PeersResult(msgspec.Struct):
    """A run."""

    config: dict[str, object]
    environment: dict[str, object]
    """From its start."""
    load_average_end: float
    client_priority: str
    versions: dict[str, str]
    models: list[ModelResult]
