"""A service's life against real servers: start, beats, NATS micro, drain, exit codes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from pydantic import SecretStr

import tokenmesh
from tests.servers import Server, bus_settings_of, free_port, redis_settings_of
from tokenmesh.shared import subjects
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.mesh import (
    BusSettings,
    RedisSettings,
    ServiceSettings,
    TelemetrySettings,
)
from tokenmesh.shared.errors import (
    CheckpointError,
    ConfigError,
    Draining,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.ids import InstanceId, ModelName, WorkerId
from tokenmesh.shared.lifecycle import ExitCode, StopSignals
from tokenmesh.shared.messages import Accepted, Done, Heartbeat, Ping
from tokenmesh.shared.messages.beat import ModelCard, WorkerLoad
from tokenmesh.shared.service import Mesh, serve

INSTANCE = InstanceId("worker-test")
CARD = ModelCard(name=ModelName("tiny"), max_model_len=64, vocab_size=100)


class Greeter(Actor):
    """Answers Ping; on demand it hangs, or its background task crashes."""

    def __init__(self, name: str = "t.greet") -> None:
        self.subject = name
        self.hang = False
        self.fails_to_stop = False
        self.crash = asyncio.Event()

    async def start(self) -> None:
        self.spawn(self.wait_for_crash, "crasher", is_fatal=True)

    async def stop(self) -> None:
        if self.fails_to_stop:
            raise RuntimeError("cannot stop")

    async def wait_for_crash(self) -> None:
        await self.crash.wait()
        raise RuntimeError("crashed on demand")

    @handles(Ping)
    async def ping(self, _message: Ping, _context: Context) -> Accepted:
        if self.hang:
            await asyncio.sleep(60)
        return Accepted(worker_id=WorkerId(INSTANCE))


@pytest.fixture
def settings(bus_settings: BusSettings, redis_settings: RedisSettings) -> Settings:
    """Quick beats, short grace."""
    return Settings(
        bus=bus_settings,
        redis=redis_settings,
        service=ServiceSettings(worker_beat_interval_s=0.02, drain_grace_s=5.0),
        telemetry=TelemetrySettings(enabled=False),
    )


class Running:
    """A service inside the test."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.actor = Greeter()
        self.stops = StopSignals()
        self.built: asyncio.Future[Mesh] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(
            serve(name, INSTANCE, settings, self.build, self.stops), name="service"
        )

    async def build(self, mesh: Mesh) -> None:
        await mesh.listen(self.actor, self.actor.subject, "greeters")
        mesh.set_beat(lambda: ([CARD], WorkerLoad(running=3)))
        self.built.set_result(mesh)

    async def ready(self) -> Mesh:
        mesh = await asyncio.wait_for(self.built, 15.0)
        await asyncio.wait_for(mesh.ready.wait(), 15.0)
        return mesh

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.task, 15.0)


@asynccontextmanager
async def running(settings: Settings, name: str = "worker") -> AsyncIterator[Running]:
    service = Running(settings, name)
    try:
        yield service
    finally:
        service.stops.stop("test is over")
        service.stops.stop("test is over")
        await service.exit_code()


async def collect_beats(bus: MessageBus) -> list[Heartbeat]:
    """Beats of the service under test, as they arrive."""
    beats: list[Heartbeat] = []

    async def receiver(envelope: Envelope) -> None:
        if isinstance(envelope.message, Heartbeat) and envelope.message.instance_id == INSTANCE:
            beats.append(envelope.message)

    await bus.subscribe(subjects.ALL_BEATS, receiver)
    await bus.flush()
    return beats


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def test_service_answers_beats_and_leaves_cleanly(
    bus: MessageBus, settings: Settings
) -> None:
    beats = await collect_beats(bus)
    async with running(settings) as service:
        mesh = await service.ready()
        answer = await bus.request("t.greet", Ping(), deadline_s=now_s() + 5)
        assert answer == Accepted(worker_id=WorkerId(INSTANCE))
        await until(lambda: len(beats) > 3)
        service.stops.stop("SIGTERM")
        assert await service.exit_code() == ExitCode.CLEAN
        assert mesh.draining
    await until(lambda: beats[-1].leaving)
    assert [beat.sequence for beat in beats] == sorted({beat.sequence for beat in beats})
    assert {beat.epoch for beat in beats} == {mesh.epoch}
    assert (beats[0].models, beats[0].load) == ([CARD], WorkerLoad(running=3))
    assert [beat.draining for beat in beats] == sorted(beat.draining for beat in beats)
    assert sum(beat.draining and not beat.leaving for beat in beats) >= 1


async def test_members_appear_and_disappear(bus: MessageBus, settings: Settings) -> None:
    async with running(settings, "scheduler") as service:
        mesh = await service.ready()
        await until(lambda: mesh.members.workers(CARD.name))
        stranger = Heartbeat(
            service="worker",
            instance_id=InstanceId("worker-other"),
            epoch=1,
            sequence=1,
            version="0",
            interval_s=0.02,
            models=[CARD],
        )
        await bus.publish(subjects.beat("worker", stranger.instance_id), stranger)
        await until(lambda: len(mesh.members.workers(CARD.name)) == 2)
        await until(lambda: len(mesh.members.workers(CARD.name)) == 1)
        assert 'tokenmesh:members{service="scheduler"} 1.0' in mesh.metrics.render().decode()


