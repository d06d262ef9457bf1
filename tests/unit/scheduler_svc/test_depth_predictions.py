"""DepthPredictions: the blocks that most workers held of the last prompt that began alike."""

from tokenmesh.services.scheduler_svc.index import placement_index
from tokenmesh.services.scheduler_svc.index.placement_index import DepthPredictions


def test_the_median_counts_not_the_worker_with_the_conversation() -> None:
    known = DepthPredictions()
    known.record(b"12345678abcdefgh", [64, 64, 900, 64])
    assert known.of(b"12345678ijklmnop") == 64
    assert known.of(b"87654321") == 0
    assert known.of(b"") == 0


def test_a_prompt_that_no_worker_holds_has_no_prediction() -> None:
    known = DepthPredictions()
    known.record(b"12345678", [5])
    known.record(b"12345678", [0])
    assert known.of(b"12345678") == 0


def test_the_oldest_predictions_are_dropped() -> None:
    known, limit = DepthPredictions(), placement_index._MAX_PROMPTS
    for number in range(limit + 3):
        known.record(number.to_bytes(8, "little"), [1])
        known.record(number.to_bytes(8, "little"), [2])
    assert [known.of(number.to_bytes(8, "little")) for number in (0, 2, 3)] == [0, 0, 2]
    assert len(known._depths) == limit
