"""HostTier: order of eviction, and what must hold whatever steps, loads and failures do."""

from collections import deque
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tokenmesh.engine.kv.block_pool import BlockPool
from tokenmesh.engine.kv.host_tier import HostTier

ALL = 1000


def pool_with(*keys: bytes) -> tuple[BlockPool, list[int]]:
    """A pool with held blocks of these contents."""
    pool = BlockPool(len(keys) + 2)
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
    return pool, blocks


def save_now(tier: HostTier, pool: BlockPool, step: int, *keys: bytes) -> list[tuple[int, int]]:
    """Save blocks in one step, which lands."""
    for key in keys:
        block = pool.find(key)
        assert block is not None
        tier.save(key, block)
    saves = tier.take_saves(step, pool, ALL)
    tier.landed(step)
    return saves


def test_an_image_is_found_once_the_step_that_saves_it_has_landed() -> None:
    pool, blocks = pool_with(b"a", b"b")
    tier = HostTier(4)
    tier.save(b"a", blocks[0])
    tier.save(b"b", blocks[1])
    saves = dict(tier.take_saves(1, pool, ALL))
    assert tier.find(b"a") is None
    assert sorted(tier.landed(1)) == [b"a", b"b"]
    assert [tier.find(b"a"), tier.find(b"b")] == [saves[block] for block in blocks]


def test_a_step_saves_no_more_than_it_may_and_the_next_one_goes_on() -> None:
    pool, blocks = pool_with(b"a", b"b", b"c")
    tier = HostTier(4)
    for key, block in zip((b"a", b"b", b"c"), blocks, strict=True):
        tier.save(key, block)
    assert [block for block, _ in tier.take_saves(1, pool, 2)] == blocks[:2]
    assert [block for block, _ in tier.take_saves(2, pool, 2)] == blocks[2:]


def test_a_block_whose_content_is_gone_is_not_saved() -> None:
    pool, blocks = pool_with(b"a")
    tier = HostTier(4)
    tier.save(b"a", blocks[0])
    pool.forget(blocks[0])
    pool.register(blocks[0], b"other")
    assert tier.take_saves(1, pool, ALL) == []


def test_tails_give_way_before_heads() -> None:
    pool, _ = pool_with(b"head", b"middle", b"tail", b"new", b"newer")
    forgotten: list[bytes] = []
    tier = HostTier(3, forgotten.append)
    save_now(tier, pool, 1, b"head", b"middle", b"tail")
    save_now(tier, pool, 2, b"new")
    assert forgotten == [b"tail"]
    tier.touch([b"head", b"middle"])
    save_now(tier, pool, 3, b"newer")
    assert forgotten == [b"tail", b"new"]


def test_a_slot_that_a_step_reads_gives_way_to_nothing_until_it_has_landed() -> None:
    pool, _ = pool_with(b"a", b"b")
    tier = HostTier(1)
    save_now(tier, pool, 1, b"a")
    slot = tier.read(b"a", 2)
    assert save_now(tier, pool, 3, b"b") == []
    assert tier.reserve([b"c"]) == []
    tier.landed(2)
    (saved,) = tier.take_saves(4, pool, ALL)
    assert saved[1] == slot


def test_an_image_of_a_step_that_failed_is_never_found() -> None:
    pool, blocks = pool_with(b"a")
    tier = HostTier(1)
    tier.save(b"a", blocks[0])
    tier.take_saves(1, pool, ALL)
    assert tier.landed(1, ok=False) == []
    assert tier.find(b"a") is None
    assert tier.states["free"] == 1


def test_an_image_that_was_discarded_while_it_was_saved_is_never_found() -> None:
    pool, blocks = pool_with(b"a")
    tier = HostTier(2)
    tier.save(b"a", blocks[0])
    tier.take_saves(1, pool, ALL)
    tier.discard(b"a")
    tier.save(b"a", blocks[0])
    tier.take_saves(2, pool, ALL)
    assert tier.landed(1) == []
    assert tier.find(b"a") is None
    assert tier.landed(2) == [b"a"]


def test_loads_leave_half_of_the_slots_to_others() -> None:
    tier = HostTier(5)
    keys = [bytes([number]) for number in range(5)]
    assert len(tier.reserve(keys)) == 2
    tier.finish(keys[:2], [True, False])
    assert tier.find(keys[0]) is not None
    assert tier.find(keys[1]) is None


def test_a_load_pins_what_is_here_already() -> None:
    pool, _ = pool_with(b"a", b"b", b"c")
    tier = HostTier(2)
    save_now(tier, pool, 1, b"a")
    slots = tier.reserve([b"a", b"x"])
    assert slots[0] is None
    assert slots[1] is not None
    assert save_now(tier, pool, 2, b"b") == []
    tier.finish([b"x"], [False])
    tier.unpin([b"a"])
    assert len(save_now(tier, pool, 3, b"b", b"c")) == 2
    tier.drop_all()
    assert tier.states == {"free": 2, "saving": 0, "loading": 0, "ready": 0}


@dataclass
class Step:
    """The work of a step in flight, and whether it was carried out."""

    number: int
    reads: list[tuple[bytes, int]]
    writes: list[tuple[bytes, int]]
    is_done: bool = False


KEYS = st.sampled_from([bytes([number]) for number in range(7)])
UNKNOWN = b""


