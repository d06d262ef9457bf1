"""EventLog: what a log says has happened, read by whoever goes on from there."""

from dataclasses import dataclass, field
from typing import TypeVar

from tokenmesh.services.gateway.responses.records import (
    Adopted,
    Begun,
    Ended,
    Record,
    decode_records,
    frames_of,
)
from tokenmesh.shared.journal import Journal

RecordT = TypeVar("RecordT")


@dataclass(slots=True)
class Log:
    """A response's whole log."""

    records: list[Record] = field(default_factory=list)
    last: int = 0
    """Number of the last entry: what the next writer has to follow."""
    num_bytes: int = 0

    @property
    def begun(self) -> Begun | None:
        """None also when the beginning has expired already."""
        first = self.records[0] if self.records else None
        return first if isinstance(first, Begun) else None

    @property
    def ended(self) -> Ended | None:
        """The end, once there is one."""
        last = self.records[-1] if self.records else None
        return last if isinstance(last, Ended) else None

    @property
    def frames(self) -> list[bytes]:
        """All events so far."""
        return [frame for record in self.records for frame in frames_of(record)]


async def read_log(journal: Journal, key: str, batch: int) -> Log:
    """Everything in a log; empty when there is none. Raises what the journal raises."""
    log = Log()
    while entries := await journal.read(key, log.last, batch):
        for entry in entries:
            log.records.extend(decode_records(entry.data))
            log.num_bytes += len(entry.data)
        log.last = entries[-1].sequence
    return log


class EventLog:
    """The recorded steps of a response that are still to be done again, in order."""

    def __init__(self, log: Log | None = None) -> None:
        records = log.records if log is not None else []
        self._steps = [each for each in records if not isinstance(each, Begun | Adopted)]
        self._steps.reverse()

    @property
    def is_over(self) -> bool:
        """Whether everything from now on is new."""
        return not self._steps

    def take(self, kind: type[RecordT]) -> RecordT | None:
        """The next step if it is of a kind."""
        step = self._steps[-1] if self._steps else None
        if not isinstance(step, kind):
            return None
        self._steps.pop()
        return step
