"""The worker remembers streams, gateways and its load."""

import pytest

from tokenmesh.engine.core.outputs import EngineStats
from tokenmesh.engine.exec.kv_bytes import KvBytes
from tokenmesh.engine.request.spec import (
    NO_TENANT,
    StreamKey,
    TenantShare,
)
from tokenmesh.services.worker_svc.adapters.lease import AdapterTurn
from tokenmesh.services.worker_svc.load import LoadBook
from tokenmesh.services.worker_svc.streams import GatewayWatch, WorkerStream, WorkerStreams
from tokenmesh.services.worker_svc.telemetry import WorkerMetrics
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import GatewayId, ModelName, WorkerId
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.tokens import pack_ids, unpack_ids

GATEWAY = GatewayId("gateway")
SETTINGS = WorkerSettings(
    resend_streams=2, resend_window_s=10.0, max_num_seqs=2, max_waiting=1, max_waiting_tokens=100
)


def key(stream: int, attempt: int = 0) -> StreamKey:
    return StreamKey(GATEWAY, stream, attempt)


def test_a_replay_holds_what_was_recorded_from_the_offset_on() -> None:
    stream = WorkerStream(key(1), first_offset=4)
    stream.record(Delta(1, 0, 4, pack_ids([10]), cached_tokens=3))
    stream.record(Delta(1, 0, 5, pack_ids([11, 12])))
    stream.record(Delta(1, 0, 7, b"", "stop", stop_token=9))
    whole = stream.replay(4)
    assert whole is not None
    assert unpack_ids(whole.token_ids) == [10, 11, 12]
    assert (whole.cached_tokens, whole.finish, whole.stop_token) == (3, "stop", 9)
    rest = stream.replay(6)
    assert rest is not None
    assert (rest.offset, unpack_ids(rest.token_ids), rest.cached_tokens) == (6, [12], None)
    assert stream.replay(3) is None
    assert stream.replay(8) is None


def test_ended_streams_are_kept_for_a_while_and_up_to_a_number() -> None:
    streams = WorkerStreams(SETTINGS)
    for number in range(4):
        stream = streams.open(key(number), 0)
        if number < 3:
            streams.end(stream, now=float(number))
    assert streams.get(GATEWAY, 0) is None
    assert streams.get(GATEWAY, 1) is not None
    assert [stream.key.stream for stream in streams.live()] == [3]
    assert streams.num_live == 1
    streams.expire(now=11.5)
    assert streams.get(GATEWAY, 1) is None
    assert streams.get(GATEWAY, 2) is not None
    assert streams.get(GATEWAY, 3) is not None


def test_a_stream_that_ends_or_is_replaced_waits_for_no_adapter() -> None:
    streams = WorkerStreams(SETTINGS)
    turns = [AdapterTurn() for _ in range(3)]
    for number, turn in enumerate(turns):
        streams.open(key(number), 0).turn = turn
    ended = streams.get(GATEWAY, 0)
    assert ended is not None
    streams.end(ended, now=0.0)
    streams.open(key(1, attempt=1), 0)
    assert [turn.is_given_up for turn in turns] == [True, True, False]


def test_a_higher_attempt_takes_the_place_of_a_lower_one() -> None:
    streams = WorkerStreams(SETTINGS)
    old = streams.open(key(1), 0)
    new = streams.open(key(1, attempt=1), 0)
    streams.end(old, now=0.0)
    assert streams.get(GATEWAY, 1) is new
    assert streams.num_live == 1
    assert streams.find(Delta(1, 0, 0, b""), GATEWAY) is None
    assert streams.find(Delta(1, 1, 0, b""), GATEWAY) is new
    streams.forget(new)
    assert streams.num_live == 0


def test_the_reservation_of_an_attempt_that_was_replaced_is_given_back() -> None:
    released: list[str] = []
    streams = WorkerStreams(SETTINGS, released.append)
    streams.open(key(1), 0).reservation = "first"
    streams.open(key(1, attempt=1), 0).reservation = "second"
    assert released == ["first"]