@pytest.mark.parametrize(
    ("name", "heard"),
    [
        ("tokenizer", set()),
        ("worker", {INSTANCE, "gateway-other"}),
        ("scheduler", {INSTANCE, "gateway-other", "worker-other"}),
    ],
)
async def test_heartbeats_reach_only_services_that_follow_them(
    bus: MessageBus, settings: Settings, name: str, heard: set[str]
) -> None:
    async with running(settings, name) as service:
        mesh = await service.ready()
        for stranger in ("worker", "gateway"):
            beat = Heartbeat(
                service=stranger,
                instance_id=InstanceId(f"{stranger}-other"),
                epoch=1,
                sequence=1,
                version="0",
                interval_s=60.0,
            )
            await bus.publish(subjects.beat(stranger, beat.instance_id), beat)
        await bus.flush()
        await mesh.bus.flush()
        await asyncio.sleep(0.05)
        await until(lambda: {each.beat.instance_id for each in mesh.members.all()} == heard)


async def test_drain_hooks_run_in_order_and_one_that_fails_does_not_stop_the_others(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[str] = []

    def hook(name: str, *, fails: bool = False) -> Callable[[float], Coroutine[None, None, None]]:
        async def run(left_s: float) -> None:
            assert 0 < left_s <= settings.service.drain_grace_s
            ran.append(name)
            if fails:
                raise RuntimeError("hook failed")

        return run

    async with running(settings) as service:
        mesh = await service.ready()
        mesh.on_drain(hook("first"))
        mesh.on_drain(hook("second", fails=True))
        mesh.on_drain(hook("third"))
        service.stops.stop("SIGTERM")
        assert await service.exit_code() == ExitCode.CLEAN
    assert ran == ["first", "second", "third"]
    assert "hook failed" in caplog.text


async def test_hanging_work_is_answered_when_the_grace_is_over(
    bus: MessageBus, settings: Settings
) -> None:
    short = settings.service.model_copy(update={"drain_grace_s": 0.1})
    async with running(settings.model_copy(update={"service": short})) as service:
        mesh = await service.ready()
        service.actor.hang = True
        asking = asyncio.create_task(bus.request("t.greet", Ping(), deadline_s=now_s() + 10))
        await until(lambda: 'actor_running{actor="Greeter"} 1.0' in mesh.metrics.render().decode())
        service.stops.stop("SIGTERM")
        with pytest.raises(Draining):
            await asking
        assert await service.exit_code() == ExitCode.CLEAN


async def test_an_actor_that_fails_to_stop_does_not_end_the_others(
    bus: MessageBus, settings: Settings
) -> None:
    beats = await collect_beats(bus)
    async with running(settings) as service:
        mesh = await service.ready()
        await mesh.listen(Greeter(), "t.other")
        service.actor.fails_to_stop = True
        service.stops.stop("enough")
        assert await service.exit_code() == ExitCode.CLEAN
    await until(lambda: beats and beats[-1].leaving)


async def test_second_signal_leaves_at_once(settings: Settings) -> None:
    hanging = asyncio.Event()

    async def hang(_left_s: float) -> None:
        hanging.set()
        await asyncio.sleep(60)

    long = settings.service.model_copy(update={"drain_grace_s": 60.0})
    async with running(settings.model_copy(update={"service": long})) as service:
        mesh = await service.ready()
        mesh.on_drain(hang)
        service.stops.stop("SIGINT")
        await asyncio.wait_for(hanging.wait(), 15.0)
        service.stops.stop("SIGINT")
        assert await service.exit_code() == ExitCode.CLEAN


async def test_second_signal_while_work_is_running_answers_it(
    bus: MessageBus, settings: Settings
) -> None:
    long = settings.service.model_copy(update={"drain_grace_s": 60.0})
    async with running(settings.model_copy(update={"service": long})) as service:
        mesh = await service.ready()
        service.actor.hang = True
        asking = asyncio.create_task(bus.request("t.greet", Ping(), deadline_s=now_s() + 10))
        await until(lambda: 'actor_running{actor="Greeter"} 1.0' in mesh.metrics.render().decode())
        service.stops.stop("SIGINT")
        await until(lambda: mesh.draining)
        service.stops.stop("SIGINT")
        with pytest.raises(Draining):
            await asking
        assert await service.exit_code() == ExitCode.CLEAN


async def test_stop_during_a_long_start_ends_the_start(settings: Settings) -> None:
    started = asyncio.Event()
    stops = StopSignals()

    async def build(_mesh: Mesh) -> None:
        started.set()
        await asyncio.sleep(60)

    service = asyncio.create_task(serve("worker", INSTANCE, settings, build, stops))
    await asyncio.wait_for(started.wait(), 15.0)
    stops.stop("SIGTERM")
    assert await asyncio.wait_for(service, 5.0) == ExitCode.CLEAN


async def test_crash_of_a_fatal_task_ends_the_service(settings: Settings) -> None:
    async with running(settings) as service:
        await service.ready()
        service.actor.crash.set()
        assert await service.exit_code() == ExitCode.CRASHED


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConfigError("no such setting"), ExitCode.BAD_CONFIG),
        (CheckpointError("no such file"), ExitCode.BAD_CONFIG),
        (TokenMeshError("something else"), ExitCode.CRASHED),
        (ZeroDivisionError(), ExitCode.CRASHED),
    ],
)
async def test_failing_start_has_its_exit_code(
    settings: Settings, error: Exception, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def build(_mesh: Mesh) -> None:
        raise error

    assert await serve("worker", INSTANCE, settings, build, StopSignals()) == expected
    assert str(error) in caplog.text
    assert ("Traceback" in caplog.text) == (expected == ExitCode.CRASHED)


async def never(_mesh: Mesh) -> None:
    raise AssertionError("must not be built")


async def test_absent_nats_has_its_exit_code_and_message(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    away = BusSettings(url=f"nats://127.0.0.1:{free_port()}", connect_deadline_s=0.1)
    lonely = settings.model_copy(update={"bus": away})
    assert await serve("worker", INSTANCE, lonely, never, StopSignals()) == ExitCode.NO_BUS
    assert f"cannot reach NATS at {away.url}" in caplog.text


@pytest.mark.parametrize("section", ["bus", "redis"])
async def test_wrong_password_is_a_bad_config(settings: Settings, section: str) -> None:
    wrong = getattr(settings, section).model_copy(update={"password": SecretStr("wrong")})
    bad = settings.model_copy(update={section: wrong})
    assert await serve("worker", INSTANCE, bad, never, StopSignals()) == ExitCode.BAD_CONFIG


async def test_service_lives_without_redis_and_finds_it_later(
    bus: MessageBus, settings: Settings, start_redis: Callable[[], Server]
) -> None:
    server = start_redis()
    server.stop()
    late = settings.model_copy(update={"redis": redis_settings_of(server)})
    async with running(late) as service:
        mesh = await service.ready()
        assert await bus.request("t.greet", Ping(), deadline_s=now_s() + 5) != Done()
        with pytest.raises(Unavailable):
            await mesh.blobs.put(b"nowhere")
        server.start()
        assert await mesh.blobs.get(await mesh.blobs.put(b"data")) == b"data"


async def test_service_goes_on_after_a_restart_of_nats(
    settings: Settings, start_nats: Callable[[], Server]
) -> None:
    server = start_nats()
    own = settings.model_copy(update={"bus": bus_settings_of(server)})
    async with running(own) as service:
        mesh = await service.ready()
        server.stop()
        await until(lambda: not mesh.bus.is_connected)
        server.start()
        await until(lambda: mesh.bus.is_connected)
        assert await mesh.bus.request("t.greet", Ping(), deadline_s=now_s() + 5, retries=5)
        await until(lambda: mesh.members.workers(CARD.name))


@pytest.fixture
async def nats_cli(nats_server: Server) -> AsyncIterator[Client]:
    """A foreign client, such as the `nats` command."""
    client = await nats.connect(
        f"nats://127.0.0.1:{nats_server.port}", user="tokenmesh", password=nats_server.password
    )
    yield client
    await client.close()


async def ask(client: Client, subject: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((await client.request(subject, b"", timeout=3)).data)
    return answer


@pytest.mark.parametrize("suffix", ["", ".tokenmesh-worker", f".tokenmesh-worker.{INSTANCE}"])
async def test_nats_micro_sees_the_service(
    nats_cli: Client, bus: MessageBus, settings: Settings, suffix: str
) -> None:
    async with running(settings) as service:
        mesh = await service.ready()
        await bus.request("t.greet", Ping(), deadline_s=now_s() + 5)
        with pytest.raises(TokenMeshError):
            await bus.request("t.greet", Done(), deadline_s=now_s() + 5)
        identity = {
            "name": "tokenmesh-worker",
            "id": INSTANCE,
            "version": tokenmesh.__version__,
            "metadata": {"epoch": str(mesh.epoch)},
        }
        endpoint = {
            "name": "Greeter",
            "subject": "t.greet",
            "queue_group": "greeters",
            "metadata": {"subjects": "t.greet"},
        }
        ping = await ask(nats_cli, f"$SRV.PING{suffix}")
        info = await ask(nats_cli, f"$SRV.INFO{suffix}")
        stats = await ask(nats_cli, f"$SRV.STATS{suffix}")
    assert ping == {"type": "io.nats.micro.v1.ping_response"} | identity
    listed = info.pop("endpoints")
    described = {"type": "io.nats.micro.v1.info_response", "description": "TokenMesh worker"}
    assert info == described | identity
    assert endpoint in listed
    counted, control = stats["endpoints"]
    assert control["name"] == "ProcessControl"
    assert str(stats["started"]).endswith("Z")
    assert (counted["num_requests"], counted["num_errors"]) == (2, 1)
    assert counted["processing_time"] > 0
    assert "does not handle Done" in counted["last_error"]
    assert endpoint.items() <= counted.items()
