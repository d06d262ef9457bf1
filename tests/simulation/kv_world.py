"""Workers that exchange KV in one virtual-time loop, and clients whose streams say what they had.

Tokens depend on what blocks hold (`KvRunner`). What workers say to each other about KV is dropped,
delayed and repeated; workers die and stand still, and so do their transfer processes. Everything
but device, transfer process and network is real.
"""

import asyncio
from dataclasses import dataclass
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from tests.fakes.engine_schedules import unbatched
from tests.fakes.kv_runner import VOCAB, KvRunner
from tests.simulation.kv_transfer import SimTransfer
from tests.simulation.network import Faults, Network, SimBus
from tests.simulation.sim_host import SimHost
from tests.simulation.world import NoRedis
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.sim import SimRunner
from tokenmesh.engine.kv.shared_arena import SharedArena, SharedKv
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import RequestSpec, StreamKey
from tokenmesh.services.worker_svc.actor import WorkerActor, WorkerContext
from tokenmesh.services.worker_svc.intake import Identity
from tokenmesh.services.worker_svc.loaded import SimModel
from tokenmesh.services.worker_svc.main import listen_as
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.ids import GatewayId, InstanceId, ModelName, RequestId, WorkerId
from tokenmesh.shared.messages import (
    Accepted,
    Cancel,
    Generate,
    KvReady,
    KvStarted,
    PollKv,
    PrefillKv,
    ReleaseKv,
    Tokens,
)
from tokenmesh.shared.messages.place import KvOrigin
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.service import Mesh
from tokenmesh.shared.tokens import pack_ids, unpack_ids

MODEL, GATEWAY, SIZE = ModelName("sim"), GatewayId("gateway-1"), 4
MOST_ATTEMPTS = 200
_SILENT_S = 30.0
_BETWEEN_WORKERS = (PrefillKv, PollKv, ReleaseKv, KvStarted, KvReady)


@dataclass(frozen=True)
class Trouble:
    """It says what befalls one world, and the sizes of its workers. Times are virtual seconds."""

    seed: int = 0
    drop: float = 0.0
    repeat: float = 0.0
    max_delay_s: float = 0.001
    wrong: float = 0.0
    """Share of images that come with wrong numbers."""
    deaths: int = 0
    freezes: int = 0
    transfer_deaths: int = 0
    transfer_freezes: int = 0
    leaving: float = 0.0
    """Share of clients that leave."""
    row_trouble: float = 0.0
    step_trouble: float = 0.0
    recomputes: bool = False
    images: int = 20
    blocks: int = 30
    step_tokens: int = 16
    step_s: float = 0.01
    slow_s: float = 0.01
    """A transfer takes up to so long for each image."""
    lease_s: float = 2.0
    streams: int = 10
    is_async: bool = True


class KvNetwork(Network):
    """Only what workers say to each other about KV is lost: streams have tests of their own."""

    def faults_of(self, envelope: Envelope) -> Faults:
        return self.faults if isinstance(envelope.message, _BETWEEN_WORKERS) else QUIET


QUIET = Faults(max_delay_s=0.0)
"""NATS keeps the order of what one process sends to another."""


@dataclass(eq=False)
class KvSide:
    """A worker."""

    id: WorkerId
    epoch: int
    bus: SimBus
    host: SimHost
    actor: WorkerActor
    transfer: SimTransfer

    def held(self) -> dict[str, int]:
        """Return what it holds for others and for streams."""
        engine = self.host.engine
        tier, desk = engine._cache.host, self.actor._kv.desk  # type: ignore[union-attr]
        assert tier is not None
        assert desk is not None
        states = tier.states
        assert sum(states.values()) == tier.num_slots, "a slot is lost"
        counts = {name: states[name] for name in ("saving", "loading")}
        counts |= {"leases": desk.num_leases, "pins": len(tier._holds)}
        counts |= {"streams": self.actor._streams.num_live, "blocks": engine._pool.num_used}
        return counts


