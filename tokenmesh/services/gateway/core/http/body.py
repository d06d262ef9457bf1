"""Reading a JSON body: its media type, size and bounds are checked before its fields.

The bounds (depth, objects, names, strings, values) are counted before the text is parsed: its bytes
are scanned in portions by C functions. In text that is not JSON the counts may be too high, but not
too low for the part that a parser reads before it finds the error.

Routes read their bodies themselves; `body_schema` describes them in the OpenAPI document.
"""

import asyncio
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import accumulate
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from tokenmesh.services.gateway.core.context import context_of
from tokenmesh.services.gateway.core.http.body_budget import SHORT_BYTES
from tokenmesh.services.gateway.core.http.errors import UnsupportedMediaType, invalid_fields
from tokenmesh.services.gateway.core.http.event_loop import OneByOne, Turns
from tokenmesh.services.gateway.core.http.fields import Bounded, Conversions
from tokenmesh.services.gateway.core.http.id_lists import IdLists
from tokenmesh.services.gateway.core.http.long_strings import LongStrings, portions, without_escapes
from tokenmesh.shared.config.http import BodySettings
from tokenmesh.shared.errors import Cancelled, DeadlineExceeded, InvalidInput, PayloadTooLarge

_Body = TypeVar("_Body", bound=Bounded)

SCHEMA_REF: Final = "#/components/schemas/{model}"
"""Where the OpenAPI document has the schema of a body."""

_large: Final = OneByOne()


async def read_json(
    request: Request, model: type[_Body], limits: BodySettings, *, any_type: bool = False
) -> _Body:
    """The validated body, with `any_type` whatever its media type is.

    Raises InvalidInput and its subclasses.
    """
    if not any_type:
        _check_json_type(request)
    _check_is_plain(request)
    data = await read_bytes(request, limits.max_body_bytes, limits.body_timeout_s)
    converted = Conversions()
    body = await parse_body(data, model, limits, converted)
    context = context_of(request.scope)
    context.has_large_body = len(data) > SHORT_BYTES
    if converted:
        names = ", ".join(converted)
        context.warnings.append(f"strings read as numbers or booleans: {names}")
    return body


async def parse_body(
    data: bytes, model: type[_Body], limits: BodySettings, converted: Conversions
) -> _Body:
    """Check the bounds, then the fields; a large body yields to other requests in between."""
    # Some programs on Windows write a byte order mark, which RFC 8259 lets a parser ignore.
    data = data.removeprefix(BOM_UTF8)
    if len(data) <= SHORT_BYTES:
        check_bounds_now(data, limits)
        return _validated(model, data, converted)
    async with _large.turn():
        return await _parse_large(data, model, limits, converted)


async def without_ids(data: bytes, limits: BodySettings) -> bytes:
    """The body without its long lists of token ids. Raises PayloadTooLarge and InvalidInput."""
    async with _large.turn():
        return (await _checked(data, limits))[0]


async def _checked(data: bytes, limits: BodySettings) -> tuple[bytes, IdLists]:
    lists = IdLists(limits.max_json_ids)
    rest = await lists.cut(data)
    await check_bounds(rest, limits)
    return rest, lists


async def _parse_large(
    data: bytes, model: type[_Body], limits: BodySettings, converted: Conversions
) -> _Body:
    strings = LongStrings()
    whole = await strings.cut(data)
    rest, lists = await _checked(whole, limits)
    is_shortened = len(rest) < len(data)
    body = await _validated_in_steps(model, rest, strings, converted, is_shortened=is_shortened)
    if lists and not await lists.fill(body):
        await check_bounds(whole, limits)
        body = await _validated_in_steps(
            model, whole, strings, converted, is_shortened=is_shortened
        )
    return body


async def _validated_in_steps(
    model: type[_Body],
    data: bytes,
    strings: LongStrings,
    converted: Conversions,
    *,
    is_shortened: bool,
) -> _Body:
    try:
        given = from_json(data)
    except ValueError as error:
        # The place in a shortened text is not that in the body.
        reason = str(error).partition(" at line ")[0] if is_shortened else str(error)
        raise InvalidInput(f"the body is not valid JSON: {reason}") from None
    await asyncio.sleep(0)
    if strings:
        given = await strings.fill(given)
    try:
        return model.model_validate(given, context=converted)
    except ValidationError as error:
        raise invalid_fields(error) from None


