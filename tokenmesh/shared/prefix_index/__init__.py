"""The prefix index in Redis: names of its keys, and scripts that release reservations.

It holds which worker has which route blocks and what is reserved on it. Workers write it,
schedulers read it. The braces in keys keep a model's keys in one slot of a cluster. A worker's
epoch is part of its keys: what a dead process wrote is never read again and expires.
"""

from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.subjects import slug

_PREFIX = "kvx"
_ON = "@"


def name_reservation(field: str, worker: WorkerId, epoch: int) -> str:
    """Name of a placement's reservation, with the worker on which it is."""
    return f"{field}{_ON}{worker}:{epoch:x}"


@dataclass(frozen=True, slots=True)
class IndexKeys:
    model: ModelName

    def blocks(self, worker: WorkerId, epoch: int, tier: str = "gpu") -> str:
        """SET of the 8-byte route hashes that the incarnation holds."""
        return self._key("w", f"{worker}:{epoch:x}:{tier}")

    def rewrite(self, worker: WorkerId, epoch: int) -> str:
        """SET that becomes `blocks` once it is complete."""
        return self._key("n", f"{worker}:{epoch:x}")

    def digest(self, worker: WorkerId, epoch: int) -> str:
        """HASH `seq`, `n`, `xor`: what the set should hold, written together with it."""
        return self._key("s", f"{worker}:{epoch:x}")

    def reserved(self, worker: WorkerId, epoch: int) -> str:
        """HASH of reservations, uncached prompt tokens and streams, and their sum; see
        `give_back.lua`."""
        return self._key("rsv", f"{worker}:{epoch:x}")

    def reserved_by(self, reservation: str) -> tuple[str, str]:
        """The key and the field of what `name_reservation` named."""
        field, _, incarnation = reservation.partition(_ON)
        return self._key("rsv", incarnation), field

    def _key(self, kind: str, rest: str) -> str:
        return f"{_PREFIX}:{{{slug(self.model)}}}:{kind}:{rest}"


_HERE: Final = files(__package__)
_SHARED: Final = _HERE.joinpath("give_back.lua").read_text(encoding="utf-8")

RELEASE: Final = _SHARED + _HERE.joinpath("release.lua").read_text(encoding="utf-8")


def with_shared(source: str) -> str:
    """A script that may give reservations back."""
    return _SHARED + source
