"""NatsLink: a connection to core NATS, in bytes.

nats-py reconnects by itself without end; what is sent meanwhile waits in a bounded buffer.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Final, cast

import nats.errors
from nats.aio.client import Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ClientSubscription

from tokenmesh.shared.bus.base import RateLimitedLog, Subscription
from tokenmesh.shared.bus.nats_client import FastClient
from tokenmesh.shared.bus.nats_frames import Packet
from tokenmesh.shared.config.mesh import BusSettings
from tokenmesh.shared.errors import BusLost, ConfigError, PayloadTooLarge, ProtocolError
from tokenmesh.shared.rights import INBOXES, inbox_prefix

logger = logging.getLogger(__name__)

MAX_OUTSTANDING_PINGS: Final = 2
"""Unanswered probes after which the connection is given up."""
PENDING_BYTES: Final = 64 * 1024 * 1024
"""The same bound in bytes."""

_DENIED: Final = "Authorization Violation"
_USER_INFO: Final = re.compile(r"//[^/,]*@")
"""May hold a password."""
_BACKOFF_STEPS: Final = 16
"""Doublings of the pause; more would only overflow."""


OnPacket = Callable[[Packet], Awaitable[None]]


class NatsLink:
    """One NATS connection. Methods raise BusLost when they cannot wait for a reconnect."""

    def __init__(
        self,
        settings: BusSettings,
        name: str,
        log: RateLimitedLog,
        on_dropped: Callable[[str], Awaitable[None]],
    ) -> None:
        """NATS monitoring shows `name`. `on_dropped` is called with the reply subject of each
        request that a full subscription had to drop."""
        self._settings = settings
        self._name = name
        self._log = log
        self._on_dropped = on_dropped
        self._shown_url = _USER_INFO.sub("//", settings.url)
        self._client = FastClient()
        self._subscriptions: set[_NatsSubscription] = set()
        self._is_open = False
        self._is_closing = False
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    @property
    def max_payload_bytes(self) -> int:
        """The server's limit of one message, headers included."""
        return self._client.max_payload

    def new_inbox(self) -> str:
        """A subject prefix that no other process uses, below that of this process's user."""
        return inbox_prefix(self._name) + self._client.new_inbox().removeprefix(INBOXES)

    async def open(self) -> None:
        """Connect; raises as `message_bus.connect`."""
        try:
            async with asyncio.timeout(self._settings.connect_deadline_s):
                await self._open_client()
        except ConfigError:
            await self.close()
            raise
        except TimeoutError as error:
            reason = self._client.last_error or "no answer"
            await self.close()
            raise BusLost(f"cannot reach NATS at {self._shown_url}: {reason}") from error
        self._is_open = True
        self._connected.set()

    async def _open_client(self) -> None:
        settings = self._settings
        await self._client.connect(
            servers=[url.strip() for url in settings.url.split(",")],
            name=self._name,
            user=settings.user,
            password=settings.password.get_secret_value() if settings.password else None,
            token=settings.token.get_secret_value() if settings.token else None,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            max_reconnect_attempts=-1,
            reconnect_to_server_handler=self._next_server,
            # nats-py annotates whole seconds and takes any number.
            connect_timeout=settings.connect_timeout_s,  # type: ignore[arg-type]
            reconnect_time_wait=settings.reconnect_min_s,  # type: ignore[arg-type]
            ping_interval=settings.ping_interval_s,  # type: ignore[arg-type]
            max_outstanding_pings=MAX_OUTSTANDING_PINGS,
            pending_size=settings.reconnect_buffer_bytes,
            flush_timeout=settings.flush_timeout_s,
        )

    async def send(
        self, subject: str, data: bytes, headers: dict[str, str] | None, reply_to: str = ""
    ) -> None:
        """Send, or buffer while the server cannot be reached. Waits while it reads too slowly."""
        try:
            if self._client.put(subject, data, reply_to, headers):
                return
            async with asyncio.timeout(self._settings.flush_timeout_s):
                while not self._client.put(subject, data, reply_to, headers):
                    await self._client.wait_for_room()
        except TimeoutError as error:
            raise BusLost(f"cannot send on {subject}: the NATS server does not read") from error
        except nats.errors.MaxPayloadError as error:
            raise PayloadTooLarge(
                f"{len(data)} bytes are too many for the NATS server (its max_payload)"
            ) from error
        except (nats.errors.BadSubjectError, nats.errors.BadHeaderError) as error:
            raise ProtocolError(f"{subject!r}, {reply_to!r}: {error}") from error
        except nats.errors.Error as error:
            raise BusLost(f"cannot send on {subject}: {error}") from error

    def offer(self, subject: str, data: bytes) -> bool:
        """Send if that needs no waiting."""
        try:
            return self._client.put(subject, data, "", None)
        except nats.errors.Error:
            return False

    async def subscribe(self, subject: str, on_packet: OnPacket, queue: str | None) -> Subscription:
        """Hand over each packet, one at a time in order of arrival."""
        try:
            inner = await self._client.subscribe(
                subject,
                queue or "",
                # `Msg` has the attributes of `Packet`.
                cb=cast("Callable[[Msg], Awaitable[None]]", on_packet),
                pending_msgs_limit=self._settings.pending_messages,
                pending_bytes_limit=PENDING_BYTES,
            )
        except nats.errors.BadSubjectError as error:
            raise ProtocolError(f"{subject!r}: {error}") from error
        except nats.errors.Error as error:
            raise BusLost(f"cannot subscribe to {subject}: {error}") from error
        subscription = _NatsSubscription(self, inner)
        self._subscriptions.add(subscription)
        return subscription

    async def stop_subscription(self, subscription: "_NatsSubscription") -> None:
        """Hand over what was received on a subscription, then forget it."""
        if subscription not in self._subscriptions:
            return
        self._subscriptions.discard(subscription)
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self._client.leave(subscription.inner)
        except TimeoutError as error:
            self._log.note("undrained", f"{subscription.inner.subject}: {error!r}")

    async def flush(self) -> None:
        try:
            async with asyncio.timeout(self._settings.flush_timeout_s):
                await self._connected.wait()
                await self._client.flush()
        except (TimeoutError, nats.errors.Error) as error:
            raise BusLost("the NATS server does not answer") from error

    async def close(self) -> None:
        self._is_closing = True
        await asyncio.gather(*(each.stop() for each in tuple(self._subscriptions)))
        try:
            if not self._client.is_connected:
                raise BusLost("the NATS server is away")
            await self.flush()
        except BusLost as error:
            # nats-py would wait until the server has read everything
            if num_bytes := self._client.abort():
                self._log.note("closed unflushed", f"{num_bytes} bytes were not sent: {error}")
        try:
            async with asyncio.timeout(self._settings.flush_timeout_s):
                await self._client.close()
        except (OSError, RuntimeError, TimeoutError) as error:
            # uvloop calls a write to a closed transport a RuntimeError
            self._client.abort()
            self._log.note("closed unflushed", repr(error))

    async def wait_lost(self) -> None:
        await self._lost.wait()

    def _next_server(
        self, servers: list[Server], _info: dict[str, object]
    ) -> tuple[Server | None, float]:
        """The least tried server, and how long to wait before it is tried again."""
        server = min(servers, key=lambda each: each.reconnects)
        if server.reconnects == 0:
            return server, 0.0
        doublings = min(server.reconnects - 1, _BACKOFF_STEPS)
        pause_s = self._settings.reconnect_min_s * 2**doublings
        return server, min(pause_s, self._settings.reconnect_max_s)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self._log.note("slow consumer", f"dropped a message on {error.subject}")
            if error.reply:
                await self._on_dropped(error.reply)
        elif not self._is_open and _DENIED in str(error):
            # Raised here it ends nats-py's loop of attempts, which could not succeed.
            raise ConfigError(
                f"NATS at {self._shown_url} refuses user, password or token", param="bus"
            )
        elif isinstance(error, OSError | nats.errors.Error | TimeoutError):
            self._log.note("connection", repr(error))
        else:
            self._log.note("receiver", repr(error))
            logger.error("a receiver failed", exc_info=error)

    async def _on_disconnected(self) -> None:
        self._connected.clear()
        if not self._is_closing:
            self._log.note("disconnected", self._shown_url)

    async def _on_reconnected(self) -> None:
        self._connected.set()
        self._log.note("reconnected", self._shown_url)

    async def _on_closed(self) -> None:
        if not self._is_closing:
            logger.error(
                "NATS closed the connection and does not reconnect: %r", self._client.last_error
            )
            self._lost.set()


class _NatsSubscription(Subscription):
    """A `Subscription` of one link."""

    def __init__(self, link: NatsLink, inner: ClientSubscription) -> None:
        self._link = link
        self.inner = inner

    async def stop(self) -> None:
        await self._link.stop_subscription(self)
