"""Process entry of scheduler_svc."""

from functools import partial

from tokenmesh.services.scheduler_svc.actor import SchedulerActor
from tokenmesh.services.scheduler_svc.index.indexed_placement import IndexedPlacement
from tokenmesh.services.scheduler_svc.index.placement_index import PlacementIndex
from tokenmesh.services.scheduler_svc.placement import Worker, worker_from_beat
from tokenmesh.services.scheduler_svc.policies import make_placer
from tokenmesh.services.scheduler_svc.request_queue import RequestQueue
from tokenmesh.services.scheduler_svc.wake_leases import WakeLeases
from tokenmesh.services.scheduler_svc.waker import Waker
from tokenmesh.shared import subjects
from tokenmesh.shared.config import Settings
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.membership import Members
from tokenmesh.shared.service import Mesh, run_service


def workers_of(members: Members, model: ModelName) -> list[Worker]:
    """The live workers of a model."""
    found = (worker_from_beat(each.beat, each.last_seen) for each in members.workers(model))
    return [worker for worker in found if worker is not None]


async def build(mesh: Mesh) -> None:
    """Listen for Place and Wake of every model."""
    settings, index_settings = mesh.settings.scheduler, mesh.settings.prefix_index
    block_tokens = mesh.settings.tokenizer.route_block_tokens
    index = PlacementIndex(mesh.redis, block_tokens, settings, index_settings)
    placer = make_placer(
        settings, lambda: IndexedPlacement(settings, index_settings, index, mesh.metrics)
    )
    queue = RequestQueue(settings, lambda model: workers_of(mesh.members, model), placer)
    leases = WakeLeases(mesh.redis, mesh.instance_id, mesh.epoch)
    waker = Waker(mesh.bus, mesh.members, settings, leases)
    actor = SchedulerActor(
        settings, queue, waker, mesh.metrics, partial(mesh.members.is_starting, "worker")
    )
    mesh.members.on_beat = actor.on_beat
    mesh.count_queue(lambda: queue.num_waiting)
    # A waiting request is a running handler: the queue must fit in addition to those being placed.
    service = mesh.settings.service
    concurrency = service.concurrency + settings.max_queued
    service = service.model_copy(update={"concurrency": concurrency})
    subject = subjects.place_any()
    await mesh.listen(actor, subject, mesh.service, settings=service)
    await mesh.listen(actor, subjects.replica(subject, mesh.instance_id))


def run(settings: Settings) -> int:
    """Run until a signal; returns the exit code."""
    return run_service("scheduler", settings, build)
