"""Knows which instances are alive, by the last heartbeat of each.

`MembershipView` is plain bookkeeping; `Members` feeds it from the bus. An instance is dead when
its last heartbeat has `leaving` or when it missed several of its own intervals.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Final

import msgspec

from tokenmesh.shared.bus.base import Bus, Envelope, Subscription
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.failed_starts import FailedStarts
from tokenmesh.shared.ids import InstanceId, ModelName
from tokenmesh.shared.lost_lives import LostLives
from tokenmesh.shared.messages import Heartbeat
from tokenmesh.shared.messages.beat import PROTOCOL, ModelCard, WorkerLoad
from tokenmesh.shared.subjects import ALL_BEATS
from tokenmesh.shared.subjects import beat as beat_subject

_MAX_INTERVAL_S: Final = 60.0
"""With a longer interval an instance would never count as dead."""
_MAX_NUMBER: Final = 2.0**53
"""Larger floats lose whole numbers. A heartbeat may come from any client of NATS."""
MAX_MODELS: Final = 256
"""In one heartbeat."""
_MAX_NAME_CHARS: Final = 1024
_ABSENT_BEATS: Final = 2
"""After so many missed heartbeats the next one is a return: what was asked meanwhile may be lost.
Fewer than those after which an instance counts as dead, since to ask once more costs little."""
_LATE_BEATS: Final = 1.5
"""After so many intervals of silence an instance may be dead."""


def check_beat(beat: Heartbeat, subject: str) -> None:
    """Raises ProtocolError for a heartbeat that no service would send on `subject`."""
    wrong = _wrong(beat, subject)
    if wrong is not None:
        raise ProtocolError(f"a heartbeat of {beat.instance_id[:64]!r} with {wrong}")


def _wrong(beat: Heartbeat, subject: str) -> str | None:
    if subject != beat_subject(beat.service, beat.instance_id):
        return "another sender than its subject names"
    if not 0 < beat.interval_s <= _MAX_INTERVAL_S:
        return f"an interval of {beat.interval_s} s"
    cards = [*beat.models, *beat.tokenizes]
    num_models = max(len(cards) + len(beat.starts), len(beat.broken))
    if num_models > MAX_MODELS:
        return f"{num_models} models"
    if not all(_may_be(text) for text in (*beat.starts, *beat.broken, *beat.broken.values())):
        return "an impossible model"
    if not all(_is_sane(card) for card in cards):
        return "an impossible model"
    if not _may_be(beat.alone):
        return "an impossible turn"
    return "an impossible load" if beat.load is not None and not _is_sane(beat.load) else None


def _is_sane(part: ModelCard | WorkerLoad) -> bool:
    """Numbers are finite and not negative, names have a bound."""
    return all(_may_be(value) for value in msgspec.structs.astuple(part))


def _may_be(value: object) -> bool:
    if isinstance(value, int | float):
        return isfinite(value) and 0 <= value <= _MAX_NUMBER
    return not isinstance(value, str) or len(value) <= _MAX_NAME_CHARS


logger = logging.getLogger(__name__)

_SHOWN_CHARS: Final = 64


@dataclass(frozen=True, slots=True)
class Member:
    """One instance as its last heartbeat describes it."""

    beat: Heartbeat
    last_seen: float
    """By our clock, not the sender's."""
    outage_s: float = 0.0
    """Outage in all when the instance was seen, see `ListenGap`."""

    @property
    def takes_requests(self) -> bool:
        """True for a worker that is awake, or that a request wakes."""
        load = self.beat.load
        is_awake = load is None or load.sleep_level == 0
        return is_awake or any(card.on_demand for card in self.beat.models)


