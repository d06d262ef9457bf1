"""StepBuffer: what a step sends to the device, one flat buffer in pinned memory, one copy."""

from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import Final, Self

import torch

from tokenmesh.engine.exec.cuda.device import Device, DeviceEvent
from tokenmesh.kernels.alignment import MULTIPLE, padded
from tokenmesh.kernels.staged_writes import staged_writes
from tokenmesh.shared.errors import TokenMeshError

WRITE_WORDS: Final = 1 << 16
"""int32 words for what changed in the rows; a step with more uses a separate copy."""


@dataclass(frozen=True, slots=True)
class StepBuffer:
    """Host and device have one each, laid out alike, with room for R rows of a batch.

    The device's stays where it is: graphs read their inputs from it.
    """

    flat: torch.Tensor
    """int32 [words]"""
    rows: torch.Tensor
    """int32 [R]: the row of each row of the batch; negative: padding."""
    sampled_rows: torch.Tensor
    """int32 [R]: those of them that draw a token."""
    draws: torch.Tensor
    """int32 [R]: which of these each row of the batch is; negative: it draws nothing."""
    positions: torch.Tensor
    """int64 [R]: how many tokens each row that draws has generated."""
    last_tokens: torch.Tensor
    """int64 [R]: the token of the batch whose logits it draws from."""
    query_starts: torch.Tensor
    """int32 [R + 1]"""
    writes: torch.Tensor
    """int32 [WRITE_WORDS]: destinations, starts and values of `staged_writes`."""

    @staticmethod
    def num_words(num_rows: int) -> int:
        """Size of a buffer."""
        return 8 * padded(num_rows) + MULTIPLE + WRITE_WORDS

    @classmethod
    def of(cls, flat: torch.Tensor, num_rows: int) -> Self:
        """The parts of a buffer. Each begins at a multiple of 16 words."""
        room = padded(num_rows)
        sizes = [room] * 3 + [2 * room] * 2 + [room + MULTIPLE, WRITE_WORDS]
        parts = torch.split(flat, sizes)
        rows, sampled_rows, draws = (part[:num_rows] for part in parts[:3])
        positions, last_tokens = (part.view(torch.int64)[:num_rows] for part in parts[3:5])
        query_starts = parts[5][: num_rows + 1]
        return cls(flat, rows, sampled_rows, draws, positions, last_tokens, query_starts, parts[6])

    def used(self, num_write_words: int) -> torch.Tensor:
        """The part that a copy has to carry."""
        return self.flat[: len(self.flat) - WRITE_WORDS + num_write_words]


def fill(part: torch.Tensor, values: list[int]) -> None:
    """Write the first entries of a part on the host."""
    part[: len(values)] = torch.tensor(values, dtype=part.dtype)


class TooManyInFlight(TokenMeshError):
    """More steps were launched than the ring has slots."""


@dataclass(slots=True)
class Slot:
    """It holds what one step needs on the host."""

    upload: StepBuffer
    download: torch.Tensor
    """uint8, grows with the largest answer."""
    event: DeviceEvent
    """Recorded after the step's last copy."""


class Staging:
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
        """The caller no longer reads the slot."""
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


def pack_writes(writes: list[tuple[int, list[int]]]) -> torch.Tensor:
    """(address, values) -> int32 words; empty when there is nothing to write."""
    if not writes:
        return torch.empty(0, dtype=torch.int32)
    destinations = torch.tensor([address for address, _ in writes])
    starts = torch.tensor([0] + [len(values) for _, values in writes]).cumsum(0).int()
    values = torch.tensor(list(chain.from_iterable(v for _, v in writes)), dtype=torch.int32)
    return torch.cat([destinations.view(torch.int32), starts, values])


def apply_writes(flat: torch.Tensor, packed: torch.Tensor, count: int) -> None:
    """Write what `pack_writes` made of `count` writes, on the device."""
    destinations = packed[: 2 * count].view(torch.int64)
    staged_writes(flat, destinations, packed[2 * count : 3 * count + 1], packed[3 * count + 1 :])
