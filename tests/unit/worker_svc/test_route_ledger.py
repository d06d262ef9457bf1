"""RouteLedger: exactly the route blocks whose engine blocks can all be found."""

import logging
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.engine_schedules import Schedule
from tokenmesh.engine.core import engine as engine_module
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.kv.block_log import BlockChange
from tokenmesh.engine.kv.block_pool import KvGroups
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import RequestSpec, StreamKey
from tokenmesh.shared.hashing import chain_head, route_hashes, route_scope
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.tokens import pack_ids

SIZE, ROUTE = 2, 6
SCOPE = route_scope("m", "f", ROUTE)


class Rig:
    """A pool, a cache and a ledger, and requests that hold all of their blocks at once."""

    def __init__(self, num_blocks: int = 24) -> None:
        self.cache = PrefixCache(num_blocks, KvGroups(SIZE), enabled=True, route_tokens=ROUTE)
        assert self.cache.reports.routes is not None
        self.pool, self.ledger = self.cache.pool, self.cache.reports.routes
        self.held: list[Request] = []
        self.written: set[bytes] = set()

    def begin(self, token_ids: list[int], salt: str | None = None) -> Request:
        request = Request(
            RequestSpec(
                key=StreamKey(GatewayId("g"), len(self.held), 0),
                request_id=RequestId("r"),
                num_prompt=len(token_ids),
                sampling=SamplingParams(seed=0, max_tokens=9),
                cache_salt=salt,
                route_head=chain_head(SCOPE),
                route_salt=salt,
            ),
            token_ids,
        )
        (hits,) = self.cache.find(request)
        self.pool.share(hits)
        wanted = -(-len(token_ids) // SIZE) - len(hits)
        request.kv.blocks = hits + self.pool.allocate(wanted)
        self.cache.register(request, len(hits) * SIZE, len(token_ids))
        self.held.append(request)
        return request

    def end(self, index: int) -> None:
        self.pool.free(self.held.pop(index % len(self.held)).kv.blocks)

    def expected(self, seen: list[Request]) -> set[bytes]:
        """From the pool alone."""
        ratio = ROUTE // SIZE
        return {
            route
            for request in seen
            for index, route in enumerate(routes_of(request))
            if all(
                self.pool.find(each) is not None
                for each in request.kv.hashes[index * ratio : (index + 1) * ratio]
            )
        }

    def follow(self) -> None:
        """Take over a change as a reader does."""
        change = self.ledger.take_change()
        if change is None:
            return
        if change.is_cleared:
            self.written.clear()
        for route, is_there in change.is_there.items():
            (self.written.add if is_there else self.written.discard)(route)


def routes_of(request: Request) -> list[bytes]:
    packed = route_hashes(pack_ids(request.token_ids), ROUTE, SCOPE, salt=request.spec.route_salt)
    return [packed[first : first + 8] for first in range(0, len(packed), 8)]


def test_hashes_are_the_tokenizers() -> None:
    rig = Rig()
    request = rig.begin(list(range(20)), salt="s")
    assert rig.ledger.routes == set(routes_of(request))
    assert len(rig.ledger.routes) == 3


def test_a_request_outside_of_the_index_is_not_noted() -> None:
    rig = Rig()
    request = Request(
        RequestSpec(
            StreamKey(GatewayId("g"), 0, 0),
            RequestId("r"),
            12,
            SamplingParams(seed=0, max_tokens=1),
        ),
        [1] * 12,
    )
    request.kv.blocks = rig.pool.allocate(6)
    rig.cache.register(request, 0, 12)
    rig.ledger.note(request, 12)
    assert rig.ledger.take_change() is None


def test_nothing_is_left_after_the_pool_forgot_everything() -> None:
    rig = Rig()
    rig.begin(list(range(20)))
    rig.follow()
    rig.pool.forget_all()
    rig.ledger.forget_all()
    rig.follow()
    assert rig.written == rig.ledger.routes == set()


Step = Callable[[Rig, Random], Any]


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 60))
def test_routes_are_there_while_their_blocks_are(seed: int, num_steps: int) -> None:
    random, rig, seen = Random(seed), Rig(), list[Request]()
    for _ in range(num_steps):
        length = random.randrange(1, 20)
        fits = -(-length // SIZE) <= rig.pool.num_free
        if fits and random.random() < 0.6:
            prefix = [random.randrange(2)] * random.randrange(length + 1)
            token_ids = prefix + [random.randrange(2) for _ in range(length - len(prefix))]
            seen.append(rig.begin(token_ids))
        elif rig.held:
            rig.end(random.randrange(99))
        if random.random() < 0.5:
            rig.follow()
        assert rig.ledger.routes == rig.expected(seen)
    rig.follow()
    assert rig.written == rig.ledger.routes


class Routed(Schedule):
    """An engine whose rows keep states, and which tells of its route blocks."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, 0.1, is_async=seed % 2 > 0, has_states=True)
        self.ratio = 1 + seed % 3
        self.engine = Engine(self.runner, self.settings, self.ratio * self.settings.block_size)
        self.most = 0
        for case in self.cases:
            salt = case.request.spec.cache_salt
            case.change_spec(route_head=chain_head(SCOPE), route_salt=salt)

    def note_blocks(self, changes: list[BlockChange]) -> None:
        """Exactly the route blocks before a saved state are there."""
        cache = self.engine._cache
        ledger, states = cache.reports.routes, cache._states
        if ledger is None or states is None:
            return
        expected = {
            ledger._route_hash(case.request, index)
            for case in self._added
            for index in range(len(case.request.kv.hashes) // self.ratio)
            if all(
                map(
                    states.reaches,
                    case.request.kv.hashes[index * self.ratio : (index + 1) * self.ratio],
                )
            )
        }
        assert ledger.routes == expected
        self.most = max(self.most, len(expected))


def test_where_rows_keep_states_only_what_is_before_a_saved_one_is_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, logger=engine_module.__name__)
    most = []
    for seed in range(150):
        schedule = Routed(seed)
        schedule.run()
        most.append(schedule.most)
    assert sum(count > 1 for count in most) > 50
