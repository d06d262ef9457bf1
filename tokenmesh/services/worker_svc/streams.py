"""WorkerStreams: the event loop's record of each stream, from which output can be sent again.

A stream is kept for a while after its end: a gateway may have missed its last tokens, and a
repeated or late Generate of the same attempt must not start it again.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tokenmesh.engine.request.spec import (
    NO_TENANT,
    StreamKey,
    TenantShare,
)
from tokenmesh.services.worker_svc.adapters.lease import AdapterLease, AdapterTurn
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import GatewayId
from tokenmesh.shared.messages.tokens import Delta, TokenLogprobs
from tokenmesh.shared.tokens import BYTES_PER_ID

_Place = tuple[GatewayId, int]


@dataclass(slots=True, eq=False)
class WorkerStream:
    """The output of one attempt so far."""

    key: StreamKey
    first_offset: int
    """Output position where this attempt began."""
    reservation: str = ""
    """It holds what its placement reserved; empty once that was given back."""
    owner: TenantShare = NO_TENANT
    num_items: int = 1
    """Requests of the engine that it consists of: several of a Pool."""
    adapter: AdapterLease | None = None
    turn: AdapterTurn | None = None
    """While it waits for its adapter."""
    is_submitted: bool = False
    """It tells whether the engine has it."""
    is_cancelled: bool = False
    """It tells whether its cancellation was submitted to the engine."""
    token_ids: bytearray = field(default_factory=bytearray)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    head: Delta | None = None
    """The first delta, with the facts about the prompt."""
    tail: Delta | None = None
    """The last delta, with the ending."""
    drafts: tuple[int, int] | None = None
    """See `Delta.drafts`."""
    ended_s: float | None = None
    """Monotonic seconds; None while it runs."""

    def record(self, delta: Delta) -> None:
        """Remember what was published."""
        self.head = self.head or delta
        self.token_ids += delta.token_ids
        self.drafts = delta.drafts or self.drafts
        if delta.logprobs is not None:
            self.logprobs += delta.logprobs
        if delta.finish is not None:
            self.tail = delta

    def replay(self, offset: int) -> Delta | None:
        """All from `offset` on as one delta; None when this attempt does not hold it."""
        skipped = offset - self.first_offset
        if skipped < 0 or skipped > len(self.token_ids) // BYTES_PER_ID:
            return None
        head = self.head if skipped == 0 else None
        tail = self.tail
        return Delta(
            stream=self.key.stream,
            attempt=self.key.attempt,
            offset=offset,
            token_ids=bytes(self.token_ids[skipped * BYTES_PER_ID :]),
            finish=tail.finish if tail else None,
            stop_token=tail.stop_token if tail else None,
            logprobs=self.logprobs[skipped:] if self.logprobs else None,
            cached_tokens=head.cached_tokens if head else None,
            prompt_logprobs=head.prompt_logprobs if head else None,
            error=tail.error if tail else None,
            alignment=head.alignment if head else None,
            drafts=self.drafts,
        )


class WorkerStreams:
    """At most one attempt of each stream; ended ones up to `resend_streams` and their time."""

    def __init__(
        self, settings: WorkerSettings, release: Callable[[str], None] | None = None
    ) -> None:
        """release: called with each reservation that is over."""
        self._settings = settings
        self._release = release
        self._stream_by_place: dict[_Place, WorkerStream] = {}
        self._live: dict[_Place, WorkerStream] = {}
        """Those that have not ended: few compared with the ended ones."""
        self._ended: OrderedDict[_Place, WorkerStream] = OrderedDict()
        self._idle = asyncio.Event()
        self.used_s = monotonic_s()
        """When there was a stream last, where there is none now."""

    async def wait_idle(self, timeout_s: float | None) -> bool:
        """Return whether all streams have ended by then; None: wait for as long as it takes."""
        self._idle.clear()
        if self.num_live:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
            except TimeoutError:
                return False
        return True

    @property
    def num_live(self) -> int:
        """Streams that have not ended."""
        return len(self._live)

    @property
    def num_starting(self) -> int:
        """Streams before their first delta."""
        return sum(stream.head is None for stream in self.live())

    def holders(self) -> Counter[TenantShare]:
        """Return how many live streams each tenant has."""
        return Counter(stream.owner for stream in self.live())

    def live(self) -> Iterator[WorkerStream]:
        """Streams that have not ended."""
        return iter(self._live.values())

    def get(self, gateway: GatewayId, stream: int) -> WorkerStream | None:
        """The latest attempt, ended or not."""
        return self._stream_by_place.get((gateway, stream))

    def find(self, delta: Delta, gateway: GatewayId) -> WorkerStream | None:
        """The stream of a delta; None when a higher attempt took its place."""
        stream = self._stream_by_place.get((gateway, delta.stream))
        return stream if stream is not None and stream.key.attempt == delta.attempt else None

    def open(self, key: StreamKey, first_offset: int) -> WorkerStream:
        """Begin an attempt; it replaces an earlier one."""
        place = (key.gateway, key.stream)
        earlier = self._stream_by_place.get(place)
        if earlier is not None:
            self._give_back(earlier)
            _release_adapter(earlier)
        self._ended.pop(place, None)
        stream = self._stream_by_place[place] = WorkerStream(key, first_offset)
        self._live[place] = stream
        return stream

    def record(self, stream: WorkerStream, delta: Delta) -> None:
        """Record what was published; the first delta releases the reservation."""
        stream.record(delta)
        self._give_back(stream)

    def _give_back(self, stream: WorkerStream) -> None:
        if stream.reservation and self._release is not None:
            self._release(stream.reservation)
        stream.reservation = ""

    def end(self, stream: WorkerStream, now: float) -> None:
        """The stream is over; keep it for a while. Forgets those kept long enough."""
        self._give_back(stream)
        _release_adapter(stream)
        place = (stream.key.gateway, stream.key.stream)
        if self._stream_by_place.get(place) is stream and stream.ended_s is None:
            stream.ended_s = now
            del self._live[place]
            self._ended[place] = stream
        self.expire(now)
        self._note_idle()

    def forget(self, stream: WorkerStream) -> None:
        self._give_back(stream)
        _release_adapter(stream)
        place = (stream.key.gateway, stream.key.stream)
        if self._stream_by_place.get(place) is stream:
            del self._stream_by_place[place]
            self._live.pop(place, None)
            self._ended.pop(place, None)
        self._note_idle()

    def _note_idle(self) -> None:
        if not self.num_live:
            self.used_s = monotonic_s()
            self._idle.set()

    def expire(self, now: float) -> None:
        """Forget ended streams past their number or time."""
        while self._ended:
            place, oldest = next(iter(self._ended.items()))
            assert oldest.ended_s is not None
            is_old = now - oldest.ended_s > self._settings.resend_window_s
            if not is_old and len(self._ended) <= self._settings.resend_streams:
                return
            del self._ended[place], self._stream_by_place[place]


def _release_adapter(stream: WorkerStream) -> None:
    if stream.adapter is not None:
        stream.adapter.release()
    if stream.turn is not None:
        stream.turn.give_up()
    stream.adapter = stream.turn = None


class GatewayWatch:
    """Finds gateways without heartbeats for so long that nothing reads their streams. Times are
    monotonic seconds."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._last_alive: dict[GatewayId, float] = {}

    def dead(
        self, gateways: Iterable[GatewayId], is_alive: Callable[[GatewayId], bool], now: float
    ) -> set[GatewayId]:
        """Those of `gateways` that were not alive for the grace time; only these gateways are kept.

        A gateway that was never seen alive counts from its first appearance here.
        """
        last_alive = {
            gateway: now if is_alive(gateway) else self._last_alive.get(gateway, now)
            for gateway in gateways
        }
        self._last_alive = last_alive
        return {gateway for gateway, at in last_alive.items() if now - at > self._grace_s}
