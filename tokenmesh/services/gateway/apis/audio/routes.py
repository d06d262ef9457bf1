"""Routes of recordings that become text, which arrive as forms."""

from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.datastructures import UploadFile
from starlette.responses import Response

from tokenmesh.services.gateway.apis.audio.request import (
    SpeechFields,
    TranscriptionRequest,
    TranslationRequest,
)
from tokenmesh.services.gateway.apis.audio.service import TRANSCRIBE, TRANSLATE, Transcriptions
from tokenmesh.services.gateway.core.context import context_of
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.body import SCHEMA_REF
from tokenmesh.services.gateway.core.http.forms import (
    FILE_SCHEMA,
    FORM_BYTES,
    check_is_form,
    read_form,
)
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge
from tokenmesh.shared.telemetry import span

TRANSCRIPTIONS: Final = "/v1/audio/transcriptions"
TRANSLATIONS: Final = "/v1/audio/translations"
_MAX_SPEECH_FIELDS: Final = 128


def audio_router(core: Core, transcriptions: Transcriptions) -> APIRouter:
    """The routes of recordings."""
    router = APIRouter(tags=["audio"])

    @router.post(TRANSCRIPTIONS, openapi_extra=_speech_form(TranscriptionRequest))
    async def create_transcription(request: Request) -> Response:
        """Write down what is said in a recording."""
        return await _transcribe(request, TRANSCRIBE)

    @router.post(TRANSLATIONS, openapi_extra=_speech_form(TranslationRequest))
    async def create_translation(request: Request) -> Response:
        """Write down in English what is said in a recording."""
        return await _transcribe(request, TRANSLATE)

    async def _transcribe(request: Request, task: str) -> Response:
        context = context_of(request.scope)
        with span("validate"):
            data, fields = await _read_speech(request, core.settings)
            return await transcriptions.respond(data, fields, task, context)

    return router


def _speech_form(kind: type[SpeechFields]) -> dict[str, Any]:
    """The `openapi_extra` of a form with a recording."""
    schema = {
        "allOf": [
            {"$ref": SCHEMA_REF.format(model=kind.__name__)},
            {"type": "object", "required": ["file"], "properties": {"file": FILE_SCHEMA}},
        ]
    }
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


async def _read_speech(
    request: Request, limits: GatewaySettings
) -> tuple[bytes, list[tuple[str, str]]]:
    """The file of a form, and all other fields in their order. Raises InvalidInput."""
    check_is_form(request, "recording")
    limit = limits.max_audio_bytes
    too_large = PayloadTooLarge(
        f"file: the file is larger than {limit} bytes (gateway.max_audio_bytes)", param="file"
    )
    form = await read_form(
        request,
        limit + FORM_BYTES,
        limits.body_timeout_s,
        too_large,
        max_fields=_MAX_SPEECH_FIELDS,
        max_part_size=FORM_BYTES,
    )
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise InvalidInput("the form needs a file in the field file", param="file")
        data = await file.read()
        if not data:
            raise InvalidInput("file: the file is empty", param="file")
        if len(data) > limit:
            raise too_large
        return data, [(key, text) for key, text in form.multi_items() if isinstance(text, str)]
    finally:
        await form.close()
