"""BeatPace: when a worker should beat before its time.

Schedulers count what they place on a worker until its next beat. Where streams are short, many end
between two regular beats, and a worker with room would look full.
"""

from tokenmesh.shared.config.worker import WorkerSettings


class BeatPace:
    """Counts ended streams since the last early beat. Times are monotonic seconds."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._enough = max(1, int(settings.max_num_seqs * settings.early_beat_share))
        self._interval_s = settings.early_beat_interval_s
        self._num_ended = 0
        self._beat_at = 0.0

    def is_due(self, num_ended: int, now: float) -> bool:
        """Whether to beat now, after `num_ended` more streams have ended."""
        self._num_ended += num_ended
        if self._num_ended < self._enough or now - self._beat_at < self._interval_s:
            return False
        self._num_ended = 0
        self._beat_at = now
        return True
