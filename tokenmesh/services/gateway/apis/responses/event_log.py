"""EventLog and Replay: a response as the records of its log, and its continuation from them.

The code that generates a response is the same for its first gateway and for one that continues it.
As long as the log has a next record, that is replayed instead of running the model or a tool.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from tokenmesh.services.gateway.apis.openai.translation import Json
from tokenmesh.services.gateway.apis.responses.log_writer import RecordWriter
from tokenmesh.services.gateway.apis.responses.output_items import Event
from tokenmesh.services.gateway.apis.responses.records import (
    Adopted,
    Flushed,
    Record,
    ResponseBegun,
    ResponseEnded,
    decode_records,
    frames_of,
)
from tokenmesh.services.gateway.apis.responses.shapes import error_facts
from tokenmesh.services.gateway.core.http.event_loop import Turns
from tokenmesh.services.gateway.core.http.sse import encode_json, event_frame
from tokenmesh.services.gateway.core.tenancy.ledger import TokenCounts
from tokenmesh.shared.errors import ProtocolError, TokenMeshError
from tokenmesh.shared.ids import GatewayId
from tokenmesh.shared.journal import Journal

RecordT = TypeVar("RecordT", bound=Record)

_DATA: Final = b"data: "


@dataclass(slots=True)
class EventLog:
    """All records of a response."""

    records: list[Record] = field(default_factory=list)
    last: int = 0
    """Number of the last entry, which the next append names."""
    num_bytes: int = 0

    @property
    def begun(self) -> ResponseBegun | None:
        """The first record; None if it has expired."""
        first = self.records[0] if self.records else None
        return first if isinstance(first, ResponseBegun) else None

    @property
    def ended(self) -> ResponseEnded | None:
        last = self.records[-1] if self.records else None
        return last if isinstance(last, ResponseEnded) else None

    @property
    def owner(self) -> GatewayId | None:
        """The gateway that may append."""
        for record in reversed(self.records):
            if isinstance(record, ResponseBegun | Adopted):
                return record.owner
        return None

    @property
    def frames(self) -> list[bytes]:
        """SSE frames of all events so far."""
        return [frame for record in self.records for frame in frames_of(record)]

    def response(self) -> Json:
        """The current Response object, without items that are not complete."""
        if self.ended is not None:
            return _decode(self.ended.response)
        begun = self.begun
        assert begun is not None, "only a log with its first record has a response"
        response: Json = {
            "id": begun.id,
            "object": "response",
            "created_at": int(begun.created_s),
            "model": begun.model,
            "status": "queued" if begun.is_background else "in_progress",
            "output": [],
        }
        items = []
        for frame in self.frames:
            event = _decode(frame[frame.index(_DATA) + len(_DATA) :])
            if "response" in event:
                response = event["response"]
            elif event["type"] == "response.output_item.done":
                items.append(event["item"])
        return {**response, "output": items}

    def cancelled(self) -> ResponseEnded:
        """The last record of a response that is cancelled while no gateway generates it."""
        return self._ended("cancelled", {**self.response(), "status": "cancelled"})

    def failed(self, error: TokenMeshError) -> ResponseEnded:
        """The last record of a response that cannot be continued."""
        fields = {"status": "failed", "error": error_facts(error)}
        return self._ended("failed", {**self.response(), **fields})

    def _ended(self, status: Any, response: Json) -> ResponseEnded:
        kind = "response.failed" if status == "failed" else "response.incomplete"
        event = {"type": kind, "sequence_number": len(self.frames), "response": response}
        return ResponseEnded(
            status=status, response=encode_json(response), frames=[event_frame(event)]
        )


async def read_log(journal: Journal, key: str, batch: int) -> EventLog:
    """The whole log of a key; empty if there is none. Raises what the journal raises."""
    log, turns, count = EventLog(), Turns(), 0
    while entries := await journal.read(key, log.last, batch, count):
        count += len(entries)
        for entry in entries:
            log.records.extend(decode_records(entry.data))
            log.num_bytes += len(entry.data)
            await turns.rest()
        log.last = entries[-1].sequence
    return log


def tokens_of(ended: ResponseEnded) -> TokenCounts | None:
    """The usage in the Response object; None if it has none."""
    usage = _decode(ended.response).get("usage")
    if usage is None:
        return None
    details = usage["input_tokens_details"]
    return TokenCounts(
        1,
        usage["input_tokens"],
        details["cached_tokens"],
        usage["output_tokens"],
        details.get("image_tokens", 0),
        details.get("audio_tokens", 0),
        details.get("video_tokens", 0),
    )


def _decode(data: bytes) -> Json:
    return msgspec.json.decode(data, type=Json)


class Replay:
    """Replays the records of a log in order, then appends new ones.

    Methods raise ProtocolError if the log does not match what this version generates.
    """

    def __init__(self, writer: RecordWriter, log: EventLog | None = None) -> None:
        records = log.records if log is not None else []
        self._records = [each for each in records if not isinstance(each, ResponseBegun | Adopted)]
        self._records.reverse()
        self._writer = writer
        self.num_events = 0

    def next(self, kind: type[RecordT]) -> RecordT | None:
        """Take the next record of the log if it is of this kind."""
        record = self._records[-1] if self._records else None
        if not isinstance(record, kind):
            return None
        self._records.pop()
        return record

    def check(self, record: Record, events: Sequence[Event]) -> None:
        """Count events that were generated again and must be those of the record."""
        if len(frames_of(record)) != len(events):
            raise _mismatch()
        self.num_events += len(events)

    async def emit(self, events: Sequence[Event]) -> None:
        """Record events that depend only on earlier records."""
        recorded = self.next(Flushed)
        if recorded is not None:
            self.check(recorded, events)
        elif events:
            await self.record(Flushed(frames=encode_frames(events)))

    async def record(self, record: Record) -> None:
        """Append a new record."""
        if self._records:
            raise _mismatch()
        self.num_events += len(frames_of(record))
        await self._writer.put(record)

    async def settle(self) -> None:
        """Return when all records are durable."""
        await self._writer.settle()


def encode_frames(events: Sequence[Event]) -> list[bytes]:
    """One SSE frame for each event."""
    return [event_frame(event) for event in events]


def _mismatch() -> ProtocolError:
    return ProtocolError("this version cannot continue the response: its log does not match")
