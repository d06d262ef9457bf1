"""A service of which a process stands still, or none is there: an answer as soon as one can."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest

from tests.fakes.back_end import FakeTokenizer
from tests.fakes.service_mesh import running
from tokenmesh.services.gateway.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.mesh.held_prompts import HeldPrompts
from tokenmesh.services.gateway.mesh.replicas import Replicas
from tokenmesh.shared import subjects
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import NoResponders, Unavailable
from tokenmesh.shared.ids import GatewayId, InstanceId, ModelName, RequestId, WorkerId
from tokenmesh.shared.membership import Members, MembershipView
from tokenmesh.shared.messages import Place, Placed
from tokenmesh.shared.messages.tokenize import Detokenize, Detokenized
from tokenmesh.shared.service import Mesh
from tokenmesh.shared.tokens import pack_ids

GATEWAY = GatewayId("g")
NUM_QUESTIONS = 12
"""That none of so many would reach the frozen one by chance: 1 in 4096."""


class PromptScheduler(Actor):
    """Has a place for everybody."""

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
    """One more of the queue group, which takes questions and says nothing."""

    async def say_nothing(_envelope: Envelope) -> None:
        return

    await bus.subscribe(subject, say_nothing, queue=queue)
    await bus.flush()


def calls_of(bus: MessageBus, members: Members) -> ServiceCalls:
    other = Replicas(members).freshest
    return ServiceCalls(
        bus,
        GatewaySettings(second_ask_s=0.05),
        other,
        left_out=list,
        prompts=HeldPrompts(bus, GATEWAY),
    )


async def listen(mesh: Mesh, actor: Actor, subject: str, queue: str) -> None:
    await mesh.listen(actor, subject, queue)
    await mesh.listen(actor, subjects.replica(subject, mesh.instance_id))


async def known(members: Members, service: str) -> None:
    async with asyncio.timeout(5):
        while not members.service(service):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_frozen_tokenizer_costs_a_moment(
    settings: Settings, bus: MessageBus, members: Members
) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")
    subject = subjects.tokenize(model)

    async def build(mesh: Mesh) -> None:
        await listen(mesh, FakeTokenizer(), subject, "tokenizer")

    async with running("tokenizer", settings, build):
        await freeze_one(bus, subject, "tokenizer")
        await known(members, "tokenizer")
        calls = calls_of(bus, members)
        question = Detokenize(request_id=RequestId("r"), model=model, token_ids=pack_ids([40, 41]))
        async with asyncio.timeout(3):
            for _ in range(NUM_QUESTIONS):
                await calls.ask(
                    subject, question, Detokenized, timeout_s=30, deadline_s=now_s() + 60
                )


async def test_a_question_that_a_tokenizer_took_along_is_asked_until_there_is_another(
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
    question = Detokenize(request_id=RequestId("r"), model=model, token_ids=pack_ids([40, 41]))
    asking = asyncio.create_task(
        calls_of(bus, members).ask(
            subject, question, Detokenized, timeout_s=30, deadline_s=now_s() + 60
        )
    )
    await is_taken.wait()
    await dying.stop()
    await asyncio.sleep(1.0)
    async with running("tokenizer", settings, build):
        await asyncio.wait_for(asking, 5.0)


async def test_a_frozen_scheduler_costs_a_moment(
    settings: Settings, bus: MessageBus, members: Members
) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")
    subject = subjects.place(model)

    async def build(mesh: Mesh) -> None:
        await listen(mesh, PromptScheduler(), subject, "scheduler")

    async with running("scheduler", settings, build):
        await freeze_one(bus, subject, "scheduler")
        await known(members, "scheduler")
        calls = calls_of(bus, members)
        place = Place(request_id=RequestId("r"), model=model, num_tokens=1, max_tokens=1)
        async with asyncio.timeout(5):
            for _ in range(NUM_QUESTIONS):
                assert (await calls.place(place, now_s() + 60)).worker_id == "w"


async def test_a_replica_that_is_gone_is_asked_only_once(
    settings: Settings, bus: MessageBus
) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")
    subject = subjects.place(model)

    async def build(mesh: Mesh) -> None:
        await mesh.listen(PromptScheduler(), subject, "scheduler")

    def gone(asked: str) -> str:
        return subjects.replica(asked, InstanceId("scheduler-gone"))

    async with running("scheduler", settings, build):
        await freeze_one(bus, subject, "scheduler")
        limits = GatewaySettings(second_ask_s=0.05, call_attempts=24, place_idle_s=0.1)
        calls = ServiceCalls(bus, limits, gone, left_out=list, prompts=HeldPrompts(bus, GATEWAY))
        place = Place(request_id=RequestId("r"), model=model, num_tokens=1, max_tokens=1)
        async with asyncio.timeout(15):
            for _ in range(8):
                assert (await calls.place(place, now_s() + 60)).worker_id == "w"


HOLE_S = 1.5
"""Nobody is there for so long: five attempts are over after half a second."""


async def test_a_hole_without_any_tokenizer_is_waited_out(
    settings: Settings, bus: MessageBus, members: Members
) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")
    subject = subjects.tokenize(model)

    async def build(mesh: Mesh) -> None:
        await listen(mesh, FakeTokenizer(), subject, "tokenizer")

    question = Detokenize(request_id=RequestId("r"), model=model, token_ids=pack_ids([40, 41]))
    asked = calls_of(bus, members).ask(
        subject, question, Detokenized, timeout_s=30, deadline_s=now_s() + 60
    )
    asking = asyncio.create_task(asked)
    await asyncio.sleep(HOLE_S)
    async with running("tokenizer", settings, build), asyncio.timeout(5):
        assert isinstance(await asking, Detokenized)


async def test_a_hole_without_any_scheduler_is_waited_out(
    settings: Settings, bus: MessageBus, members: Members
) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")

    async def build(mesh: Mesh) -> None:
        await listen(mesh, PromptScheduler(), subjects.place(model), "scheduler")

    place = Place(request_id=RequestId("r"), model=model, num_tokens=1, max_tokens=1)
    placing = asyncio.create_task(calls_of(bus, members).place(place, now_s() + 60))
    await asyncio.sleep(HOLE_S)
    async with running("scheduler", settings, build), asyncio.timeout(5):
        assert (await placing).worker_id == "w"


async def test_the_wait_for_somebody_has_an_end(bus: MessageBus, members: Members) -> None:
    limits = GatewaySettings(service_wait_s=0.4, retry_pause_max_s=0.1)
    calls = ServiceCalls(
        bus, limits, Replicas(members).freshest, left_out=list, prompts=HeldPrompts(bus, GATEWAY)
    )
    place = Place(request_id=RequestId("r"), model=ModelName("none"), num_tokens=1, max_tokens=1)
    async with asyncio.timeout(5):
        with pytest.raises(NoResponders):
            await calls.place(place, now_s() + 60)


async def test_a_scheduler_that_waited_for_a_worker_in_vain_is_not_asked_again(
    settings: Settings, bus: MessageBus, members: Members
) -> None:
    model, asked = ModelName(f"m-{secrets.token_hex(4)}"), 0

    class NoWorker(Actor):
        @handles(Place)
        async def place(self, message: Place, context: Context) -> Placed:
            nonlocal asked
            asked += 1
            raise Unavailable("no live worker")

    async def build(mesh: Mesh) -> None:
        await mesh.listen(NoWorker(), subjects.place(model), "scheduler")

    place = Place(request_id=RequestId("r"), model=model, num_tokens=1, max_tokens=1)
    async with running("scheduler", settings, build):
        with pytest.raises(Unavailable, match="no live worker"):
            await calls_of(bus, members).place(place, now_s() + 60)
    assert asked == 1
