"""The journal in JetStream: one stream for all keys, created when it is first used."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Final, TypeVar

import msgspec

from tokenmesh.shared.bus.base import Subscription
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.bus.requests import RawReply
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import (
    Conflict,
    DeadlineExceeded,
    NoResponders,
    Overloaded,
    PayloadTooLarge,
    ProtocolError,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.journal import Entry, Journal, StoreFull

logger = logging.getLogger(__name__)


class StreamConfigDiffers(ProtocolError):
    """The stream exists with other limits."""


class StreamMissing(ProtocolError):
    """The stream does not exist (yet)."""


def answer_of(reply: RawReply) -> dict[str, Any]:
    """The JSON of an answer. Raises our error for JetStream's."""
    try:
        answer: dict[str, Any] = msgspec.json.decode(reply.data, type=dict[str, Any])
    except msgspec.DecodeError as problem:
        raise ProtocolError(f"JetStream's answer is not JSON: {problem}") from problem
    if error := answer.get("error"):
        raise _error_of(error)
    return answer


_ERROR_BY_CODE: Final[dict[int, type[TokenMeshError]]] = {
    **dict.fromkeys((10071, 10164), Conflict),
    **dict.fromkeys((10023, 10047, 10077), StoreFull),
    10054: PayloadTooLarge,
    10058: StreamConfigDiffers,
    10059: StreamMissing,
}


def _error_of(error: dict[str, Any]) -> TokenMeshError:
    default = Unavailable if error.get("code") == 503 else ProtocolError
    kind = _ERROR_BY_CODE.get(error.get("err_code", 0), default)
    return kind(f"JetStream: {error.get('description')}")


