"""Mesh: one instance's connections and actors; what a service's `build` receives."""

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import tokenmesh
from tokenmesh.shared import subjects
from tokenmesh.shared.actor import Actor, ActorRuntime
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.mesh import ServiceSettings
from tokenmesh.shared.errors import BusLost, TokenMeshError
from tokenmesh.shared.ids import InstanceId, ModelName, new_epoch
from tokenmesh.shared.membership import MAX_MODELS, Members, MembershipView
from tokenmesh.shared.messages import Heartbeat
from tokenmesh.shared.messages.beat import PROTOCOL, ModelCard, WorkerLoad
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.redis import Redis
from tokenmesh.shared.rights import heartbeats_of
from tokenmesh.shared.service.micro import Micro
from tokenmesh.shared.services import SERVICE_BY_NAME, SERVICES

if TYPE_CHECKING:
    from tokenmesh.shared.config import Settings

logger = logging.getLogger(__name__)

MAX_LISTENING_GAP_S: Final = 0.5
"""So much of a time without any heartbeat counts as silence: a process that could not read must
not take all others for dead."""

_FOLDERS: Final = re.compile(r"(?:/[^\s/:'\"]+)+/")
_MAX_REASON_CHARS: Final = 512

BeatContent = Callable[[], tuple[list[ModelCard], WorkerLoad | None]]


def _nothing() -> tuple[list[ModelCard], WorkerLoad | None]:
    return [], None


class HeartbeatSender:
    """Publishes the heartbeats of one instance."""

    def __init__(
        self, bus: Bus, service: str, instance_id: InstanceId, epoch: int, interval_s: float
    ) -> None:
        self._bus = bus
        self._service = service
        self._instance_id = instance_id
        self._epoch = epoch
        self._interval_s = interval_s
        self._sequence = 0
        self.content: BeatContent = _nothing
        self.count_queued: Callable[[], int] = int
        self.tokenizes: list[ModelCard] = []
        self.starts: list[ModelName] = []
        self.broken: dict[ModelName, str] = {}
        self.alone = ""
        self.is_draining = False
        self._has_left = False

    async def run(self) -> None:
        """Publish until cancelled. A late heartbeat does not shift the next ones."""
        next_s = monotonic_s()
        while True:
            await self.beat()
            next_s = max(next_s + self._interval_s, monotonic_s())
            await asyncio.sleep(next_s - monotonic_s())

    async def beat(self, *, is_leaving: bool = False) -> None:
        """Publish one heartbeat now; none while the bus is lost or after the last one."""
        if self._has_left:
            return
        self._has_left = is_leaving
        self._sequence += 1
        models, load = _nothing() if self.starts else self.content()
        message = Heartbeat(
            service=self._service,
            instance_id=self._instance_id,
            epoch=self._epoch,
            sequence=self._sequence,
            version=tokenmesh.__version__,
            protocol=PROTOCOL,
            draining=self.is_draining or bool(self.starts),
            leaving=is_leaving,
            interval_s=self._interval_s,
            models=models,
            load=load,
            queued=self.count_queued(),
            tokenizes=[] if self.starts else self.tokenizes,
            starts=self.starts,
            broken=self.broken,
            alone=self.alone,
        )
        try:
            await self._bus.publish(subjects.beat(self._service, self._instance_id), message)
        except BusLost as error:
            logger.debug("no heartbeat: %s", error)


OnDrain = Callable[[float], Coroutine[Any, Any, None]]
OnLeave = Callable[[], Coroutine[Any, Any, None]]


