"""Replay: each step of a response is done once, and is done again from its record ever after.

The code that makes a response runs the same way for its first owner and for whoever takes over:
as long as the history has a next step, that is taken instead of asking the mesh or a tool.
"""

from collections.abc import Sequence
from typing import TypeVar

from tokenmesh.services.gateway.responses.event_log import EventLog
from tokenmesh.services.gateway.responses.frames import frames
from tokenmesh.services.gateway.responses.log_writer import RecordWriter
from tokenmesh.services.gateway.responses.recorder import Event
from tokenmesh.services.gateway.responses.records import Flushed, Portion, Record, frames_of
from tokenmesh.shared.errors import ProtocolError

RecordT = TypeVar("RecordT", bound=Record)


class Replay:
    """What has been done and what is new."""

    def __init__(self, history: EventLog, writer: RecordWriter) -> None:
        self._history = history
        self._writer = writer
        self.num_told = 0
        """Events so far."""

    def recorded(self, kind: type[RecordT]) -> RecordT | None:
        """The next step, if it was done before and is of this kind."""
        return self._history.take(kind)

    def retell(self, record: Record, events: Sequence[Event]) -> None:
        """A recorded step was done again. Raises ProtocolError when something else came out."""
        if len(frames_of(record)) != len(events):
            raise ProtocolError("the response cannot be continued by this version")
        self.num_told += len(events)

    async def tell(self, events: Sequence[Event], portions: Sequence[Portion] = ()) -> None:
        """Events that follow from what was recorded before, or from `portions`, which are new."""
        again = None if portions else self.recorded(Flushed)
        if again is not None:
            self.retell(again, events)
        elif events or portions:
            await self.record(Flushed(portions=list(portions), frames=encode_frames(events)))

    async def record(self, record: Record) -> None:
        """Something new. Raises ProtocolError when the history goes on in another way."""
        if not self._history.is_over:
            raise ProtocolError("the response cannot be continued by this version")
        self.num_told += len(frames_of(record))
        await self._writer.put(record)

    async def settle(self) -> None:
        """Return when all of it is kept."""
        await self._writer.settle()


def encode_frames(events: Sequence[Event]) -> list[bytes]:
    """One frame an event."""
    return [frames((event,)) for event in events]
