"""An adapter by its name, its matrices in memory, a stream's use of them, and its wait for that."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenmesh.engine.adapters.adapter import ReadAdapter
from tokenmesh.shared.hashing import Adapter


@dataclass(slots=True)
class KnownAdapter:
    """A name and what it stands for now."""

    name: str
    path: Path
    content_hash: str
    created_s: float
    version: int
    """This is the version of the command that brought it; 0: it was there from the start."""
    source: str = ""
    """The path or hub id by which it was named."""

    @property
    def adapter(self) -> Adapter:
        return Adapter(self.name, self.content_hash)


@dataclass(slots=True)
class ResidentAdapter:
    """Matrices in memory, by content hash: two names may share them."""

    adapter: ReadAdapter
    num_leases: int = 0


@dataclass(slots=True, eq=False)
class AdapterTurn:
    """A stream's place among those that wait for an adapter."""

    is_given_up: bool = False
    on_give_up: "Callable[[AdapterTurn], None] | None" = None
    """Set while the stream waits."""

    def give_up(self) -> None:
        """The stream has ended: it is not to take room, and none is to wait behind it."""
        self.is_given_up = True
        if self.on_give_up is not None:
            self.on_give_up(self)


@dataclass(slots=True, eq=False)
class AdapterLease:
    """A stream's use of an adapter. `release` it once; more often does nothing."""

    adapter: ReadAdapter
    _release: Callable[[str], None] | None

    def release(self) -> None:
        """The stream has ended."""
        if self._release is not None:
            self._release(self.adapter.content_hash)
            self._release = None
