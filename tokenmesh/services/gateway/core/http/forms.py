"""Forms with a file, bounded while they arrive."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import Request
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.types import Message

from tokenmesh.services.gateway.core.http.body import arriving
from tokenmesh.services.gateway.core.http.errors import UnsupportedMediaType
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

FORM_BYTES: Final = 64 * 1024
"""Room for boundaries, headers and the other fields of a form."""
FILE_SCHEMA: Final[dict[str, Any]] = {"type": "string", "format": "binary", "minLength": 1}


def check_is_form(request: Request, what: str) -> None:
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise UnsupportedMediaType(f"send the {what} as multipart/form-data")


async def read_form(
    request: Request,
    max_bytes: int,
    timeout_s: float,
    too_large: PayloadTooLarge,
    on_bytes: Callable[[int], Awaitable[None]] | None = None,
    **limits: int,
) -> FormData:
    """The form, refused as soon as its body is larger than `max_bytes`.

    `on_bytes` is called with the length that is announced, if any, before bytes are read, and then
    with the number of those that have arrived. `limits` are Starlette's.
    """
    length, num_bytes = request.headers.get("content-length", ""), 0

    async def count(number: int) -> None:
        if number > max_bytes:
            raise too_large
        if on_bytes is not None:
            await on_bytes(number)

    async def receive() -> Message:
        nonlocal num_bytes
        message = await request.receive()
        num_bytes += len(message.get("body", b""))
        await count(num_bytes)
        return message

    await count(int(length) if length.isdigit() else 0)
    try:
        async with arriving(timeout_s):
            return await Request(request.scope, receive).form(max_files=1, **limits)
    except HTTPException as error:
        raise InvalidInput(f"the form is broken: {error.detail}") from error
