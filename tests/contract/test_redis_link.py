"""The connection for scripts, on a real Redis: whose reply is whose, and what ends a call."""

import asyncio
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from pydantic import SecretStr

from tests.fakes import certificates
from tests.servers import Server, redis_settings_of
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.errors import ConfigError, TokenMeshError, Unavailable
from tokenmesh.shared.redis import Part, Redis, open_redis

ECHO = "return ARGV[1]"
SLOW = "local n = 0 for i = 1, tonumber(ARGV[1]) do n = n + 1 end return n"


@asynccontextmanager
async def opened(settings: RedisSettings, **changes: object) -> AsyncIterator[Redis]:
    redis = open_redis(settings.model_copy(update=changes))
    try:
        yield redis
    finally:
        await redis.close()


async def test_many_calls_at_once_each_get_their_own_reply(redis_settings: RedisSettings) -> None:
    async with opened(redis_settings) as redis:
        echo = redis.script(ECHO)
        texts = [str(number) * (1 + number % 999) for number in range(500)]
        replies = await asyncio.gather(*(echo([], [text]) for text in texts))
        assert replies == [text.encode() for text in texts]


async def test_who_gives_up_does_not_get_the_others_out_of_step(
    redis_settings: RedisSettings,
) -> None:
    async with opened(redis_settings) as redis:
        echo, dice = redis.script(ECHO), Random(3)
        await echo([], ["here"])

        async def ask(number: int) -> None:
            try:
                async with asyncio.timeout(dice.choice([0, 0.0001, 0.001, 5])):
                    assert await echo([], [number]) == str(number).encode()
            except TimeoutError:
                return

        for first in range(0, 2000, 50):
            await asyncio.gather(*(ask(first + number) for number in range(50)))
        assert await echo([], ["last"]) == b"last"


async def test_redis_comes_back(start_redis: Callable[[], Server]) -> None:
    server = start_redis()
    async with opened(redis_settings_of(server)) as redis:
        echo = redis.script(ECHO)
        assert await echo([], ["1"]) == b"1"
        server.stop()
        with pytest.raises(Unavailable):
            await echo([], ["2"])
        server.start()
        assert await echo([], ["3"]) == b"3"
        server.stop()
        server.start()
        # the lost connection has not been noticed
        assert await echo([], ["4"]) == b"4"


async def test_what_is_under_way_when_redis_dies_fails(start_redis: Callable[[], Server]) -> None:
    server = start_redis()
    async with opened(redis_settings_of(server)) as redis:
        echo = redis.script(ECHO)
        await echo([], ["1"])
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        asked = [asyncio.create_task(echo([], [number])) for number in range(9)]
        await asyncio.sleep(0.02)
        server.stop()
        for each in asked:
            with pytest.raises(Unavailable):
                await each


async def test_a_redis_that_stands_still_costs_the_time_of_a_call(
    start_redis: Callable[[], Server],
) -> None:
    server = start_redis()
    async with opened(redis_settings_of(server), call_timeout_s=0.3) as redis:
        echo = redis.script(ECHO)
        await echo([], ["1"])
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(8):
            with pytest.raises(Unavailable, match="no answer within"):
                await echo([], ["2"])
        server.process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(8):
            assert await echo([], ["3"]) == b"3"


async def test_too_many_calls_at_once_are_refused(redis_settings: RedisSettings) -> None:
    async with opened(redis_settings, max_script_calls=4) as redis:
        echo = redis.script(ECHO)
        await echo([], ["1"])
        slow = asyncio.create_task(redis.script(SLOW)([], [1_000_000]))
        replies = await asyncio.gather(*(echo([], ["2"]) for _ in range(9)), return_exceptions=True)
        refused = [each for each in replies if isinstance(each, Unavailable)]
        assert len(refused) == 9 - sum(each == b"2" for each in replies) >= 5
        assert await slow == 1_000_000


async def test_errors_are_ours(redis_settings: RedisSettings) -> None:
    async with opened(redis_settings) as redis:
        with pytest.raises(TokenMeshError, match="refuses a command"):
            await redis.script("return redis.call('NOTHING')")([], [])
        with pytest.raises(Unavailable, match="MASTERDOWN"):
            await redis.script("return redis.error_reply('MASTERDOWN is away')")([], [])
        assert await redis.script(ECHO)([], ["on"]) == b"on"


@pytest.mark.parametrize("password", [None, SecretStr("wrong")])
async def test_a_wrong_password_is_a_wrong_setting(
    redis_settings: RedisSettings, password: SecretStr | None
) -> None:
    async with opened(redis_settings, password=password) as redis:
        with pytest.raises(ConfigError):
            await redis.script(ECHO)([], ["x"])


async def test_a_script_that_redis_forgot_is_sent_again(redis_settings: RedisSettings) -> None:
    async with opened(redis_settings) as redis:
        echo = redis.script(ECHO + " -- forgotten")
        assert await echo([], ["1"]) == b"1"
        await redis.call("SCRIPT", "FLUSH")
        assert await echo([], ["2"]) == b"2"


