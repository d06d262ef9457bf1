"""AdapterMatrices: an adapter, for code that does not load torch."""

from typing import Protocol


class AdapterMatrices(Protocol):
    """An adapter as the runner takes it: `kernels.lora.LoraWeights`."""

    @property
    def content_hash(self) -> str: ...

    @property
    def nbytes(self) -> int: ...
