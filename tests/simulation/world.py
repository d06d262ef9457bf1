"""A whole mesh in one virtual-time loop: gateway, scheduler, workers and clients, real code all."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tests.simulation.network import Network, SimBus
from tests.simulation.sim_host import SimHost
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.sim import SimRunner, SimVocabulary
from tokenmesh.services.gateway.core.generation.delivery import Inbox
from tokenmesh.services.gateway.core.generation.request import PromptJob
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.scheduler_svc.main import build as build_scheduler
from tokenmesh.services.worker_svc.actor import WorkerActor, WorkerContext
from tokenmesh.services.worker_svc.intake import Identity
from tokenmesh.services.worker_svc.loaded import SimModel
from tokenmesh.services.worker_svc.main import card_of, is_alive
from tokenmesh.shared import subjects
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.config import Settings
from tokenmesh.shared.errors import TokenMeshError, Unavailable
from tokenmesh.shared.ids import GatewayId, InstanceId, ModelName, WorkerId
from tokenmesh.shared.messages import Tokenize, Tokenized
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.tokenize import IdsPrompt
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.service import Mesh

MODEL = ModelName("sim")
VOCABULARY = SimVocabulary(1000, (2,))
MAX_LEN = 512
CARD = ModelCard(name=MODEL, max_model_len=MAX_LEN, vocab_size=VOCABULARY.size)


class IdsTokenizer(Actor):
    """Takes ids for ids: the simulation is about what comes after."""

    @handles(Tokenize)
    async def tokenize(self, message: Tokenize, context: Context) -> Tokenized:
        assert isinstance(message.prompt, IdsPrompt)
        return Tokenized(token_ids=message.prompt.token_ids)


class NoRedis:
    """A Redis that never answers."""

    def script(self, source: str) -> Callable[[object, object], Awaitable[None]]:
        return self._refuse

    async def _refuse(self, keys: object, arguments: object) -> None:
        raise Unavailable("there is no Redis here")


@dataclass
class SimWorker:
    """One worker process."""

    bus: SimBus
    host: SimHost
    actor: WorkerActor


@dataclass
class Outcome:
    """A client's results: tokens of each choice, and the error that ended it, if any."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    error: TokenMeshError | None = None


class World:
    """Everything that runs."""

    def __init__(self, network: Network, settings: Settings) -> None:
        self.network = network
        self.settings = settings
        self.workers: list[SimWorker] = []
        self.gateway: Gateway
        self._num_started = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def _mesh(self, service: str) -> tuple[SimBus, Mesh]:
        self._num_started += 1
        bus = SimBus(self.network)
        instance_id = InstanceId(f"{service}-{self._num_started}")
        anything, no_redis = cast("Any", bus), cast("Any", NoRedis())
        return bus, Mesh(service, instance_id, self.settings, anything, no_redis, Metrics())

    async def start(self, num_workers: int) -> None:
        """A mesh with one scheduler, one gateway and some workers."""
        _, mesh = self._mesh("tokenizer")
        await mesh.listen(IdsTokenizer(), subjects.tokenize(MODEL), "tokenizer")
        _, mesh = self._mesh("scheduler")
        await mesh.start()
        await build_scheduler(mesh)
        await mesh.join()
        await self._start_gateway()
        for _ in range(num_workers):
            await self.start_worker()

    async def _start_gateway(self) -> None:
        bus, mesh = self._mesh("gateway")
        self.gateway = Gateway(
            GatewayId(mesh.instance_id),
            bus,
            mesh.blobs,
            mesh.members,
            self.settings,
            metrics=mesh.metrics,
        )
        await self.gateway.start()
        await mesh.start()
        await mesh.join()
        self._tasks.add(asyncio.create_task(self.gateway.run()))

    async def start_worker(self) -> SimWorker:
        """One more worker joins."""
        bus, mesh = self._mesh("worker")
        settings = self.settings.worker
        worker_id = WorkerId(mesh.instance_id)
        host = SimHost()
        runner = SimRunner(VOCABULARY, settings, host.wait)
        loaded = SimModel(runner, MAX_LEN, VOCABULARY.size, frozenset(VOCABULARY.eos_ids))
        host.engine = Engine(runner, settings)
        actor = WorkerActor(
            Identity(worker_id, mesh.epoch, (MODEL,)),
            settings,
            loaded,
            host,
            WorkerContext(
                bus=bus,
                blobs=mesh.blobs,
                metrics=mesh.metrics,
                is_alive=lambda gateway: is_alive(mesh, gateway),
                leave=lambda: None,
                beat=mesh.beat_now,
            ),
        )
        await mesh.start()
        await mesh.listen(actor, subjects.worker_generate(worker_id))
        await mesh.listen(actor, subjects.worker_control(worker_id))
        card = card_of((MODEL,), loaded)
        mesh.set_beat(lambda: ([card], actor.load()))
        await mesh.join()
        worker = SimWorker(bus, host, actor)
        self.workers.append(worker)
        return worker

    def kill_worker(self, worker: SimWorker) -> None:
        """As kill -9 does: from one instant to the next nothing comes from it."""
        self.workers.remove(worker)
        worker.bus.kill()
        worker.host.kill()

    async def ask(self, job: PromptJob) -> Outcome:
        """One client: reads until every choice has ended or the request has failed."""
        outcome = Outcome()
        inbox = Inbox(self.settings.gateway.max_buffered_tokens)
        open_choices = set(range(job.first_choice, job.first_choice + job.n))
        try:
            async with self.gateway.core.mesh.pipeline.run([job], inbox):
                while open_choices:
                    for choice, output in await inbox.get():
                        outcome.tokens.setdefault(choice, []).extend(output.token_ids)
                        if output.finish is not None:
                            open_choices.discard(choice)
        except TokenMeshError as error:
            outcome.error = error
        return outcome

    async def stop(self) -> None:
        """End the loop's tasks."""
        for worker in list(self.workers):
            self.kill_worker(worker)
        current = asyncio.current_task()
        rest = [task for task in asyncio.all_tasks() if task is not current]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


async def disturb(
    world: World, dice: random.Random, instants: Sequence[float], *, rejoin_s: float
) -> None:
    """Kill a random worker at each instant (seconds from now); another one joins later."""
    started = asyncio.get_running_loop().time()
    for instant in sorted(instants):
        await asyncio.sleep(max(0.0, started + instant - asyncio.get_running_loop().time()))
        if world.workers:
            world.kill_worker(dice.choice(world.workers))
        await asyncio.sleep(rejoin_s)
        await world.start_worker()
