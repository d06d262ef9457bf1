"""Role: what a process does in a group of ranks, as far as building a runner depends on it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tokenmesh.engine.adapters.adapter import AdapterSource
from tokenmesh.engine.exec.pool_runner import PoolRunner
from tokenmesh.engine.exec.resident import TorchResident
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.engine.models.api import LanguageModel
from tokenmesh.engine.ranks.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class Role:
    """By default that of a process alone."""

    ranks: Ranks = ALONE
    local_world: int = 1
    """Ranks of this host, which share its cores and its memory."""
    make_runner: Callable[..., TorchRunner] = TorchRunner
    """With the arguments of `TorchRunner`."""
    make_pool_runner: Callable[..., PoolRunner] = PoolRunner
    """With those of `PoolRunner`."""
    make_resident: Callable[..., TorchResident] = TorchResident
    """With those of `TorchResident`."""
    share_adapters: Callable[[AdapterSource], AdapterSource] = lambda reader: reader
    """Reads adapters on all ranks, where this one leads them."""
    share_ends: Callable[[LanguageModel], LanguageModel] = lambda model: model
    """Returns what a head is given of the model that it drafts for."""


ALONE_ROLE: Final = Role()