def _validated(model: type[_Body], data: bytes, converted: Conversions) -> _Body:
    try:
        return model.model_validate_json(data, context=converted)
    except ValidationError as error:
        raise invalid_fields(error) from None


async def read_bytes(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The body. Raises PayloadTooLarge, before reading where Content-Length says so."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    async with arriving(timeout_s):
        return await _join_parts(request, max_bytes)


@asynccontextmanager
async def arriving(timeout_s: float) -> AsyncIterator[None]:
    """Bounds the time of reading a body. Raises DeadlineExceeded, or Cancelled on a disconnect."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(f"the body did not arrive within {timeout_s:g} s") from error
    except ClientDisconnect as error:
        raise Cancelled("the client disconnected while sending") from error


async def _join_parts(request: Request, max_bytes: int) -> bytes:
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than gateway.max_body_bytes = {max_bytes}")


def _check_json_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    # A missing header is accepted: short curl commands have none.
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaType(f"the body must be application/json, not {given!r}")


def _check_is_plain(request: Request) -> None:
    given = request.headers.get("content-encoding", "identity")
    if given.strip().lower() not in ("identity", ""):
        raise UnsupportedMediaType(
            f"content-encoding {given[:60]!r} is not supported: send the body unencoded"
        )


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route."""
    return _described({"$ref": SCHEMA_REF.format(model=model.__name__)})


def any_body_schema(models: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """The `openapi_extra` of a route that accepts several bodies."""
    return _described(
        {"anyOf": [{"$ref": SCHEMA_REF.format(model=each.__name__)} for each in models]}
    )


def _described(schema: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


_PORTION_BYTES: Final = 16 * 1024
_BRACKETS: Final = b"[]{}"
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(_BRACKETS))
_STEP: Final = {char: 1 if char in b"[{" else -1 for char in _BRACKETS}


async def check_bounds(data: bytes, limits: BodySettings) -> None:
    """Raises PayloadTooLarge, or InvalidInput for JSON that is nested too deep."""
    turns, counts = Turns(), _Counts(limits)
    for portion in portions(data, _PORTION_BYTES):
        counts.take(portion)
        await turns.rest()


def check_bounds_now(data: bytes, limits: BodySettings) -> None:
    """The same without yielding to the event loop, for short texts."""
    counts = _Counts(limits)
    for portion in [data] if len(data) <= _PORTION_BYTES else portions(data, _PORTION_BYTES):
        counts.take(portion)


class _Counts:
    """The counts of the portions so far."""

    def __init__(self, limits: BodySettings) -> None:
        self._limits = limits
        self._is_in_string = False
        self._depth = 0
        self._num_quotes = 0
        self._num_values = 1
        self._num_objects = 0
        self._num_names = 0

    def take(self, portion: bytes) -> None:
        """Raises what `check_bounds` raises."""
        if b"\\" in portion:
            portion = without_escapes(portion)
        pieces = portion.split(b'"')
        outside = b"".join(pieces[self._is_in_string :: 2])
        self._is_in_string ^= len(pieces) % 2 == 0
        self._count(outside, len(pieces) - 1)
        brackets = outside.translate(None, _NOT_BRACKETS)
        if brackets:
            self._check_depth(brackets)

    def _count(self, outside: bytes, num_quotes: int) -> None:
        limits = self._limits
        num_opened = outside.count(b"[") + outside.count(b"{")
        self._num_quotes += num_quotes
        self._num_objects += num_opened
        self._num_values += num_opened + outside.count(b",")
        self._num_names += outside.count(b":")
        for found, most, what, setting in (
            (self._num_quotes // 2, limits.max_json_strings, "strings", "strings"),
            (self._num_objects, limits.max_json_objects, "objects and lists", "objects"),
            (self._num_names, limits.max_json_names, "names of fields", "names"),
            (self._num_values, limits.max_json_values, "values", "values"),
        ):
            if found > most:
                raise PayloadTooLarge(
                    f"the body holds more than {most} {what} (gateway.max_json_{setting})"
                )

    def _check_depth(self, brackets: bytes) -> None:
        limit = self._limits.max_json_depth
        depths = list(accumulate(map(_STEP.__getitem__, brackets), initial=self._depth))
        self._depth = depths[-1]
        if max(depths) > limit:
            raise InvalidInput(
                f"the body is nested deeper than {limit} levels (gateway.max_json_depth)"
            )
