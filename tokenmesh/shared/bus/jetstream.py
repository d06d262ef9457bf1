"""The journal in JetStream: one stream for all keys, made when it is first needed.

JetStream's own protocol, JSON questions on `$JS.API.`, is spoken here directly: whoever reads by
number needs none of a client library's consumers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from tokenmesh.shared.bus.base import Subscription
from tokenmesh.shared.bus.jetstream_answers import NoStream, OtherConfig, answer_of
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.bus.raw_questions import RawReply
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.errors import (
    Conflict,
    DeadlineExceeded,
    NoResponders,
    Overloaded,
    ProtocolError,
    Unavailable,
)
from tokenmesh.shared.journal import Entry, Journal

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_AFTER: Final = "Nats-Expected-Last-Subject-Sequence"
_SEQUENCE: Final = "Nats-Sequence"
_PREVIOUS: Final = "Nats-Last-Sequence"
"""Of the entry before it in the same answer."""
_BEFORE_FIRST: Final = "0"
_END_OF_BATCH: Final = "204"
_NOT_FOUND: Final = "404"
_BATCH_BYTES: Final = 8 * 1024 * 1024
_NS: Final = 1_000_000_000
_HEADER_ROOM_BYTES: Final = 1024
_RETRY_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """How the stream keeps what it is given."""

    name: str
    subjects: str
    max_age_s: float
    max_bytes: int
    max_entry_bytes: int
    replicas: int = 1

    def config(self) -> dict[str, Any]:
        """As JetStream wants it; what is oldest goes first."""
        return {
            "name": self.name,
            "subjects": [self.subjects],
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "max_age": int(self.max_age_s * _NS),
            "max_bytes": self.max_bytes,
            "max_msg_size": self.max_entry_bytes,
            "num_replicas": self.replicas,
            "allow_direct": True,
        }


class JetStreamJournal(Journal):
    """A `Journal` in one stream.

    `timeout_s` bounds a question, `patience_s` all attempts of an append or a read; `mute_s` those
    of appends while JetStream answers everything else: so it does when its disk is full.
    """

    def __init__(
        self,
        bus: MessageBus,
        spec: StreamSpec,
        *,
        timeout_s: float,
        patience_s: float,
        mute_s: float,
    ) -> None:
        self.bus = bus
        self.spec = spec
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._mute_s = mute_s
        self._mute_since_s: float | None = None
        """When the first append was sent of those that were not answered, with none kept since."""
        self._mute_bytes = 0
        """The smallest of them: on a full disk an entry that is smaller may still find room."""
        self._is_prepared = False

    @property
    def max_entry_bytes(self) -> int:
        """See `Journal.max_entry_bytes`."""
        return min(self.spec.max_entry_bytes, self.bus.max_message_bytes) - _HEADER_ROOM_BYTES

    async def append(self, key: str, data: bytes, after: int) -> int:
        """See `Journal.append`."""
        return await self._patiently(key, partial(self._append_once, key, data, after))

    async def _patiently(self, key: str, attempt: Callable[[bool], Awaitable[_Answer]]) -> _Answer:
        """`attempt(is_retry)`, again while the store is only away, for `patience_s` at most."""
        give_up_s = now_s() + self._patience_s
        is_retry = False
        while True:
            try:
                return await attempt(is_retry)
            except (Overloaded, _NoJetStream, _Mute):
                raise
            except (Unavailable, DeadlineExceeded) as error:
                if now_s() + _RETRY_PAUSE_S >= give_up_s:
                    raise
                logger.info("asking for %s again: %s", key, error)
            is_retry = True
            await asyncio.sleep(_RETRY_PAUSE_S)

    async def _append_once(self, key: str, data: bytes, after: int, is_retry: bool) -> int:
        headers = {_AFTER: str(after)}
        await self._prepare_once()
        asked_s = now_s()
        try:
            reply = await self.bus.raw.ask(key, data, headers=headers, deadline_s=self._soon())
        except NoResponders:
            self._is_prepared = False
            raise
        except DeadlineExceeded:
            await self._note_silence(key, len(data), asked_s)
            raise
        try:
            number = int(answer_of(reply)["seq"])
        except Conflict:
            # The attempt before may have arrived, and only its acknowledgement been lost.
            last = await self._get({"last_by_subj": key}) if is_retry else None
            if last is None or last.data != data:
                raise
            return _entry_of(last).sequence
        if len(data) >= self._mute_bytes:
            self._mute_since_s = None
        return number

    async def _note_silence(self, key: str, size: int, asked_s: float) -> None:
        """Raises Unavailable when it has lasted, and JetStream answers when it is asked to read."""
        if self._mute_since_s is None:
            self._mute_since_s, self._mute_bytes = asked_s, size
        self._mute_bytes = min(self._mute_bytes, size)
        silent_s = now_s() - self._mute_since_s
        if silent_s >= self._mute_s:
            await self._get({"last_by_subj": key})
            raise _Mute(f"JetStream has kept nothing for {silent_s:.0f} s: is its disk full?")

    async def read(self, key: str, after: int, limit: int) -> list[Entry]:
        """See `Journal.read`."""
        question = {"seq": after + 1, "next_by_subj": key, "batch": limit}
        bounded = {**question, "max_bytes": _BATCH_BYTES}
        replies = await self._patiently(key, lambda _is_retry: self._gather(bounded))
        return [_entry_of(reply) for reply in replies]

    async def last(self, key: str) -> Entry | None:
        """See `Journal.last`."""
        question = {"last_by_subj": key}
        reply = await self._patiently(key, lambda _is_retry: self._get(question))
        return None if reply is None else _entry_of(reply)

    async def _get(self, question: dict[str, Any]) -> RawReply | None:
        subject, data = self._direct, msgspec.json.encode(question)
        try:
            reply = await self.bus.raw.ask(subject, data, deadline_s=self._soon())
        except NoResponders:
            await self._without_stream()
            raise
        _check(reply.status, ("", _NOT_FOUND))
        return None if reply.status else reply

    async def _gather(self, question: dict[str, Any]) -> list[RawReply]:
        subject, data = self._direct, msgspec.json.encode(question)
        try:
            replies, end = await self.bus.raw.gather(subject, data, deadline_s=self._soon())
        except NoResponders:
            await self._without_stream()
            raise
        _check(end.status, (_END_OF_BATCH, _NOT_FOUND))
        whole = _unbroken(replies)
        if not whole and end.status == _END_OF_BATCH:
            raise Unavailable("what was to be read was dropped on the way")
        return whole

    async def _without_stream(self) -> None:
        """Nobody answers for the stream: see to it that there is one to be asked again.

        Raises Unavailable when there is no JetStream at all.
        """
        self._is_prepared = False
        await self._prepare_once()

    @property
    def _direct(self) -> str:
        return f"$JS.API.DIRECT.GET.{self.spec.name}"

    def _soon(self) -> float:
        return now_s() + self._timeout_s

    async def purge(self, key: str) -> None:
        """See `Journal.purge`."""
        await self._ask_api("STREAM.PURGE", {"filter": key})

    async def keys(self, pattern: str) -> list[str]:
        """See `Journal.keys`."""
        found: list[str] = []
        while True:
            question = {"subjects_filter": pattern, "offset": len(found)}
            answer = await self._ask_api("STREAM.INFO", question)
            page = (answer.get("state") or {}).get("subjects") or {}
            found.extend(page)
            if not page or len(found) >= answer.get("total", 0):
                return found

    async def watch(self, key: str, on_append: Callable[[], None]) -> Subscription:
        """See `Journal.watch`."""

        async def on_data(_subject: str, _data: bytes) -> None:
            on_append()

        return await self.bus.subscribe_raw(key, on_data)

    async def prepare(self) -> None:
        """See `Journal.prepare`."""
        await self._patiently(self.spec.name, lambda _is_retry: self._prepare_once())

    async def _prepare_once(self) -> None:
        """Make the stream, or change it to this spec."""
        if self._is_prepared:
            return
        config = self.spec.config()
        try:
            try:
                await self._ask_api("STREAM.CREATE", config)
            except OtherConfig:
                await self._ask_api("STREAM.UPDATE", config)
        except NoResponders as error:
            raise _NoJetStream("NATS runs without JetStream: nothing can be kept") from error
        except ProtocolError as error:
            raise Unavailable(f"the stream {self.spec.name} cannot be made: {error}") from error
        self._is_prepared = True

    async def _ask_api(self, verb: str, question: dict[str, Any]) -> dict[str, Any]:
        subject = f"$JS.API.{verb}.{self.spec.name}"
        data = msgspec.json.encode(question)
        reply = await self.bus.raw.ask(subject, data, deadline_s=self._soon())
        try:
            return answer_of(reply)
        except NoStream:
            return {}


class _NoJetStream(Unavailable):
    """Nor will there be any soon."""


class _Mute(Unavailable):
    """It reads and does not write: what waits for it waits in vain."""


def _check(status: str, expected: Sequence[str]) -> None:
    if status not in expected:
        raise ProtocolError(f"JetStream answered with status {status}")


def _unbroken(replies: Sequence[RawReply]) -> list[RawReply]:
    """Those before the first that was dropped on the way; the reader will ask for the others."""
    whole, previous = [], _BEFORE_FIRST
    for reply in replies:
        if reply.headers[_PREVIOUS] != previous:
            break
        whole.append(reply)
        previous = reply.headers[_SEQUENCE]
    return whole


def _entry_of(reply: RawReply) -> Entry:
    return Entry(int(reply.headers[_SEQUENCE]), reply.data)
