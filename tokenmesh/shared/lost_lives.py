"""LostLives: the last heartbeats of processes that have fallen silent without a farewell."""

from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.messages import Heartbeat


class LostLives:
    """By instance and epoch; the oldest go first. Times are monotonic."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lives: dict[tuple[InstanceId, int], tuple[Heartbeat, float]] = {}

    def note_loss(self, last: Heartbeat, seen_s: float) -> None:
        """A process is no longer heard, or has begun a new life; it was heard last at `seen_s`."""
        if len(self._lives) >= self._limit:
            del self._lives[next(iter(self._lives))]
        self._lives[last.instance_id, last.epoch] = last, seen_s

    def note_beat(self, beat: Heartbeat) -> None:
        """A process lives after all."""
        self._lives.pop((beat.instance_id, beat.epoch), None)

    def last_beat(self, instance: InstanceId, epoch: int) -> Heartbeat | None:
        """None for a life that is not known to be lost."""
        found = self._lives.get((instance, epoch))
        return None if found is None else found[0]

    def is_any_since(self, service: str, time_s: float) -> bool:
        """Return whether a process was lost that was still heard at that time or later."""
        return any(
            last.service == service and seen_s >= time_s for last, seen_s in self._lives.values()
        )
