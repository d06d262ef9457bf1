"""POST /v1/files (multipart), GET /v1/files, GET and DELETE /v1/files/{id}: uploads of tenants."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tokenmesh.services.gateway.context import access_of, context_of
from tokenmesh.services.gateway.files.contents import CHUNK_BYTES
from tokenmesh.services.gateway.files.uploads import FileDeleted, FileObject, NewFile, new_file_id
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.http.body import arriving
from tokenmesh.services.gateway.http.errors import UnsupportedMediaType
from tokenmesh.services.gateway.http.response_sender import ClientWatch
from tokenmesh.services.gateway.http.sse import json_response
from tokenmesh.services.gateway.tenancy.upload_quota import UploadReservation
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Cancelled, InvalidInput, PayloadTooLarge, TokenMeshError

logger = logging.getLogger(__name__)

_HEADERS: Final = [
    (b"content-type", b"application/octet-stream"),
    # Browsers must not render it: the content is not trusted.
    (b"content-disposition", b"attachment"),
    (b"x-content-type-options", b"nosniff"),
]


class ContentResponse(Response):
    """The status is sent with the first chunk, so a file without content is a 404."""

    def __init__(
        self, file: FileObject, chunks: AsyncGenerator[bytes, None], write_timeout_s: float
    ) -> None:
        super().__init__()
        self._file = file
        self._chunks = chunks
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        try:
            async with (
                aclosing(self._chunks) as chunks,
                ClientWatch(receive, self._write_timeout_s) as watch,
            ):
                await self._send(chunks, watch, send)
        except Cancelled:
            context.has_client_left = True
        except TokenMeshError as error:
            if not context.status:
                raise
            # The server closes the connection of a body that is not complete.
            logger.warning("the download of %s broke off: %s", self._file.id, error.message)

    async def _send(
        self, chunks: AsyncGenerator[bytes, None], watch: ClientWatch, send: Send
    ) -> None:
        num_left = self._file.bytes
        async for chunk in chunks:
            if num_left == self._file.bytes:
                await send({"type": "http.response.start", "status": 200, "headers": self._head()})
            num_left -= len(chunk)
            if num_left <= 0:
                watch.stop()
            watch.is_writing = True
            await send({"type": "http.response.body", "body": chunk, "more_body": num_left > 0})
            watch.is_writing = False
            watch.num_writes += 1

    def _head(self) -> list[tuple[bytes, bytes]]:
        return [*_HEADERS, (b"content-length", str(self._file.bytes).encode())]


_FORM_BYTES = 64 * 1024
"""Room for boundaries, headers and the other fields of a form."""
_USUAL_FORM_BYTES = 4 * 1024
"""The part of it that is not reserved, since it is not stored."""
_MAX_FIELDS = 8

_PURPOSES: Final = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
"""As OpenAI has them."""
_IMAGE_PURPOSES: Final = ("assistants", "user_data", "vision")
_ANCHOR: Final = "expires_after[anchor]"
_SECONDS: Final = "expires_after[seconds]"
_LEAST_S: Final = 3600
_MOST_S: Final = 30 * 86400
"""OpenAI's range of `expires_after`."""
_MAX_PAGE: Final = 10_000

_FILE = {"type": "string", "format": "binary", "minLength": 1}
_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": _FILE,
        "purpose": {"enum": list(_PURPOSES)},
        _ANCHOR: {"enum": ["created_at"]},
        _SECONDS: {"type": "integer", "minimum": _LEAST_S, "maximum": _MOST_S},
    },
}
_BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _SCHEMA}}}}


def files_router(gateway: Gateway) -> APIRouter:
    """The routes of uploads."""
    router = APIRouter(tags=["files"])

    @router.post("/v1/files", openapi_extra=_BODY)
    async def create_file(request: Request) -> Response:
        """Store a file for a day: an image that chats name by its id, or the lines of a batch."""
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise UnsupportedMediaType("send the file as multipart/form-data")
        return json_response(await _keep(request, gateway))

    _add_reading(router, gateway)
    return router


async def _keep(request: Request, gateway: Gateway) -> FileObject:
    """Store the form's file; after any error its part of the quota is released."""
    file_id, tenant = new_file_id(), access_of(request).tenant
    settings = gateway.settings
    quota = gateway.uploads.quota
    reservation = UploadReservation(quota, tenant, file_id, settings.body_timeout_s)
    try:
        form = await _receive(request, settings, reservation)
        try:
            file, purpose = _read(form)
            ttl_s = _ttl_of(form, settings)
            num_bytes = file.size or 0
            _check_size(num_bytes, purpose, settings)
            await reservation.keep(num_bytes, ttl_s)
            name = file.filename or "file"
            new = NewFile(
                id=file_id, filename=name, purpose=purpose, owner=tenant.name, ttl_s=ttl_s
            )
            return await gateway.uploads.add(new, _parts(file))
        finally:
            await form.close()
    except BaseException:
        await reservation.release()
        raise


