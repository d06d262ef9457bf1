"""Staging: the pinned memory through which steps reach the device and their tokens come back.

A copy may still read or write it while the host goes on, so there is a ring of slots as deep as the
steps in flight, and a slot is not used again before its step's result was read.
"""

from collections import deque
from dataclasses import dataclass

import torch

from tokenmesh.services.worker_svc.runner.cuda.device import Device, Event
from tokenmesh.services.worker_svc.runner.cuda.step_buffer import StepBuffer
from tokenmesh.shared.errors import TokenMeshError


class TooManyInFlight(TokenMeshError):
    """More steps were launched than the ring has slots."""


@dataclass(slots=True)
class Slot:
    """What one step needs on the host."""

    upload: StepBuffer
    download: torch.Tensor
    """uint8, grows with the largest answer."""
    event: Event
    """Recorded after the step's last copy."""


class Staging:
    """The ring."""

    def __init__(self, device: Device, num_rows: int, depth: int) -> None:
        self._device = device
        self._num_rows = num_rows
        self._free = deque(self._make() for _ in range(depth))

    def take(self) -> Slot:
        """A slot whose step has ended and was read. Raises TooManyInFlight."""
        if not self._free:
            raise TooManyInFlight("no slot is free: results were not taken")
        return self._free.popleft()

    def give_back(self, slot: Slot) -> None:
        """Nobody looks at it any more."""
        self._free.append(slot)

    def renew(self, slot: Slot) -> None:
        """The step that took the slot failed halfway, so a copy may still use its memory."""
        self._free.append(self._make())
        del slot

    def download(self, slot: Slot, answer: torch.Tensor) -> torch.Tensor:
        """Launch the copy of an answer, uint8 [n]; where its bytes will be after the event."""
        size = len(answer)
        if size > len(slot.download):
            slot.download = self._device.pinned(-(-size // 4)).view(torch.uint8)
        target = slot.download[:size]
        target.copy_(answer, non_blocking=True)
        slot.event.record()
        return target

    def _make(self) -> Slot:
        words = StepBuffer.num_words(self._num_rows)
        return Slot(
            StepBuffer.of(self._device.pinned(words), self._num_rows),
            # tokens and flaws of a full batch
            self._device.pinned(4 * self._num_rows).view(torch.uint8),
            self._device.event(),
        )
