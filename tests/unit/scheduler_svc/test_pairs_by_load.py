"""Pairs while only heartbeats are known: who takes streams, and who computes for others."""

import msgspec
import pytest

from tokenmesh.services.scheduler_svc.placement import (
    ASSUMED_LOCAL_TOKENS,
    LoadPlacement,
    Worker,
    sources_of,
)
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.ids import ModelName, RequestId, WorkerId
from tokenmesh.shared.messages.beat import WorkerLoad
from tokenmesh.shared.messages.place import KvOrigin, Place

LONG = ASSUMED_LOCAL_TOKENS + 1


def worker(name: str, role: str, *, scope: bytes = b"s", draining: bool = False) -> Worker:
    load = WorkerLoad(max_num_seqs=8, kv_tokens_per_s=1000.0 if role else 0.0)
    return Worker(WorkerId(name), 7, load, draining, 0.0, (), role, scope if role else b"")


def request(tokens: int = LONG, **fields: object) -> Place:
    place = Place(request_id=RequestId("r"), model=ModelName("m"), num_tokens=tokens, max_tokens=1)
    return msgspec.structs.replace(place, **fields)


async def placed(place: Place, *workers: Worker) -> tuple[str, KvOrigin | None]:
    decision = await LoadPlacement(SchedulerSettings()).place(place, list(workers), 1.0)
    assert decision.worker is not None
    return decision.worker.worker_id, decision.kv


async def test_a_long_prompt_gets_a_source_and_a_prefill_worker_no_stream() -> None:
    workers = worker("p", "prefill"), worker("d", "decode")
    source = KvOrigin(worker_id=WorkerId("p"), epoch=7, computes=True)
    assert await placed(request(), *workers) == ("d", source)
    assert await placed(request(ASSUMED_LOCAL_TOKENS), *workers) == ("d", None)


@pytest.mark.parametrize(
    "source",
    [
        worker("p", "prefill", scope=b"other"),
        worker("p", "prefill", draining=True),
        worker("p", "both"),
        worker("p", ""),
    ],
)
async def test_others_are_no_source_of_what_is_to_be_computed(source: Worker) -> None:
    place = request(exclude=[WorkerId("p")])
    assert await placed(place, source, worker("d", "decode")) == ("d", None)


async def test_a_source_that_has_failed_is_left_out() -> None:
    workers = worker("p", "prefill"), worker("d", "decode"), worker("q", "prefill")
    _, kv = await placed(request(exclude=[WorkerId("p")]), *workers)
    assert kv is not None
    assert kv.worker_id == "q"


async def test_prefill_workers_serve_alone_where_no_other_worker_lives() -> None:
    assert await placed(request(), worker("p", "prefill")) == ("p", None)
    gone = worker("d", "decode", draining=True)
    assert await placed(request(), worker("p", "prefill"), gone) == ("p", None)


def test_a_draining_worker_is_still_read_from() -> None:
    taker, leaving = worker("d", "both"), worker("l", "both", draining=True)
    assert sources_of(request(), [taker, leaving], [taker]) == [taker, leaving]
    assert sources_of(request(), [taker, leaving], [worker("x", "")]) == []
