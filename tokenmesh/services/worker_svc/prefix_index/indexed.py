"""The route blocks that the index should hold for this worker, and reservations past their time."""

from collections.abc import Iterable
from itertools import islice

from tokenmesh.engine.kv.route_ledger import RouteChange


class IndexedBlocks:
    """Every route block that is whole in the pool. No I/O."""

    def __init__(self, max_changes: int) -> None:
        self._max_changes = max_changes
        self._hashes: set[bytes] = set()
        self._changes: dict[bytes, bool] = {}
        """It holds what is to be written, by route hash: whether it is there."""
        self.xor = 0
        """This is the sum (xor) of all hashes: with their number, a digest that costs nothing to
        keep."""
        self.must_rewrite = False
        """It holds what Redis holds is wrong or unknown: only all of it will do."""

    def __len__(self) -> int:
        return len(self._hashes)

    def apply(self, change: RouteChange) -> None:
        """Apply a change of the engine."""
        if change.is_cleared:
            self._hashes.clear()
            self.xor = 0
            self.lose()
        for route, is_there in change.is_there.items():
            if is_there != (route in self._hashes):
                self._note(route, is_there)
        if len(self._changes) > self._max_changes:
            self.lose()

    def _note(self, route: bytes, is_there: bool) -> None:
        (self._hashes.add if is_there else self._hashes.remove)(route)
        self.xor ^= int.from_bytes(route, "little")
        if not self.must_rewrite:
            self._changes[route] = is_there

    def lose(self) -> None:
        """The content in Redis is unknown from now on."""
        self.must_rewrite = True
        self._changes.clear()

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes to add and to remove since the last call; `lose` when they are not written."""
        changes, self._changes = self._changes, {}
        added = [route for route, is_there in changes.items() if is_there]
        return added, [route for route, is_there in changes.items() if not is_there]

    def take_all(self) -> list[bytes]:
        """Every hash; changes count from here on. `lose` when they are not written."""
        self.must_rewrite = False
        self._changes.clear()
        return list(self._hashes)


class ExpiredReservations:
    """Looks at what is reserved, now and then."""

    def __init__(self, lifetime_s: float, max_reservations: int) -> None:
        """The rest of more than `max_reservations` is looked at later."""
        self._lifetime_s = lifetime_s
        self._max_reservations = max_reservations
        self._seen_s: dict[str, float] = {}

    def look(self, reservations: Iterable[str], now_s: float) -> list[str]:
        """Those of all that there are now which are too old."""
        known = self._seen_s
        there = islice(reservations, self._max_reservations)
        self._seen_s = {each: known.get(each, now_s) for each in there}
        limit_s = now_s - self._lifetime_s
        return [each for each, seen_s in self._seen_s.items() if seen_s <= limit_s]
