"""StepNotes: what scheduling a step did besides its plan."""

import msgspec

from tokenmesh.services.worker_svc.engine.prefix_cache import Registered
from tokenmesh.services.worker_svc.engine.request import Request


class StepNotes(msgspec.Struct):
    """For traces, rates and retraction."""

    prefills: list[tuple[Request, int, int]] = []
    """Request, tokens of its chunk, and tokens that the prefix cache saved it just now."""
    preempted: list[Request] = []
    registered: list[Registered] = []
    """Blocks that the step fills and that can be found already."""
