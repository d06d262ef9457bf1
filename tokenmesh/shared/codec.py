"""Messages to bytes and back: msgpack, checked against the closed union on the way in.

A `Message` is a msgpack map and `Tokens` a msgpack array, so the first byte distinguishes them;
msgspec itself does not support both in one union.
"""

from typing import Final

import msgspec

from tokenmesh.shared.errors import PayloadTooLarge, ProtocolError
from tokenmesh.shared.messages import Message, Tokens

SCHEMA: Final = "1"
"""Travels as `tm-schema`; raised only when old bytes no longer decode."""

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""NATS refuses what is over its own `max_payload`; media and tensors go through Redis instead."""

_FIXARRAY: Final = range(0x90, 0xA0)
_ARRAY16: Final = 0xDC
_ARRAY32: Final = 0xDD

_encoder: Final = msgspec.msgpack.Encoder()
_message_decoder: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)
_tokens_decoder: Final = msgspec.msgpack.Decoder(Tokens)


def encode(message: Message | Tokens, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """The bytes of a message. Raises PayloadTooLarge above `max_bytes`."""
    data = _encoder.encode(message)
    if len(data) > max_bytes:
        name = type(message).__name__
        raise PayloadTooLarge(
            f"{name} takes {len(data)} bytes, more than the {max_bytes} that a message may hold "
            "(bus.max_message_bytes)"
        )
    return data


def decode(data: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> Message:
    """The message in `data`. Raises ProtocolError for anything but one known message."""
    _check_size(data, max_bytes)
    try:
        return _message_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"undecodable message: {error}") from error


def decode_tokens(data: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> Tokens:
    """The tokens in `data`. Raises ProtocolError for anything else."""
    _check_size(data, max_bytes)
    try:
        return _tokens_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"undecodable tokens: {error}") from error


def decode_any(data: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> Message | Tokens:
    """Whichever of the two `data` holds. Raises ProtocolError."""
    if data and (data[0] in _FIXARRAY or data[0] in (_ARRAY16, _ARRAY32)):
        return decode_tokens(data, max_bytes)
    return decode(data, max_bytes)


def _check_size(data: bytes, max_bytes: int) -> None:
    if len(data) > max_bytes:
        raise ProtocolError(f"message of {len(data)} bytes, more than {max_bytes}")
