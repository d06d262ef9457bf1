"""Process entry of scheduler_svc."""

from tokenmesh.services.scheduler_svc.actor import SchedulerActor
from tokenmesh.services.scheduler_svc.desk import Desk
from tokenmesh.services.scheduler_svc.placement import Worker, worker_from_beat
from tokenmesh.shared import subjects
from tokenmesh.shared.config import Settings
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.membership import Members
from tokenmesh.shared.service import Mesh, run_service


def workers_of(members: Members, model: ModelName) -> list[Worker]:
    """The live workers of a model."""
    entries = members.view.workers(model)
    found = (worker_from_beat(entry.beat, entry.last_seen) for entry in entries)
    return [worker for worker in found if worker is not None]


async def build(mesh: Mesh) -> None:
    """Listen for Place of every model."""
    settings = mesh.settings.scheduler
    desk = Desk(settings, lambda model: workers_of(mesh.members, model))
    actor = SchedulerActor(settings, desk)
    mesh.members.on_beat(actor.pump)
    await mesh.listen(actor, subjects.place_any(), queue=subjects.SCHEDULER_QUEUE)


def run(settings: Settings) -> int:
    """Run until a signal; the exit code."""
    return run_service("scheduler", settings, build)
