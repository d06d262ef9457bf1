"""Routes of uploads, which arrive as forms."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response

from tokenmesh.services.gateway.core.context import access_of
from tokenmesh.services.gateway.core.files.contents import CHUNK_BYTES, ContentResponse
from tokenmesh.services.gateway.core.files.uploads import (
    FileDeleted,
    FileObject,
    NewFile,
    new_file_id,
)
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.http.forms import (
    FILE_SCHEMA,
    FORM_BYTES,
    check_is_form,
    read_form,
)
from tokenmesh.services.gateway.core.http.sse import json_response
from tokenmesh.services.gateway.core.tenancy.upload_quota import UploadReservation
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.http import UploadSettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

_USUAL_BYTES = 4 * 1024
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

_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": FILE_SCHEMA,
        "purpose": {"enum": list(_PURPOSES)},
        _ANCHOR: {"enum": ["created_at"]},
        _SECONDS: {"type": "integer", "minimum": _LEAST_S, "maximum": _MOST_S},
    },
}
_BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _SCHEMA}}}}


def files_router(core: Core) -> APIRouter:
    """The routes of uploads."""
    router = APIRouter(tags=["files"])

    @router.post("/v1/files", openapi_extra=_BODY)
    async def create_file(request: Request) -> Response:
        """Store a file for a day: an image that chats name by its id, or the lines of a batch."""
        check_is_form(request, "file")
        return json_response(await _keep(request, core))

    _add_reading(router, core)
    return router


async def _keep(request: Request, core: Core) -> FileObject:
    """Store the form's file; after any error its part of the quota is released."""
    file_id, tenant = new_file_id(), access_of(request).tenant
    settings = core.settings
    quota = core.uploads.quota
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
            return await core.uploads.add(new, _parts(file))
        finally:
            await form.close()
    except BaseException:
        await reservation.release()
        raise


async def _receive(
    request: Request, limits: GatewaySettings, reservation: UploadReservation
) -> FormData:
    """Read the form. Its bytes are reserved before they are read, if their number is known."""
    max_bytes = limits.max_file_bytes + FORM_BYTES
    too_large = PayloadTooLarge(
        f"the body is larger than {max_bytes} bytes (gateway.max_file_bytes)", param="file"
    )

    async def reserve(num_bytes: int) -> None:
        await reservation.grow(max(1, num_bytes - _USUAL_BYTES))

    return await read_form(
        request, max_bytes, limits.body_timeout_s, too_large, reserve, max_fields=_MAX_FIELDS
    )


async def _parts(file: UploadFile) -> AsyncIterator[bytes]:
    """The file from its temporary copy on disk, where a form keeps what is large."""
    while part := await file.read(CHUNK_BYTES):
        yield part


def _check_size(num_bytes: int, purpose: str, limits: UploadSettings) -> None:
    setting = "max_media_bytes" if purpose in _IMAGE_PURPOSES else "max_file_bytes"
    limit = getattr(limits, setting)
    if num_bytes > limit:
        raise PayloadTooLarge(
            f"the file has {num_bytes} bytes, with the purpose {purpose} at most {limit} "
            f"(gateway.{setting})",
            param="file",
        )


def _add_reading(router: APIRouter, core: Core) -> None:
    uploads = core.uploads

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
        return ContentResponse(
            file.id, file.bytes, uploads.content(file), core.settings.write_timeout_s
        )

    @router.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> Response:
        """Delete an upload of the caller's tenant."""
        await uploads.remove(file_id, access_of(request))
        return json_response(FileDeleted(id=file_id))


def _ttl_of(form: FormData, limits: UploadSettings) -> int:
    """Seconds until the file expires, at most `file_ttl_s`. Raises InvalidInput."""
    anchor, seconds = form.get(_ANCHOR), form.get(_SECONDS)
    if anchor is None and seconds is None:
        return limits.file_ttl_s
    if anchor != "created_at":
        raise invalid(_ANCHOR, "must be 'created_at'")
    digits = seconds if isinstance(seconds, str) and seconds.isdecimal() else ""
    if not digits or len(digits) > 9 or not _LEAST_S <= int(digits) <= _MOST_S:
        raise invalid(_SECONDS, f"must be {_LEAST_S} to {_MOST_S}")
    return min(int(digits), limits.file_ttl_s)


def _read(form: FormData) -> tuple[UploadFile, str]:
    """The file and its purpose. Raises InvalidInput."""
    file, purpose = form.get("file"), form.get("purpose", "vision")
    if len(form.getlist("purpose")) > 1:
        raise InvalidInput("the form holds purpose twice", param="purpose")
    if not isinstance(file, UploadFile) or not isinstance(purpose, str):
        raise InvalidInput("the form needs a file in the field file", param="file")
    if purpose not in _PURPOSES:
        raise invalid("purpose", f"is one of {', '.join(_PURPOSES)}")
    return file, purpose
