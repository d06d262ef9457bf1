"""DecodeWheel: which requests are visited in a step, and that no others are."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.engine.core.decode_wheel import DecodeWheel
from tokenmesh.engine.core.scheduler import Scheduler
from tokenmesh.engine.kv.block_pool import KvGroups
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import RequestSpec, StreamKey
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.sampling import SamplingParams

TOKEN = 7
BLOCK_SIZE = 16


def request(stream: int, max_tokens: int = 100, **sampling: Any) -> Request:
    return Request(
        RequestSpec(
            key=StreamKey(GatewayId("g"), stream, 0),
            request_id=RequestId(f"r{stream}"),
            num_prompt=2,
            sampling=SamplingParams(seed=stream, max_tokens=max_tokens, **sampling),
            eos_ids=frozenset({0}),
        ),
        [stream, 1],
    )


def running(num_requests: int) -> Scheduler:
    """All of them decode, far from any border."""
    settings = WorkerSettings(
        max_num_seqs=num_requests, max_num_batched_tokens=10_000, kv_watermark=0.0,
        long_prefill_token_threshold=0, block_size=BLOCK_SIZE,
    )  # fmt: skip
    cache = PrefixCache(10 * num_requests + 10, KvGroups(BLOCK_SIZE), enabled=True)
    scheduler = Scheduler(settings, cache)
    for stream in range(num_requests):
        scheduler.add(request(stream))
    for _ in range(3):
        plan = scheduler.schedule()
        scheduler.draw(plan, {row: [TOKEN] for row in plan.rows})
    return scheduler


def lines_of(call: Callable[[], object]) -> int:
    """Lines of Python that a call executes; one of a loop counts as often as it runs."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_what_a_step_costs_does_not_depend_on_how_many_decode() -> None:
    few, many = running(4), running(64)
    assert lines_of(few.schedule) == lines_of(many.schedule)
    assert len(many.schedule().decodes) == 64


def test_a_stream_that_fills_a_block_costs_others_nothing() -> None:
    counts = []
    for num_requests in (4, 64):
        scheduler = running(num_requests)
        scheduler.add(request(1000))
        for _ in range(BLOCK_SIZE - 6):
            plan = scheduler.schedule()
            scheduler.draw(plan, {row: [TOKEN] for row in plan.rows})
        # only those that came first are at a border in these steps
        counts.append([lines_of(scheduler.schedule) for _ in range(4)])
    few, many = counts
    assert [a == b for a, b in zip(few, many, strict=True)].count(False) == 2


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_a_border_is_met_at_its_length_and_nowhere_else(
    members: list[tuple[int, int]], size: int
) -> None:
    wheel = DecodeWheel()
    requests = []
    for row, (max_tokens, room) in enumerate(members):
        each = request(row, max_tokens)
        each.place.row, each.kv.capacity = row, 2 + room % size
        wheel.begin(each, 2)
        wheel.enter(each)
        requests.append(each)
    for length in range(3, 50):
        members_before = [each for each in requests if each in wheel]
        at_border = wheel.turn()
        assert len(at_border) == len(set(map(id, at_border)))
        for each in members_before:
            assert each.num_computed == length
            borders = {
                each.kv.capacity,
                each.kv.capacity + 1,
                each.spec.max_len - 1,
                each.spec.max_len,
            }
            assert (each in at_border) == (length in borders)
        for each in at_border:
            if length == each.spec.max_len:
                wheel.leave(each)
                continue
            if length > each.kv.capacity:
                each.kv.capacity += size
            wheel.expect_border(each, length)
    assert wheel.rows() == [each.place.row for each in requests if each.spec.max_len >= 50]


def test_who_left_and_came_back_is_met_once() -> None:
    wheel, each = DecodeWheel(), request(1)
    each.place.row, each.kv.capacity = 0, 16
    wheel.begin(each, 2)
    wheel.enter(each)
    wheel.leave(each)
    wheel.enter(each)
    met = [wheel.turn() for _ in range(14)]
    assert met == [[]] * 13 + [[each]]
