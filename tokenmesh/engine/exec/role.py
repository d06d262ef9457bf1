"""Role: what a process does in a group of ranks, as far as building a runner depends on it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tokenmesh.engine.exec.resident import TorchResident
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.engine.ranks.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class Role:
    """By default that of a process alone."""

    ranks: Ranks = ALONE
    local_world: int = 1
    """Ranks of this host, which share its cores and its memory."""
    make_runner: Callable[..., TorchRunner] = TorchRunner
    """With the arguments of `TorchRunner`."""
    make_resident: Callable[..., TorchResident] = TorchResident
    """With those of `TorchResident`."""


ALONE_ROLE: Final = Role()