def test_a_gateway_is_gone_after_the_grace_time_without_a_beat() -> None:
    watch = GatewayWatch(grace_s=2.0)
    alive = {GATEWAY}
    assert watch.dead([GATEWAY], alive.__contains__, 0.0) == set()
    alive.clear()
    assert watch.dead([GATEWAY], alive.__contains__, 1.9) == set()
    assert watch.dead([GATEWAY], alive.__contains__, 2.1) == {GATEWAY}
    newcomer = GatewayId("never seen")
    assert watch.dead([newcomer], alive.__contains__, 5.0) == set()
    assert watch.dead([newcomer], alive.__contains__, 7.1) == {newcomer}


def test_what_the_engine_has_not_seen_yet_counts_as_load() -> None:
    book = LoadBook(SETTINGS, num_blocks=10)
    book.submitted(40)
    book.submitted(30)
    assert (book.load().waiting, book.load().queued_tokens) == (2, 70)
    assert book.load().kv_blocks_total == 9
    book.update(EngineStats(num_added=1, running=1, queued_tokens=5, prefill_tokens_per_s=10.0))
    load = book.load()
    assert (load.running, load.waiting, load.queued_tokens) == (1, 1, 35)


@pytest.mark.parametrize(
    ("block", "row", "used", "blocks", "states"),
    [
        # pages or latents; states and blocks; states alone
        (100, 0, (7, 9), (700, 900), (0, 0)),
        (100, 30, (7, 9), (700, 900), (60, 30 * SETTINGS.num_rows)),
        (0, 30, (2, SETTINGS.num_rows), (0, 0), (60, 30 * SETTINGS.num_rows)),
    ],
)
def test_what_the_kv_cache_takes_is_blocks_and_states(
    block: int,
    row: int,
    used: tuple[int, int],
    blocks: tuple[int, int],
    states: tuple[int, int],
) -> None:
    book = LoadBook(SETTINGS, 10, KvBytes(block, row), has_prefix_cache=row == 0)
    book.update(EngineStats(running=2, kv_blocks_used=7))
    load = book.load()
    assert (load.kv_blocks_used, load.kv_blocks_total) == used
    for of_rows, expected in ((False, blocks), (True, states)):
        sizes = (book.kv_bytes(of_rows=of_rows, in_use=in_use) for in_use in (True, False))
        assert tuple(sizes) == expected
    assert book.cache_config["enable_prefix_caching"] == str(row == 0)
    assert book.cache_config["cache_dtype"] == "auto"
    coded = SETTINGS.model_copy(update={"kv_cache_dtype": "fp8"})
    assert LoadBook(coded, 10).cache_config["cache_dtype"] == "fp8_e4m3"


@pytest.mark.parametrize(
    ("submitted", "tokens", "limit"),
    [
        ([], 500, ""),
        ([40], 60, ""),
        ([40], 61, "max_num_queued_tokens"),
        ([1, 1, 1], 1, "max_num_queued_reqs"),
    ],
)
def test_the_queue_is_bounded_in_streams_and_tokens(
    submitted: list[int], tokens: int, limit: str
) -> None:
    metrics = Metrics()
    book = LoadBook(SETTINGS, num_blocks=10)
    for num_tokens in submitted:
        book.submitted(num_tokens)
    WorkerMetrics(metrics, ModelName("m"), WorkerId("w"), book)
    refusal = book.refusal(tokens, NO_TENANT, WorkerStreams(SETTINGS))
    assert (refusal is not None) == bool(limit)
    assert refusal is None or refusal.retry_after_s > 0
    for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
        labels = f'model_name="m",reason="{reason}"'
        line = f"admission_rejections_total{{{labels}}} {float(reason == limit)}"
        assert line in metrics.render().decode()


def test_tokens_of_one_tenant_keep_no_other_out_of_its_share() -> None:
    streams, book = WorkerStreams(SETTINGS), LoadBook(SETTINGS, num_blocks=10)
    flood, quiet = TenantShare("flood"), TenantShare("quiet", weight=1e-2)
    streams.open(StreamKey(GATEWAY, 1, 0), 0).owner = flood
    book.submitted(SETTINGS.max_waiting_tokens)
    assert book.refusal(1, flood, streams) is not None
    assert book.refusal(1, quiet, streams) is not None
    assert book.refusal(1, TenantShare("quiet"), streams) is None
    assert book.load(streams=streams).tenant_streams == {"flood": 1}
