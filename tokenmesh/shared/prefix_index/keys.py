"""Names of the index's keys. The braces keep a model's keys in one slot of a cluster.

A worker's incarnation is part of its keys: what a dead or hung process wrote is never read again,
and goes when its time is over.
"""

from dataclasses import dataclass

from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.subjects import slug

_PREFIX = "kvx"


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """Of one model."""

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

    def load(self, worker: WorkerId, epoch: int) -> str:
        """STRING: uncached prompt tokens and streams that are reserved; see `give_back.lua`."""
        return self._key("load", f"{worker}:{epoch:x}")

    def reservation(self, reservation_id: str) -> str:
        """STRING: what one placement reserved, and on which load key."""
        return self._key("rsv", reservation_id)

    @property
    def expiries(self) -> str:
        """ZSET of reservation keys by the time (ms) at which nobody can mean them any more."""
        return self._key("exp", "")

    def _key(self, kind: str, rest: str) -> str:
        return f"{_PREFIX}:{{{slug(self.model)}}}:{kind}:{rest}"
