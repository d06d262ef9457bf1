"""Reading a JSON body: its media type, size and bounds are checked before its fields.

Routes read their bodies themselves; `body_schema` describes them in the OpenAPI document. Long
lists of token ids are removed before validation and read in portions: they make up most of the
largest legitimate bodies, and reading one at once would block the event loop for a tenth of a
second.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.http.body_budget import SHORT_BYTES
from tokenmesh.services.gateway.http.errors import UnsupportedMediaType, invalid_fields
from tokenmesh.services.gateway.http.event_loop import OneByOne, Turns
from tokenmesh.services.gateway.http.fields import Bounded, Conversions
from tokenmesh.services.gateway.http.json_bounds import check_bounds, check_bounds_now
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Cancelled, DeadlineExceeded, PayloadTooLarge

_MIN_BYTES: Final = 1024
_MAX_LISTS: Final = 8192
"""A body with more lists of any kind is validated as it is."""
_PORTION_BYTES: Final = 32 * 1024
_HIGHEST: Final = 2**32 - 1
"""The numbers from here downwards stand for lists."""

_Ids = list[Annotated[int, msgspec.Meta(ge=0, le=_HIGHEST)]]
_decoder: Final = msgspec.json.Decoder(_Ids)


class IdLists:
    """The long lists of one body."""

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self._lists: list[list[int]] = []

    def __bool__(self) -> bool:
        return bool(self._lists)

    async def cut(self, data: bytes) -> bytes:
        """The body without its long lists. Raises PayloadTooLarge.

        What looks like a list within a string is removed too: `fill` then returns False.
        """
        turns = Turns()
        kept, done, room = [], 0, self._max_ids
        for start, end in _candidates(data):
            ids = await _read(data, start, end, turns, room)
            if ids is not None:
                room -= len(ids)
                kept += [data[done:start], b"%d" % (_HIGHEST - len(self._lists))]
                done = end
                self._lists.append(ids)
            await turns.rest()
        return b"".join((*kept, data[done:])) if kept else data

    def fill(self, body: BaseModel) -> bool:
        """Put the lists back. False: one is not in a field for ids, validate the whole body."""
        places = [
            (holder, key, place)
            for holder, key in _holders(body)
            if (place := _HIGHEST - _only(holder[key])) < len(self._lists)
        ]
        if sorted(place for _, _, place in places) != list(range(len(self._lists))):
            return False
        for holder, key, place in places:
            holder[key] = self._lists[place]
        return True


def _candidates(data: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of long lists without inner lists, brackets excluded."""
    if data.count(b"]") > _MAX_LISTS:
        return
    before, end = 0, data.find(b"]")
    while end >= 0:
        start = data.rfind(b"[", before, end) + 1
        if start and end - start >= _MIN_BYTES:
            yield start, end
        before, end = end + 1, data.find(b"]", end + 1)


async def _read(data: bytes, start: int, end: int, turns: Turns, room: int) -> list[int] | None:
    """The ids between two positions; None if there is anything else. Raises PayloadTooLarge."""
    ids: list[int] = []
    while start < end:
        cut = min(start + _PORTION_BYTES, end)
        comma = data.rfind(b",", start, cut) if cut < end else end
        if comma < 0:
            return None
        try:
            ids += _decoder.decode(b"[%b]" % data[start:comma])
        except msgspec.DecodeError:
            return None
        # These are ids: a list that is too long is refused before all of it is read.
        if len(ids) + data.count(b",", comma, end) > room:
            raise PayloadTooLarge("the body holds more token ids than gateway.max_json_ids")
        start = comma + 1
        await turns.rest()
    return ids


def _holders(body: BaseModel) -> Iterator[tuple[Any, Any]]:
    """Containers and keys, in the fields of a body and lists in them, of lists with one number."""
    fields = body.__dict__
    for name, value in fields.items():
        if isinstance(value, list):
            if _only(value) >= 0:
                yield fields, name
            else:
                yield from ((value, i) for i, each in enumerate(value) if _only(each) >= 0)


def _only(value: object) -> int:
    """The number in a list of one number; -1 for anything else."""
    if isinstance(value, list) and len(value) == 1 and type(value[0]) is int:
        return value[0]
    return -1


_Body = TypeVar("_Body", bound=Bounded)

SCHEMA_REF: Final = "#/components/schemas/{model}"
"""Where the OpenAPI document has the schema of a body."""

_large: Final = OneByOne()


async def read_json(
    request: Request, model: type[_Body], limits: GatewaySettings, *, any_type: bool = False
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
    if converted:
        names = ", ".join(converted)
        warnings = context_of(request.scope).warnings
        warnings.append(f"strings read as numbers or booleans: {names}")
    return body


async def parse_body(
    data: bytes, model: type[_Body], limits: GatewaySettings, converted: Conversions
) -> _Body:
    """Check the bounds, then the fields; a large body yields to other requests in between."""
    if len(data) <= SHORT_BYTES:
        check_bounds_now(data, limits)
        return _validated(model, data, converted)
    async with _large.turn():
        return await _parse_large(data, model, limits, converted)


async def without_ids(data: bytes, limits: GatewaySettings) -> bytes:
    """The body without its long lists of token ids. Raises PayloadTooLarge and InvalidInput."""
    async with _large.turn():
        return (await _checked(data, limits))[0]


async def _checked(data: bytes, limits: GatewaySettings) -> tuple[bytes, IdLists]:
    lists = IdLists(limits.max_json_ids)
    rest = await lists.cut(data)
    await check_bounds(rest, limits)
    return rest, lists


async def _parse_large(
    data: bytes, model: type[_Body], limits: GatewaySettings, converted: Conversions
) -> _Body:
    rest, lists = await _checked(data, limits)
    body = _validated(model, rest, converted)
    if lists and not lists.fill(body):
        await check_bounds(data, limits)
        body = _validated(model, data, converted)
    return body


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
    return PayloadTooLarge(f"the body is larger than {max_bytes} bytes")


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
