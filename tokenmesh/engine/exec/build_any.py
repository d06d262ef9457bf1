"""build: settings -> what the checkpoint is served for, by one process or several ranks."""

import logging

from tokenmesh.engine.exec.build_here import build_here
from tokenmesh.engine.exec.loaded_model import LoadedPooler, RunnableModel
from tokenmesh.engine.models.api import Progress
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)


def build(
    model: ModelSettings, worker: WorkerSettings, progress: Progress
) -> RunnableModel | LoadedPooler:
    """Build what `build_ranked` or `build_here` does."""
    if worker.num_ranks > 1:
        # here, so that a worker of one rank starts without them
        from tokenmesh.engine.exec.leader import build_ranked

        return build_ranked(model, worker, progress)
    if worker.enable_eplb:
        problem = "there is one rank, which has all experts: it needs --tensor-parallel-size"
        raise ConfigError(f"enable_eplb: {problem}", param="worker.enable_eplb")
    if worker.enable_expert_parallel:
        logger.warning(
            "enable_expert_parallel has no effect on one rank: each replica has all experts; "
            "--tensor-parallel-size divides them"
        )
    return build_here(model, worker, progress)
