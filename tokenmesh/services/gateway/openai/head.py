"""Head: the fields that every chunk and body of one response begins with."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Head:
    """The identity of a response."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    service_tier: str | None = None
    """Only in responses to requests that name a tier."""
