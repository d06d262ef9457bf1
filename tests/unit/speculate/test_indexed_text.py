"""IndexedText: it finds what a search through the whole text finds, at the same cost everywhere."""

from array import array
from collections.abc import Sequence
from random import Random
from time import thread_time

import pytest

from tokenmesh.engine.speculate.indexed_text import CHUNK, IndexedText, Match


def searched(text: Sequence[int], tail: Sequence[int], lengths: Sequence[int]) -> int:
    """The last end of the longest run that `tail` ends with; the end of the text does not count."""
    for length in sorted(lengths, reverse=True):
        for end in range(len(text) - 1, length - 1, -1):
            if len(tail) >= length and text[end - length : end] == tail[-length:]:
                return end
    return 0


def updated(text: IndexedText) -> IndexedText:
    while not text.update():
        pass
    return text


@pytest.mark.parametrize("seed", range(12))
def test_a_match_is_what_a_search_through_the_text_finds(seed: int) -> None:
    rng = Random(seed)
    lengths = rng.sample(range(1, 9), rng.randint(1, 4))
    vocabulary = rng.choice([2, 5, 40, 100_000])
    text = [rng.randrange(vocabulary) for _ in range(rng.choice([0, 1, 5, 300, 3 * CHUNK]))]
    other = array("i", text[:500])
    own, foreign = IndexedText(text, lengths), updated(IndexedText(other, lengths))
    for _ in range(20):
        match = updated(own).find(text, 64)
        assert (match.end if match else 0) == searched(text, text, lengths)
        if match is not None:
            length, end = match.length, match.end
            assert text[end - length : end] == text[-length:]
            assert length == 64 or length == end or text[end - length - 1] != text[-length - 1]
        tail = array("i", text[-9:])
        match = foreign.find(tail, 64)
        assert (match.end if match else 0) == searched(other, tail, lengths)
        text += [rng.randrange(vocabulary) for _ in range(rng.randint(1, 40))]


def test_a_loop_is_continued_beyond_the_end_of_the_text() -> None:
    text = IndexedText([7, 8, 9, 1, 2, 3, 1, 2, 3], [2])
    text.update()
    match = text.find(text.ids, 9)
    assert match == Match(6, 3)
    assert text.after(match.end, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_one_call_indexes_no_more_than_a_chunk_of_a_long_prompt() -> None:
    text = IndexedText(list(range(5 * CHUNK)), [2, 3])
    num_calls = 1
    while not text.update():
        num_calls += 1
    assert num_calls == 5


def test_the_memory_of_an_index_is_at_most_twelve_bytes_a_token_and_length() -> None:
    for num_tokens in (3_000, 70_000):
        text = updated(IndexedText(list(range(num_tokens)), [2, 3, 4, 5]))
        assert 0 < text.num_bytes <= 12 * 4 * num_tokens


def test_a_token_costs_the_same_in_a_long_text() -> None:
    rng = Random(3)

    def cost_s(num_tokens: int) -> float:
        ids = [rng.randrange(3000) for _ in range(num_tokens)]
        text = updated(IndexedText(ids, [2, 3, 4, 5]))
        costs = []
        for _ in range(400):
            ids.append(rng.randrange(3000))
            start_s = thread_time()
            text.update()
            text.find(ids, 24)
            costs.append(thread_time() - start_s)
        return sorted(costs)[len(costs) // 4]

    assert cost_s(100_000) < 3 * cost_s(1_000)