_Answer = TypeVar("_Answer")
_AFTER: Final = "Nats-Expected-Last-Subject-Sequence"
_SEQUENCE: Final = "Nats-Sequence"
_PREVIOUS: Final = "Nats-Last-Sequence"
_END_OF_BATCH: Final = "204"
_NOT_FOUND: Final = "404"
_HEADER_ROOM_BYTES: Final = 1024
"""The server counts the headers of an entry into the sizes that it allows."""
_RETRY_PAUSE_S: Final = 0.05
_HEARD_S: Final = 2.5
"""Replicas answer their leader every second, and elect another one after 4 s without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    name: str
    subjects: str
    max_age_s: float
    max_bytes: int
    setting: str
    """The setting that `max_bytes` follows."""
    max_entry_bytes: int
    replicas: int = 1
    refuses_when_full: bool = False
    """True: an entry beyond `max_bytes` is refused; else the oldest entries are removed."""

    def config(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "subjects": [self.subjects],
            "retention": "limits",
            "storage": "file",
            "discard": "new" if self.refuses_when_full else "old",
            "max_age": int(self.max_age_s * 1e9),
            "max_bytes": self.max_bytes,
            "max_msg_size": self.max_entry_bytes,
            "num_replicas": self.replicas,
            "allow_direct": True,
        }


class JetStreamJournal(Journal):
    """A `Journal` in one stream; the settings `journal_*` are its times.

    `journal_mute_s` bounds appends while JetStream answers other requests, which it does when its
    disk is full.
    """

    def __init__(self, bus: MessageBus, spec: StreamSpec, settings: ResponseSettings) -> None:
        self.bus = bus
        self.spec = spec
        self._settings = settings
        # When the first unanswered append was sent since one was stored, and the size of the
        # smallest of them: a smaller entry may still fit on a full disk.
        self._mute_since_s: float | None = None
        self._mute_bytes = 0
        self._is_prepared = False

    @property
    def max_entry_bytes(self) -> int:
        return min(self.spec.max_entry_bytes, self.bus.max_message_bytes) - _HEADER_ROOM_BYTES

    async def append(self, key: str, data: bytes, after: int) -> int:
        return await self._retrying(key, partial(self._append_once, key, data, after))

    async def add(self, key: str, data: bytes) -> None:
        await self._retrying(key, partial(self._append_once, key, data, None))

    async def _retrying(self, key: str, attempt: Callable[[bool], Awaitable[_Answer]]) -> _Answer:
        """`attempt(is_retry)`, repeated while the store is unavailable, within the patience."""
        give_up_s = now_s() + self._settings.journal_patience_s
        is_retry = False
        while True:
            try:
                return await attempt(is_retry)
            except (Overloaded, _NotRetryable):
                raise
            except (Unavailable, DeadlineExceeded) as error:
                if now_s() + _RETRY_PAUSE_S >= give_up_s:
                    raise
                logger.info("retrying the request for %s: %s", key, error)
            is_retry = True
            await asyncio.sleep(_RETRY_PAUSE_S)

    async def _append_once(self, key: str, data: bytes, after: int | None, is_retry: bool) -> int:
        await self._prepare_once()
        sent_s = now_s()
        try:
            headers = None if after is None else {_AFTER: str(after)}
            reply = await self.bus.raw.request(key, data, headers=headers, deadline_s=self._soon())
        except NoResponders:
            self._is_prepared = False
            raise
        except DeadlineExceeded:
            await self._note_silence(key, len(data), sent_s)
            raise
        try:
            number = int(answer_of(reply)["seq"])
        except Conflict:
            # The attempt before may have been stored and only its acknowledgement lost.
            last = await self._last_once(key) if is_retry else None
            if last is not None and after is not None and last.sequence <= after:
                raise Unavailable("a replica of the stream lacks entries") from None
            if last is None or last.data != data:
                raise
            return last.sequence
        if len(data) >= self._mute_bytes:
            self._mute_since_s = None
        return number

    async def _note_silence(self, key: str, size: int, sent_s: float) -> None:
        """Raises Unavailable when appends stay unanswered while JetStream answers a read."""
        if self._mute_since_s is None:
            self._mute_since_s, self._mute_bytes = sent_s, size
        self._mute_bytes = min(self._mute_bytes, size)
        silent_s = now_s() - self._mute_since_s
        if silent_s >= self._settings.journal_mute_s:
            await self._get({"last_by_subj": key})
            raise _NotRetryable(
                f"no entry stored for {silent_s:.0f} s: is the disk of JetStream full?"
            )

    async def read(
        self, key: str, after: int, limit: int, num_before: int | None = None
    ) -> list[Entry]:
        request = {"seq": after + 1, "next_by_subj": key, "batch": limit, "max_bytes": 8 << 20}

        async def once(_is_retry: bool) -> list[RawReply]:
            replies = await self._gather(request)
            if not replies and (num_before is not None or not after):
                await self._check_whole(key, num_before or 0)
            return replies

        return [_entry_of(reply) for reply in await self._retrying(key, once)]

    async def last(self, key: str) -> Entry | None:
        return await self._retrying(key, lambda _is_retry: self._last_once(key))

    async def _last_once(self, key: str) -> Entry | None:
        reply = await self._get({"last_by_subj": key})
        if reply is None:
            await self._check_whole(key, 0)
            return None
        return _entry_of(reply)

    async def _check_whole(self, key: str, num_read: int) -> None:
        """Raises Unavailable unless the stream's leader is sure that the key has no more entries.

        Any replica answers reads, also one that is cut off from the others and lacks what they have
        stored since, or have not yet sent to it.
        """
        if self.spec.replicas == 1:
            return
        answer = await self._call_api("STREAM.INFO", {"subjects_filter": key})
        counts = (answer.get("state") or {}).get("subjects") or {}
        if counts.get(key, 0) > num_read:
            raise Unavailable("a replica of the stream lacks entries")
        if answer and not _has_quorum(answer.get("cluster") or {}):
            raise Unavailable("the stream's leader may be cut off")

    async def _get(self, request: dict[str, Any]) -> RawReply | None:
        subject, data = f"$JS.API.DIRECT.GET.{self.spec.name}", msgspec.json.encode(request)
        try:
            reply = await self.bus.raw.request(subject, data, deadline_s=self._soon())
        except NoResponders:
            await self._create_again()
            raise
        _check(reply.status, ("", _NOT_FOUND))
        return None if reply.status else reply

    async def _gather(self, request: dict[str, Any]) -> list[RawReply]:
        subject, data = f"$JS.API.DIRECT.GET.{self.spec.name}", msgspec.json.encode(request)
        try:
            replies, end = await self.bus.raw.gather(subject, data, deadline_s=self._soon())
        except NoResponders:
            await self._create_again()
            raise
        _check(end.status, (_END_OF_BATCH, _NOT_FOUND))
        whole = _unbroken(replies)
        if not whole and end.status == _END_OF_BATCH:
            raise Unavailable("the entries were dropped on the way")
        return whole

    async def _create_again(self) -> None:
        self._is_prepared = False
        await self._prepare_once()

    def _soon(self) -> float:
        return now_s() + self._settings.journal_timeout_s

    async def purge(self, key: str, keep: int = 0) -> None:
        await self._call_api("STREAM.PURGE", {"filter": key, "keep": keep})

    async def keys(self, pattern: str) -> list[str]:
        found: list[str] = []
        while True:
            request = {"subjects_filter": pattern, "offset": len(found)}
            answer = await self._call_api("STREAM.INFO", request)
            page = (answer.get("state") or {}).get("subjects") or {}
            found.extend(page)
            if not page or len(found) >= answer.get("total", 0):
                return found

    async def num_bytes(self) -> int:
        answer = await self._call_api("STREAM.INFO", {})
        return int((answer.get("state") or {}).get("bytes", 0))

    async def watch(self, key: str, on_append: Callable[[], None]) -> Subscription:
        async def on_data(_subject: str, _data: bytes) -> None:
            on_append()

        return await self.bus.subscribe_raw(key, on_data)

    async def prepare(self) -> None:
        await self._retrying(self.spec.name, lambda _is_retry: self._prepare_once())

    async def _prepare_once(self) -> None:
        """Create the stream, or change it to this spec."""
        if self._is_prepared:
            return
        try:
            try:
                await self._call_api("STREAM.CREATE", self.spec.config())
            except StreamConfigDiffers:
                await self._call_api("STREAM.UPDATE", self.spec.config())
        except NoResponders as error:
            raise _NotRetryable("NATS runs without JetStream: nothing can be stored") from error
        except StoreFull as error:
            raise _NotRetryable(await self._too_small()) from error
        except ProtocolError as error:
            raise Unavailable(f"{self._needs()} cannot be created: {error}") from error
        self._is_prepared = True

    def _needs(self) -> str:
        spec = self.spec
        return f"the stream {spec.name}, of {spec.max_bytes} bytes by {spec.setting},"

    async def _too_small(self) -> str:
        """An operator's error, not a load: nothing was stored yet."""
        try:
            reply = await self.bus.raw.request("$JS.API.INFO", b"", deadline_s=self._soon())
            info = answer_of(reply)
        except TokenMeshError as error:
            return f"{self._needs()} is larger than what NATS has left: {error.message}"
        # NATS tells an account's limit, not the server's.
        most = (info.get("limits") or {}).get("max_storage", -1)
        room = f"the {most} bytes of the account's max_file" if most >= 0 else "its max_file_store"
        return (
            f"{self._needs()} is larger than what NATS has left of {room}, of which its streams "
            f"have reserved {info.get('reserved_storage', 0)}: set one of the two"
        )

    async def _call_api(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        subject = f"$JS.API.{verb}.{self.spec.name}"
        data = msgspec.json.encode(request)
        reply = await self.bus.raw.request(subject, data, deadline_s=self._soon())
        try:
            return answer_of(reply)
        except StreamMissing:
            return {}


class _NotRetryable(Unavailable):
    """No JetStream, or one that reads and does not write."""


def _has_quorum(cluster: dict[str, Any]) -> bool:
    """Return whether the leader has heard from most replicas so lately that there is no other."""
    replicas = cluster.get("replicas") or ()
    heard = sum(
        not each.get("offline") and each.get("active", inf) < _HEARD_S * 1e9 for each in replicas
    )
    return bool(2 * (1 + heard) > 1 + len(replicas))


def _check(status: str, expected: Sequence[str]) -> None:
    if status not in expected:
        raise ProtocolError(f"JetStream answered with status {status}")


def _unbroken(replies: Sequence[RawReply]) -> list[RawReply]:
    """Replies before the first that was dropped; the reader requests the others again."""
    whole, previous = [], "0"
    for reply in replies:
        if reply.headers[_PREVIOUS] != previous:
            break
        whole.append(reply)
        previous = reply.headers[_SEQUENCE]
    return whole


def _entry_of(reply: RawReply) -> Entry:
    return Entry(int(reply.headers[_SEQUENCE]), reply.data)
