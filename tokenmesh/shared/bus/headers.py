"""The headers of a message as text: `tm-schema`, `tm-deadline`, `traceparent`.

Answers and `Tokens` travel without any, which means this schema and saves a tenth of a round trip.
"""

from collections.abc import Mapping
from typing import Final

from tokenmesh.shared.bus.base import Headers
from tokenmesh.shared.codec import SCHEMA
from tokenmesh.shared.errors import ProtocolError

_SCHEMA: Final = "tm-schema"
_DEADLINE: Final = "tm-deadline"
_TRACEPARENT: Final = "traceparent"

_NONE: Final = Headers()


def pack(headers: Headers) -> dict[str, str]:
    """The text form."""
    packed = {_SCHEMA: SCHEMA}
    if headers.deadline_s is not None:
        packed[_DEADLINE] = repr(headers.deadline_s)
    if headers.traceparent is not None:
        packed[_TRACEPARENT] = headers.traceparent
    return packed


def unpack(packed: Mapping[str, str] | None) -> Headers:
    """What `pack` made; a message without headers is fine. Raises ProtocolError."""
    if not packed:
        return _NONE
    schema = packed.get(_SCHEMA, SCHEMA)
    if schema != SCHEMA:
        raise ProtocolError(f"message of schema {schema}, this process speaks {SCHEMA}")
    deadline = packed.get(_DEADLINE)
    try:
        deadline_s = None if deadline is None else float(deadline)
    except ValueError as error:
        raise ProtocolError(f"{_DEADLINE} {deadline!r} is no number") from error
    return Headers(deadline_s=deadline_s, traceparent=packed.get(_TRACEPARENT))
