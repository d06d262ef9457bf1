"""build: settings -> what the checkpoint is served for, by one process or several ranks."""

import logging

from tokenmesh.engine.exec.build import build_runner, fitting, start_device
from tokenmesh.engine.exec.loaded_model import LoadedPooler, RunnableModel
from tokenmesh.engine.exec.pool_build import build_pool_runner
from tokenmesh.engine.models.api import Progress
from tokenmesh.engine.models.location import locate
from tokenmesh.engine.models.pooling.kind import pools
from tokenmesh.engine.models.raw_config import read_config
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings

logger = logging.getLogger(__name__)


def build(
    model: ModelSettings, worker: WorkerSettings, progress: Progress
) -> RunnableModel | LoadedPooler:
    """Build what `build_ranked`, `build_runner` or `build_pool_runner` does."""
    if worker.num_ranks > 1:
        # here, so that a worker of one rank starts without them
        from tokenmesh.engine.exec.leader import build_ranked

        return build_ranked(model, worker, progress)
    if worker.enable_expert_parallel:
        logger.warning("enable_expert_parallel has no effect on one rank")
    directory = locate(model, with_code=model.trust_remote_code)
    raw = read_config(directory)
    if not pools(model, raw, directory):
        return build_runner(model, worker, progress)
    device = start_device(worker)
    with fitting("the model does not fit the GPU", "model"):
        return build_pool_runner(model, worker, directory, raw, device, progress)
