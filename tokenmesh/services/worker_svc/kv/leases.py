"""ServedLeases: who may read which slots, as the transfer process knows it."""

import hmac
import threading
from collections.abc import Sequence

from tokenmesh.services.worker_svc.kv.orders import MOST_SLOTS


class ServedLeases:
    """Used by all threads of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[int, tuple[bytes, set[int]]] = {}

    def add(self, lease: int, token: bytes, slots: Sequence[int]) -> None:
        with self._lock:
            self._leases.setdefault(lease, (token, set()))[1].update(slots)

    def remove(self, lease: int) -> None:
        with self._lock:
            self._leases.pop(lease, None)

    def allows(self, lease: int, token: bytes, slots: Sequence[int]) -> bool:
        """Return whether who shows this token may read all of these slots now."""
        with self._lock:
            known, held = self._leases.get(lease, (b"", set()))
            is_right = hmac.compare_digest(known, token) and bool(known)
            return is_right and len(slots) <= MOST_SLOTS and held.issuperset(slots)
