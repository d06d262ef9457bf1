"""Runner: what the engine asks of a model. `sim.SimRunner` and the torch runner answer."""

from typing import Generic, Protocol, TypeVar

from tokenmesh.services.worker_svc.engine.plan import StepPlan, StepResult

Inputs = TypeVar("Inputs")
Logits = TypeVar("Logits")


class Runner(Protocol, Generic[Inputs, Logits]):
    """One model on one device. All calls come from the engine thread."""

    num_blocks: int
    """Size of the KV pool in blocks, the null block 0 included."""

    def prepare(self, plan: StepPlan) -> Inputs:
        """Apply the plan's row changes and gather this step's model inputs."""

    def forward(self, inputs: Inputs) -> Logits:
        """Write KV and compute the logits that sampling needs."""

    def sample(self, inputs: Inputs, logits: Logits) -> StepResult:
        """Draw a token for every row that samples."""
