"""InFlightStep: a step between its launch and the moment its tokens are read."""

from dataclasses import dataclass

from tokenmesh.services.worker_svc.engine.plan import StepPlan
from tokenmesh.services.worker_svc.engine.runner import Launch
from tokenmesh.services.worker_svc.engine.step_notes import StepNotes


@dataclass(slots=True)
class InFlightStep:
    """One launched step."""

    plan: StepPlan
    notes: StepNotes
    launch: Launch
    started_ns: int
    """Wall clock; when it was launched or, if later, when the step before it ended."""
    started_s: float
    """The same instant on `perf_s`."""
    num_prefill: int
    """Tokens of prefill chunks."""

    @property
    def num_decode(self) -> int:
        """Its other tokens: one of each stream that decodes, and drafts."""
        return self.plan.num_tokens - self.num_prefill

    @property
    def rows(self) -> set[int]:
        """Those that compute something."""
        return set(self.plan.rows)
