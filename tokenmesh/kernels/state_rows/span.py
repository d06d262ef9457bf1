"""RowSpan: one row's tokens in a step, as numbers of the host."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Tokens first to last (not included) of a step are at position start and those after it."""

    slot: int
    start: int
    first: int
    last: int

    @property
    def tokens(self) -> slice:
        """Where they are in a step's tensors."""
        return slice(self.first, self.last)

    def chunks(self, size: int) -> Iterator[slice]:
        """The tokens in chunks whose borders are at positions that `size` divides.

        However a prompt was cut into steps, most of its chunks are then the same, and so are the
        sums over them.
        """
        first = self.first
        position = self.start
        while first < self.last:
            last = min(self.last, first + size - position % size)
            yield slice(first, last)
            position += last - first
            first = last
