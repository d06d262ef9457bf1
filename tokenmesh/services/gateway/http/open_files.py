"""How many connections the process may have, by the files that the system lets it open."""

import logging
import resource
from typing import Final

logger = logging.getLogger(__name__)

_SPARE: Final = 64
"""For NATS, Redis, logs, and whatever a library opens."""


def connections_allowed(wanted: int) -> int:
    """`wanted`, or less where the limit on open files (RLIMIT_NOFILE) cannot be raised so far."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _SPARE
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = max(1, soft - _SPARE)
    logger.warning("%d connections at most: no more than %d files may be open", allowed, soft)
    return allowed
