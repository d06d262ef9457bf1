"""CudaLimits: the sizes that the runner's memory on the device is made for."""

from dataclasses import dataclass
from typing import Self

from tokenmesh.shared.config.worker import WorkerSettings


@dataclass(frozen=True, slots=True)
class CudaLimits:
    """Upper bounds."""

    max_num_seqs: int
    max_tokens: int
    """Of a step."""
    max_model_len: int
    steps_in_flight: int
    largest_graph: int
    """Rows; 0: no graphs."""

    @classmethod
    def of(cls, settings: WorkerSettings, max_model_len: int) -> Self:
        """From a worker's settings."""
        return cls(
            max_num_seqs=settings.max_num_seqs,
            max_tokens=settings.max_num_batched_tokens,
            max_model_len=max_model_len,
            # one that is launched while another waits to be read
            steps_in_flight=1 if settings.async_scheduling is False else 2,
            largest_graph=0 if settings.enforce_eager else settings.max_cudagraph_capture_size,
        )
