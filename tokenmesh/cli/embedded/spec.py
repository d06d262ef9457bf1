"""ChildSpec: a process that `up` runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum


class Phase(IntEnum):
    """What stops together; lower ones first. The gateway goes before those it asks."""

    EDGE = 0
    MESH = 1
    SERVER = 2


@dataclass(frozen=True)
class ChildSpec:
    """How to start a process; no secret stands in `command`, which everybody can read."""

    name: str
    command: tuple[str, ...]
    phase: Phase
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Added to the environment of `up`."""
    port: int | None = None
    """Loopback port that it accepts on once it has started."""
