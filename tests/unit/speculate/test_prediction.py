"""Prediction: it follows an answer through what was changed, and costs the same everywhere."""

from random import Random
from time import thread_time

import pytest

from tokenmesh.engine.speculate.prediction import Prediction

PROMPT = [1, 2, 3]


def accepted(predicted: list[int], answer: list[int], limit: int = 8) -> tuple[int, int]:
    """Return how many tokens of the answer are drafted before it has them, and how many in vain."""
    prediction, num_right, num_wrong, known = Prediction(predicted, len(PROMPT)), 0, 0, 1
    while known < len(answer):
        offer = prediction.offer(PROMPT + answer[:known], limit)
        drafts = offer[1] if offer else []
        right = 0
        while right < min(len(drafts), len(answer) - known) and (
            drafts[right] == answer[known + right]
        ):
            right += 1
        num_right += right
        num_wrong += len(drafts) - right
        known += right + 1
    return num_right, num_wrong


@pytest.mark.parametrize("vocabulary", [30, 5000])
def test_an_answer_with_a_few_changes_is_drafted_but_for_those(vocabulary: int) -> None:
    rng = Random(vocabulary)
    text = [rng.randrange(vocabulary) for _ in range(600)]
    replaced, inserted, shorter = list(text), list(text), list(text)
    for place in (50, 51, 52, 300):
        replaced[place] = vocabulary + place
    inserted[200:200] = range(vocabulary, vocabulary + 20)
    del shorter[100:120]
    for answer in (text, replaced, inserted, shorter):
        num_right, num_wrong = accepted(text, answer)
        # each step draws a token that was not drafted
        assert num_right > 0.85 * len(answer)
        assert num_wrong < 100


def test_parts_that_moved_are_found_where_they_were() -> None:
    rng = Random(1)
    text = [rng.randrange(5000) for _ in range(3000)]
    assert accepted(text, text[2000:] + text[:2000])[0] > 2500


def test_an_answer_of_its_own_has_few_drafts() -> None:
    rng = Random(2)
    text, other = ([rng.randrange(5000) for _ in range(500)] for _ in range(2))
    num_right, num_wrong = accepted(text, other)
    assert num_right < 5
    assert num_wrong < 200


def test_nothing_is_offered_behind_the_end() -> None:
    prediction = Prediction([5, 6], len(PROMPT))
    assert prediction.offer([*PROMPT, 5], 4) == ((1, 9), [6])
    assert prediction.offer([*PROMPT, 5, 6], 4) is None
    assert Prediction([], 3).offer([*PROMPT, 5], 4) is None


def test_a_long_prediction_costs_no_more_a_token_than_a_short_one() -> None:
    costs = []
    for length in (1000, 100_000):
        text = [each * 7919 % 30_000 for each in range(length)]
        prediction, stream = Prediction(text, 1), [0]
        for _ in range(length // 2048 + 2):
            prediction.offer(stream, 8)
        best = float("inf")
        for _ in range(5):
            started = thread_time()
            for step in range(200):
                stream.append(text[step] if step % 3 else -1)
                prediction.offer(stream, 8)
            best = min(best, thread_time() - started)
        costs.append(best / 200)
    assert costs[1] < 3 * costs[0]
