"""The seam between messages and bytes: what `MessageBus` needs from a connection."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from tokenmesh.shared.bus.base import Subscription


class Packet(Protocol):
    """Received bytes."""

    subject: str
    reply: str
    """Empty when nobody waits for an answer."""
    data: bytes
    headers: dict[str, str] | None


OnPacket = Callable[[Packet], Awaitable[None]]


class Link(Protocol):
    """A connection that reconnects by itself; BusLost where a call cannot wait for that."""

    @property
    def is_connected(self) -> bool:
        """Whether the server can be talked to right now."""

    @property
    def max_payload_bytes(self) -> int:
        """What the server takes in one message, headers included."""

    def new_inbox(self) -> str:
        """A subject prefix that nobody else uses."""

    async def send(
        self, subject: str, data: bytes, headers: dict[str, str] | None, reply_to: str = ""
    ) -> None:
        """Send, or buffer while the server is away."""

    async def subscribe(self, subject: str, on_packet: OnPacket, queue: str | None) -> Subscription:
        """Hand over each packet, one at a time in order of arrival."""

    async def flush(self) -> None:
        """Return when the server has everything that was sent so far."""

    async def close(self) -> None:
        """Hand over what was received, disconnect."""

    async def wait_lost(self) -> None:
        """Return when the connection has ended for good."""