class Mesh:
    """One instance's connections, actors and heartbeats."""

    def __init__(
        self,
        service: str,
        instance_id: InstanceId,
        settings: "Settings",
        bus: MessageBus,
        redis: Redis,
        metrics: Metrics,
    ) -> None:
        self.settings = settings
        self.service = service
        self.instance_id = instance_id
        self.epoch = new_epoch()
        self.bus = bus
        self.redis = redis
        self.blobs = Blobs(redis, settings.redis)
        self.metrics = metrics
        limits = settings.service
        view = MembershipView(limits.missed_beats, limits.max_members)
        self.members = Members(view, MAX_LISTENING_GAP_S)
        self.ready = asyncio.Event()
        """Set once the service is built and its heartbeats say so."""
        self.crashed = asyncio.Event()
        """Set when a background task that must not crash did."""
        spec = SERVICE_BY_NAME[service]
        often, seldom = limits.worker_beat_interval_s, limits.beat_interval_s
        interval_s = often if spec.beats_often else seldom
        self._heartbeats = HeartbeatSender(bus, service, instance_id, self.epoch, interval_s)
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._runtimes: dict[Actor, ActorRuntime] = {}
        self._on_drain: list[OnDrain] = []
        self._on_leave: list[OnLeave] = []
        self._micro = Micro.of(
            service, instance_id, self.epoch, lambda: tuple(self._runtimes.values())
        )

    @property
    def draining(self) -> bool:
        """True while the instance drains: it should accept no new work."""
        return self._heartbeats.is_draining

    async def listen(
        self,
        actor: Actor,
        subject: str,
        queue: str | None = None,
        *,
        settings: ServiceSettings | None = None,
    ) -> ActorRuntime:
        """Let `actor` answer on `subject`; an actor has one mailbox for all its subjects.

        `settings` replaces the configured section; only the actor's first call uses it.
        """
        runtime = self._runtimes.get(actor)
        if runtime is None:
            runtime = ActorRuntime(
                actor,
                self.bus,
                settings or self.settings.service,
                metrics=self.metrics,
                on_fatal=self._on_fatal,
                on_sole_turn=self._announce_turn,
            )
            self._runtimes[actor] = runtime
            self._measure(runtime)
        await runtime.listen(subject, queue)
        return runtime

    def set_beat(self, content: BeatContent) -> None:
        """Models and load for every heartbeat; called in the event loop, must be quick."""
        self._heartbeats.content = content

    def count_queue(self, count: Callable[[], int]) -> None:
        """The number of waiting requests, for every heartbeat."""
        self._heartbeats.count_queued = count

    def set_tokenizes(self, cards: list[ModelCard]) -> None:
        """The models that this instance tokenizes, for every heartbeat."""
        self._heartbeats.tokenizes = cards

    def note_broken(self, names: Iterable[ModelName], error: TokenMeshError) -> None:
        """A model that is left out, for every heartbeat: its requests are refused with this."""
        # for clients, who need not know where files are
        reason = _FOLDERS.sub("", error.message)[:_MAX_REASON_CHARS]
        for name in names:
            if len(self._heartbeats.broken) < MAX_MODELS:
                self._heartbeats.broken[name] = reason

    async def beat_now(self) -> None:
        """Publish a heartbeat now."""
        await self._heartbeats.beat()

    def on_drain(self, hook: OnDrain) -> None:
        """Run `hook(seconds left)` when the service drains, after the hooks added before it.

        Actors still answer meanwhile; a hook that outlasts its seconds is cancelled.
        """
        self._on_drain.append(hook)

    def on_leave(self, hook: OnLeave) -> None:
        """Run `hook()` when the instance leaves, also where it crashed and did not drain."""
        self._on_leave.append(hook)

    async def start(self) -> None:
        """Start to receive heartbeats of other instances."""
        spec = SERVICE_BY_NAME[self.service]
        for each in SERVICES if spec.heartbeats == "all" else ():
            count = partial(self._count_members, each.name)
            self.metrics.gauge_of("members", count, service=each.name)
        await self.members.start(self.bus, heartbeats_of(spec, self.instance_id))

    def announce(self) -> None:
        """Publish heartbeats which say that the instance loads its models, until it joins."""
        wanted = self.settings.worker.model if self.service == "worker" else None
        names = [each.name for each in self.settings.models if wanted in (None, each.name)]
        self._heartbeats.starts = [ModelName(name) for name in names[:MAX_MODELS]]
        # without a name they would say that it answers
        if names:
            self._publish_beats()

    async def join(self) -> None:
        """Answer the micro protocol, and publish heartbeats which say that the instance answers."""
        await self._micro.listen(self.bus)
        await self.bus.flush()
        self._heartbeats.starts = []
        if self._heartbeat_task is None:
            self._publish_beats()
        else:
            await self._heartbeats.beat()
        self.ready.set()

    def _publish_beats(self) -> None:
        self._heartbeat_task = asyncio.create_task(self._heartbeats.run(), name="beats")
        self._heartbeat_task.add_done_callback(self._on_heartbeat_task_done)

    async def drain(self, grace_s: float) -> None:
        """Announce it, run the hooks, let handlers finish: all within `grace_s`."""
        give_up_s = monotonic_s() + grace_s
        self._heartbeats.is_draining = True
        await self._heartbeats.beat()
        for hook in self._on_drain:
            left_s = max(0.0, give_up_s - monotonic_s())
            # After a failed hook the next one still has work to hand over.
            (error,) = await asyncio.gather(
                asyncio.wait_for(hook(left_s), left_s), return_exceptions=True
            )
            if error is not None:
                logger.error("drain hook %s did not finish", hook, exc_info=error)
        await self._stop_actors(max(0.0, give_up_s - monotonic_s()))

    async def leave(self) -> None:
        """Answer waiting messages with Failed(draining) and publish the last heartbeat."""
        self._heartbeats.is_draining = True
        for hook in self._on_leave:
            await hook()
        await self._stop_actors(0.0)
        if self._heartbeat_task is not None:
            self._heartbeat_task.remove_done_callback(self._on_heartbeat_task_done)
            self._heartbeat_task.cancel()
            await self._heartbeats.beat(is_leaving=True)

    async def _stop_actors(self, grace_s: float) -> None:
        await asyncio.gather(*(each.stop(grace_s) for each in self._runtimes.values()))

    async def _announce_turn(self, turn: str) -> None:
        self._heartbeats.alone = turn
        await self._heartbeats.beat()
        # Known before the request can do any harm.
        await self.bus.flush()

    def _measure(self, runtime: ActorRuntime) -> None:
        name = runtime.name
        self.metrics.gauge_of("actor_running", lambda: runtime.num_running, actor=name)
        self.metrics.gauge_of("actor_waiting", lambda: runtime.num_waiting, actor=name)

    def _count_members(self, service: str) -> int:
        return len(self.members.service(service))

    def _on_fatal(self, name: str) -> None:
        logger.critical("background task %s crashed, the service cannot continue", name)
        self.crashed.set()

    def _on_heartbeat_task_done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.critical("the heartbeats crashed", exc_info=task.exception())
            self.crashed.set()