async def _parts(file: UploadFile) -> AsyncIterator[bytes]:
    """The file from its temporary copy on disk, where a form keeps what is large."""
    while part := await file.read(CHUNK_BYTES):
        yield part


def _check_size(num_bytes: int, purpose: str, limits: GatewaySettings) -> None:
    limit = limits.max_media_bytes if purpose in _IMAGE_PURPOSES else limits.max_file_bytes
    if num_bytes > limit:
        raise PayloadTooLarge(
            f"the file has {num_bytes} bytes, with the purpose {purpose} at most {limit}",
            param="file",
        )


def _add_reading(router: APIRouter, gateway: Gateway) -> None:
    uploads = gateway.uploads

    @router.get("/v1/files")
    async def list_files(
        request: Request,
        purpose: Annotated[str | None, Query(description="Only files of this purpose.")] = None,
        limit: Annotated[int, Query(ge=1, le=_MAX_PAGE, description="Files at most.")] = _MAX_PAGE,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str | None, Query(description="The last id of the page before.")] = None,
    ) -> Response:
        """The uploads of the caller's tenant, in pages of at most 1,000."""
        access = access_of(request)
        page = await uploads.page(access, purpose=purpose, limit=limit, order=order, after=after)
        return json_response(page)

    @router.get("/v1/files/{file_id}")
    async def get_file(request: Request, file_id: str) -> Response:
        """The description of an upload."""
        return json_response(await uploads.get(file_id, access_of(request)))

    @router.get("/v1/files/{file_id}/content")
    async def get_content(request: Request, file_id: str) -> Response:
        """The bytes of an upload."""
        file = await uploads.get(file_id, access_of(request))
        return ContentResponse(file, uploads.content(file), gateway.settings.write_timeout_s)

    @router.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> Response:
        """Delete an upload of the caller's tenant."""
        await uploads.remove(file_id, access_of(request))
        return json_response(FileDeleted(id=file_id))


def _ttl_of(form: FormData, limits: GatewaySettings) -> int:
    """Seconds until the file expires, at most `file_ttl_s`. Raises InvalidInput."""
    anchor, seconds = form.get(_ANCHOR), form.get(_SECONDS)
    if anchor is None and seconds is None:
        return limits.file_ttl_s
    if anchor != "created_at":
        raise InvalidInput(f"{_ANCHOR} must be 'created_at'", param=_ANCHOR)
    digits = seconds if isinstance(seconds, str) and seconds.isdecimal() else ""
    if not digits or len(digits) > 9 or not _LEAST_S <= int(digits) <= _MOST_S:
        raise InvalidInput(f"{_SECONDS} must be {_LEAST_S} to {_MOST_S}", param=_SECONDS)
    return min(int(digits), limits.file_ttl_s)


def _read(form: FormData) -> tuple[UploadFile, str]:
    """The file and its purpose. Raises InvalidInput."""
    file, purpose = form.get("file"), form.get("purpose", "vision")
    if len(form.getlist("purpose")) > 1:
        raise InvalidInput("the form holds purpose twice", param="purpose")
    if not isinstance(file, UploadFile) or not isinstance(purpose, str):
        raise InvalidInput("the form needs a file in the field file", param="file")
    if purpose not in _PURPOSES:
        raise InvalidInput(f"purpose is one of {', '.join(_PURPOSES)}", param="purpose")
    return file, purpose


async def _receive(
    request: Request, limits: GatewaySettings, reservation: UploadReservation
) -> FormData:
    """Read the form. Its bytes are reserved before they are read, if their number is known."""
    bounded = await _bounded(request, limits.max_file_bytes + _FORM_BYTES, reservation)
    try:
        async with arriving(limits.body_timeout_s):
            return await bounded.form(max_files=1, max_fields=_MAX_FIELDS)
    except HTTPException as error:
        raise InvalidInput(f"the form is broken: {error.detail}") from error


async def _bounded(request: Request, max_bytes: int, reservation: UploadReservation) -> Request:
    """The request, refused as soon as its body is too large or over the quota."""
    length = request.headers.get("content-length", "")
    too_large = PayloadTooLarge(f"the body is larger than {max_bytes} bytes", param="file")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    await reservation.grow(max(1, int(length) - _USUAL_FORM_BYTES) if length.isdigit() else 1)
    num_bytes = 0

    async def receive() -> Message:
        nonlocal num_bytes
        message = await request.receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise too_large
        await reservation.grow(num_bytes - _USUAL_FORM_BYTES)
        return message

    return Request(request.scope, receive)
