"""Define how a process ends when its group does."""

import logging
import os
from typing import Final

from tokenmesh.engine.ranks.link import End

CRASHED: Final = 1
BAD_CONFIG: Final = 2
"""Exit codes, as `shared.lifecycle` has them."""

logger = logging.getLogger(__name__)


def end_process(rank: int) -> End:
    """Ends this process at once: a thread that computes may be in a sum that never returns."""

    def end(reason: str, is_config: bool) -> None:
        logger.critical("rank %d ends, since not all ranks go on: %s", rank, reason)
        logging.shutdown()
        os._exit(BAD_CONFIG if is_config else CRASHED)

    return end
