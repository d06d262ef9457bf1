"""A worker actor with the simulated engine on a real bus, and the gateway that talks to it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.sim import (
    SimRunner,
    SimVocabulary,
    prompt_key,
    sim_token,
)
from tokenmesh.engine.media_facts import MediaFacts
from tokenmesh.engine.models.pooling.facts import PoolingFacts
from tokenmesh.services.worker_svc.actor import WorkerActor, WorkerContext
from tokenmesh.services.worker_svc.adapters.store import AdapterStore
from tokenmesh.services.worker_svc.intake import Identity
from tokenmesh.services.worker_svc.loaded import SimModel
from tokenmesh.services.worker_svc.thread import EngineThread
from tokenmesh.shared import subjects
from tokenmesh.shared.actor import ActorRuntime
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.mesh import ServiceSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import BlobKey, GatewayId, ModelName, RequestId, WorkerId
from tokenmesh.shared.messages import (
    Generate,
    Message,
    Ping,
    Tokens,
)
from tokenmesh.shared.messages.media import IMAGE, MediaItem
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.tokens import pack_ids, unpack_ids

WORKER = WorkerId("worker-1")
GATEWAY = GatewayId("gateway-1")
MODEL = ModelName("tiny")
EPOCH = 7
VOCABULARY = SimVocabulary(1000, (2,))
PROMPT = list(range(10, 50))


class Brakes:
    """Stands for the time a step takes: `hold` keeps the engine inside of one."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self._released.set()

    def __call__(self, seconds: float) -> None:
        self._released.wait(15.0)

    def hold(self) -> None:
        self._released.clear()

    def release(self) -> None:
        self._released.set()


@dataclass
class Rig:
    """A running worker and the gateway that talks to it."""

    bus: MessageBus
    actor: WorkerActor
    brakes: Brakes
    metrics: Metrics
    alive: set[GatewayId]
    left: list[bool]
    messages: list[Tokens] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, envelope: Envelope) -> None:
        assert isinstance(envelope.message, Tokens)
        self.messages.append(envelope.message)
        self.arrived.set()

    async def generate(self, stream: int = 1, **changes: Any) -> Message:
        question = msgspec.structs.replace(request(stream), **changes)
        subject = subjects.worker_generate(WORKER)
        return await self.bus.request(subject, question, deadline_s=now_s() + 15)

    async def control(self, command: Message) -> Message:
        subject = subjects.worker_control(WORKER)
        return await self.bus.request(subject, command, deadline_s=now_s() + 15)

    def deltas(self, stream: int = 1) -> list[Delta]:
        return [
            delta for tokens in self.messages for delta in tokens.deltas if delta.stream == stream
        ]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while not condition():
                self.arrived.clear()
                await self.arrived.wait()

    async def finished(self, stream: int = 1) -> list[Delta]:
        await self.until(lambda: any(delta.finish for delta in self.deltas(stream)))
        return self.deltas(stream)

    async def idle(self) -> None:
        """A round trip after the last ending; then the engine must hold nothing."""
        await self.control(Ping())
        load = self.actor.load()
        assert (load.running, load.waiting, load.kv_blocks_used) == (0, 0, 0)


def request(stream: int) -> Generate:
    return Generate(
        request_id=RequestId(f"r{stream}"),
        model=MODEL,
        gateway=GATEWAY,
        stream=stream,
        epoch=EPOCH,
        prompt_ids=pack_ids(PROMPT),
        sampling=SamplingParams(seed=5, max_tokens=8),
    )


def image(offset: int, length: int) -> MediaItem:
    return MediaItem(
        kind="image", content_hash="c", offset=offset, length=length, pixels=BlobKey("p")
    )


def expected(count: int, sampling: SamplingParams | None = None) -> list[int]:
    key = prompt_key(PROMPT)
    sampling = sampling or request(1).sampling
    return [sim_token(key, sampling, position, VOCABULARY) for position in range(count)]


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in unpack_ids(delta.token_ids)]


async def no_beat() -> None:
    """This rig does not place requests."""


SETTINGS = WorkerSettings(
    engine="sim",
    max_num_seqs=4,
    max_waiting=2,
    sim_num_blocks=64,
    sim_step_s=5.0,  # the brakes do not wait for it; shorter steps could end before they are asked
    gateway_check_s=0.02,
    gateway_grace_s=0.1,
    max_step_failures=2,
    hand_over_s=0.5,
)


@asynccontextmanager
async def running_rig(
    bus: MessageBus,
    blobs: Blobs,
    pooling: PoolingFacts | None = None,
    adapters: AdapterStore | None = None,
) -> AsyncIterator[Rig]:
    """A worker on the bus. pooling: of a model that pools."""
    brakes = Brakes()
    sizes = (pooling.size, len(pooling.labels)) if pooling is not None else ()
    runner = SimRunner(VOCABULARY, SETTINGS, brakes, *sizes)
    loaded = SimModel(
        *(runner, 512, VOCABULARY.size, frozenset({2})),
        hidden_size=4,
        media=MediaFacts(frozenset({IMAGE})),
        pooling=pooling,
    )
    metrics = Metrics()
    alive = {GATEWAY}
    left: list[bool] = []
    around = WorkerContext(
        *(bus, blobs, metrics, alive.__contains__, lambda: left.append(True), no_beat),
        adapters=adapters,
    )
    host = EngineThread(Engine(runner, SETTINGS), SETTINGS)
    actor = WorkerActor(Identity(WORKER, EPOCH, (MODEL,)), SETTINGS, loaded, host, around)
    runtime = ActorRuntime(actor, bus, ServiceSettings())
    rig = Rig(bus, actor, brakes, metrics, alive, left)
    subscription = await bus.subscribe(subjects.gateway_tokens(GATEWAY), rig.take)
    taker = runtime
    if pooling is not None:
        taker = ActorRuntime(actor.pooling(), bus, ServiceSettings())
    await runtime.listen(subjects.worker_control(WORKER))
    await taker.listen(subjects.worker_generate(WORKER))
    await bus.flush()
    yield rig
    brakes.release()
    for each in {taker, runtime}:
        await each.stop(grace_s=1.0)
    await subscription.stop()
