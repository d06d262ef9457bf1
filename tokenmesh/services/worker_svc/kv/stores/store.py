"""The protocol that all stores have in common."""

from collections.abc import Sequence
from typing import Protocol

SUM_BYTES = 16
"""Length of the checksum of an image that is stored, xxh3_128."""
MOST_KEY_BYTES = 23
"""Longest key: a block's hash and a mark."""


class CannotOpen(Exception):
    """The store cannot be used as it is set; says why."""


class Store(Protocol):
    """Images by key, within one scope. Every method may be called by several threads at a time."""

    name: str

    def open(self) -> None:
        """Find what is there. Blocks. Raises CannotOpen."""

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first of these it has, in a row. Raises nothing."""

    def get(self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float) -> list[bool]:
        """Copy images to slots of the arena; of each whether it is there. Blocks. Raises nothing;
        when it returns it writes no more."""

    def put(self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float) -> int:
        """Keep images that it lacks; how many were written. Blocks. Raises nothing."""
