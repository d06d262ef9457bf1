"""Limits and usage in a real Redis: counted over all gateways, each charge once."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.servers import Server, redis_settings_of
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.usage import usage_of
from tokenmesh.services.gateway.core.tenancy.admission import Admission
from tokenmesh.services.gateway.core.tenancy.ledger import Ledger, TokenCounts, month_of
from tokenmesh.services.gateway.core.tenancy.redis_state import (
    Scripts,
    expiry_key,
    open_key,
    state_key,
    usage_key,
)
from tokenmesh.services.gateway.core.tenancy.tenant import (
    Access,
    LocalLimits,
    QuotaExceeded,
    RateLimited,
    Tenant,
)
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.config.requests import TenancySettings
from tokenmesh.shared.errors import InvalidInput, Overloaded, Unavailable
from tokenmesh.shared.ids import RequestId
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.redis import Part, Redis, open_redis


@pytest.fixture
async def redis(redis_settings: RedisSettings) -> AsyncIterator[Redis]:
    client = open_redis(redis_settings)
    yield client
    await client.close()


def tenant_of(**limits: Any) -> Tenant:
    return Tenant(name=f"t-{secrets.token_hex(4)}", **limits)


def admission_of(redis: Redis | None, **settings: Any) -> Admission:
    name = f"gateway-{secrets.token_hex(4)}"
    return Admission(name, redis, TenancySettings(**settings), Metrics())


def exchange_of(tenant: Tenant) -> RequestContext:
    return RequestContext(RequestId("r"), True, monotonic_s(), Access(tenant))


async def until(is_so: Callable[[], Awaitable[Any]]) -> None:
    async with asyncio.timeout(15):
        while not await is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def is_admitted(admission: Admission, tenant: Tenant) -> bool:
    try:
        await admission.admit(exchange_of(tenant))
    except RateLimited:
        return False
    return True


async def usage_of_tenant(redis: Redis, tenant: Tenant) -> dict[bytes, int]:
    flat = await redis.call("HGETALL", usage_key(tenant.name, month_of(now_s())))
    assert isinstance(flat, list)
    return {flat[i]: int(flat[i + 1]) for i in range(0, len(flat), 2)}  # type: ignore[arg-type, misc]


async def test_requests_a_minute_are_counted_for_all_gateways_together(redis: Redis) -> None:
    tenant, gateways = tenant_of(requests_per_minute=3), [admission_of(redis) for _ in range(2)]
    exchange = exchange_of(tenant)
    for index in range(3):
        await gateways[index % 2].admit(exchange)
    assert exchange.standing is not None
    headers = dict(exchange.standing.headers())
    assert headers[b"x-ratelimit-limit-requests"] == b"3"
    assert headers[b"x-ratelimit-remaining-requests"] == b"0"
    for gateway in gateways:
        with pytest.raises(RateLimited, match="3 requests a minute") as refused:
            await gateway.admit(exchange)
        assert refused.value.retry_after_s == pytest.approx(20, abs=2)


async def test_leases_are_released_and_those_of_a_dead_gateway_expire(
    redis: Redis,
) -> None:
    tenant, first, second = tenant_of(max_concurrent=2), admission_of(redis), admission_of(redis)
    lease = await first.admit(exchange_of(tenant))
    await second.admit(exchange_of(tenant))
    with pytest.raises(RateLimited, match="2 requests at a time"):
        await second.admit(exchange_of(tenant))
    lease.release()
    lease.release()
    await first.settle()
    short = admission_of(redis, lease_s=1.0)
    await short.admit(exchange_of(tenant))
    with pytest.raises(RateLimited):
        await first.admit(exchange_of(tenant))
    await until(partial(is_admitted, first, tenant))


@pytest.mark.parametrize("is_alone", [False, True], ids=["with redis", "without redis"])
async def test_a_wide_request_counts_its_prompts_and_its_sequences(
    redis: Redis, is_alone: bool
) -> None:
    tenant = tenant_of(requests_per_minute=5, max_concurrent=6)
    gateway = admission_of(None if is_alone else redis)
    first = await gateway.admit(exchange_of(tenant))
    await first.widen(requests=2, sequences=4)
    second = await gateway.admit(exchange_of(tenant))
    with pytest.raises(RateLimited, match="6 requests at a time"):
        await second.widen(requests=1, sequences=3)
    first.release()
    await gateway.settle()
    await second.widen(requests=1, sequences=6)
    second.release()
    await gateway.settle()
    third = await gateway.admit(exchange_of(tenant))
    with pytest.raises(RateLimited, match="5 requests a minute"):
        await third.widen(requests=4, sequences=4)
    for requests, sequences in ((6, 1), (1, 7)):
        with pytest.raises(InvalidInput, match="more than"):
            await third.widen(requests, sequences)


async def test_leases_of_long_requests_are_renewed(redis: Redis) -> None:
    tenant, gateway = tenant_of(max_concurrent=1), admission_of(redis, lease_s=2.0)
    running = asyncio.create_task(gateway.run())
    await gateway.admit(exchange_of(tenant))
    await redis.call("DEL", open_key(tenant.name))
    await until(partial(redis.call, "EXISTS", open_key(tenant.name)))
    with pytest.raises(RateLimited):
        await admission_of(redis).admit(exchange_of(tenant))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_tenant_in_debt_waits_and_one_without_budget_is_refused(redis: Redis) -> None:
    tenant = tenant_of(tokens_per_minute=600, monthly_tokens=5000)
    gateway, other = admission_of(redis), admission_of(redis)
    await gateway.admit(exchange_of(tenant))
    gateway.charge(tenant, "m", [usage_of(700, 199, 300, None)])
    await gateway.settle()
    with pytest.raises(RateLimited, match="600 tokens a minute") as refused:
        await other.admit(exchange_of(tenant))
    assert refused.value.retry_after_s == pytest.approx(30, abs=2)
    gateway.charge(tenant, "m", [usage_of(5000, 0, None, None)])
    await gateway.settle()
    with pytest.raises(QuotaExceeded, match="5000 tokens of this month") as over:
        await other.admit(exchange_of(tenant))
    assert over.value.code == "insufficient_quota"
    assert over.value.retry_after_s is not None
    assert await usage_of_tenant(redis, tenant) == {
        b"tokens": 5899,
        b"models": 1,
        b"requests:m": 2,
        b"prompt:m": 5700,
        b"cached:m": 300,
        b"completion:m": 199,
    }


class _LossyRedis:
    """A Redis some of whose answers are lost after it has executed the script."""

    def __init__(self, redis: Redis, losses: list[bool]) -> None:
        self._scripts = Scripts(redis)
        self._losses = losses

    async def settle(self, keys: Any, arguments: Any) -> None:
        await self._scripts.settle(keys, arguments)
        if self._losses and self._losses.pop():
            raise Unavailable("the answer is lost")


async def test_every_charge_counts_once_when_answers_are_lost(redis: Redis) -> None:
    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8), st.data())
    def check(charges: list[tuple[int, int]], data: st.DataObject) -> None:
        losses = data.draw(st.lists(st.booleans(), max_size=8))
        plans.append((charges, losses))

    plans: list[tuple[list[tuple[int, int]], list[bool]]] = []
    check()
    for charges, losses in plans[:40]:
        tenant = tenant_of()
        scripts: Any = _LossyRedis(redis, losses)
        ledger = Ledger(secrets.token_hex(4), scripts, TenancySettings(), Metrics())
        for prompt, completion in charges:
            ledger.charge(tenant, month_of(now_s()), "m", TokenCounts(1, prompt, 0, completion))
            if prompt % 2:
                try:
                    await ledger.flush()
                except Unavailable:
                    assert ledger.unwritten >= 0
        while True:
            try:
                await ledger.flush()
                break
            except Unavailable:
                continue
        assert ledger.unwritten == 0
        counted = await usage_of_tenant(redis, tenant)
        assert counted.get(b"tokens", 0) == sum(map(sum, charges))
        assert counted.get(b"requests:m", 0) == len(charges)


async def test_a_named_response_counts_once_when_two_gateways_charge_it(redis: Redis) -> None:
    tenant, owner, heir = tenant_of(), admission_of(redis), admission_of(redis)
    owner.charge(tenant, "m", [usage_of(7, 3, 0, None)], "resp_1")
    owner.charge(tenant, "m", [usage_of(1, 1, 0, None)])
    assert owner.is_charge_pending("resp_1")
    waiting = asyncio.create_task(owner.wait_charged("resp_1"))
    await heir.charge_for_another(tenant, "m", TokenCounts(1, 7, 0, 3), "resp_1")
    assert not waiting.done()
    await owner.settle()
    async with asyncio.timeout(15):
        await waiting
    await heir.charge_for_another(tenant, "m", TokenCounts(1, 7, 0, 3), "resp_1")
    await heir.charge_for_another(tenant, "m", TokenCounts(1, 50, 0, 0), "resp_2")
    counted = await usage_of_tenant(redis, tenant)
    assert (counted[b"tokens"], counted[b"requests:m"]) == (62, 3)


async def test_responses_beyond_the_bound_of_names_are_counted(redis: Redis) -> None:
    tenant, gateway = tenant_of(), admission_of(redis)
    for number in range(1500):
        gateway.charge(tenant, "m", [usage_of(1, 1, 0, None)], f"resp_{number}")
    assert not gateway.is_charge_pending("resp_1499")
    await gateway.settle()
    assert (await usage_of_tenant(redis, tenant))[b"tokens"] == 3000


async def test_models_beyond_the_bound_share_one_name(redis: Redis) -> None:
    tenant, gateway = tenant_of(), admission_of(redis, max_usage_models=2)
    for index in range(6):
        gateway.charge(tenant, f"m{index}", [usage_of(1, 1, 1, None)])
        await gateway.settle()
    counted = await usage_of_tenant(redis, tenant)
    assert counted[b"tokens"] == 12
    assert counted[b"requests:other"] >= 3


@pytest.mark.parametrize(
    "garbage", [("SET", "x"), ("RPUSH", "x"), ("HSET", "at", "x"), ("HSET", "at", "9e99")]
)
async def test_foreign_values_in_redis_block_no_request(
    redis: Redis, garbage: tuple[str, ...]
) -> None:
    tenant, gateway = tenant_of(requests_per_minute=2, max_concurrent=2), admission_of(redis)
    command, *values = garbage
    for key in (state_key(tenant.name), usage_key(tenant.name, month_of(now_s()))):
        await redis.call(command, key, *values)
    await redis.call("SET", open_key(tenant.name), "x")
    await redis.call("HSET", usage_key(tenant.name + "x", "2026-11"), "tokens", "many")
    await gateway.admit(exchange_of(tenant))
    gateway.charge(tenant, "m", [usage_of(3, 4, 0, None)])
    await gateway.settle()
    flat = await redis.call("HGET", usage_key(tenant.name, month_of(now_s())), "tokens")
    assert flat == b"7"
    await gateway.admit(exchange_of(tenant))
    with pytest.raises(RateLimited):
        await gateway.admit(exchange_of(tenant))


async def test_without_redis_a_gateway_enforces_limits_and_writes_usage_later(
    start_redis: Callable[[], Server],
) -> None:
    server = start_redis()
    redis = open_redis(redis_settings_of(server))
    tenant = tenant_of(requests_per_minute=4, max_concurrent=10)
    gateway = admission_of(redis, limits_retry_s=0.05)
    await gateway.admit(exchange_of(tenant))
    server.stop()
    for _ in range(3):
        await gateway.admit(exchange_of(tenant))
    with pytest.raises(RateLimited):
        await gateway.admit(exchange_of(tenant))
    gateway.charge(tenant, "m", [usage_of(5, 6, 0, None)])
    with pytest.raises(Unavailable):
        await gateway.settle()
    server.start()
    await asyncio.sleep(0.1)
    await gateway.settle()
    assert (await usage_of_tenant(redis, tenant))[b"tokens"] == 11
    await redis.close()


REFUSALS: dict[str, tuple[list[list[Part]], list[list[Part]]]] = {
    "out of memory": (
        [
            ["CONFIG", "SET", "maxmemory-policy", "noeviction"],
            ["CONFIG", "SET", "maxmemory", "1"],
        ],
        [["CONFIG", "SET", "maxmemory", "0"]],
    ),
    "a replica": ([["REPLICAOF", "127.0.0.1", "1"]], [["REPLICAOF", "NO", "ONE"]]),
    "no permission": (
        [["ACL", "SETUSER", "default", "-evalsha", "-eval"]],
        [["ACL", "SETUSER", "default", "+@all"]],
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_usage_is_retried_until_redis_accepts_it(
    start_redis: Callable[[], Server], refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    redis = open_redis(redis_settings_of(start_redis()))
    tenant, gateway = tenant_of(requests_per_minute=5), admission_of(redis, limits_retry_s=0.02)
    refuse, accept = REFUSALS[refusal]
    running = asyncio.create_task(gateway.run())
    await redis.call_all(refuse)
    for _ in range(3):
        await gateway.admit(exchange_of(tenant))
        gateway.charge(tenant, "m", [usage_of(5, 6, 0, None)])
        await asyncio.sleep(0.05)
    await redis.call_all(accept)
    async with asyncio.timeout(15):
        while (await usage_of_tenant(redis, tenant)).get(b"tokens") != 33:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    running.cancel()
    await gateway.stop()
    logged = [each for each in caplog.records if "usage" in each.getMessage()]
    assert [each.levelname for each in logged] == ["WARNING"]
    await redis.close()


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 200)), max_size=60),
    st.integers(1, 20),
    st.integers(1, 500),
)
def test_local_limits_never_admit_more_than_the_rates(
    steps: list[tuple[float, int]], rpm: int, tpm: int
) -> None:
    tenant, buckets, now, admitted, charged = (
        tenant_of(requests_per_minute=rpm, tokens_per_minute=tpm),
        LocalLimits(),
        0.0,
        0,
        0,
    )
    for pause_s, tokens in steps:
        now += pause_s
        if buckets.refusal(tenant, 1, 1, now, "m") is None:
            assert charged < tpm + now * tpm / 60 + 1e-6
            buckets.admit(tenant, 1, [str(now)], now, "m")
            admitted += 1
            buckets.charge(tenant, tokens, now, "m")
            charged += tokens
        assert admitted <= rpm + now * rpm / 60 + 1e-6


async def test_local_limits_include_concurrency_and_budget() -> None:
    gateway = admission_of(None)
    tenant = tenant_of(max_concurrent=1, monthly_tokens=10)
    lease = await gateway.admit(exchange_of(tenant))
    with pytest.raises(Overloaded, match="at a time"):
        await gateway.admit(exchange_of(tenant))
    lease.release()
    gateway.charge(tenant, "m", [usage_of(10, 0, None, None)])
    with pytest.raises(QuotaExceeded):
        await gateway.admit(exchange_of(tenant))


async def test_a_stopping_gateway_retries_for_a_while_to_write_its_usage(
    start_redis: Callable[[], Server],
) -> None:
    server = start_redis()
    redis = open_redis(redis_settings_of(server))
    tenant, gateway = tenant_of(), admission_of(redis, limits_retry_s=0.05, last_usage_s=10.0)
    server.stop()
    gateway.charge(tenant, "m", [usage_of(5, 6, 0, None)])
    leaving = asyncio.create_task(gateway.stop())
    await asyncio.sleep(0.2)
    server.start()
    await leaving
    assert (await usage_of_tenant(redis, tenant))[b"tokens"] == 11
    server.stop()
    impatient = admission_of(redis, limits_retry_s=0.05, last_usage_s=0.1)
    impatient.charge(tenant, "m", [usage_of(5, 6, 0, None)])
    async with asyncio.timeout(15):
        await impatient.stop()
    await redis.close()


async def tenant_keys(redis: Redis) -> list[bytes]:
    found = await redis.call("KEYS", "tm:tenant*")
    assert isinstance(found, list)
    return [each for each in found if isinstance(each, bytes)]


async def test_a_full_redis_evicts_nothing_of_a_tenant(start_redis: Callable[[], Server]) -> None:
    redis = open_redis(redis_settings_of(start_redis()))
    await redis.call("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
    tenant = tenant_of(requests_per_minute=5, tokens_per_minute=1000, max_concurrent=3)
    gateway = admission_of(redis)
    await gateway.admit(exchange_of(tenant))
    gateway.charge(tenant, "m", [usage_of(900, 15, 0, None)], "resp_1")
    await gateway.settle()
    before = await tenant_keys(redis)
    assert len(before) == 6
    await redis.call("CONFIG", "SET", "maxmemory", "16mb")
    for index in range(64):
        await redis.call("SET", f"blob:{index}", bytes(2**20), "EX", 86400)
    assert await redis.call("EXISTS", "blob:0") == 0
    assert sorted(await tenant_keys(redis)) == sorted(before)
    assert (await usage_of_tenant(redis, tenant))[b"tokens"] == 915
    await redis.close()


async def test_usage_keys_with_an_expiry_of_an_older_version_are_persisted(redis: Redis) -> None:
    tenant, gateway = tenant_of(), admission_of(redis)
    key = usage_key(tenant.name, month_of(now_s()))
    await redis.call("HSET", key, "tokens", 5)
    await redis.call("EXPIRE", key, 1000)
    gateway.charge(tenant, "m", [usage_of(5, 6, 0, None)])
    await gateway.settle()
    assert await redis.call("TTL", key) == -1
    assert (await usage_of_tenant(redis, tenant))[b"tokens"] == 16


async def test_only_keys_past_their_time_are_deleted(start_redis: Callable[[], Server]) -> None:
    redis = open_redis(redis_settings_of(start_redis()))
    tenant, gateway = tenant_of(), admission_of(redis, tenant_sweep_s=0.05)
    gateway.charge(tenant, "m", [usage_of(5, 6, 0, None)])
    await gateway.settle()
    name, month = tenant.name, month_of(now_s())
    old, held = usage_key(name, "2020-01"), usage_key(name, month)
    await redis.call("HSET", old, "tokens", 7)
    await redis.call("ZADD", expiry_key(name), now_s() - 1, old)
    await redis.call("HSET", usage_key("other", "2020-01"), "tokens", 7)
    running = asyncio.create_task(gateway.run())
    async with asyncio.timeout(15):
        while await redis.call("EXISTS", old):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await redis.call("EXISTS", held, usage_key("other", "2020-01")) == 2
    score = await redis.call("ZSCORE", expiry_key(name), held)
    assert isinstance(score, bytes)
    assert float(score) - now_s() == pytest.approx(400 * 86400, abs=60)
    await redis.close()


async def test_a_policy_that_evicts_usage_is_an_error_in_the_log(
    start_redis: Callable[[], Server], caplog: pytest.LogCaptureFixture
) -> None:
    redis = open_redis(redis_settings_of(start_redis()))
    await redis.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    running = asyncio.create_task(admission_of(redis).run())
    async with asyncio.timeout(15):
        while "may evict tenants' usage" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await redis.close()


class CountingScripts:
    """Counts calls of the script that writes usage."""

    def __init__(self) -> None:
        self.num_settled = 0

    async def settle(self, _keys: object, _arguments: object) -> None:
        self.num_settled += 1


@pytest.mark.parametrize("limits", [{}, {"tokens_per_minute": 10**6}])
async def test_usage_of_tenants_without_limits_is_written_in_batches(
    limits: dict[str, int],
) -> None:
    scripts, tenant = CountingScripts(), tenant_of(**limits)
    ledger = Ledger("writer", cast("Scripts", scripts), TenancySettings(), Metrics())
    running = asyncio.create_task(ledger.run())
    for _ in range(5):
        ledger.charge(tenant, "2026-11", "model", TokenCounts(1, 2, 0, 3))
        for _ in range(3):
            await asyncio.sleep(0)
    await ledger.flush()
    running.cancel()
    assert scripts.num_settled == (5 if limits else 1)
