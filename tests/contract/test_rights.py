"""Real servers with the rights of each service: what is needed works, the rest is refused."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from pydantic import SecretStr

from tests.servers import Server, bus_settings_of, make_nats, make_redis
from tokenmesh.shared import subjects
from tokenmesh.shared.blobs import PREFIX
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.errors import BusLost, ConfigError, DeadlineExceeded, NoResponders
from tokenmesh.shared.ids import GatewayId, InstanceId, ModelName, ResponseId, WorkerId
from tokenmesh.shared.messages import Done, Ping
from tokenmesh.shared.prefix_index import IndexKeys
from tokenmesh.shared.redis import Redis, open_redis
from tokenmesh.shared.rights import SERVICE_USERS, USERS, nats_users, redis_users

SOON_S = 0.3
"""A refused message could take so long to arrive."""
MODEL, WORKER, GATEWAY = ModelName("m"), WorkerId("worker-1"), GatewayId("gateway-1")


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A NATS with the users of the table; their password is the server's."""
    server = make_nats(tmp_path_factory.mktemp("nats"))
    config = Path(server.command[-1])
    kept = [line for line in config.read_text().splitlines() if "authorization" not in line]
    users = nats_users(dict.fromkeys(USERS, f'"{server.password}"'))
    config.write_text("\n".join(kept) + "\n" + users)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Redis or Valkey with the users of the table."""
    server = make_redis(tmp_path_factory.mktemp("redis"))
    config = Path(server.command[-1])
    kept = [line for line in config.read_text().splitlines() if "requirepass" not in line]
    users = redis_users(dict.fromkeys(SERVICE_USERS, server.password))
    config.write_text("\n".join(kept) + "\n" + users)
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def user(server: Server, name: str) -> AsyncIterator[tuple[MessageBus, list[str]]]:
    """A connection of a user, and the kinds of what goes wrong on it."""
    problems: list[str] = []
    settings = bus_settings_of(server).model_copy(update={"user": name})
    bus = await connect(settings, f"{name}-1", problems.append)
    try:
        yield bus, problems
    finally:
        await bus.close()


async def answers(bus: MessageBus, subject: str, times: int = 1) -> None:
    """Answer each request on a subject so many times."""

    async def receive(envelope: Envelope) -> None:
        for _ in range(times):
            await bus.reply(envelope, Done())

    await bus.subscribe(subject, receive)
    await bus.flush()


REQUESTS = [
    ("gateway", "tokenizer", subjects.tokenize(MODEL)),
    ("gateway", "tokenizer", subjects.replica(subjects.tokenize(MODEL), InstanceId("tokenizer-1"))),
    ("gateway", "encoder", subjects.encode(MODEL)),
    ("gateway", "scheduler", subjects.place(MODEL)),
    ("gateway", "worker", subjects.worker_generate(WORKER)),
    ("gateway", "worker", subjects.worker_control(WORKER)),
    ("tokenizer", "gateway", subjects.gateway_prompts(GATEWAY)),
    *(("gateway", name, subjects.process_control(InstanceId("x-1"))) for name in SERVICE_USERS),
]


@pytest.mark.parametrize(("sender", "listener", "subject"), REQUESTS)
async def test_a_request_that_is_needed_is_answered(
    nats: Server, sender: str, listener: str, subject: str
) -> None:
    async with user(nats, listener) as (other, problems), user(nats, sender) as (bus, own):
        await answers(other, subject)
        assert await bus.request(subject, Ping(), deadline_s=now_s() + 5) == Done()
        assert (problems, own) == ([], [])


async def arrives(
    server: Server, sender: str, receiver: str, subject: str
) -> tuple[bool, list[str]]:
    """Return whether what one user publishes reaches another, and the sender's problems."""
    found = asyncio.Event()

    async def receive(_subject: str, _data: bytes) -> None:
        found.set()

    async with user(server, receiver) as (other, _), user(server, sender) as (bus, problems):
        await other.subscribe_raw(subject, receive)
        await other.flush()
        await bus.publish_raw(subject, b"x")
        await bus.flush()
        with suppress(TimeoutError):
            await asyncio.wait_for(found.wait(), SOON_S)
        return found.is_set(), problems


@pytest.mark.parametrize("sender", SERVICE_USERS)
async def test_only_a_worker_can_publish_tokens(nats: Server, sender: str) -> None:
    has_arrived, problems = await arrives(nats, sender, "gateway", subjects.gateway_tokens(GATEWAY))
    assert has_arrived == (sender == "worker")
    assert bool(problems) == (sender != "worker")


@pytest.mark.parametrize("sender", SERVICE_USERS)
async def test_a_heartbeat_is_published_under_the_own_name_only(nats: Server, sender: str) -> None:
    subject = subjects.beat("worker", InstanceId("worker-1"))
    has_arrived, _ = await arrives(nats, sender, "scheduler", subject)
    assert has_arrived == (sender == "worker")


