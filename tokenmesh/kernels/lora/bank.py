"""A linear layer's place in adapters, and the adapters of the step at work."""

from dataclasses import dataclass, field

from tokenmesh.kernels.lora.device import DeviceAdapterRows
from tokenmesh.kernels.lora.weights import AdapterRows


@dataclass(slots=True)
class StepAdapters:
    """The adapters of the step at work, for all banks of a model; set before each forward pass."""

    rows: AdapterRows | DeviceAdapterRows | None = None
    """None: the step has no adapter."""


@dataclass(frozen=True, slots=True)
class LoraBank:
    """A linear layer's place in every adapter of its model."""

    number: int
    step: StepAdapters = field(repr=False)
