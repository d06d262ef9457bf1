"""Know which gateway works on what, and the watch that continues the work of dead ones.

A mark is an entry of a journal. Every gateway looks for marks of dead owners; the fence of the
work's log admits one of them. A gateway that was only suspended gets a Conflict at its next append,
and stops.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tokenmesh.shared.errors import Conflict, TokenMeshError
from tokenmesh.shared.ids import GatewayId
from tokenmesh.shared.journal import Journal

logger = logging.getLogger(__name__)


class OwnerMarks:
    """`subject`: the key of a mark, from its owner and the name of the work; both may be `*`."""

    def __init__(self, journal: Journal, subject: Callable[[str, str], str]) -> None:
        self._journal = journal
        self._subject = subject

    async def set(self, owner: GatewayId, name: str) -> None:
        """Mark work before beginning it. A mark without work does no harm."""
        with suppress(Conflict):
            await self._journal.append(self._subject(owner, name), b"", 0)

    async def remove(self, owner: str, name: str) -> None:
        """Remove the mark of this owner; `*`: of all owners."""
        await self._journal.purge(self._subject(owner, name))

    async def all(self) -> list[tuple[GatewayId, str]]:
        """All marks: owner and name."""
        keys = await self._journal.keys(self._subject("*", "*"))
        parts = [key.rsplit(".", 2) for key in keys]
        return [(GatewayId(owner), name) for _, owner, name in parts]


class OrphanWatch:
    """Hands work without a live owner to `adopt`, again and again."""

    def __init__(
        self,
        marks: OwnerMarks,
        owner: GatewayId,
        adopt: Callable[[GatewayId, str], Awaitable[None]],
        *,
        is_alive: Callable[[GatewayId], bool],
        is_here: Callable[[str], bool],
        interval_s: float,
        what: str,
    ) -> None:
        """`owner`: this gateway; `is_alive`: whether a gateway sends heartbeats; `is_here`:
        whether this gateway works on it; `what` names the work in logs."""
        self._marks = marks
        self._owner = owner
        self._adopt = adopt
        self._is_alive = is_alive
        self._is_here = is_here
        self._interval_s = interval_s
        self._what = what

    async def run(self, delay_s: float) -> None:
        """Look again and again, until cancelled. In `delay_s` all live gateways must be heard."""
        await asyncio.sleep(delay_s)
        while True:
            try:
                await self.look()
            except TokenMeshError as error:
                logger.debug("cannot look for orphaned %ss: %s", self._what, error.message)
            await asyncio.sleep(self._interval_s)

    async def look(self) -> None:
        """Adopt what no live gateway works on, the oldest names first."""
        for owner, name in sorted(await self._marks.all(), key=lambda mark: mark[1]):
            if self._is_here(name) or self.is_live_peer(owner):
                continue
            try:
                await self._adopt(owner, name)
            except Conflict:
                # Another gateway has adopted it, or it was deleted.
                await self._marks.remove(self._owner, name)
            except TokenMeshError as error:
                # One log that cannot be read must not stop the adoption of others.
                logger.info("cannot adopt %s %s yet: %s", self._what, name, error.message)

    def is_live_peer(self, owner: GatewayId) -> bool:
        """Return whether it is another gateway, and alive."""
        return owner != self._owner and self._is_alive(owner)
