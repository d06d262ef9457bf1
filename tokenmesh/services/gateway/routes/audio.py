"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.audio.form import read_form
from tokenmesh.services.gateway.audio.request import (
    SpeechFields,
    TranscriptionRequest,
    TranslationRequest,
)
from tokenmesh.services.gateway.audio.service import TRANSCRIBE, TRANSLATE
from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.http.body import SCHEMA_REF
from tokenmesh.shared.telemetry import span


def audio_router(gateway: Gateway) -> APIRouter:
    """The routes of recordings."""
    router = APIRouter(tags=["audio"])

    @router.post("/v1/audio/transcriptions", openapi_extra=_form(TranscriptionRequest))
    async def create_transcription(request: Request) -> Response:
        """Write down what is said in a recording."""
        return await _respond(request, TRANSCRIBE)

    @router.post("/v1/audio/translations", openapi_extra=_form(TranslationRequest))
    async def create_translation(request: Request) -> Response:
        """Write down in English what is said in a recording."""
        return await _respond(request, TRANSLATE)

    async def _respond(request: Request, task: str) -> Response:
        context = context_of(request.scope)
        with span("validate"):
            form = await read_form(request, gateway.settings)
            return await gateway.transcriptions.respond(form, task, context)

    return router


def _form(kind: type[SpeechFields]) -> dict[str, Any]:
    """The `openapi_extra` of a form with a file."""
    file = {"type": "string", "format": "binary", "minLength": 1}
    schema = {
        "allOf": [
            {"$ref": SCHEMA_REF.format(model=kind.__name__)},
            {"type": "object", "required": ["file"], "properties": {"file": file}},
        ]
    }
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}