@pytest.mark.parametrize(
    ("thief", "subject"),
    [
        ("tokenizer", subjects.worker_generate(WORKER)),
        ("encoder", subjects.tokenize(MODEL)),
        ("worker", subjects.place(MODEL)),
        ("worker", subjects.ALL_SPANS),
        ("tokenizer", "tm.>"),
        ("events", subjects.gateway_tokens(GATEWAY)),
        ("tokenizer", "_INBOX.gateway.>"),
    ],
)
async def test_what_is_for_others_cannot_be_heard(nats: Server, thief: str, subject: str) -> None:
    async with user(nats, thief) as (bus, problems):
        await answers(bus, subject)
        async with asyncio.timeout(15):
            while not problems:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_an_answer_can_be_given_once_and_only_to_a_request(nats: Server) -> None:
    async with user(nats, "encoder") as (encoder, problems), user(nats, "gateway") as (bus, _):
        await answers(encoder, subjects.encode(MODEL), times=2)
        await bus.request(subjects.encode(MODEL), Ping(), deadline_s=now_s() + 5)
        await encoder.flush()
        assert problems
        problems.clear()
        await encoder.publish_raw("_INBOX.gateway.guessed", b"x")
        await encoder.flush()
        assert problems


async def test_a_user_with_a_wrong_password_does_not_connect(nats: Server) -> None:
    settings = bus_settings_of(nats).model_copy(
        update={"user": "worker", "password": SecretStr("wrong")}
    )
    with pytest.raises(ConfigError):
        await connect(settings, "worker-1")


async def test_only_gateways_reach_the_log_of_responses(nats: Server) -> None:
    subject = "$JS.API.STREAM.INFO.tm-responses"
    async with user(nats, "gateway") as (gateway, _):
        reply = await gateway.raw.request(subject, b"", deadline_s=now_s() + 5)
        assert b"stream not found" in reply.data
    async with user(nats, "worker") as (worker, problems):
        with pytest.raises((DeadlineExceeded, NoResponders, BusLost)):
            await worker.raw.request(subject, b"", deadline_s=now_s() + SOON_S)
        assert problems


async def test_a_gateway_hears_of_new_entries_in_the_log_of_a_response(nats: Server) -> None:
    subject = subjects.response_log(ResponseId("resp_1"))
    async with user(nats, "gateway") as (gateway, problems):
        heard: asyncio.Queue[bytes] = asyncio.Queue()

        async def receive(_: str, data: bytes) -> None:
            heard.put_nowait(data)

        await gateway.subscribe_raw(subject, receive)
        await gateway.flush()
        await gateway.publish_raw(subject, b"entry")
        assert await asyncio.wait_for(heard.get(), 5) == b"entry"
        assert problems == []


@asynccontextmanager
async def redis_of(server: Server, name: str) -> AsyncIterator[Redis]:
    settings = RedisSettings(
        url=f"redis://127.0.0.1:{server.port}/0", user=name, password=SecretStr(server.password)
    )
    redis = open_redis(settings)
    try:
        yield redis
    finally:
        await redis.close()


Act = Callable[[Redis], Awaitable[object]]
KEYS = IndexKeys(MODEL)


def put(key: str) -> Act:
    return lambda redis: redis.call("SET", key, "x")


async def release(redis: Redis) -> object:
    script = "return redis.call('HSET', KEYS[1], 'a', 1)"
    return await redis.call("EVAL", script, 1, KEYS.reserved(WORKER, 1))


ACTS = [
    (put(PREFIX + "a"), {"gateway", "tokenizer", "encoder", "worker"}),
    (put("tm:tenant:{a}:state"), {"gateway"}),
    (put(KEYS.blocks(WORKER, 1)), {"scheduler", "worker"}),
    (release, {"gateway", "scheduler", "worker"}),
    (lambda redis: redis.call("PING"), set(SERVICE_USERS)),
    (lambda redis: redis.call("INFO", "memory"), set(SERVICE_USERS)),
    (lambda redis: redis.call("KEYS", "*"), set()),
    (lambda redis: redis.call("FLUSHALL"), set()),
    (lambda redis: redis.call("CONFIG", "GET", "*"), set()),
    (lambda redis: redis.call("ACL", "LIST"), set()),
    (put("another"), set()),
]


@pytest.mark.parametrize("name", SERVICE_USERS)
async def test_a_service_reaches_its_own_keys_and_commands_in_redis(
    valkey: Server, name: str
) -> None:
    async with redis_of(valkey, name) as redis:
        allowed = set()
        for number, (act, _) in enumerate(ACTS):
            try:
                await act(redis)
            except ConfigError:
                continue
            allowed.add(number)
    assert allowed == {number for number, (_, users) in enumerate(ACTS) if name in users}
