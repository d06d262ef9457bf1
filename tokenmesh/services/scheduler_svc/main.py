"""Process entry of scheduler_svc."""

from dataclasses import replace

from tokenmesh.services.scheduler_svc.actor import SchedulerActor
from tokenmesh.services.scheduler_svc.desk import Desk
from tokenmesh.services.scheduler_svc.placement import Placement, Worker, worker_from_beat
from tokenmesh.shared import subjects
from tokenmesh.shared.actor import ActorLimits
from tokenmesh.shared.config import Settings
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.membership import Members
from tokenmesh.shared.service import Mesh, run_service


def workers_of(members: Members, model: ModelName) -> list[Worker]:
    """The live workers of a model."""
    found = (worker_from_beat(each.beat, each.last_seen) for each in members.workers(model))
    return [worker for worker in found if worker is not None]


async def build(mesh: Mesh) -> None:
    """Listen for Place of every model."""
    settings = mesh.settings.scheduler
    desk = Desk(settings, lambda model: workers_of(mesh.members, model), Placement(settings))
    actor = SchedulerActor(settings, desk, mesh.metrics)
    mesh.members.on_beat = actor.on_beat
    mesh.count_queue(lambda: desk.num_waiting)
    # A waiting request is a running handler: the line must fit beside those being placed.
    limits = ActorLimits.of(mesh.settings.service)
    limits = replace(limits, concurrency=limits.concurrency + settings.max_queued)
    await mesh.listen(actor, subjects.place_any(), subjects.SCHEDULER_QUEUE, limits=limits)


def run(settings: Settings) -> int:
    """Run until a signal; the exit code."""
    return run_service("scheduler", settings, build)
