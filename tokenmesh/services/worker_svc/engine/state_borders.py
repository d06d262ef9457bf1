"""StateBorders: the positions of a prompt at which its state is saved.

A chunk ends there, which costs a step, so they are few: the last one of a prompt, where an equal
prompt or the next turn of a conversation goes on; the end of what an earlier prompt has in common
with it, where later ones will part as well; and up to `MOST_REGULAR` at equal distances between.
All are multiples of `unit`, whatever the batch was: so the kernels, which go in chunks of 64, cut
a prompt alike with a hit and without.
"""

from dataclasses import dataclass
from math import gcd, lcm
from typing import Final, Self

KERNEL_CHUNK: Final = 64
"""Tokens that kernels of the gated delta rule and of Mamba compute at a time."""

MOST_REGULAR: Final = 8


@dataclass(frozen=True, slots=True)
class StateBorders:
    """Sizes in tokens."""

    unit: int
    """Of which each border is a multiple; whole blocks."""
    interval: int
    """The smallest distance of regular borders, and the least that is worth a saved state."""
    most_regular: int

    @classmethod
    def of(cls, interval: int, block_size: int, num_slots: int) -> Self:
        """interval: rounded up to whole blocks. One prompt takes a quarter of the slots at most."""
        interval = -(-interval // block_size) * block_size
        unit = gcd(interval, lcm(block_size, KERNEL_CHUNK))
        return cls(unit, interval, max(1, min(MOST_REGULAR, num_slots // 4)))

    def after(self, start: int, num_known: int, num_matched: int) -> int | None:
        """The first border of the known tokens of a request behind `start`; None: there is none.

        num_matched: at its beginning, tokens that another request had as well. The last known token
        is always computed, so that no border is behind it.
        """
        last = (num_known - 1) // self.unit * self.unit
        spacing = self.interval
        while spacing * self.most_regular < last:
            spacing *= 2
        regular = (start // spacing + 1) * spacing
        if last - regular < self.interval:
            regular = last  # so near to it, it is not worth a step of its own
        parting = num_matched // self.unit * self.unit
        wanted = (each for each in (regular, parting, last) if start < each <= last)
        return min((each for each in wanted if each >= self.interval), default=None)

    def cut(self, num_tokens: int, start: int, num_known: int, num_matched: int) -> int:
        """How many of `num_tokens` known tokens from `start` on one chunk computes.

        It ends at the first border; one that ends before that ends on the grid where it can.
        """
        end = start + num_tokens
        border = self.after(start, num_known, num_matched)
        if border is not None and end >= border:
            return border - start
        on_grid = end // self.unit * self.unit
        return on_grid - start if start < on_grid and end < num_known else num_tokens
