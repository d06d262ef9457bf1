"""Head: what every chunk and body of one response begins with."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Head:
    """Identity of a response."""

    id: str
    created: int
    """Unix seconds."""
    model: str