class KvWorld:
    def __init__(self, trouble: Trouble) -> None:
        self.trouble, self.dice = trouble, Random(trouble.seed)
        faults = Faults(trouble.drop, trouble.repeat, trouble.max_delay_s)
        self.network = KvNetwork(trouble.seed, faults)
        self.sides: list[KvSide] = []
        self.transfers: dict[bytes, SimTransfer] = {}
        self.bus = SimBus(self.network)
        self.counts = {"read": 0, "attempts": 0, "cached": 0}
        self._streams = count(1)
        self._inboxes: dict[int, asyncio.Queue[Delta]] = {}
        self._metrics = Metrics()

    async def start(self, num_workers: int) -> None:
        await self.bus.subscribe(subjects.gateway_tokens(GATEWAY), self._take)
        for _ in range(num_workers):
            await self.start_worker()

    async def _take(self, envelope: Envelope) -> None:
        assert isinstance(envelope.message, Tokens)
        for delta in envelope.message.deltas:
            if (inbox := self._inboxes.get(delta.stream)) is not None:
                inbox.put_nowait(delta)

    def _settings(self) -> WorkerSettings:
        trouble = self.trouble
        kv = {
            "role": "both",
            "lease_s": trouble.lease_s,
            "load_failure_policy": "recompute" if trouble.recomputes else "fail",
        }
        values = {
            "async_scheduling": trouble.is_async,
            "max_num_seqs": 3,
            "max_num_batched_tokens": trouble.step_tokens,
            "block_size": SIZE,
            "max_step_failures": 1000,
            "gateway_grace_s": 1000.0,
            "kv": kv,
        }
        return WorkerSettings.model_validate(values)

    async def start_worker(self) -> KvSide:
        settings, number = self._settings(), next(self._streams)
        bus, trouble, dice = SimBus(self.network), self.trouble, Random(self.dice.random())
        anything, no_redis = cast("Any", bus), cast("Any", NoRedis())
        instance = InstanceId(f"worker-{number}")
        mesh = Mesh("worker", instance, Settings(worker=settings), anything, no_redis, Metrics())
        runner = KvRunner(
            *(settings, trouble.blocks, Random(dice.random())),
            *(trouble.row_trouble, trouble.step_trouble),
            num_images=trouble.images,
        )
        transfer = SimTransfer(
            runner, SIZE, dice, self.transfers, wrong=trouble.wrong, slow_s=trouble.slow_s
        )
        await transfer.start()
        arena = cast("SharedArena", SimpleNamespace(image_bytes=16, num_slots=trouble.images))
        loaded = SimModel(
            *(cast("SimRunner", runner), trouble.blocks * SIZE - SIZE, VOCAB, frozenset()),
            shared_kv=SharedKv(arena, b"s" * 16, 4, SIZE),
        )
        host = SimHost(lambda: trouble.step_s * dice.random())
        host.engine = Engine(runner, settings)
        worker_id = WorkerId(instance)
        context = WorkerContext(
            bus=anything,
            blobs=mesh.blobs,
            metrics=self._metrics,
            is_alive=lambda _: True,
            leave=lambda: None,
            beat=mesh.beat_now,
            transfer=cast("Any", transfer),
        )
        actor = WorkerActor(
            Identity(worker_id, mesh.epoch, (MODEL,)), settings, loaded, host, context
        )
        await listen_as(mesh, worker_id, actor, loaded)
        side = KvSide(worker_id, mesh.epoch, bus, host, actor, transfer)
        self.sides.append(side)
        return side

    def kill(self, side: KvSide) -> None:
        """As kill -9 does."""
        self.sides.remove(side)
        self.counts["read"] += side.transfer.num_read
        side.bus.kill()
        side.host.kill()
        side.transfer._is_over = True
        side.transfer.kill()

    async def freeze(self, side: KvSide, seconds: float) -> None:
        """As SIGSTOP and SIGCONT do. Its transfer process goes on."""
        for each in (side.bus.is_running, side.host.is_running):
            each.clear()
        await asyncio.sleep(seconds)
        for each in (side.bus.is_running, side.host.is_running):
            each.set()

    async def ask(self, prompt: list[int], max_tokens: int, leaves_s: float | None) -> None:
        """One client: its stream is placed again until it has ended, or the client leaves."""
        sampling = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
        until_s = None if leaves_s is None else now_s() + leaves_s
        for _ in range(MOST_ATTEMPTS):
            if not self.sides:
                await asyncio.sleep(0.2)
                continue
            self.counts["attempts"] += 1
            tokens = await self._attempt(prompt, sampling, until_s)
            if tokens is not None:
                assert tokens == _expected(prompt, sampling), "a wrong token"
                return
            if until_s is not None and now_s() >= until_s:
                return
            await asyncio.sleep(0.1)
        raise AssertionError("a stream does not come to its end")

    def _origin(self, reader: KvSide) -> KvOrigin | None:
        """Where KV is to come from: what the scheduler would say, and what is wrong by now."""
        if self.dice.random() < 0.2:
            return None
        computes, others = self.dice.random() < 0.6, [each for each in self.sides if each != reader]
        if self.dice.random() < 0.1 or not others:
            return KvOrigin(worker_id=WorkerId("worker-gone"), epoch=1, computes=computes)
        source = self.dice.choice(others)
        epoch = source.epoch + (self.dice.random() < 0.05)
        return KvOrigin(worker_id=source.id, epoch=epoch, computes=computes)

    async def _attempt(
        self, prompt: list[int], sampling: SamplingParams, until_s: float | None
    ) -> list[int] | None:
        """The stream's tokens; None: it is to be placed again, or its client has left."""
        reader, number = self.dice.choice(self.sides), next(self._streams)
        question = Generate(
            request_id=RequestId(f"r{number}"),
            model=MODEL,
            gateway=GATEWAY,
            stream=number,
            epoch=reader.epoch,
            prompt_ids=pack_ids(prompt),
            sampling=sampling,
            kv=self._origin(reader),
        )
        inbox = self._inboxes[number] = asyncio.Queue()
        try:
            subject = subjects.worker_generate(reader.id)
            answer = await self.bus.request(subject, question, deadline_s=now_s() + 10)
            if not isinstance(answer, Accepted):
                return None
            return await self._read(inbox, until_s)
        except TokenMeshError:
            return None
        finally:
            del self._inboxes[number]
            await self._cancel(reader, number)

    async def _read(self, inbox: "asyncio.Queue[Delta]", until_s: float | None) -> list[int] | None:
        tokens: list[int] = []
        while True:
            rest_s = _SILENT_S if until_s is None else max(0.0, until_s - now_s())
            try:
                async with asyncio.timeout(rest_s):
                    delta = await inbox.get()
            except TimeoutError:
                return None
            assert delta.offset == len(tokens), "a gap or a duplicate"
            tokens += unpack_ids(delta.token_ids)
            self.counts["cached"] += delta.cached_tokens or 0
            if delta.finish is not None:
                return tokens if delta.error is None else None

    async def _cancel(self, reader: KvSide, number: int) -> None:
        """Repeated until it is heard, as a gateway's watch of its streams comes to."""
        cancel = Cancel(gateway=GATEWAY, stream=number, attempt=0)
        while reader in self.sides:
            try:
                subject = subjects.worker_control(reader.id)
                await self.bus.request(subject, cancel, deadline_s=now_s() + 10)
            except TokenMeshError:
                continue
            return

    async def disturb(self) -> None:
        """Everything that befalls processes, in any order, within some seconds."""
        trouble, dice = self.trouble, self.dice
        kinds = ["death"] * trouble.deaths + ["freeze"] * trouble.freezes
        kinds += ["transfer"] * trouble.transfer_deaths + ["stuck"] * trouble.transfer_freezes
        dice.shuffle(kinds)
        async with asyncio.TaskGroup() as group:
            for kind in kinds:
                await asyncio.sleep(dice.random())
                side = dice.choice(self.sides)
                if kind == "death":
                    self.kill(side)
                    await self.start_worker()
                elif kind == "freeze":
                    group.create_task(self.freeze(side, 3 * dice.random()))
                elif kind == "transfer":
                    side.transfer.kill()
                else:
                    side.transfer.freeze()

    async def at_rest(self) -> None:
        """Every lease ends, and nothing is held."""
        limit_s = 60.0
        while any(any(side.held().values()) for side in self.sides):
            await asyncio.sleep(0.5)
            limit_s -= 0.5
            assert limit_s > 0, f"held for ever: {[side.held() for side in self.sides]}"

    async def stop(self) -> None:
        for side in list(self.sides):
            self.kill(side)
        current = asyncio.current_task()
        rest = [task for task in asyncio.all_tasks() if task is not current]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def _expected(prompt: list[int], sampling: SamplingParams) -> list[int]:
    key = StreamKey(GATEWAY, 0, 0)
    spec = RequestSpec(key, RequestId("r"), len(prompt), sampling, eos_ids=frozenset())
    return unbatched(Request(spec, list(prompt)), prompt)[0]
