"""OpenAI's transcriptions and translations, as the table of APIs has them."""

from typing import Final

from tokenmesh.services.gateway.apis.audio.request import TranscriptionRequest, TranslationRequest
from tokenmesh.services.gateway.apis.audio.response import Transcription, VerboseTranscription
from tokenmesh.services.gateway.apis.audio.routes import TRANSCRIPTIONS, TRANSLATIONS, audio_router
from tokenmesh.services.gateway.apis.audio.service import Transcriptions
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.core.api import AnswerShape, Api, Routes
from tokenmesh.services.gateway.core.gateway_core import Core


def build(core: Core) -> Routes:
    """The routes, for one gateway."""
    transcriptions = Transcriptions(RequestBuilder(core), core.mesh.calls, core.generation)
    return Routes(
        routers=[audio_router(core, transcriptions)],
        bodies=[TranscriptionRequest, TranslationRequest],
    )


AUDIO: Final = Api(
    name="audio",
    build=build,
    answers={
        ("post", path): AnswerShape([Transcription, VerboseTranscription], streams=True)
        for path in (TRANSCRIPTIONS, TRANSLATIONS)
    },
)
