"""A worker beats early when many streams have ended, and not too often."""

from tokenmesh.services.worker_svc.load import EarlyHeartbeats
from tokenmesh.shared.config.worker import WorkerSettings

SETTINGS = WorkerSettings(max_num_seqs=16, early_beat_share=0.25, early_beat_interval_s=0.1)


def test_enough_ended_streams_are_worth_a_beat() -> None:
    pace = EarlyHeartbeats(SETTINGS)
    assert [pace.is_due(1, 1.0 + at) for at in range(4)] == [False, False, False, True]
    assert not pace.is_due(0, 9.0)


def test_two_early_beats_keep_their_distance() -> None:
    pace = EarlyHeartbeats(SETTINGS)
    assert pace.is_due(4, 1.0)
    assert not pace.is_due(4, 1.05)
    assert pace.is_due(0, 1.11)


def test_a_worker_of_one_stream_beats_for_each() -> None:
    pace = EarlyHeartbeats(SETTINGS.model_copy(update={"max_num_seqs": 1}))
    assert pace.is_due(1, 1.0)