class MembershipView:
    """The members by instance id. Times are passed in and must be of one clock."""

    def __init__(self, missed_beats: int, max_members: int) -> None:
        self._missed_beats = missed_beats
        self._max_members = max_members
        self._member_by_id: dict[InstanceId, Member] = {}
        self._failed = FailedStarts(max_members)
        self._lost = LostLives(max_members)
        self._left: dict[tuple[InstanceId, int], None] = {}
        # Instances that have left, by id and epoch; the oldest are dropped over `max_members`.
        self.ignored = 0
        """Heartbeats that were older than the known one, that came after the last one of their
        epoch, or that were of one instance too many."""

    def observe(self, beat: Heartbeat, now: float, outage_s: float = 0.0) -> bool:
        """Store a heartbeat if it is newer than the known one or of another epoch.

        An instance that has left does not return in the same epoch. Returns whether the instance
        has come, or has come back after a silence, which may have been ours.
        """
        known = self._member_by_id.get(beat.instance_id)
        same = known if known is not None and known.beat.epoch == beat.epoch else None
        is_late = same is not None and beat.sequence <= same.beat.sequence
        if is_late or (beat.instance_id, beat.epoch) in self._left:
            self.ignored += 1
        elif beat.leaving:
            self._note_left(beat)
            if same is not None:
                self._failed.note_end(same.beat, now)
                del self._member_by_id[beat.instance_id]
        elif known is None and len(self._member_by_id) >= self._max_members:
            self.ignored += 1
        else:
            self._member_by_id[beat.instance_id] = Member(beat, now, outage_s)
            if known is not None and same is None:
                self._failed.note_end(known.beat, now)
                self._lost.note_loss(known.beat, known.last_seen)
            self._lost.note_beat(beat)
            self._failed.note_beat(beat, None if same is None else same.beat)
            return not beat.starts and (same is None or _was_away(same, now))
        return False

    def _note_left(self, beat: Heartbeat) -> None:
        if len(self._left) >= self._max_members:
            del self._left[next(iter(self._left))]
        self._left[beat.instance_id, beat.epoch] = None

    def expire(self, now: float, outage_s: float = 0.0) -> list[Member]:
        """Forget, and return, members that were silent for too long outside of outages."""
        dead = [
            member
            for member in self._member_by_id.values()
            if now - member.last_seen - (outage_s - member.outage_s)
            > self._missed_beats * member.beat.interval_s
        ]
        for member in dead:
            self._failed.note_end(member.beat, now)
            self._lost.note_loss(member.beat, member.last_seen)
            del self._member_by_id[member.beat.instance_id]
        return dead

    def get(self, instance_id: InstanceId) -> Member | None:
        """One instance, if it is alive and no longer starting."""
        member = self._member_by_id.get(instance_id)
        return None if member is None or member.beat.starts else member

    def all(self) -> list[Member]:
        """All members of all services, without those that are starting."""
        return [each for each in self._member_by_id.values() if not each.beat.starts]

    def service(self, service: str) -> list[Member]:
        """The instances of one service, without those that are starting."""
        return [each for each in self.all() if each.beat.service == service]

    def starting(self, service: str) -> list[Member]:
        """The instances of one service that are alive and cannot answer yet."""
        members = self._member_by_id.values()
        return [each for each in members if each.beat.starts and each.beat.service == service]

    def is_starting(self, service: str, now: float, model: ModelName | None = None) -> bool:
        """Return whether an instance of the service will soon answer, for a model if one is named.

        Not one that starts again and again: that would have no end.
        """
        loaded = {name for each in self.starting(service) for name in each.beat.starts}
        asked = loaded if model is None else loaded & {model}
        return any(not self._failed.are_many(service, name, now) for name in asked)

    def lost(self, instance_id: InstanceId, epoch: int) -> Heartbeat | None:
        """Return the last heartbeat of a life that seems to have ended without a farewell."""
        return self._lost.last_beat(instance_id, epoch)

    def misses_any(self, service: str, since_s: float, now: float, outage_s: float = 0.0) -> bool:
        """Return whether an instance that lived at `since_s`, or later, may have died."""
        members = self.service(service)
        interval_s = max((each.beat.interval_s for each in members), default=1.0)
        return len(self.heard(service, now, outage_s)) < len(members) or self._lost.is_any_since(
            service, since_s - _LATE_BEATS * interval_s
        )

    def heard(self, service: str, now: float, outage_s: float = 0.0) -> list[Member]:
        """The instances of one service whose next heartbeat is not late, outages apart."""
        return [
            each
            for each in self.service(service)
            if now - each.last_seen - (outage_s - each.outage_s)
            <= _LATE_BEATS * each.beat.interval_s
        ]

    def workers(self, model: ModelName) -> list[Member]:
        """The workers of `model`, by name or alias, draining ones included."""
        return [
            member
            for member in self._member_by_id.values()
            if not member.beat.starts
            and any(model == card.name or model in card.aliases for card in member.beat.models)
        ]


def _was_away(last: Member, now: float) -> bool:
    """Return whether an instance could not answer at its last heartbeat before that of `now`."""
    return bool(last.beat.starts) or now - last.last_seen > _ABSENT_BEATS * last.beat.interval_s


class ListenGap:
    """Our own outage: time without any heartbeat, beyond `max_gap_s` of each gap.

    A process that was too busy to read, or cut off from the bus, must not take all others for dead:
    their heartbeats are still unread.
    """

    def __init__(self, max_gap_s: float, now: float) -> None:
        self._max_gap_s = max_gap_s
        self._noted_at = now
        self._outage_s = 0.0

    def note(self, now: float) -> float:
        """A heartbeat arrived; seconds of outage until now."""
        self._outage_s = self.outage_s(now)
        self._noted_at = now
        return self._outage_s

    def outage_s(self, now: float) -> float:
        """Seconds of outage until now."""
        return self._outage_s + max(0.0, now - self._noted_at - self._max_gap_s)


class Foreigners:
    """Instances with another major protocol: ignored, shown to operators. Bounded."""

    def __init__(self, limit: int = 64, memory_s: float = 60.0) -> None:
        self._limit = limit
        self._memory_s = memory_s
        self._last: dict[InstanceId, tuple[Heartbeat, float]] = {}

    def note(self, beat: Heartbeat, now: float) -> bool:
        """Note a heartbeat; True for an instance that is new and not one too many."""
        is_known = beat.instance_id in self._last
        if not is_known and len(self.all(now)) >= self._limit:
            return False
        self._last[beat.instance_id] = (beat, now)
        return not is_known

    def all(self, now: float) -> list[Heartbeat]:
        """The last heartbeats of recent ones."""
        self._last = {
            name: (beat, at)
            for name, (beat, at) in self._last.items()
            if now - at <= self._memory_s and not beat.leaving
        }
        return [beat for beat, _ in self._last.values()]


