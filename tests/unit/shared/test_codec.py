"""The codec: round trips, the size guard, and bytes that are no message."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.shared import codec
from tokenmesh.shared.errors import PayloadTooLarge, ProtocolError
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages import Detokenized, Failed, Message, Ping, Queued, Tokens
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.tokens import pack_ids

GOLDEN = [path.read_bytes() for path in sorted((Path(__file__).parent / "golden").iterdir())]

MESSAGES = st.one_of(
    st.builds(Detokenized, text=st.text(max_size=50)),
    st.builds(Queued, position=st.integers(-(2**63), 2**64 - 1)),
    st.builds(
        Failed,
        code=st.text(max_size=20),
        message=st.text(max_size=50),
        retryable=st.booleans(),
        retry_after_s=st.none() | st.floats(allow_nan=False),
    ),
)
TOKENS = st.builds(
    Tokens,
    worker_id=st.text(max_size=10).map(WorkerId),
    epoch=st.integers(0, 2**63 - 1),
    step=st.integers(0, 2**40),
    deltas=st.lists(
        st.builds(
            Delta,
            stream=st.integers(0, 2**40),
            attempt=st.integers(0, 100),
            offset=st.integers(0, 2**20),
            token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=5).map(pack_ids),
            finish=st.none() | st.sampled_from(["stop", "length", "abort", "error"]),
        ),
        max_size=4,
    ),
)


@given(MESSAGES)
def test_message_survives_the_wire(message: Message) -> None:
    data = codec.encode(message)
    assert codec.decode(data) == message
    assert codec.decode_any(data) == message


@given(TOKENS)
def test_tokens_survive_the_wire(tokens: Tokens) -> None:
    data = codec.encode(tokens)
    assert codec.decode_tokens(data) == tokens
    assert codec.decode_any(data) == tokens


def test_many_deltas_are_still_tokens() -> None:
    deltas = [Delta(stream, 0, 0, b"") for stream in range(70_000)]
    tokens = Tokens(WorkerId("w"), 1, 1, deltas)
    assert codec.decode_any(codec.encode(tokens)) == tokens


@given(st.binary(max_size=200))
def test_junk_is_a_protocol_error_or_a_message(data: bytes) -> None:
    for decode in (codec.decode, codec.decode_tokens, codec.decode_any):
        try:
            message = decode(data)
        except ProtocolError:
            continue
        assert isinstance(message, msgspec.Struct)


@given(st.sampled_from(GOLDEN), st.data())
def test_damaged_message_is_a_protocol_error_or_a_message(
    golden: bytes, draw: st.DataObject
) -> None:
    damaged = bytearray(golden)
    for _ in range(draw.draw(st.integers(1, 3))):
        damaged[draw.draw(st.integers(0, len(golden) - 1))] = draw.draw(st.integers(0, 255))
    try:
        message = codec.decode_any(bytes(damaged))
    except ProtocolError:
        return
    assert isinstance(message, msgspec.Struct)


@given(st.sampled_from(GOLDEN), st.data())
def test_truncated_message_is_a_protocol_error(golden: bytes, draw: st.DataObject) -> None:
    cut = golden[: draw.draw(st.integers(0, len(golden) - 1))]
    with pytest.raises(ProtocolError):
        codec.decode_any(cut)


@pytest.mark.parametrize("depth", [10, 100_000])
def test_deeply_nested_junk_is_a_protocol_error(depth: int) -> None:
    unknown_field = b"\x82\xa4type\xa4Ping\xa1x" + b"\x91" * depth
    for data in (unknown_field, b"\x91" * depth, b"\x81\xa1x" * depth):
        with pytest.raises(ProtocolError):
            codec.decode_any(data)


def test_tokens_are_no_message_and_the_other_way_round() -> None:
    with pytest.raises(ProtocolError):
        codec.decode(codec.encode(Tokens(WorkerId("w"), 1, 1, [])))
    with pytest.raises(ProtocolError):
        codec.decode_tokens(codec.encode(Ping()))


def test_oversized_message_is_refused_in_both_directions() -> None:
    message = Detokenized(text="x" * 100)
    size = len(codec.encode(message))
    assert codec.decode(codec.encode(message, size), size) == message
    with pytest.raises(PayloadTooLarge, match="Detokenized"):
        codec.encode(message, size - 1)
    with pytest.raises(ProtocolError):
        codec.decode(codec.encode(message), size - 1)
