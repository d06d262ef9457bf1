"""Frames of the NATS protocol, cut out of what a server sends.

nats-py's own parser tries seven expressions on each line, takes payloads without looking at their
ends, and holds any number of bytes that have no end of line.
"""

import json
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import nats.errors

MAX_LINE_BYTES: Final = 64 * 1024
"""The longest line, such as the INFO of a large cluster. nats-py reads at most 32 KiB of the first
one."""
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
"""The largest message. A server by default gives up a client for which it holds more."""

_CRLF: Final = b"\r\n"
_VERSION: Final = "NATS/1.0"
_MAX_DIGITS: Final = 10
_HANDLED: Final = (b"PING", b"PONG", b"+OK")


@dataclass(slots=True)
class Packet:
    """A message as it was received."""

    subject: str
    reply: str
    """Empty when no answer is expected."""
    data: bytes
    headers: dict[str, str] | None


class MalformedFrame(nats.errors.ProtocolError):
    """Raised where what was received is not the protocol of NATS; the client connects again."""

    def __str__(self) -> str:
        return str(self.args[0])


class FrameReader(Protocol):
    """Reacts to frames: the methods of nats-py's client, and `take` for messages."""

    def take(
        self, subject: bytes, sid: int, reply: bytes, head: bytes, payload: bytes
    ) -> Awaitable[None] | None:
        """A message; `head`: its headers as received. Returns what is awaited before the next."""

    async def report(self, error: MalformedFrame) -> None:
        """Nothing more is read from this connection; nats-py says nothing about it."""

    async def _process_ping(self) -> None: ...

    async def _process_pong(self) -> None: ...

    async def _process_info(self, info: dict[str, Any]) -> None: ...

    async def _process_err(self, err_msg: str) -> None: ...


class FrameParser:
    """Stands where nats-py has its `Parser`. Raises MalformedFrame."""

    def __init__(self, reader: FrameReader) -> None:
        self._reader = reader
        self.reset()

    def reset(self) -> None:
        """Forget what was received."""
        self._parts: list[bytes] = []
        self._num_held = 0
        self._num_needed = 0
        """Bytes that a message needs of which the beginning is held."""
        self._reaction: Awaitable[None] | None = None

    async def parse(self, data: bytes = b"") -> None:
        parts = self._parts
        parts.append(data)
        self._num_held += len(data)
        if self._num_held < self._num_needed:
            return
        data = data if len(parts) == 1 else b"".join(parts)
        # A frame may end the connection: `reset` then puts another list here.
        parts.clear()
        self._num_held = self._num_needed = start = 0
        while start < len(data):
            try:
                end = self._frame(data, start)
                if self._reaction is not None:
                    reaction, self._reaction = self._reaction, None
                    await reaction
            except MalformedFrame as error:
                await self._reader.report(error)
                raise
            if self._parts is not parts:
                return
            if end < 0:
                parts.append(data[start:])
                self._num_held = len(data) - start
                return
            start = end

    def _frame(self, data: bytes, start: int) -> int:
        """Hand over the frame at `start`; returns its end, negative when it is not complete."""
        line_end = data.find(_CRLF, start, start + MAX_LINE_BYTES)
        if line_end < 0:
            if len(data) - start >= MAX_LINE_BYTES:
                raise _malformed("a line", data[start:])
            return -1
        words = data[start:line_end].split()
        begin = line_end + len(_CRLF)
        if not words or words[0] not in (b"MSG", b"HMSG"):
            self._reaction = self._obey(words, data[start:line_end])
            return begin
        # MSG subject subscription [reply] [bytes of headers] bytes
        num_sizes = 2 if words[0] == b"HMSG" else 1
        if not 3 <= len(words) - num_sizes <= 4:
            raise _malformed("a message", data[start:line_end])
        sid, num_bytes = _number(words[2]), _number(words[-1])
        num_head = _number(words[-2]) if num_sizes == 2 else 0
        if num_head > num_bytes or num_bytes > MAX_FRAME_BYTES:
            raise _malformed("the size of a message", data[start:line_end])
        end = begin + num_bytes
        if end + len(_CRLF) > len(data):
            self._num_needed = end + len(_CRLF) - start
            return -1
        if not data.startswith(_CRLF, end):
            raise _malformed("the end of a message", data[end:])
        reply = words[3] if len(words) - num_sizes == 4 else b""
        head, payload = data[begin : begin + num_head], data[begin + num_head : end]
        self._reaction = self._reader.take(words[1], sid, reply, head, payload)
        return end + len(_CRLF)

    async def _obey(self, words: list[bytes], line: bytes) -> None:
        """Any other frame than a message."""
        kind = words[0] if words else b""
        if kind in _HANDLED and len(words) > 1:
            raise _malformed("a line", line)
        if kind == b"PING":
            await self._reader._process_ping()
        elif kind == b"PONG":
            await self._reader._process_pong()
        elif kind == b"INFO":
            await self._reader._process_info(_info(line))
        elif kind == b"-ERR":
            text = line[len(b"-ERR") :].decode(errors="replace")
            await self._reader._process_err(text.strip().lower())
        elif kind != b"+OK":
            raise _malformed("a line", line)


def _number(word: bytes) -> int:
    if not word.isdigit() or len(word) > _MAX_DIGITS:
        raise _malformed("a number", word)
    return int(word)


def _info(line: bytes) -> dict[str, Any]:
    try:
        info = json.loads(line[len(b"INFO") :])
    except ValueError as error:
        raise _malformed("INFO", line) from error
    if not isinstance(info, dict):
        raise _malformed("INFO", line)
    return info


def _malformed(what: str, data: bytes) -> MalformedFrame:
    return MalformedFrame(f"malformed {what}: {data[:64]!r}")


def headers_of(head: bytes) -> dict[str, str] | None:
    """The headers of a block, and the server's status and its description as two more.

    A peer may have written anything: what is malformed is left out.
    """
    first, *lines = head.decode(errors="replace").split("\r\n")
    headers = {}
    if first != _VERSION and first.startswith(_VERSION):
        headers = dict(zip(("Status", "Description"), first.split(None, 2)[1:], strict=False))
        if not headers.get("Status", "").isdigit():
            headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon and name.isascii() and name.isprintable() and name and " " not in name:
            headers[name] = value.strip()
    return headers or None
