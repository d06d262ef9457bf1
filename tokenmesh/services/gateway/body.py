"""Reading a JSON body: media type, size, nesting, then the fields; each with its own refusal."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from tokenmesh.services.gateway.exchange import exchange_of
from tokenmesh.services.gateway.openai.errors import UnsupportedMediaType, invalid_fields
from tokenmesh.services.gateway.openai.lenient import Conversions
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidInput,
    PayloadTooLarge,
)

_Body = TypeVar("_Body", bound=BaseModel)

_STRING_OR_BRACKET: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
"""A string without an end is one, too: else each of its quotes would be looked at up to the end."""


async def read_json(request: Request, model: type[_Body], limits: GatewaySettings) -> _Body:
    """The validated body. Raises InvalidInput and its kin."""
    _check_json_type(request)
    _check_is_plain(request)
    data = await read_bytes(request, limits.max_body_bytes, limits.body_timeout_s)
    check_depth(data, limits.max_json_depth)
    converted = Conversions()
    try:
        body = model.model_validate_json(data, context=converted)
    except ValidationError as error:
        raise invalid_fields(error) from None
    if converted:
        names = ", ".join(converted)
        warnings = exchange_of(request.scope).warnings
        warnings.append(f"strings read as numbers or booleans: {names}")
    return body


async def read_bytes(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The body. Raises PayloadTooLarge, before reading where the length is told."""
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > max_bytes:
        raise _too_large(max_bytes)
    async with arriving(timeout_s):
        return await _join_parts(request, max_bytes)


@asynccontextmanager
async def arriving(timeout_s: float) -> AsyncIterator[None]:
    """A body is read inside. Raises DeadlineExceeded, and Cancelled when its client leaves."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(f"the body did not arrive within {timeout_s:g} s") from error
    except ClientDisconnect as error:
        raise Cancelled("the client left while sending") from error


async def _join_parts(request: Request, max_bytes: int) -> bytes:
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than {max_bytes} bytes")


def _check_json_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    # Without the header curl users would be refused, with a form's they are told.
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaType(f"the body must be application/json, not {given!r}")


def _check_is_plain(request: Request) -> None:
    given = request.headers.get("content-encoding", "identity")
    if given.strip().lower() not in ("identity", ""):
        raise UnsupportedMediaType(f"the body must be sent as it is, not in {given[:60]!r}")


def check_depth(data: bytes, limit: int) -> None:
    """Raises InvalidInput for JSON that is nested too deep.

    The parser has a limit of its own; templates and other services want a lower one.
    """
    if data.count(b"[") + data.count(b"{") <= limit:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(data):
        char = data[match.start()]
        if char in b"[{":
            depth += 1
            if depth > limit:
                raise InvalidInput(f"the body is nested deeper than {limit} levels")
        elif char in b"]}":
            depth -= 1
