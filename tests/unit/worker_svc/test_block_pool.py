"""BlockPool: eviction order, sharing, and its invariants under random use."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenmesh.engine.kv.block_pool import NULL_BLOCK, BlockPool

NUM_BLOCKS = 7


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert pool.num_free == 0
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


def test_tails_are_evicted_before_heads_and_older_requests_before_newer_ones() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(3), pool.allocate(2)
    for block in (*first, *second):
        pool.register(block, bytes([block]))
    pool.free(first)
    pool.free(second)
    assert list(pool._free) == [*reversed(first), *reversed(second)]


def test_a_block_without_content_is_evicted_first() -> None:
    pool = BlockPool(5)
    full, partial = pool.allocate(2)
    pool.register(full, b"full")
    pool.free([full, partial])
    free = list(pool._free)
    assert (free[0], free[-1]) == (partial, full)


def test_a_free_block_keeps_its_content_until_it_is_allocated_again() -> None:
    pool = BlockPool(3)
    block = pool.allocate(1)[0]
    pool.register(block, b"content")
    pool.free([block])
    assert pool.find(b"content") == block
    pool.share([block])
    assert pool.num_used == 1
    pool.free([block])
    pool.allocate(2)
    assert pool.find(b"content") is None


def test_equal_content_is_found_in_the_older_block() -> None:
    pool = BlockPool(4)
    older, newer = pool.allocate(2)
    pool.register(older, b"same")
    pool.register(newer, b"same")
    assert pool.find(b"same") == older
    pool.forget(newer)
    assert pool.find(b"same") == older


class PoolMachine(RuleBasedStateMachine):
    """Random allocation, sharing, registering and freeing against a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.content: dict[bytes, int] = {}
        self.next_hash = 0

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.num_free))
        expected = list(self.pool._free)[:count]
        blocks = self.pool.allocate(count)
        assert blocks == expected
        self.content = {key: block for key, block in self.content.items() if block not in blocks}
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for table in self.tables for block in table]))
        self.next_hash += 1
        key = self.next_hash.to_bytes(4, "little")
        self.pool.register(block, key)
        if block not in self.content.values():
            self.content[key] = block

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.content)))
        block = self.pool.find(key)
        assert block is not None
        self.pool.share([block])
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.free(self.tables.pop(index))

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.content = {}

    @invariant()
    def every_block_is_free_or_held_as_often_as_counted(self) -> None:
        held = Counter(block for table in self.tables for block in table)
        free = list(self.pool._free)
        assert len(free) == len(set(free)) == self.pool.num_free
        assert sorted([*free, *held]) == list(range(1, NUM_BLOCKS))
        assert all(self.pool.ref_count(block) == count for block, count in held.items())
        assert self.pool.ref_count(NULL_BLOCK) == 0
        assert self.pool.num_used == len(held)

    @invariant()
    def content_is_found_where_it_is(self) -> None:
        assert self.pool.num_cached == len(self.content)
        assert all(self.pool.find(key) == block for key, block in self.content.items())


PoolMachine.TestCase.settings = settings(max_examples=75)
TestPoolMachine = PoolMachine.TestCase


def test_a_block_that_was_used_before_and_holds_nothing_comes_before_a_fresh_one() -> None:
    pool = BlockPool(100)
    for _ in range(50):
        first, second = pool.allocate(3), pool.allocate(2)
        pool.free(first)
        pool.free(second)
    assert {*pool.allocate(5)} == {1, 2, 3, 4, 5}
