"""DeviceChoice: temperature, filters and seed of every row, on the device."""

import torch

from tokenmesh.kernels.sample import ChoiceRows
from tokenmesh.services.worker_svc.engine.plan import NewRow
from tokenmesh.services.worker_svc.sampling.choice import GREEDY_BELOW, signed64
from tokenmesh.services.worker_svc.sampling.device_tables import DeviceTables, Shape
from tokenmesh.services.worker_svc.sampling.filters import has_filter


class DeviceChoice:
    """How each row chooses a token."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        dtypes = {
            "temperature": torch.float32,
            "min_p": torch.float32,
            "top_k": torch.int32,
            "top_p": torch.float64,
            "seed": torch.int64,
        }
        shapes = {name: Shape(max_num_seqs, 1, dtype) for name, dtype in dtypes.items()}
        self._tables = DeviceTables.zeros(shapes, device)
        self.rows = ChoiceRows(**{name: self._tables.column(name) for name in dtypes})
        self._filtered: set[int] = set()

    def add(self, new: NewRow) -> None:
        """Take a row."""
        params = new.sampling
        is_greedy = params.temperature < GREEDY_BELOW
        if not is_greedy and has_filter(params):
            self._filtered.add(new.row)
        values = {
            "temperature": 0.0 if is_greedy else params.temperature,
            "min_p": params.min_p,
            "top_k": min(params.top_k, self._vocab_size),
            "top_p": params.top_p,
            "seed": signed64(params.seed),
        }
        for name, value in values.items():
            self._tables.stage_number(name, new.row, value)

    def remove(self, number: int) -> None:
        """Forget a row; what the device holds of it is overwritten by the next."""
        self._filtered.discard(number)

    def apply(self) -> None:
        """Send what changed."""
        self._tables.apply()

    def has_filter(self, number: int) -> bool:
        """Whether a row draws from less than the vocabulary."""
        return number in self._filtered
