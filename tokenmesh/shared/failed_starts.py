"""FailedStarts: which models a service fails to load again and again."""

from typing import Final

from tokenmesh.shared.ids import InstanceId, ModelName
from tokenmesh.shared.messages import Heartbeat

_MAX_FAILED_STARTS: Final = 3
_FAILED_START_MEMORY_S: Final = 3600.0
"""A model that failed so often in this time is not waited for; later it may be repaired."""


class FailedStarts:
    """Lives of processes that ended while they loaded their models, by instance and epoch."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lives: dict[tuple[InstanceId, int], tuple[Heartbeat, float]] = {}

    def note_end(self, last: Heartbeat, now: float) -> None:
        """A process has left, fell silent or began a new life; `last`: what it said before."""
        if not last.starts:
            return
        if len(self._lives) >= self._limit:
            del self._lives[next(iter(self._lives))]
        self._lives[last.instance_id, last.epoch] = last, now

    def note_beat(self, beat: Heartbeat, before: Heartbeat | None) -> None:
        """A process lives; `before`: what it last said in this life, where that is known."""
        was_silent = self._lives.pop((beat.instance_id, beat.epoch), None)
        before = before if was_silent is None else was_silent[0]
        if before is None or not before.starts or beat.starts:
            return
        loaded = set(before.starts)
        self._lives = {
            life: (last, at_s)
            for life, (last, at_s) in self._lives.items()
            if last.service != beat.service or loaded.isdisjoint(last.starts)
        }

    def are_many(self, service: str, model: ModelName, now: float) -> bool:
        """Return whether loads of the model have failed so often that the next will fail."""
        ends = (at_s for last, at_s in self._lives.values() if _loads(last, service, model))
        return sum(now - at_s < _FAILED_START_MEMORY_S for at_s in ends) >= _MAX_FAILED_STARTS


def _loads(beat: Heartbeat, service: str, model: ModelName) -> bool:
    return beat.service == service and model in beat.starts
