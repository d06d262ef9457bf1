"""SoleTurns: a request that may be what processes of a service die of, asked of one at a time.

A process that dies takes all its requests with it, and most of them are innocent. So a request that
has been asked twice where processes were lost gets turns in which a process works on it and nothing
else: who dies in such a turn, died of this request. It is refused when that has happened twice.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.errors import (
    DeadlineExceeded,
    Draining,
    InvalidInput,
    NoResponders,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.ids import InstanceId, new_turn
from tokenmesh.shared.membership import Member, Members
from tokenmesh.shared.messages import Message, Ping
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.telemetry import span

logger = logging.getLogger(__name__)

_SHARED_ASKS: Final = 2
"""It bounds the asks of processes that have other requests, too; each may cost one of them."""
_MOST_DEATHS: Final = 2
_MOST_LOST: Final = 16
"""Turns that may be lost for any reason: a bound where no request can be blamed, as where
processes are never alone with it."""
_LOOK_S: Final = 0.25
"""Interval of looking whether the process of a turn is there."""
_PING_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn that had begun when its process was lost."""

    instance: InstanceId
    epoch: int
    name: str
    lost_s: float


class SoleTurns:
    """It arranges the sole turns of one request to one service; an object is cheap, as hardly any
    request needs it.
    """

    def __init__(
        self, bus: Bus, members: Members, subject: str, metrics: Metrics, most_wait_s: float
    ) -> None:
        """`subject`: of the service's queue group. `most_wait_s`: how long a turn waits for a
        process."""
        self._bus = bus
        self._members = members
        self._subject = subject
        self._service = subjects.service_of(subject)
        self._metrics = metrics
        self._most_wait_s = most_wait_s
        self._began_s = monotonic_s()
        self._lost: list[_Turn] = []
        self._gone: set[tuple[InstanceId, int]] = set()
        """Instances, by epoch, that were lost in any turn, or before it."""
        self._num_lost = 0
        self.num_shared = 0
        """Requests that went to a process which may have had others."""

    @property
    def are_due(self) -> bool:
        """Return whether the next request should be one for a sole turn."""
        return bool(self._num_lost) or (
            self.num_shared >= _SHARED_ASKS
            and self._members.misses_any(self._service, self._began_s)
        )

    async def ask(self, message: Message, limit_s: float) -> Message:
        """The answer of the first process that survives its turn.

        Raises InvalidInput where the request ends processes, NoResponders where there is none, and
        errors of the answer.
        """
        while True:
            await self._judge(limit_s)
            member = await self._next_process(limit_s)
            turn = new_turn()
            attributes = {"tokenmesh.instance": member.beat.instance_id, "tokenmesh.turn": turn}
            with span("sole_turn", attributes) as current:
                try:
                    answer = await self._take(member, turn, message, limit_s)
                except Draining:
                    answer = None
                current.set_attribute("tokenmesh.is_lost", answer is None)
            if answer is not None:
                return answer
            if now_s() >= limit_s:
                raise DeadlineExceeded(f"no answer from {self._subject} in time")

    async def _take(
        self, member: Member, turn: str, message: Message, limit_s: float
    ) -> Message | None:
        """None: the process is gone, or what it was sent is lost."""
        instance, epoch = member.beat.instance_id, member.beat.epoch
        subject = subjects.replica(self._subject, instance)
        asking = asyncio.create_task(
            self._bus.request(subject, message, deadline_s=limit_s, alone=turn)
        )
        try:
            while not asking.done():
                back = self._members.next_return(self._service)
                await asyncio.wait(
                    (asking, back), timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                is_back = back.done() and back.result() == instance
                back.cancel()
                if not asking.done() and (is_back or await self._is_gone(instance)):
                    break
            if asking.done() and not isinstance(asking.exception(), NoResponders):
                return asking.result()
            # one that lives but does not know the model would be asked without end
            await asyncio.sleep(_LOOK_S * asking.done())
        finally:
            if not asking.cancel() and not asking.cancelled():
                asking.exception()
        self._note_loss(_Turn(instance, epoch, turn, monotonic_s()))
        return None

    def _note_loss(self, turn: _Turn) -> None:
        self._num_lost += 1
        self._gone.add((turn.instance, turn.epoch))
        member = self._members.get(turn.instance)
        last = self._members.lost(turn.instance, turn.epoch) if member is None else member.beat
        if last is not None and last.alone == turn.name:
            self._lost.append(turn)

    async def _is_gone(self, instance: InstanceId) -> bool:
        """Return whether a process has left NATS, or counts as dead by its silence."""
        return await self._has_left(instance) or self._members.get(instance) is None

    async def _has_left(self, instance: InstanceId) -> bool:
        try:
            await self._bus.request(
                subjects.process_control(instance), Ping(), deadline_s=now_s() + _PING_S
            )
        except NoResponders:
            return True
        except TokenMeshError:
            # An older process refuses pings; one that stands still answers later.
            return False
        return False

    async def _next_process(self, limit_s: float) -> Member:
        """The one that was heard last, of those whose heartbeats are not late.

        While there is none the request waits here: its next attempt would be a shared one.
        """
        give_up_s = min(limit_s, now_s() + self._most_wait_s)
        while True:
            found = [
                each
                for each in self._members.heard(self._service)
                if not each.beat.draining
                and (self._is_new(each) or not await self._has_left(each.beat.instance_id))
            ]
            if found:
                return max(found, key=lambda each: (self._is_new(each), each.last_seen))
            if now_s() >= give_up_s:
                raise NoResponders(f"no process listens on {self._subject}")
            back = self._members.next_return(self._service)
            await asyncio.wait((back,), timeout=min(_LOOK_S, max(0.0, give_up_s - now_s())))
            back.cancel()

    def _is_new(self, member: Member) -> bool:
        return (member.beat.instance_id, member.beat.epoch) not in self._gone

    async def _judge(self, limit_s: float) -> None:
        """Return if the request may have a further turn.

        A process that has left NATS may come back, and is known to have died only once its
        heartbeats are missing: that is waited for where a death would be one too many.
        """
        while len(self._lost) >= _MOST_DEATHS and now_s() < limit_s:
            verdicts = [await self._has_died(turn) for turn in self._lost]
            if verdicts.count(True) >= _MOST_DEATHS:
                self._refuse()
            if None not in verdicts:
                break
            await asyncio.sleep(_LOOK_S)
        if self._num_lost >= _MOST_LOST:
            raise Unavailable(
                f"the {self._service} was lost {self._num_lost} times with this request"
            )

    async def _has_died(self, turn: _Turn) -> bool | None:
        """Return whether a process died in its turn; None: that is not known yet."""
        last = self._members.lost(turn.instance, turn.epoch)
        if last is not None:
            # one that stands still or is cut off has not left
            return last.alone == turn.name and await self._has_left(turn.instance)
        member = self._members.get(turn.instance)
        is_silent = member is not None and member.last_seen <= turn.lost_s
        return None if is_silent else False

    def _refuse(self) -> None:
        self._metrics.counter("lethal_requests", service=self._service).inc()
        text = (
            f"{_MOST_DEATHS} processes of the service {self._service} have died while they worked "
            "on this request and on nothing else: it is refused"
        )
        logger.error("%s", text)
        raise InvalidInput(text)
