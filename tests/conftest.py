"""Fixtures for the whole tree: a NATS and a Redis for the session, connections for each test."""

import contextlib
import gc
import importlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, settings

from tests.again import (  # noqa: F401 - hooks of pytest
    pytest_collectreport,
    pytest_runtest_logreport,
    pytest_sessionfinish,
    pytest_sessionstart,
)
from tests.left_gateways import LEFT_GATEWAYS
from tests.repeated import mark_repeated
from tests.servers import Server, bus_settings_of, make_nats, make_redis, redis_settings_of
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.redis import open_redis

# How long an example takes says how busy the machine is: no test fails for it.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep the garbage collector from imported objects: it takes half of the collection.

    Frozen, it costs nothing in the collections of garbage during the tests either.
    """
    gc.disable()
    try:
        _import_own_share_first(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_repeated(items, config.rootpath)


def _import_own_share_first(config: pytest.Config) -> None:
    """In a process of xdist, import the test files in another order than the others do.

    All of them collect the same files at the same time: in a fresh clone each would compile them
    all and rewrite their assertions. So they find what another one has written.
    """
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not number:
        return
    places = [Path(each).absolute() for each in config.args]
    found = {file for each in places for file in each.rglob("test_*.py")}.union(
        each for each in places if each.match("test_*.py")
    )
    # Files of packages are imported by other names.
    files = sorted(each for each in found if not (each.parent / "__init__.py").exists())
    begin = len(files) * int(number) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for file in files[begin:] + files[:begin]:
        # The collection reports what cannot be imported.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(
                ".".join(file.relative_to(config.rootpath).with_suffix("").parts)
            )


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One for each process of pytest, because tests look for what a mesh has left in it."""
    folder = str(tmp_path_factory.mktemp("temporary"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_pulled_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the models that a developer has pulled: they would change what `tokenmesh up` serves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_root_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An HTTP client reads the root certificates when it is made: all of them take it 25 ms."""
    end = "-----END CERTIFICATE-----\n"
    first = Path(certifi.where()).read_text().partition(end)[0] + end
    file = tmp_path_factory.mktemp("certificates") / "root.pem"
    file.write_text(first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        # for clients that do not trust the environment
        patch.setattr(certifi, "where", lambda: str(file))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Fail where a gateway was left running, with the name of the test that began it.

    Without it any later test that collects the gateway's tasks would be blamed.
    """
    result = yield
    is_module_over = nextitem is None or nextitem.path != item.path
    if left := LEFT_GATEWAYS.pop_left(is_module_over=is_module_over):
        pytest.fail(f"gateways are left running by {', '.join(left)}")
    return result


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One NATS for the whole session; a test that stops its NATS takes one from `start_nats`."""
    server = make_nats(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One Redis for the whole session; a test that stops its Redis takes one from `start_redis`."""
    server = make_redis(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def start_nats(tmp_path: Path) -> Iterator[Callable[[], Server]]:
    """Starts a NATS that the test may stop and start."""
    yield from _starter(lambda: make_nats(tmp_path))


@pytest.fixture
def plain_nats(start_nats: Callable[[], Server]) -> Server:
    """A NATS without JetStream."""
    server = start_nats()
    server.stop()
    config = Path(server.command[-1])
    lines = config.read_text().splitlines()
    config.write_text("\n".join(line for line in lines if "jetstream" not in line))
    server.start()
    return server


@pytest.fixture
def small_nats(start_nats: Callable[[], Server]) -> Server:
    """A NATS whose account may have 8 MiB of JetStream's disk."""
    server = start_nats()
    server.stop()
    config = Path(server.command[-1])
    login = f'[{{ user: tokenmesh, password: "{server.password}" }}]'
    account = f"accounts {{ A {{ jetstream {{ max_file: 8388608 }}, users: {login} }} }}\n"
    lines = [
        line for line in config.read_text().splitlines() if not line.startswith("authorization")
    ]
    config.write_text("\n".join([*lines, account]))
    server.start()
    return server


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[Callable[[], Server]]:
    """Starts a Redis that the test may stop and start."""
    yield from _starter(lambda: make_redis(tmp_path))


def _starter(make: Callable[[], Server]) -> Iterator[Callable[[], Server]]:
    started: list[Server] = []

    def start() -> Server:
        server = make()
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def bus_settings(nats_server: Server) -> BusSettings:
    """Settings of the session's NATS."""
    return bus_settings_of(nats_server)


@pytest.fixture
def redis_settings(redis_server: Server) -> RedisSettings:
    """Settings of the session's Redis."""
    return redis_settings_of(redis_server)


@pytest.fixture
async def bus(bus_settings: BusSettings) -> AsyncIterator[MessageBus]:
    """A connection for this test."""
    connection = await connect(bus_settings, "test")
    yield connection
    await connection.close()


@pytest.fixture
async def blobs(redis_settings: RedisSettings) -> AsyncIterator[Blobs]:
    """The blob store; keys of earlier tests may still be there."""
    redis = open_redis(redis_settings)
    yield Blobs(redis, redis_settings)
    await redis.close()
