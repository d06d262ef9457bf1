"""POST /v1/files (multipart), GET and DELETE /v1/files/{id}: images that chats name by id."""

from fastapi import APIRouter, Request
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Message

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.http.body import arriving
from tokenmesh.services.gateway.http.errors import UnsupportedMediaType
from tokenmesh.services.gateway.http.sse import json_response
from tokenmesh.services.gateway.openai.shapes import FileDeleted, FileObject
from tokenmesh.services.gateway.openai.uploads import Uploads, new_file_id
from tokenmesh.services.gateway.tenancy.upload_quota import UploadReservation
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

_FORM_BYTES = 64 * 1024
"""Room for boundaries, headers and the other fields of a form."""
_USUAL_FORM_BYTES = 4 * 1024
"""The part of it that is not reserved, since it is not stored."""
_MAX_FIELDS = 8

_PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
"""As OpenAI has them."""

_FILE = {"type": "string", "format": "binary", "minLength": 1}
_SCHEMA = {
    "type": "object",
    "required": ["file"],
    "properties": {"file": _FILE, "purpose": {"enum": list(_PURPOSES)}},
}
_BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _SCHEMA}}}}


def files_router(gateway: Gateway) -> APIRouter:
    """The routes of uploads."""
    router = APIRouter(tags=["files"])
    uploads = Uploads(gateway.blobs, gateway.settings)

    @router.post("/v1/files", openapi_extra=_BODY)
    async def create_file(request: Request) -> Response:
        """Store an image for a day; chats use its id in place of an image URL."""
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise UnsupportedMediaType("send the file as multipart/form-data")
        return json_response(await _keep(request, gateway, uploads))

    _add_reading(router, gateway, uploads)
    return router


async def _keep(request: Request, gateway: Gateway, uploads: Uploads) -> FileObject:
    """Store the form's file; after any error its part of the quota is released."""
    file_id, access = new_file_id(), context_of(request.scope).access
    settings = gateway.settings
    reservation = UploadReservation(
        gateway.upload_quota, access.tenant, file_id, settings.body_timeout_s
    )
    try:
        form = await _receive(request, settings, reservation)
        try:
            file, purpose = _read(form)
            data, name = await file.read(), file.filename or "file"
            await reservation.keep(len(data), settings.file_ttl_s)
            return await uploads.add(file_id, data, name, purpose, access)
        finally:
            await form.close()
    except BaseException:
        await reservation.release()
        raise


def _add_reading(router: APIRouter, gateway: Gateway, uploads: Uploads) -> None:
    @router.get("/v1/files/{file_id}")
    async def get_file(request: Request, file_id: str) -> Response:
        """The description of an upload."""
        return json_response(await uploads.get(file_id, context_of(request.scope).access))

    @router.get("/v1/files/{file_id}/content")
    async def get_content(request: Request, file_id: str) -> Response:
        """The bytes of an upload."""
        upload = await uploads.get(file_id, context_of(request.scope).access)
        # Browsers must not render it: the content is not trusted.
        headers = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
        data = await uploads.content(upload.id)
        return Response(data, media_type="application/octet-stream", headers=headers)

    @router.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> Response:
        """Delete an upload of the caller's tenant."""
        access = context_of(request.scope).access
        owner = access.tenant.name
        try:
            owner = await uploads.remove(file_id, access)
        finally:
            # Also for a file that Redis has evicted: its bytes would count until it expires.
            await gateway.upload_quota.release(owner, file_id)
        return json_response(FileDeleted(id=file_id))


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
    bounded = await _bounded(request, limits.max_media_bytes + _FORM_BYTES, reservation)
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
