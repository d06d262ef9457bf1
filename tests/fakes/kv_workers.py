"""Workers of one tiny model that exchange KV or keep it on disk, and a gateway that asks them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.service_mesh import running
from tokenmesh.services.worker_svc import main
from tokenmesh.services.worker_svc.actor import WorkerActor
from tokenmesh.services.worker_svc.kv.parts import KvParts
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.config.model import ModelImpl, ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import GatewayId, ModelName, RequestId, WorkerId
from tokenmesh.shared.messages import Accepted, Generate, Message, Tokens
from tokenmesh.shared.messages.place import KvOrigin
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.service import Mesh
from tokenmesh.shared.tokens import pack_ids, unpack_ids

GATEWAY = GatewayId("gateway-of-kv")
MODEL = ModelName("tiny")
SIZE = 8
PROMPT = [(7 * place) % 90 + 3 for place in range(100)]
BLOCKS = 12
"""Whole ones before the prompt's last token."""


@dataclass
class Side:
    """A worker."""

    mesh: Mesh
    actor: WorkerActor

    @property
    def id(self) -> WorkerId:
        return WorkerId(self.mesh.instance_id)

    @property
    def parts(self) -> KvParts:
        assert self.actor._kv is not None
        return self.actor._kv

    @property
    def computed(self) -> int:
        """Prompt tokens that it has computed."""
        return self.actor.load().prefill_tokens

    def origin(self, *, computes: bool = True) -> KvOrigin:
        return KvOrigin(worker_id=self.id, epoch=self.mesh.epoch, computes=computes)

    def held(self) -> tuple[int, dict[str, int]]:
        """Leases, and slots that are neither free nor ready; nothing may be pinned."""
        engine = self.actor._host._engine  # type: ignore[attr-defined]
        tier = engine._cache.host
        slots = {name: count for name, count in tier.states.items() if name != "ready"}
        slots.pop("free")
        desk = self.parts.desk
        return (desk.num_leases if desk is not None else 0) + len(tier._holds), slots


@dataclass
class Pair:
    """A source, a reader and the gateway of both."""

    bus: MessageBus
    source: Side
    reader: Side
    deltas: list[Delta] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    num_streams: int = 0

    async def take(self, envelope: Envelope) -> None:
        assert isinstance(envelope.message, Tokens)
        self.deltas += envelope.message.deltas
        self.arrived.set()

    async def begin(self, side: Side, prompt: list[int], **fields: Any) -> int:
        self.num_streams += 1
        sampling: dict[str, Any] = {
            "seed": 5,
            "max_tokens": 12,
            "temperature": 0.8,
            "ignore_eos": True,
        }
        sampling |= fields.pop("sampling", {})
        question = Generate(
            request_id=RequestId(f"r{self.num_streams}"),
            model=MODEL,
            gateway=GATEWAY,
            stream=self.num_streams,
            epoch=side.mesh.epoch,
            prompt_ids=pack_ids(prompt),
            sampling=SamplingParams(**sampling),
            **fields,
        )
        answer = await self.bus.request(
            subjects.worker_generate(side.id), question, deadline_s=now_s() + 10
        )
        assert isinstance(answer, Accepted)
        return self.num_streams

    async def finish(self, stream: int) -> list[Delta]:
        async with asyncio.timeout(15):
            while not any(each.finish for each in self.deltas if each.stream == stream):
                self.arrived.clear()
                await self.arrived.wait()
        return [each for each in self.deltas if each.stream == stream]

    async def run(self, side: Side, prompt: list[int], **fields: Any) -> tuple[list[int], int]:
        """Tokens, and how many of the prompt are said to be cached."""
        found = await self.finish(await self.begin(side, prompt, **fields))
        assert found[-1].error is None, found[-1].error
        tokens = [token for each in found for token in unpack_ids(each.token_ids)]
        assert found[0].cached_tokens is not None
        return tokens, found[0].cached_tokens

    async def ask(self, side: Side, message: Message) -> Message:
        return await self.bus.request(subjects.worker_kv(side.id), message, deadline_s=now_s() + 10)

    async def at_rest(self) -> None:
        """Nothing is held for a reader, and nothing is loading."""
        quiet = (0, {"saving": 0, "loading": 0})
        async with asyncio.timeout(10):
            while any(side.held() != quiet for side in self.sides):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.source, self.reader


@dataclass
class KvWorkers:
    """Starts workers, which end with their context."""

    checkpoint: Path
    bus: MessageBus
    bus_settings: BusSettings
    redis_settings: RedisSettings
    patch: pytest.MonkeyPatch
    model_impl: ModelImpl = "auto"
    actors: list[WorkerActor] = field(default_factory=list)

    def __post_init__(self) -> None:
        def make_actor(*args: Any) -> WorkerActor:
            self.actors.append(WorkerActor(*args))
            return self.actors[-1]

        self.patch.setattr(main, "WorkerActor", make_actor)

    @asynccontextmanager
    async def pair(self, **kv: Any) -> AsyncIterator[Pair]:
        """Two of them."""
        async with self.sides(2, {"role": "both", **kv}) as found:
            yield found

    @asynccontextmanager
    async def sides(self, count: int, kv: dict[str, Any], **worker: Any) -> AsyncIterator[Pair]:
        """One, which is source and reader, or two."""
        values = {
            "device": "cpu",
            "block_size": SIZE,
            "num_gpu_blocks_override": 64,
            "max_num_batched_tokens": 32,
            "kv_offloading_size": 0.01,
            "async_scheduling": True,
            "gateway_grace_s": 60.0,
            "kv": kv,
            **worker,
        }
        settings = Settings(
            models=(
                ModelSettings(
                    model=str(self.checkpoint),
                    served_model_name=(MODEL,),
                    dtype="float32",
                    model_impl=self.model_impl,
                ),
            ),
            bus=self.bus_settings,
            redis=self.redis_settings,
            worker=WorkerSettings.model_validate(values),
        )
        self.actors.clear()
        async with AsyncExitStack() as stack:
            meshes = [
                await stack.enter_async_context(running("worker", settings, main.build))
                for _ in range(count)
            ]
            sides = [Side(mesh, actor) for mesh, actor in zip(meshes, self.actors, strict=True)]
            found = Pair(self.bus, sides[0], sides[-1])
            subscription = await self.bus.subscribe(subjects.gateway_tokens(GATEWAY), found.take)
            await self.bus.flush()
            yield found
            await found.at_rest()
            await subscription.stop()
