"""build_here: settings -> what the checkpoint is served for, or a rank's part of it."""

from tokenmesh.engine.exec.build import build_runner, fitting, start_device
from tokenmesh.engine.exec.loaded_model import LoadedPooler, RunnableModel
from tokenmesh.engine.exec.pool_build import build_pool_runner
from tokenmesh.engine.exec.role import ALONE_ROLE, Role
from tokenmesh.engine.models.api import Progress
from tokenmesh.engine.models.location import locate
from tokenmesh.engine.models.pooling.kind import pools
from tokenmesh.engine.models.raw_config import read_config
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings


def build_here(
    model: ModelSettings, worker: WorkerSettings, progress: Progress, role: Role = ALONE_ROLE
) -> RunnableModel | LoadedPooler:
    """Build what `build_runner` or `build_pool_runner` does."""
    directory = locate(model, with_code=model.trust_remote_code)
    raw = read_config(directory)
    if not pools(model, raw, directory):
        return build_runner(model, worker, progress, role)
    device = start_device(worker, role.local_world)
    with fitting("the model does not fit the GPU", "model"):
        return build_pool_runner(model, worker, directory, raw, device, progress, role)