class Members:
    """A view that follows the heartbeats on the bus. Its clock is `monotonic_s`."""

    def __init__(self, view: MembershipView, max_gap_s: float = 0.5) -> None:
        self.view = view
        self.foreign = Foreigners()
        self._gap = ListenGap(max_gap_s, monotonic_s())
        self._subscriptions: list[Subscription] = []
        self._awaited: dict[str, set[asyncio.Future[InstanceId]]] = {}
        """Who waits for the next return, by service."""
        self.on_beat: Callable[[Heartbeat], None] = _ignore
        """Called after each heartbeat; must be quick and must not raise."""

    async def start(self, bus: Bus, beats: Iterable[str] = (ALL_BEATS,)) -> None:
        """Listen to all heartbeats, or to those on some subjects."""
        for subject in beats:
            self._subscriptions.append(await bus.subscribe(subject, self._on_beat))

    async def stop(self) -> None:
        """Stop listening; what is known stays."""
        while self._subscriptions:
            await self._subscriptions.pop().stop()

    def all(self) -> list[Member]:
        """All members that are alive now, without those that are starting."""
        self._expire()
        return self.view.all()

    def service(self, service: str) -> list[Member]:
        """The instances of one service that are alive now."""
        self._expire()
        return self.view.service(service)

    def starting(self, service: str) -> list[Member]:
        """The instances of one service that live and cannot answer yet."""
        self._expire()
        return self.view.starting(service)

    def is_starting(self, service: str, model: ModelName | None = None) -> bool:
        """Return whether an instance will soon answer, for a model if one is named."""
        self._expire()
        return self.view.is_starting(service, monotonic_s(), model)

    def lost(self, instance_id: InstanceId, epoch: int) -> Heartbeat | None:
        """Return the last heartbeat of a life that seems to have ended without a farewell."""
        self._expire()
        return self.view.lost(instance_id, epoch)

    def broken(self, service: str, model: ModelName) -> str | None:
        """Why no instance of the service serves a model, as far as one of them says so."""
        if self.is_starting(service, model):
            return None
        reasons = (each.beat.broken.get(model) for each in self.view.service(service))
        return next(filter(None, reasons), None)

    def misses_any(self, service: str, since_s: float) -> bool:
        """Return whether an instance that lived at `since_s`, or later, may have died."""
        now = self._expire()
        return self.view.misses_any(service, since_s, now, self._gap.outage_s(now))

    def heard(self, service: str) -> list[Member]:
        """The instances of one service whose next heartbeat is not late."""
        now = self._expire()
        return self.view.heard(service, now, self._gap.outage_s(now))

    def next_return(self, service: str) -> asyncio.Future[InstanceId]:
        """Done with the instance of the service that comes, or comes back; cancel it when done.

        What was asked before may be lost with the process, or on the way to it.
        """
        waiting = self._awaited.setdefault(service, set())
        future: asyncio.Future[InstanceId] = asyncio.get_running_loop().create_future()
        waiting.add(future)
        future.add_done_callback(waiting.discard)
        return future

    def workers(self, model: ModelName) -> list[Member]:
        """The live workers of `model`, draining ones included."""
        self._expire()
        return self.view.workers(model)

    def get(self, instance_id: InstanceId) -> Member | None:
        """One instance, if it is alive now and no longer starting."""
        self._expire()
        return self.view.get(instance_id)

    def _expire(self) -> float:
        """Forget the dead; the time at which that was done."""
        now = monotonic_s()
        self.view.expire(now, self._gap.outage_s(now))
        return now

    async def _on_beat(self, envelope: Envelope) -> None:
        """Raises ProtocolError, which the bus counts, for an impossible heartbeat."""
        beat = envelope.message
        if not isinstance(beat, Heartbeat):
            raise ProtocolError(f"a {type(beat).__name__} instead of a heartbeat")
        now = monotonic_s()
        if beat.protocol != PROTOCOL:
            self._note_foreign(beat, now)
            return
        check_beat(beat, envelope.subject)
        if self.view.observe(beat, now, self._gap.note(now)):
            for future in tuple(self._awaited.get(beat.service, ())):
                if not future.done():
                    future.set_result(beat.instance_id)
        self.on_beat(beat)

    def _note_foreign(self, beat: Heartbeat, now: float) -> None:
        if self.foreign.note(beat, now):
            logger.warning(
                "%s uses protocol %d, this process %d: it is ignored",
                beat.instance_id[:_SHOWN_CHARS],
                beat.protocol,
                PROTOCOL,
            )


def _ignore(_beat: Heartbeat) -> None:
    """The default of `on_beat`."""
