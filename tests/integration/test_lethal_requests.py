"""A request that ends every process which works on it: it is refused, and no other one suffers."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tokenmesh.services.gateway.core.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.core.mesh.held_prompts import HeldPrompts
from tokenmesh.shared import subjects
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings, ServiceSettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.ids import GatewayId, ModelName, RequestId, new_instance_id
from tokenmesh.shared.membership import Members, MembershipView
from tokenmesh.shared.messages.tokenize import Detokenize, Detokenized
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.redis import open_redis
from tokenmesh.shared.service import Mesh
from tokenmesh.shared.service.run import ProcessControl
from tokenmesh.shared.tokens import pack_ids, unpack_ids

LETHAL = 13
AWAY_S = 0.1
"""Until another process takes the place of one that has died."""


class Mortal(Actor):
    """Answers with the ids as text, but for the one that ends its process."""

    def __init__(self, service: "MortalService") -> None:
        self._service = service
        self.mesh: Mesh | None = None

    @handles(Detokenize)
    async def detokenize(self, message: Detokenize, context: Context) -> Detokenized:
        ids = list(unpack_ids(message.token_ids))
        if LETHAL in ids:
            assert self.mesh is not None
            self._service.end(self.mesh)
            await asyncio.Event().wait()
        await asyncio.sleep(0.002)
        return Detokenized(text=str(ids))


class MortalService:
    """Processes of one service, each of which is replaced when it dies."""

    def __init__(self, service: str, settings: Settings, subject: str) -> None:
        self.num_deaths = 0
        self._service = service
        self._settings = settings
        self._subject = subject
        self._tasks: set[asyncio.Task[None]] = set()
        self._meshes: list[Mesh] = []
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        instance = new_instance_id(self._service)
        bus = await connect(self._settings.bus, instance)
        redis = open_redis(self._settings.redis)
        self._stack.push_async_callback(redis.close)
        mesh = Mesh(self._service, instance, self._settings, bus, redis, Metrics())
        self._meshes.append(mesh)
        await mesh.start()
        actor = Mortal(self)
        actor.mesh = mesh
        await mesh.listen(actor, subjects.replica(self._subject, instance))
        await mesh.listen(actor, self._subject, queue=self._service)
        control = ProcessControl(lambda: None, mesh.metrics)
        await mesh.listen(control, subjects.process_control(instance))
        await mesh.join()

    def end(self, mesh: Mesh) -> None:
        """As a SIGKILL does: no farewell, and nothing listens any more."""
        self.num_deaths += 1
        task = asyncio.create_task(self._replace(mesh))
        self._tasks.add(task)

    async def _replace(self, mesh: Mesh) -> None:
        await self._cut(mesh)
        await asyncio.sleep(AWAY_S)
        await self.start()

    async def _cut(self, mesh: Mesh) -> None:
        beats = mesh._heartbeat_task
        assert beats is not None
        if beats.cancelled():
            return
        beats.remove_done_callback(mesh._on_heartbeat_task_done)
        beats.cancel()
        await mesh.bus.close()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for mesh in self._meshes:
            await self._cut(mesh)
        # what they had in their hands would be found as tasks without an end
        await asyncio.gather(*(mesh.leave() for mesh in self._meshes))
        await self._stack.aclose()


@asynccontextmanager
async def mortal(
    service: str, count: int, bus: BusSettings, redis: RedisSettings, subject: str
) -> AsyncIterator[MortalService]:
    quick = bus.model_copy(update={"flush_timeout_s": 0.1})
    settings = Settings(bus=quick, redis=redis, service=ServiceSettings(beat_interval_s=0.1))
    processes = MortalService(service, settings, subject)
    try:
        for _ in range(count):
            await processes.start()
        yield processes
    finally:
        await processes.stop()


@pytest.fixture
async def members(bus: MessageBus) -> AsyncIterator[Members]:
    members = Members(MembershipView(4, 100))
    await members.start(bus)
    yield members
    await members.stop()


class Caller:
    """The gateway's calls to a service."""

    def __init__(self, bus: MessageBus, members: Members, subject: str) -> None:
        self.metrics = Metrics()
        self._subject = subject
        self._calls = ServiceCalls(
            bus,
            GatewaySettings(second_ask_s=0.2),
            members,
            left_out=list,
            prompts=HeldPrompts(bus, GatewayId("g")),
            metrics=self.metrics,
        )

    async def ask(self, *ids: int) -> str:
        message = Detokenize(
            request_id=RequestId("r"), model=ModelName("m"), token_ids=pack_ids(list(ids))
        )
        answer = await self._calls.request(
            self._subject, message, Detokenized, timeout_s=60, deadline_s=now_s() + 60
        )
        return answer.text

    async def ask_often(self, first: int, until: "asyncio.Task[str]") -> int:
        """Count the answers before another request was answered."""
        count = 0
        while not until.done():
            number = first + count
            assert await self.ask(number) == str([number])
            count += 1
        return count


@pytest.mark.parametrize(("service", "count"), [("tokenizer", 1), ("tokenizer", 3), ("encoder", 1)])
async def test_a_lethal_request_is_refused_and_no_other_one_is(
    bus: MessageBus,
    members: Members,
    bus_settings: BusSettings,
    redis_settings: RedisSettings,
    service: str,
    count: int,
) -> None:
    model = ModelName(f"m-{secrets.token_hex(4)}")
    subject = {"tokenizer": subjects.tokenize, "encoder": subjects.encode}[service](model)
    async with mortal(service, count, bus_settings, redis_settings, subject) as processes:
        caller = Caller(bus, members, subject)
        assert await caller.ask(1) == "[1]"
        lethal = asyncio.create_task(caller.ask(LETHAL))
        others = [caller.ask_often(1000 * number, lethal) for number in range(1, 9)]
        async with asyncio.timeout(18):
            counts = await asyncio.gather(*others)
            with pytest.raises(InvalidInput, match=f"2 processes of the service {service} have"):
                await lethal
        assert min(counts) > 0
        assert processes.num_deaths == 4
        assert caller.metrics.counter("lethal_requests", service=service)._value.get() == 1