class TierMachine(RuleBasedStateMachine):
    """Steps are carried out late, and loads write whenever they like."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[bytes] = []
        self.tier = HostTier(4, self.forgotten.append)
        self.pool = BlockPool(6)
        self.memory: dict[int, bytes] = {}
        self.content: dict[int, bytes] = {}
        """The content of the pool's blocks, as far as planned; a step that is carried out writes
        it."""
        self.steps: deque[Step] = deque()
        self.loads: dict[bytes, int] = {}
        self.pins: list[bytes] = []
        self.num_steps = 0

    @rule(key=KEYS)
    def compute(self, key: bytes) -> None:
        """A block with that content is made, whatever it held, and can be found."""
        if self.pool.find(key) is None:
            (block,) = self.pool.allocate(1)
            self.pool.register(block, key)
            self.content[block] = key
            self.tier.save(key, block)
            self.pool.free([block])

    @rule(keys=st.lists(KEYS, max_size=3, unique=True), most=st.integers(0, 3))
    def plan(self, keys: list[bytes], most: int) -> None:
        if len(self.steps) == 2:
            self.carry_out()
            self.land(ok=True)
        number = self.num_steps
        self.num_steps += 1
        reads = [
            (key, self.tier.read(key, number)) for key in keys if self.tier.find(key) is not None
        ]
        saves = self.tier.take_saves(number, self.pool, most)
        assert all(self.pool.find(self.content[block]) == block for block, _ in saves)
        writes = [(self.content[block], slot) for block, slot in saves]
        slots = [slot for _, slot in [*reads, *writes]]
        assert len(set(slots)) == len(slots)
        self.steps.append(Step(number, reads, writes))

    @rule()
    def carry_out(self) -> None:
        for step in self.steps:
            if step.is_done:
                continue
            for key, slot in step.reads:
                assert self.memory[slot] == key, "an image was given away while it was read"
            for key, slot in step.writes:
                self.memory[slot] = key
            step.is_done = True
            return

    @rule(ok=st.booleans())
    def land(self, ok: bool) -> None:
        """In order; a step that has failed may have written anything."""
        if not self.steps:
            return
        self.steps[0].is_done or self.carry_out()
        step = self.steps.popleft()
        if not ok:
            for _, slot in step.writes:
                self.memory[slot] = UNKNOWN
        ready = self.tier.landed(step.number, ok=ok)
        assert set(ready) <= {key for key, _ in step.writes}

    @rule(key=KEYS)
    def retract(self, key: bytes) -> None:
        """The block was not computed; steps in flight that save it copy something else."""
        block = self.pool.find(key)
        if block is not None:
            self.pool.forget(block)
        for step in self.steps:
            step.writes = [(UNKNOWN if each == key else each, slot) for each, slot in step.writes]
            for each, slot in step.writes:
                if each == UNKNOWN and step.is_done:
                    self.memory[slot] = UNKNOWN
        self.tier.discard(key)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=3, unique=True))
    def begin_load(self, keys: list[bytes]) -> None:
        for key, slot in zip(keys, self.tier.reserve(keys), strict=False):
            if slot is None:
                self.pins.append(key)
            else:
                self.loads[key] = slot
                self.memory[slot] = UNKNOWN

    @rule(data=st.data(), is_good=st.booleans())
    def end_load(self, data: st.DataObject, is_good: bool) -> None:
        if self.loads:
            key = data.draw(st.sampled_from(sorted(self.loads)))
            if is_good:
                self.memory[self.loads[key]] = key
            del self.loads[key]
            self.tier.finish([key], [is_good])

    @rule(keys=st.lists(KEYS, max_size=2))
    def pin(self, keys: list[bytes]) -> None:
        self.pins += self.tier.pin(keys)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pins:
            key = data.draw(st.sampled_from(self.pins))
            self.pins.remove(key)
            self.tier.unpin([key])

    @rule(keys=st.lists(KEYS, max_size=4, unique=True))
    def touch(self, keys: list[bytes]) -> None:
        self.tier.touch(keys)

    @invariant()
    def what_is_found_is_whole(self) -> None:
        for number in range(7):
            slot = self.tier.find(bytes([number]))
            assert slot is None or self.memory[slot] == bytes([number])
        assert all(self.tier.find(key) is not None for key in self.pins), "a pinned image is gone"

    @invariant()
    def no_slot_is_lost(self) -> None:
        states = self.tier.states
        assert sum(states.values()) == self.tier.num_slots
        assert states["loading"] == len(self.loads)
        assert states["saving"] == sum(len(step.writes) for step in self.steps)
        holders = [*self.tier._free, *self.tier._ready.values(), *self.loads.values()]
        holders += [slot for step in self.steps for _, slot in step.writes]
        assert sorted(holders) == list(range(self.tier.num_slots))

    @invariant()
    def only_held_images_may_not_give_way(self) -> None:
        held = {*self.pins, *(key for step in self.steps for key, _ in step.reads)}
        assert self.tier._ready.keys() - self.tier._evictable.keys() == held

    def teardown(self) -> None:
        while self.steps:
            self.land(ok=True)
        for key in list(self.loads):
            del self.loads[key]
            self.tier.finish([key], [False])
        self.tier.unpin(self.pins)
        self.tier.drop_all()
        assert self.tier.states["free"] == self.tier.num_slots


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=80, stateful_step_count=50)