async def test_another_database(redis_settings: RedisSettings) -> None:
    url = redis_settings.url.replace("/0", "/3")
    async with opened(redis_settings, url=url) as third, opened(redis_settings) as first:
        await third.script("return redis.call('SET', KEYS[1], 'three')")(["which"], [])
        assert await third.call("GET", "which") == b"three"
        assert await first.call("GET", "which") is None
        await third.call("DEL", "which")


async def test_a_unix_socket(start_redis: Callable[[], Server], tmp_path: Path) -> None:
    server = start_redis()
    server.stop()
    server.command += ["--unixsocket", str(tmp_path / "s")]
    server.start()
    settings = redis_settings_of(server)
    async with opened(settings, url=f"unix://{tmp_path / 's'}") as redis:
        assert await redis.script(ECHO)([], ["by file"]) == b"by file"


async def test_tls(tmp_path: Path) -> None:
    certificate = tmp_path / "certificate.pem"
    certificate.write_text(certificates.FIRST)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"$4\r\nsafe\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    trusted = f"rediss://localhost:{port}/0?ssl_ca_certs={certificate}"
    async with opened(RedisSettings(url=trusted)) as redis:
        assert await redis.script(ECHO)([], []) == b"safe"
    async with opened(RedisSettings(url=f"rediss://localhost:{port}/0")) as redis:
        with pytest.raises(Unavailable):
            await redis.script(ECHO)([], [])
    server.close()


@pytest.mark.parametrize("garbage", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+OK\r\n+OK\r\n+OK\r\n"])
async def test_another_program_listens_there(garbage: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(garbage)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with opened(RedisSettings(url=f"redis://127.0.0.1:{port}/0")) as redis:
        echo = redis.script(ECHO)
        for _ in range(3):
            try:
                assert await echo([], []) == b"OK"
            except Unavailable:
                continue
    server.close()


async def test_after_close_no_connection_is_open() -> None:
    """redis-py repeats a call whose connection was closed."""
    num_open, has_call = 0, asyncio.Event()

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_open
        num_open += 1
        while await reader.read(1000):
            has_call.set()
        num_open -= 1
        writer.close()

    server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    redis = open_redis(RedisSettings(url=f"redis://127.0.0.1:{port}/0"))
    calls = [asyncio.create_task(redis.call("GET", "a")) for _ in range(3)]
    await has_call.wait()
    await redis.close()
    ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 15)
    assert all(isinstance(each, Unavailable) for each in ended)
    with pytest.raises(Unavailable):
        await redis.call("GET", "a")
    while num_open:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    server.close()


async def test_a_transaction_returns_the_replies_of_its_commands(
    redis_settings: RedisSettings,
) -> None:
    async with opened(redis_settings) as redis:
        commands: list[list[Part]] = [
            ["SET", "tx:n", 1],
            ["INCRBY", "tx:n", 4],
            ["MGET", "tx:n", "tx:none"],
        ]
        assert await redis.transact(commands) == [b"OK", 5, [b"5", None]]


async def test_transactions_and_scripts_on_one_connection_do_not_mix(
    redis_settings: RedisSettings,
) -> None:
    async with opened(redis_settings) as redis:
        echo = redis.script(ECHO)

        async def both(number: int) -> None:
            key = f"tx:mix:{number}"
            replies, text = await asyncio.gather(
                redis.transact([["SET", key, number], ["GET", key]]), echo([], [number])
            )
            assert replies == [b"OK", str(number).encode()]
            assert text == str(number).encode()

        await asyncio.gather(*(both(number) for number in range(200)))


@pytest.mark.parametrize(
    ("command", "reason"),
    [(["NOSUCH", "tx:list"], "unknown command"), (["INCR", "tx:list"], "not an integer")],
)
async def test_a_transaction_raises_the_error_of_the_command_at_fault(
    redis_settings: RedisSettings, command: list[str], reason: str
) -> None:
    async with opened(redis_settings) as redis:
        await redis.call("SET", "tx:list", "text")
        with pytest.raises(TokenMeshError, match=reason):
            await redis.transact([["GET", "tx:list"], command])
        assert await redis.transact([["GET", "tx:list"]]) == [b"text"]


async def test_a_transaction_is_repeated_after_redis_restarted(
    start_redis: Callable[[], Server],
) -> None:
    server = start_redis()
    async with opened(redis_settings_of(server)) as redis:
        await redis.transact([["PING"]])
        server.stop()
        server.start()
        assert await redis.transact([["PING"]]) == [b"PONG"]


async def test_a_transaction_on_a_closed_client_is_refused(redis_settings: RedisSettings) -> None:
    async with opened(redis_settings) as redis:
        pass
    with pytest.raises(Unavailable):
        await redis.transact([["PING"]])
