"""ChildSpec: a process that `up` runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from tokenmesh.shared.config.notify import SOCKET


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
    greeting: bytes | None = None
    """What a client writes to `port` so that a server which works answers with a line; None: no
    such question is asked."""

    @property
    def is_watched(self) -> bool:
        """Whether it shows that it works, once it does."""
        return self.greeting is not None or SOCKET in self.environment
