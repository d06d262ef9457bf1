"""The form of a recording: bounded before and while it is read, its file stored for the mesh."""

from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from tokenmesh.services.gateway.http.body import arriving
from tokenmesh.services.gateway.http.errors import UnsupportedMediaType
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

_FORM_BYTES = 64 * 1024
"""Room for boundaries, headers and the other fields of a form."""
_MAX_FIELDS = 128


@dataclass(frozen=True, slots=True)
class SpeechForm:
    data: bytes
    """The file."""
    fields: list[tuple[str, str]]
    """All others, in their order."""


async def read_form(request: Request, limits: GatewaySettings) -> SpeechForm:
    """Raises InvalidInput, PayloadTooLarge and UnsupportedMediaType."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise UnsupportedMediaType("send the recording as multipart/form-data")
    bounded = _bounded(request, limits.max_audio_bytes)
    try:
        async with arriving(limits.body_timeout_s):
            form = await bounded.form(
                max_files=1, max_fields=_MAX_FIELDS, max_part_size=_FORM_BYTES
            )
    except HTTPException as error:
        raise InvalidInput(f"the form is broken: {error.detail}") from error
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise InvalidInput("the form needs a file in the field file", param="file")
        data = await file.read()
        if not data:
            raise InvalidInput("file: the file is empty", param="file")
        if len(data) > limits.max_audio_bytes:
            raise _too_large(limits.max_audio_bytes)
        fields = [(key, text) for key, text in form.multi_items() if isinstance(text, str)]
        return SpeechForm(data, fields)
    finally:
        await form.close()


def _bounded(request: Request, max_bytes: int) -> Request:
    """The request, refused as soon as its body is too large for a file of `max_bytes`."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes + _FORM_BYTES:
        raise _too_large(max_bytes)
    num_bytes = 0

    async def receive() -> Message:
        nonlocal num_bytes
        message = await request.receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes + _FORM_BYTES:
            raise _too_large(max_bytes)
        return message

    return Request(request.scope, receive)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"file: the file is larger than {max_bytes} bytes", param="file")
