"""A service of which a process stands still, or none is there: an answer as soon as one can."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fakes.back_end import FakeTokenizer
from tests.fakes.cut_link import CutLink
from tests.fakes.service_mesh import running
from tests.servers import Server
from tokenmesh.services.gateway.core.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.core.mesh.held_prompts import HeldPrompts
from tokenmesh.services.tokenizer_svc.main import build as build_tokenizer
from tokenmesh.shared import subjects
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.loader import changed
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings, ServiceSettings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import CheckpointError, NoResponders, Unavailable
from tokenmesh.shared.ids import GatewayId, InstanceId, ModelName, RequestId, WorkerId
from tokenmesh.shared.lifecycle import StopSignals
from tokenmesh.shared.membership import Members, MembershipView
from tokenmesh.shared.messages import Heartbeat, Place, Placed
from tokenmesh.shared.messages.tokenize import Detokenize, Detokenized
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.service import Mesh
from tokenmesh.shared.service.run import serve
from tokenmesh.shared.tokens import pack_ids

GATEWAY = GatewayId("g")
NUM_REQUESTS = 12
"""The probability that none of them reaches the frozen process is 1 in 4096."""


class PromptScheduler(Actor):
    """Accepts every request."""

    @handles(Place)
    async def place(self, message: Place, context: Context) -> Placed:
        return Placed(worker_id=WorkerId("w"), epoch=1)


@pytest.fixture
def settings(bus_settings: BusSettings, redis_settings: RedisSettings) -> Settings:
    return Settings(bus=bus_settings, redis=redis_settings)


@pytest.fixture
async def members(bus: MessageBus) -> AsyncIterator[Members]:
    members = Members(MembershipView(4, 100))
    await members.start(bus)
    yield members
    await members.stop()


async def freeze_one(bus: MessageBus, subject: str, queue: str) -> None:
    """One more process of the queue group, which does not answer."""

    async def ignore(_envelope: Envelope) -> None:
        return

    await bus.subscribe(subject, ignore, queue=queue)
    await bus.flush()


def calls_of(bus: MessageBus, members: Members) -> ServiceCalls:
    return calls_with(bus, members, GatewaySettings(second_ask_s=0.05))


async def detokenize(calls: ServiceCalls, model: ModelName) -> None:
    message = Detokenize(request_id=RequestId("r"), model=model, token_ids=pack_ids([40]))
    until_s = now_s() + 60
    await calls.request(
        subjects.tokenize(model), message, Detokenized, timeout_s=30, deadline_s=until_s
    )


def calls_with(bus: MessageBus, members: Members, settings: GatewaySettings) -> ServiceCalls:
    prompts = HeldPrompts(bus, GATEWAY)
    return ServiceCalls(
        bus,
        settings,
        members,
        left_out=list,
        prompts=prompts,
        metrics=Metrics(),
    )


def beat_of(service: str, instance: str, starts: Sequence[str] = (), epoch: int = 1) -> Heartbeat:
    return Heartbeat(
        service=service,
        instance_id=InstanceId(instance),
        epoch=epoch,
        sequence=1,
        version="0",
        interval_s=60.0,
        starts=[ModelName(each) for each in starts],
    )


async def listen(mesh: Mesh, actor: Actor, subject: str, queue: str) -> None:
    await mesh.listen(actor, subject, queue)
    await mesh.listen(actor, subjects.replica(subject, mesh.instance_id))


async def known(members: Members, service: str) -> None:
    async with asyncio.timeout(15):
        while not members.service(service):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def next_to_a_frozen_one(
    service: str, actor: Actor, subject: str, settings: Settings, bus: MessageBus, members: Members
) -> AsyncIterator[ServiceCalls]:
    """Calls of a subject on which one process of the service answers and another does not."""

    async def build(mesh: Mesh) -> None:
        await listen(mesh, actor, subject, service)

    async with running(service, settings, build):
        await freeze_one(bus, subject, service)
        await known(members, service)
        yield calls_of(bus, members)


async def test_a_frozen_tokenizer_costs_little_time(
    settings: Settings, bus: MessageBus, members: Members
) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")
    subject = subjects.tokenize(model)
    both = next_to_a_frozen_one("tokenizer", FakeTokenizer(), subject, settings, bus, members)
    async with both as calls:
        message = Detokenize(request_id=RequestId("r"), model=model, token_ids=pack_ids([40, 41]))
        async with asyncio.timeout(15):
            for _ in range(NUM_REQUESTS):
                await calls.request(
                    subject, message, Detokenized, timeout_s=30, deadline_s=now_s() + 60
                )


async def test_a_request_lost_with_a_tokenizer_is_repeated_until_there_is_another(
    settings: Settings, bus: MessageBus, members: Members
) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")
    subject = subjects.tokenize(model)
    is_taken = asyncio.Event()

    async def take(_envelope: Envelope) -> None:
        is_taken.set()

    async def build(mesh: Mesh) -> None:
        await listen(mesh, FakeTokenizer(), subject, "tokenizer")

    dying = await bus.subscribe(subject, take, queue="tokenizer")
    await bus.flush()
    message = Detokenize(request_id=RequestId("r"), model=model, token_ids=pack_ids([40, 41]))
    requesting = asyncio.create_task(
        calls_of(bus, members).request(
            subject, message, Detokenized, timeout_s=30, deadline_s=now_s() + 60
        )
    )
    await is_taken.wait()
    await dying.stop()
    await asyncio.sleep(1.0)
    async with running("tokenizer", settings, build):
        await asyncio.wait_for(requesting, 15)


async def test_a_frozen_scheduler_costs_little_time(
    settings: Settings, bus: MessageBus, members: Members
) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")
    subject = subjects.place(model)
    both = next_to_a_frozen_one("scheduler", PromptScheduler(), subject, settings, bus, members)
    async with both as calls:
        place = Place(request_id=RequestId("r"), model=model, num_tokens=1, max_tokens=1)
        async with asyncio.timeout(15):
            for _ in range(NUM_REQUESTS):
                assert (await calls.place(place, now_s() + 60)).worker_id == "w"


async def test_a_dead_replica_gets_one_request(settings: Settings, bus: MessageBus) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")
    subject = subjects.place(model)

    async def build(mesh: Mesh) -> None:
        await mesh.listen(PromptScheduler(), subject, "scheduler")

    gone = Members(MembershipView(4, 100))
    gone.view.observe(beat_of("scheduler", "scheduler-gone"), monotonic_s())

    async with running("scheduler", settings, build):
        await freeze_one(bus, subject, "scheduler")
        limits = GatewaySettings(second_ask_s=0.05, call_attempts=24, place_idle_s=0.1)
        calls = calls_with(bus, gone, limits)
        place = Place(request_id=RequestId("r"), model=model, num_tokens=1, max_tokens=1)
        async with asyncio.timeout(15):
            for _ in range(8):
                assert (await calls.place(place, now_s() + 60)).worker_id == "w"


CUT_S = 3.0
"""The last of five attempts is sent long before its end."""
OUTAGE_S = 1.5
"""No process runs for so long; five attempts end after half a second."""


async def test_a_request_waits_while_no_tokenizer_runs(
    settings: Settings, bus: MessageBus, members: Members
) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")
    subject = subjects.tokenize(model)

    async def build(mesh: Mesh) -> None:
        await listen(mesh, FakeTokenizer(), subject, "tokenizer")

    message = Detokenize(request_id=RequestId("r"), model=model, token_ids=pack_ids([40, 41]))
    request = calls_of(bus, members).request(
        subject, message, Detokenized, timeout_s=30, deadline_s=now_s() + 60
    )
    requesting = asyncio.create_task(request)
    await asyncio.sleep(OUTAGE_S)
    async with running("tokenizer", settings, build), asyncio.timeout(15):
        assert isinstance(await requesting, Detokenized)


async def test_a_request_waits_while_no_scheduler_runs(
    settings: Settings, bus: MessageBus, members: Members
) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")

    async def build(mesh: Mesh) -> None:
        await listen(mesh, PromptScheduler(), subjects.place(model), "scheduler")

    place = Place(request_id=RequestId("r"), model=model, num_tokens=1, max_tokens=1)
    placing = asyncio.create_task(calls_of(bus, members).place(place, now_s() + 60))
    await asyncio.sleep(OUTAGE_S)
    async with running("scheduler", settings, build), asyncio.timeout(15):
        assert (await placing).worker_id == "w"


async def test_the_wait_for_a_service_is_bounded(bus: MessageBus, members: Members) -> None:
    limits = GatewaySettings(service_wait_s=0.4, retry_pause_max_s=0.1)
    calls = calls_with(bus, members, limits)
    place = Place(request_id=RequestId("r"), model=ModelName("none"), num_tokens=1, max_tokens=1)
    async with asyncio.timeout(15):
        with pytest.raises(NoResponders):
            await calls.place(place, now_s() + 60)


async def test_a_scheduler_that_waited_in_vain_gets_no_retry(
    settings: Settings, bus: MessageBus, members: Members
) -> None:
    model, num_requests = ModelName(f"m-{secrets.token_hex(4)}"), 0

    class NoWorker(Actor):
        @handles(Place)
        async def place(self, message: Place, context: Context) -> Placed:
            nonlocal num_requests
            num_requests += 1
            raise Unavailable("no live worker")

    async def build(mesh: Mesh) -> None:
        await mesh.listen(NoWorker(), subjects.place(model), "scheduler")

    place = Place(request_id=RequestId("r"), model=model, num_tokens=1, max_tokens=1)
    async with running("scheduler", settings, build):
        with pytest.raises(Unavailable, match="no live worker"):
            await calls_of(bus, members).place(place, now_s() + 60)
    assert num_requests == 1


async def test_the_wait_for_a_service_is_longer_while_one_is_starting(
    settings: Settings, bus: MessageBus, members: Members
) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")
    subject = subjects.tokenize(model)
    is_loaded = asyncio.Event()

    async def build(mesh: Mesh) -> None:
        await is_loaded.wait()
        await listen(mesh, FakeTokenizer(), subject, "tokenizer")

    with_model = settings.model_copy(update={"models": (ModelSettings(model=model),)})
    stops = StopSignals()
    instance = InstanceId(f"tokenizer-{secrets.token_hex(4)}")
    serving = asyncio.create_task(serve("tokenizer", instance, with_model, build, stops))
    async with asyncio.timeout(15):
        while not members.starting("tokenizer"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    limits = GatewaySettings(service_wait_s=0.1, retry_pause_max_s=0.1, call_attempts=1)
    asking = asyncio.create_task(
        calls_with(bus, members, limits).request(
            subject,
            Detokenize(request_id=RequestId("r"), model=model, token_ids=pack_ids([40, 41])),
            Detokenized,
            timeout_s=30,
            deadline_s=now_s() + 60,
        )
    )
    await asyncio.sleep(0.5)
    assert not asking.done()
    assert members.service("tokenizer") == []
    # a version that does not know of starts sends it nothing for this
    assert [each.beat.draining for each in members.starting("tokenizer")] == [True]
    is_loaded.set()
    assert isinstance(await asyncio.wait_for(asking, 15), Detokenized)
    assert [each.beat.draining for each in members.service("tokenizer")] == [False]
    assert [each.beat.instance_id for each in members.service("tokenizer")] == [instance]
    stops.stop("test is over")
    await asyncio.wait_for(serving, 15)


async def test_a_service_that_starts_again_and_again_is_not_waited_for(
    bus: MessageBus, members: Members
) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")
    for life in range(4):
        beat = beat_of("tokenizer", "t", [model], epoch=life)
        await bus.publish(subjects.beat("tokenizer", InstanceId("t")), beat)
    await bus.flush()
    async with asyncio.timeout(15):
        while not members.starting("tokenizer") or members.is_starting("tokenizer"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    limits = GatewaySettings(service_wait_s=0.1, retry_pause_max_s=0.1, call_attempts=1)
    async with asyncio.timeout(15):
        with pytest.raises(NoResponders):
            await detokenize(calls_with(bus, members, limits), model)


async def test_a_request_for_a_model_that_no_tokenizer_can_load_ends_at_once(
    settings: Settings, bus: MessageBus, members: Members
) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")

    async def build(mesh: Mesh) -> None:
        error = CheckpointError("/srv/models/m/tokenizer.json cannot be read: no such file")
        mesh.note_broken([model], error)

    async with running("tokenizer", settings, build), asyncio.timeout(15):
        await known(members, "tokenizer")
        with pytest.raises(Unavailable) as caught:
            await detokenize(calls_of(bus, members), model)
    assert caught.value.message == (
        f"the tokenizer cannot load the model {model}: tokenizer.json cannot be read: no such file"
    )


async def test_a_tokenizer_says_which_of_its_models_it_could_not_load(
    settings: Settings, bus: MessageBus, members: Members, tmp_path: Path
) -> None:
    model = ModelName(f"broken-{secrets.token_hex(4)}")
    (tmp_path / "config.json").write_text("{}")
    broken = ModelSettings(model=str(tmp_path), served_model_name=(model,))
    skips = changed(settings, {"service": {"skip_broken_models": True}})
    skips = skips.model_copy(update={"models": (broken,)})
    async with running("tokenizer", skips, build_tokenizer), asyncio.timeout(15):
        await known(members, "tokenizer")
        with pytest.raises(Unavailable) as caught:
            await detokenize(calls_of(bus, members), model)
    assert caught.value.message.startswith(f"the tokenizer cannot load the model {model}: ")
    assert str(tmp_path.parent) not in caught.value.message


async def test_a_request_ends_soon_after_its_tokenizer_was_cut_off(
    settings: Settings, bus: MessageBus, members: Members, nats_server: Server
) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")
    subject = subjects.tokenize(model)

    async def build(mesh: Mesh) -> None:
        await listen(mesh, FakeTokenizer(), subject, "tokenizer")

    async with CutLink.to(nats_server.port) as link:
        limits = {"url": f"nats://127.0.0.1:{link.port}", "ping_interval_s": 0.2}
        behind = settings.model_copy(
            update={
                "bus": settings.bus.model_copy(update=limits),
                "service": ServiceSettings(beat_interval_s=0.1),
            }
        )
        async with running("tokenizer", behind, build):
            await known(members, "tokenizer")
            calls = calls_of(bus, members)
            link.cut()
            message = Detokenize(
                request_id=RequestId("r"), model=model, token_ids=pack_ids([40, 41])
            )
            asking = asyncio.create_task(
                calls.request(subject, message, Detokenized, timeout_s=60, deadline_s=now_s() + 60)
            )
            await asyncio.sleep(CUT_S)
            assert not asking.done()
            link.repair()
            assert isinstance(await asyncio.wait_for(asking, 10), Detokenized)


BACK_S = 2.0
"""Within it after its return a process has answered what it was asked before."""


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("service", ["tokenizer", "encoder"])
async def test_what_a_service_was_asked_while_cut_off_is_answered_when_it_is_back(
    settings: Settings, bus: MessageBus, members: Members, nats_server: Server, service: str
) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")
    subject = {"tokenizer": subjects.tokenize, "encoder": subjects.encode}[service](model)

    async def build(mesh: Mesh) -> None:
        await listen(mesh, FakeTokenizer(), subject, service)

    async with CutLink.to(nats_server.port) as link:
        url = f"nats://127.0.0.1:{link.port}"
        plain = BusSettings(url=url, user=settings.bus.user, password=settings.bus.password)
        async with running(service, settings.model_copy(update={"bus": plain}), build):
            await known(members, service)
            calls = calls_with(bus, members, GatewaySettings())
            link.cut()
            asking = []
            for _ in range(10):
                message = Detokenize(
                    request_id=RequestId("r"), model=model, token_ids=pack_ids([40, 41])
                )
                request = calls.request(
                    subject,
                    message,
                    Detokenized,
                    timeout_s=60,
                    deadline_s=now_s() + 60,
                    hedge_after_s=5.0 if service == "encoder" else None,
                )
                asking.append(asyncio.create_task(request))
                await asyncio.sleep(1.0)
            assert not any(each.done() for each in asking)
            link.repair()
            began_s = monotonic_s()
            await asyncio.gather(*asking)
            assert monotonic_s() - began_s < BACK_S
