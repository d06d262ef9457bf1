"""What JetStream answers on its API: JSON, and its errors by number as ours."""

from typing import Any, Final

import msgspec

from tokenmesh.shared.bus.raw_questions import RawReply
from tokenmesh.shared.errors import (
    Conflict,
    PayloadTooLarge,
    ProtocolError,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.journal import StoreFull

_WRONG_LAST: Final = frozenset((10071, 10164))
_TOO_LARGE: Final = 10054
_FULL: Final = frozenset((10023, 10047, 10077))
_OTHER_CONFIG: Final = 10058
_NO_STREAM: Final = 10059
_UNAVAILABLE: Final = 503


class OtherConfig(ProtocolError):
    """The stream exists with other limits."""


class NoStream(ProtocolError):
    """The stream does not exist (yet)."""


def answer_of(reply: RawReply) -> dict[str, Any]:
    """The JSON of an answer. Raises what its error means here."""
    try:
        answer: dict[str, Any] = msgspec.json.decode(reply.data, type=dict[str, Any])
    except msgspec.DecodeError as problem:
        raise ProtocolError(f"JetStream's answer is no JSON: {problem}") from problem
    if error := answer.get("error"):
        raise _error_of(error)
    return answer


def _error_of(error: dict[str, Any]) -> TokenMeshError:
    code, text = error.get("err_code"), f"JetStream: {error.get('description')}"
    if code in _WRONG_LAST:
        return Conflict(text)
    if code == _TOO_LARGE:
        return PayloadTooLarge(text)
    if code in _FULL:
        return StoreFull(text)
    if code == _OTHER_CONFIG:
        return OtherConfig(text)
    if code == _NO_STREAM:
        return NoStream(text)
    return Unavailable(text) if error.get("code") == _UNAVAILABLE else ProtocolError(text)
