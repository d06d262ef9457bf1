"""GraphProgress: says how far the recording of graphs has come; on a terminal that is a bar."""

import logging

from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.logs import PROGRESS

logger = logging.getLogger(__name__)


class GraphProgress:
    """Logs each time that another tenth of the graphs is there."""

    def __init__(self) -> None:
        self._began_s = monotonic_s()
        self._tenths = -1

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` graphs are recorded."""
        tenths = 10 * done // total
        if tenths > self._tenths:
            self._tenths = tenths
            logger.info(
                "CUDA graphs: %d of %d in %.1f s",
                done,
                total,
                monotonic_s() - self._began_s,
                extra={PROGRESS: done / total},
            )
