"""SavedStates and StateBorders: what is saved where, what gives way, and who needs what."""

import logging
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.kv_runner import KvRunner
from tokenmesh.engine.kv.make_cache import has_prefix_cache, make_cache
from tokenmesh.engine.kv.saved_states import SavedStates, StateBorders
from tokenmesh.shared.config.worker import WorkerSettings

CHAIN = [bytes([at]) * 16 for at in range(9)]
OTHER = [*CHAIN[:3], b"x" * 16]


@pytest.fixture
def states() -> SavedStates:
    return SavedStates(2, StateBorders.of(16, 16, 2), needs_blocks=True)


def test_a_state_can_be_found_when_the_step_that_saves_it_was_scheduled(
    states: SavedStates,
) -> None:
    states.save(5, CHAIN[:2])
    assert states.find(CHAIN[1]) is None
    assert states.knows(CHAIN[1])
    (saved,) = states.take_saved()
    assert (saved.row, saved.key) == (5, CHAIN[1])
    assert states.find(CHAIN[1]) is saved
    assert states.find(CHAIN[0]) is None
    assert states.take_saved() == []


def test_what_was_found_least_recently_gives_way(states: SavedStates) -> None:
    states.save(0, CHAIN[:2])
    states.save(1, CHAIN[:4])
    first, second = states.take_saved()
    states.use(first)
    assert states.save(2, OTHER) == ([2, 3], [CHAIN[3], CHAIN[2]])
    (third,) = states.take_saved()
    assert third.slot == second.slot
    assert states.find(CHAIN[3]) is None
    assert [states.reaches(each) for each in CHAIN[:5]] == [True, True, True, False, False]


def test_a_block_that_goes_takes_all_states_along_that_need_it(states: SavedStates) -> None:
    states.save(0, CHAIN[:2])
    states.save(0, CHAIN[:4])
    states.take_saved()
    assert states.forget_block(CHAIN[4]) == []
    assert set(states.forget_block(CHAIN[1])) == set(CHAIN[:4])
    assert len(states) == 0
    assert not any(map(states.reaches, CHAIN))


def test_a_state_that_was_replaced_is_not_dropped_in_the_place_of_the_new_one(
    states: SavedStates,
) -> None:
    states.save(0, CHAIN[:2])
    (first,) = states.take_saved()
    assert states.drop(first) == [CHAIN[1], CHAIN[0]]
    states.save(0, CHAIN[:2])
    (again,) = states.take_saved()
    assert states.drop(first) == []
    assert states.find(CHAIN[1]) is again


def test_a_slot_is_written_once_a_step(states: SavedStates) -> None:
    for length in (1, 2, 3):
        states.save(length, CHAIN[:length])
    saved = states.take_saved()
    assert [each.row for each in saved] == [2, 3]
    assert len({each.slot for each in saved}) == 2


def test_borders_are_the_last_where_prompts_part_and_at_equal_distances() -> None:
    borders = StateBorders.of(256, 16, 64)
    assert borders == StateBorders(unit=64, interval=256, most_regular=8)
    at, found = 0, []
    while (border := borders.after(at, 1200, 1000)) is not None:
        found.append(at := border)
    # no regular one near the last
    assert found == [256, 512, 768, 960, 1152]
    # one that ends at a border leaves its last token to compute
    assert borders.after(0, 256, 0) is None
    assert borders.after(0, 257, 0) == 256
    # too short to be worth a step
    assert borders.after(0, 200, 128) is None
    assert StateBorders.of(256, 16, 64).after(0, 100_000, 0) == 16_384


@given(
    interval=st.integers(1, 600),
    block_size=st.sampled_from([1, 3, 16, 48, 1024]),
    num_slots=st.integers(1, 600),
    num_known=st.integers(1, 20_000),
    num_matched=st.integers(0, 20_000),
    budget=st.integers(1, 3000),
)
def test_chunks_go_through_a_prompt_and_hit_every_border(
    interval: int, block_size: int, num_slots: int, num_known: int, num_matched: int, budget: int
) -> None:
    borders = StateBorders.of(interval, block_size, num_slots)
    assert borders.unit % block_size == 0
    assert borders.interval % borders.unit == 0
    start, hit = 0, []
    while start < num_known:
        wanted = min(budget, num_known - start)
        num_tokens = borders.cut(wanted, start, num_known, num_matched)
        assert 1 <= num_tokens <= wanted
        if borders.after(start, num_known, num_matched) == start + num_tokens:
            hit.append(start + num_tokens)
        start += num_tokens
    expected, at = [], 0
    while (border := borders.after(at, num_known, num_matched)) is not None:
        expected.append(at := border)
    assert hit == expected
    assert all(each % borders.unit == 0 and borders.interval <= each < num_known for each in hit)
    assert len(hit) <= borders.most_regular + 2


def test_where_no_state_can_be_saved_there_is_no_prefix_cache_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    worker = WorkerSettings()
    for has_states, num_saved, is_cached in ((False, 0, True), (True, 4, True), (True, 0, False)):
        runner = KvRunner(worker, 8, Random(0), 0, 0, num_saved_states=num_saved)
        runner.has_states = has_states
        caplog.clear()
        make_cache(worker, runner, 0, None)
        assert has_prefix_cache(worker, runner) == is_cached
        assert ("no prefix cache" in caplog.text) != is_cached
    off = WorkerSettings(enable_prefix_caching=False)
    assert not has_prefix_cache(off, KvRunner(off, 8, Random(0), 0, 0, num_saved_states=4))
