"""BodyBudget: the bytes of large bodies that a gateway may hold at a time.

A large body takes its share before it is read and holds it until its prompts are tokenized, so that
memory does not grow with the number of connections. A waiting body is not read: flow control keeps
its bytes at the client.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Final

from starlette.types import Message, Receive

from tokenmesh.shared.config.http import BodySettings
from tokenmesh.shared.errors import Overloaded
from tokenmesh.shared.fair_queue import FairQueue

SHORT_BYTES: Final = 64 * 1024
"""Bodies up to this size need no share."""
_MOST: Final = 1 << 62
"""Size of a body without Content-Length."""
_RETRY_AFTER_S: Final = 1.0


@dataclass(eq=False, slots=True)
class Share:
    """The bytes reserved for one body, or the wait for them."""

    tenant: str
    num_bytes: int
    ready: asyncio.Future[None]
    is_held: bool = False


class BodyBudget:
    """Gives shares to tenants in turn, at most half of the budget to each tenant.

    A request takes at most one share, so requests cannot block each other. A body larger than half
    of the budget counts as half.
    """

    def __init__(
        self, limits: BodySettings, refusal: str = "too many large bodies are being sent"
    ) -> None:
        """`refusal`: the error's message when there is no share in time."""
        self._refusal = refusal
        self._num_free = limits.body_budget_bytes
        self._most_each = max(1, limits.body_budget_bytes // 2)
        self._wait_s = limits.body_wait_s
        self._waiting: FairQueue[Share] = FairQueue(limits.max_waiting_bodies)
        self._next: Share | None = None
        """The first in the queue; smaller bodies behind it wait until there is room for it."""
        self._held: Counter[str] = Counter()

    @property
    def num_held(self) -> int:
        """Bytes of all shares that are held."""
        return self._held.total()

    async def take(self, tenant: str, num_bytes: int) -> Share:
        """Wait for a share. Raises Overloaded after `body_wait_s` or when the queue is full."""
        ready = asyncio.get_running_loop().create_future()
        share = Share(tenant, min(num_bytes, self._most_each), ready)
        refused = self._waiting.push(tenant, share, share.num_bytes)
        if refused is not None and not refused.ready.done():
            refused.ready.set_exception(self._too_many())
        self._grant()
        try:
            async with asyncio.timeout(self._wait_s):
                await ready
        except BaseException as error:
            self._leave(share)
            if isinstance(error, TimeoutError):
                raise self._too_many() from None
            raise
        return share

    def give_back(self, share: Share) -> None:
        """Return a share. Further calls do nothing."""
        if not share.is_held:
            return
        share.is_held = False
        self._num_free += share.num_bytes
        self._held[share.tenant] -= share.num_bytes
        if not self._held[share.tenant]:
            del self._held[share.tenant]
        self._grant()

    def _leave(self, share: Share) -> None:
        self.give_back(share)
        self._waiting.remove(share.tenant, share)
        if self._next is share:
            self._next = None
        self._grant()

    def _grant(self) -> None:
        while True:
            if self._next is None:
                self._next = self._waiting.pop(self._may_hold)
            share = self._next
            if share is None or share.num_bytes > self._num_free:
                return
            self._next = None
            if share.ready.done():
                continue
            self._num_free -= share.num_bytes
            self._held[share.tenant] += share.num_bytes
            share.is_held = True
            share.ready.set_result(None)

    def _may_hold(self, share: Share) -> bool:
        return self._held[share.tenant] + share.num_bytes <= self._most_each

    def _too_many(self) -> Overloaded:
        return Overloaded(self._refusal, retry_after_s=_RETRY_AFTER_S)


class Body:
    """The body of one request: the number of bytes read, and its share if it is large."""

    def __init__(self, budget: BodyBudget, tenant: str, length: str, receive: Receive) -> None:
        """`length`: the Content-Length, or empty."""
        self._budget = budget
        self._tenant = tenant
        self._receive = receive
        self._length = int(length) if length.isdigit() else None
        self._num_read = 0
        self._is_complete = False
        self._share: Share | None = None

    async def receive(self) -> Message:
        """ASGI's `receive`; first waits for the body's share. Raises Overloaded."""
        is_large = (self._length or self._num_read) > SHORT_BYTES
        if is_large and self._share is None and not self._is_complete:
            self._share = await self._budget.take(self._tenant, self._length or _MOST)
        message = await self._receive()
        self._num_read += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        return message

    def hand_on(self) -> None:
        """The request no longer needs the body. Further calls do nothing."""
        if self._share is not None:
            self._budget.give_back(self._share)
