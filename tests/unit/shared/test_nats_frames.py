"""Frames of NATS, cut out of what was received, compared with nats-py's own parser."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.protocol.parser import Parser

from tokenmesh.shared.bus.nats_frames import (
    MAX_FRAME_BYTES,
    MAX_LINE_BYTES,
    FrameParser,
    MalformedFrame,
    headers_of,
)


class Recorder:
    """Notes what either parser hands over."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.reset_after: FrameParser | None = None

    def take(self, subject: bytes, sid: int, reply: bytes, head: bytes, payload: bytes) -> None:
        self.seen.append((subject, sid, reply, bytes(head), payload))

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None
    ) -> None:
        self.take(subject, sid, reply, headers or b"", data)

    async def report(self, error: MalformedFrame) -> None:
        self.reported = str(error)

    async def _process_ping(self) -> None:
        self.seen.append("PING")

    async def _process_pong(self) -> None:
        self.seen.append("PONG")

    async def _process_info(self, info: dict[str, Any]) -> None:
        self.seen.append(info)

    async def _process_err(self, err_msg: str) -> None:
        self.seen.append(err_msg)
        if self.reset_after is not None:
            self.reset_after.reset()


PROTOCOL_TEXT = (b"MSG a 1 2\r\nhi\r\n", b"HMSG a 1 0 2\r\n", b"PING\r\n", b"-ERR 'x'\r\n", b"\r\n")
tokens = st.text("abc.*_$09-é", min_size=1, max_size=6).map(str.encode)
payloads = st.one_of(
    st.binary(max_size=30),
    st.lists(st.sampled_from(PROTOCOL_TEXT), max_size=4).map(b"".join),
)
gaps = st.sampled_from((b" ", b"\t", b"  "))
heads = st.one_of(
    st.sampled_from((b"NATS/1.0 503\r\n\r\n", b"NATS/1.0 404 No Messages\r\n\r\n")),
    st.dictionaries(tokens, tokens, max_size=3).map(
        lambda pairs: b"NATS/1.0\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % x for x in pairs.items())
    ),
)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    payload, gap, sid = draw(payloads), draw(gaps), draw(st.integers(0, 99))
    words = [draw(tokens), b"%d" % sid, *draw(st.lists(tokens, max_size=1))]
    head = draw(st.none() | heads)
    if head is None:
        words = [b"MSG", *words, b"%d" % len(payload)]
    else:
        words = [b"HMSG", *words, b"%d" % len(head), b"%d" % len(head + payload)]
    return gap.join(words) + b"\r\n" + (head or b"") + payload + b"\r\n"


others = st.sampled_from(
    (
        b"PING\r\n",
        b"PONG\r\n",
        b"+OK\r\n",
        b"-ERR 'Permissions Violation for Publish to \"x\"'\r\n",
        b'INFO {"max_payload": 8, "connect_urls": ["a:1", "b:2"]}\r\n',
    )
)


def feed(parser: FrameParser | Parser, data: bytes, cuts: list[int]) -> None:
    async def parse() -> None:
        edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
        for start, end in pairwise(edges):
            if end > start:
                await parser.parse(data[start:end])

    asyncio.run(parse())


@given(st.lists(messages() | others, max_size=6), st.lists(st.integers(0, 10**6), max_size=8))
def test_frames_are_those_of_nats_py_wherever_they_are_cut(
    frames: list[bytes], cuts: list[int]
) -> None:
    ours, theirs = Recorder(), Recorder()
    data = b"".join(frames)
    feed(FrameParser(ours), data, cuts)
    feed(Parser(theirs), data, [])
    assert ours.seen == theirs.seen


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_payload_that_is_a_frame_stays_a_payload_at_every_cut(size: int) -> None:
    inner = b"MSG t.a 3 4\r\nevil\r\n"
    frame = b"MSG t.a 3 %d\r\n%b\r\nHMSG b 4 16 16\r\nNATS/1.0 503\r\n\r\n\r\n" % (
        len(inner),
        inner,
    )
    expected = [(b"t.a", 3, b"", b"", inner), (b"b", 4, b"", b"NATS/1.0 503\r\n\r\n", b"")]
    for first in range(len(frame)):
        seen = Recorder()
        feed(FrameParser(seen), frame, [first, *range(first, len(frame), size)])
        assert seen.seen == expected, first


