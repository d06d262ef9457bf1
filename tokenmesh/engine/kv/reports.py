"""Reports of the prefix cache: what others learn of the blocks that can be found."""

from collections.abc import Iterable

from tokenmesh.engine.kv.block_log import BlockChange, BlockLog
from tokenmesh.engine.kv.route_ledger import RouteChange, RouteLedger
from tokenmesh.engine.request.request import Request


class CacheReports:
    """The ledger of route blocks for the mesh's index, and the log of blocks for subscribers; each
    only where it is wanted."""

    def __init__(self, routes: RouteLedger | None, log: BlockLog | None) -> None:
        self.routes = routes
        self._log = log

    def stored(self, request: Request, index: int) -> None:
        """That block of the request can be found from now on."""
        if self._log is not None:
            self._log.stored(request, index)

    def note_routes(self, request: Request, end: int) -> None:
        """The request's blocks up to position `end` can be found."""
        if self.routes is not None:
            self.routes.note(request, end)

    def hide(self, hashes: Iterable[bytes]) -> None:
        """No hit can use these blocks any more."""
        for block_hash in hashes:
            if self.routes is not None:
                self.routes.forget(block_hash)
            if self._log is not None:
                self._log.removed(block_hash)

    def clear(self) -> None:
        """Nothing can be found any more."""
        if self.routes is not None:
            self.routes.forget_all()
        if self._log is not None:
            self._log.cleared()

    def take_route_change(self) -> RouteChange | None:
        """Return what is new for the index since the last call; None: nothing."""
        return self.routes.take_change() if self.routes is not None else None

    def take_block_changes(self) -> list[BlockChange]:
        """Return what the log has since the last call; nothing without one."""
        return self._log.take() if self._log is not None else []
