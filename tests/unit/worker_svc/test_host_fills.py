"""Fills from the host tier under shares of tenants: a row that copies also computes."""

from random import Random

from tests.fakes.engine_schedules import unbatched
from tests.fakes.kv_runner import KvRunner
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import RequestSpec, StreamKey, TenantShare
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.sampling import SamplingParams

LENGTH = 60


def request_of(number: int, tenant: str, step: int, max_tokens: int = 3) -> Request:
    spec = RequestSpec(
        key=StreamKey(GatewayId("g"), number, 0),
        request_id=RequestId(f"r{number}"),
        num_prompt=LENGTH,
        sampling=SamplingParams(seed=number, max_tokens=max_tokens, ignore_eos=True),
        owner=TenantShare(tenant),
    )
    return Request(spec, [(at * step) % 37 for at in range(LENGTH)])


def run(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        engine.add(request)
    for _ in range(500):
        if not engine.has_work:
            return
        engine.step()
        engine.take_output()
    raise AssertionError("the requests do not come to an end")


def test_a_tenant_whose_share_is_spent_on_copies_still_computes_behind_them() -> None:
    # a step of two tokens: the copies of one tenant are all that it has a right to
    settings = WorkerSettings(
        max_num_seqs=2, max_num_batched_tokens=2, block_size=1, async_scheduling=False
    )
    runner = KvRunner(settings, 200, Random(0), 0.0, 0.0, num_images=150)
    engine = Engine(runner, settings)
    first = [request_of(0, "a", 3), request_of(1, "b", 5)]
    run(engine, first)
    engine.settle()
    engine._cache.pool.forget_all()
    again = [request_of(2, "a", 3), request_of(3, "b", 5)]
    run(engine, again)
    assert [each.token_ids for each in again] == [each.token_ids for each in first]
    assert again[0].token_ids[LENGTH:] == unbatched(first[0], first[0].token_ids[:LENGTH])[0]
    for each in again:
        assert each.place.num_cached is not None
        assert LENGTH // 2 < each.place.num_filled <= each.place.num_cached
