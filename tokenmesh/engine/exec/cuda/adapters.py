"""AdapterSlots: adapters on the device, as many at a time as there are slots."""

from collections import OrderedDict
from collections.abc import Collection, Sequence

import torch

from tokenmesh.engine.adapters.sites import AdapterSites
from tokenmesh.engine.layers.upload import upload
from tokenmesh.kernels.alignment import padded
from tokenmesh.kernels.lora import LoraWeights
from tokenmesh.kernels.lora.device import DeviceAdapterRows, DeviceBank


class AdapterSlots:
    """Copies are queued on the stream of the steps: a step that runs still reads what it began
    with."""

    def __init__(
        self,
        sites: AdapterSites,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Takes all memory at once."""
        self._banks = [
            DeviceBank.zeros(num_slots, padded(max_rank), inputs, parts, dtype, device)
            for inputs, parts in sites.shapes()
        ]
        self._device = device
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[LoraWeights, int] = OrderedDict()
        """Least recently used first."""

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return sum(each.a.nbytes + each.b.nbytes for each in self._banks)

    def rows(
        self, spans: Sequence[tuple[LoraWeights | None, int]], in_use: Collection[LoraWeights]
    ) -> DeviceAdapterRows | None:
        """From the adapter and the number of tokens of each row; None where none has an adapter.

        in_use: adapters of all rows, whose slots are kept.
        """
        slots = [(None if each is None else self._slot_of(each, in_use), n) for each, n in spans]
        tokens, tiles = DeviceAdapterRows.tiles_of(slots)
        if not tokens:
            return None
        numbers = upload(torch.tensor([*tokens, *tiles], dtype=torch.int32), self._device)
        own, others = numbers[: len(tokens)], numbers[len(tokens) :]
        return DeviceAdapterRows(self._banks, own, others.view(-1, 3))

    def _slot_of(self, weights: LoraWeights, in_use: Collection[LoraWeights]) -> int:
        slot = self._slots.get(weights)
        if slot is None:
            slot = self._free.pop() if self._free else self._take(in_use)
            self._slots[weights] = slot
            for number, bank in enumerate(self._banks):
                bank.fill(slot, weights, number)
        self._slots.move_to_end(weights)
        return slot

    def _take(self, in_use: Collection[LoraWeights]) -> int:
        """The slot of the least recently used adapter that no row has."""
        for weights in self._slots:
            if weights not in in_use:
                return self._slots.pop(weights)
        raise AssertionError("more adapters have rows than there are slots")
