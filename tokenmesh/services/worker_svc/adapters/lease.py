"""An adapter by its name, its matrices in memory, and a stream's use of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenmesh.services.worker_svc.adapters.adapter import ReadAdapter
from tokenmesh.shared.hashing import Adapter


@dataclass(slots=True)
class KnownAdapter:
    """A name and what it stands for now."""

    name: str
    path: Path
    content_hash: str
    created_s: float
    version: int
    """Of the command that brought it; 0: it was there from the start."""

    @property
    def adapter(self) -> Adapter:
        return Adapter(self.name, self.content_hash)


@dataclass(slots=True)
class ResidentAdapter:
    """Matrices in memory, by content hash: two names may share them."""

    adapter: ReadAdapter
    num_leases: int = 0


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