@pytest.mark.parametrize(
    "frame",
    [
        b"MSG a 1 -14\r\n",
        b"MSG a 1 -5\r\n\r\n",
        b"MSG a 1 1_0\r\n0123456789\r\n",
        b"MSG a 1 +1\r\nx\r\n",
        b"MSG a 1 0x1\r\nx\r\n",
        b"MSG a 1\r\nx\r\n",
        b"MSG a 1 b c 1\r\nx\r\n",
        b"MSG a one 1\r\nx\r\n",
        b"MSG\r\n",
        b"MSG a 1 %d\r\n" % (MAX_FRAME_BYTES + 1),
        b"MSG a 1 " + b"9" * 5000 + b"\r\n",
        b"MSG a 1 2\r\nabcd",
        b"HMSG a 1 3\r\nabc\r\n",
        b"HMSG a 1 4 3\r\nabc\r\n",
        b"HMSG a 1 -1 3\r\nabc\r\n",
        b"msg a 1 1\r\nx\r\n",
        b"PING 1\r\n",
        b"INFO {\r\n",
        b"INFO []\r\n",
        b"INFO\r\n",
        b"\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"x" * MAX_LINE_BYTES,
    ],
)
def test_a_malformed_frame_is_an_error(frame: bytes) -> None:
    for cuts in ([], [len(frame) // 2]):
        seen = Recorder()
        with pytest.raises(MalformedFrame, match="malformed"):
            feed(FrameParser(seen), frame, cuts)
        assert seen.seen == []
        assert seen.reported.startswith("malformed")


@given(st.binary(max_size=80), st.lists(st.integers(0, 80), max_size=4))
def test_any_bytes_are_read_refused_or_waited_for(data: bytes, cuts: list[int]) -> None:
    whole, cut = Recorder(), Recorder()
    outcomes = []
    for recorder, edges in ((whole, []), (cut, cuts)):
        try:
            feed(FrameParser(recorder), data, edges)
            outcomes.append("")
        except MalformedFrame as error:
            outcomes.append(str(error).split(":")[0])
    assert whole.seen == cut.seen
    assert outcomes[0] == outcomes[1]


def test_what_follows_a_frame_that_ended_the_connection_is_forgotten() -> None:
    reader = Recorder()
    reader.reset_after = parser = FrameParser(reader)
    feed(parser, b"PING\r\n-ERR 'Stale Connection'\r\nPONG\r\nMSG a 1 5\r\nab", [])
    feed(parser, b"PONG\r\n", [])
    assert reader.seen == ["PING", "'stale connection'", "PONG"]


def test_thousands_of_messages_and_a_large_one_in_one_read() -> None:
    reader = Recorder()
    large = bytes(8 << 20)
    data = b"MSG a 1 1\r\nx\r\n" * 5000 + b"MSG b 2 %d\r\n%b\r\nPING\r\n" % (len(large), large)
    parser = FrameParser(reader)
    feed(parser, data, [])
    assert reader.seen[:5000] == [(b"a", 1, b"", b"", b"x")] * 5000
    assert reader.seen[5000:] == [(b"b", 2, b"", b"", large), "PING"]
    reader.seen.clear()
    feed(parser, data, list(range(0, len(data), 32768)))
    assert reader.seen[5000:] == [(b"b", 2, b"", b"", large), "PING"]
    assert parser._num_held == 0


@given(heads)
def test_headers_are_those_of_nats_py(head: bytes) -> None:
    async def by_nats_py() -> dict[str, str] | None:
        return await Client()._process_headers(head)

    assert headers_of(head) == asyncio.run(by_nats_py())


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\n\r\n", ("204", "EOB", "0")),
        (b"NATS/1.0 100\r\nNats-Num-Pending: 7\r\n\r\n", ("100", None, "7")),
        (b"NATS/1.0 abc\r\nNats-Num-Pending: 7\r\n\r\n", (None, None, "7")),
        (b"NATS/1.0\r\nno colon\r\nNats-Num-Pending:7\r\n\xff: x\r\n\r\n", (None, None, "7")),
    ],
)
def test_headers_with_a_status(head: bytes, expected: tuple[str | None, ...]) -> None:
    headers = headers_of(head) or {}
    found = tuple(map(headers.get, ("Status", "Description", "Nats-Num-Pending")))
    assert found == expected


@given(st.binary(max_size=40))
def test_headers_that_a_peer_made_up_are_no_error(head: bytes) -> None:
    assert headers_of(head) != {}
    assert headers_of(b"NATS/1.0" + head) != {}
