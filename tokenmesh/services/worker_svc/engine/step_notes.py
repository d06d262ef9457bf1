"""StepNotes: what scheduling a step did besides its plan."""

from dataclasses import dataclass, field

from tokenmesh.services.worker_svc.engine.prefix_cache import Registered
from tokenmesh.services.worker_svc.engine.request import Request


@dataclass(slots=True)
class StepNotes:
    """For traces, rates and retraction."""

    prefills: list[tuple[Request, int, int]] = field(default_factory=list)
    """Request, tokens of its chunk, and tokens that the prefix cache saved it just now."""
    preempted: list[Request] = field(default_factory=list)
    registered: list[Registered] = field(default_factory=list)
    """Blocks that the step fills and that can be found already."""
