"""Transcriptions: what the routes of recordings share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from tokenmesh.services.gateway.apis.audio.clip_passes import ClipPasses, Recording
from tokenmesh.services.gateway.apis.audio.prompts import (
    SpeechTask,
    check_language,
    check_previous,
    previous_text,
)
from tokenmesh.services.gateway.apis.audio.request import (
    TIMED,
    SpeechFields,
    TranscriptionRequest,
    TranslationRequest,
    read_fields,
)
from tokenmesh.services.gateway.apis.audio.response import TranscriptionResponse
from tokenmesh.services.gateway.apis.audio.speech_transcriber import Speech, SpeechTranscriber
from tokenmesh.services.gateway.apis.audio.transcriber import Transcriber, stored_s
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder, head_of
from tokenmesh.services.gateway.apis.openai.translation import warn_unknown
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.answer import GenerationServices
from tokenmesh.services.gateway.core.generation.usage import Meter
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.services.gateway.core.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.core.tenancy.admission import Admission
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput, TokenMeshError
from tokenmesh.shared.ids import BlobKey, new_request_id
from tokenmesh.shared.messages.audio import SpeechAsk, SpeechFacts
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.tokenize import IdsPrompt

TRANSCRIBE: Final = "transcribe"
TRANSLATE: Final = "translate"
_KINDS: Final[dict[str, type[SpeechFields]]] = {
    TRANSCRIBE: TranscriptionRequest,
    TRANSLATE: TranslationRequest,
}


@dataclass(slots=True)
class Transcriptions:
    """Makes the response of a form."""

    builder: RequestBuilder
    calls: ServiceCalls
    services: GenerationServices

    async def respond(
        self, data: bytes, form: list[tuple[str, str]], task: str, context: RequestContext
    ) -> TranscriptionResponse:
        """Store the recording and check what does not need it. Raises InvalidInput.

        `form`: its fields but the file, in their order.
        """
        fields, unknown = read_fields(_KINDS[task], form)
        warn_unknown(unknown, context.warnings)
        recording = await self._recording(fields, task, context)
        transcriber = await self._begin(recording, data, context)
        context.hand_on()
        on_end = partial(self._forget, recording.source)
        return TranscriptionResponse(transcriber, fields, task, self.services.load_headers, on_end)

    @asynccontextmanager
    async def running(
        self, fields: TranscriptionRequest, context: RequestContext, samples: bytes, rate: int
    ) -> AsyncIterator[Transcriber]:
        """Inside the block raw samples, 16 bits, little-endian, mono, can be transcribed."""
        recording = await self._recording(fields, TRANSCRIBE, context)
        recording.rate = rate
        try:
            yield await self._begin(recording, samples, context)
        finally:
            self._forget(recording.source)

    async def listen(
        self, fields: TranscriptionRequest, context: RequestContext, speech: Speech
    ) -> SpeechTranscriber | None:
        """For speech that goes on; None: the model transcribes whole recordings only.

        Raises InvalidInput.
        """
        recording = await self._recording(fields, TRANSCRIBE, context)
        if not recording.task.facts.follows_speech:
            return None
        return SpeechTranscriber(*self._parts(recording, context), speech)

    async def _begin(
        self, recording: Recording, data: bytes, context: RequestContext
    ) -> Transcriber:
        """Store the data of a recording."""
        ttl_s = stored_s(self.builder.settings)
        await self.builder.blobs.put(data, key=recording.source, ttl_s=ttl_s)
        return Transcriber(*self._parts(recording, context))

    def _parts(
        self, recording: Recording, context: RequestContext
    ) -> tuple[Recording, ClipPasses, ServiceCalls, Admission, Blobs, GatewaySettings, Meter]:
        """Those of a `RecordingRun`."""
        settings, services = self.builder.settings, self.services
        passes = ClipPasses(recording, services.pipeline, settings.max_buffered_tokens)
        meter = services.meters.start(recording.head.model, context)
        blobs = self.builder.blobs
        return recording, passes, self.calls, services.admission, blobs, settings, meter

    async def _recording(
        self, fields: SpeechFields, task: str, context: RequestContext
    ) -> Recording:
        body = fields.sampling
        card, text = await self.builder.begin(body, context, fields.max_completion_tokens)
        facts = text.described.speech
        if facts is None:
            raise InvalidInput(
                f"the model {card.name} does not transcribe recordings", param="model"
            )
        language = check_language(getattr(fields, "language", None), facts)
        if task == TRANSLATE and not _translates(facts):
            raise InvalidInput(f"the model {card.name} does not translate", param="model")
        ask = _ask_of(fields, facts, language, translates=task == TRANSLATE)
        if has_words := "word" in fields.granularities:
            _check_has_words(facts, card.name)
        sampling = self.builder.sampling(body, text, logprobs=None, prompt_logprobs=None)
        job = self.builder.job(
            body,
            card,
            IdsPrompt(token_ids=b""),
            sampling,
            fields.max_completion_tokens,
            context,
        )
        is_timed, is_verbose = fields.response_format in TIMED, fields.response_format == TIMED[0]
        tried = fields.tried(self.builder.settings.audio_temperatures)
        temperatures = tried[:1] if facts.prompt_ids else tried  # logprobs would be of silence
        # text that was sent cannot be taken back
        drops_silence = facts.no_speech_id >= 0 and not fields.stream
        return Recording(
            job=job,
            head=head_of(body, context, card),
            text=text,
            task=SpeechTask(
                facts=facts,
                translates=task == TRANSLATE,
                has_timestamps=is_timed and _has_timestamps(facts),
                previous_ids=await self._previous_ids(fields.prompt, facts, card, context),
                language=language,
                ask=ask,
            ),
            source=BlobKey(f"tm:audio:{new_request_id('audio')}"),
            temperatures=temperatures,
            needs_logprobs=is_verbose or len(temperatures) > 1 or drops_silence,
            needs_words=has_words,
            needs_no_speech=is_verbose and facts.no_speech_id >= 0,
            drops_silence=drops_silence,
            detects_language=bool(facts.languages) and language is None,
        )

    async def _previous_ids(
        self, prompt: str, facts: SpeechFacts, card: ModelCard, context: RequestContext
    ) -> tuple[int, ...]:
        """The last tokens of the text before a recording. Raises InvalidInput."""
        text = previous_text(prompt, facts)
        if not text:
            return ()
        most = facts.max_previous_tokens
        return check_previous(await self.builder.encode("prompt", text, card, context, most), facts)

    def _forget(self, source: BlobKey) -> None:
        task = asyncio.create_task(self._remove(source))
        _removing.add(task)
        task.add_done_callback(_removing.discard)

    async def _remove(self, source: BlobKey) -> None:
        """During an outage of Redis the recording expires there."""
        with suppress(TokenMeshError):
            await self.builder.blobs.remove(source)


_removing: Final[set["asyncio.Task[None]"]] = set()
"""Keeps the tasks alive."""


def _check_has_words(facts: SpeechFacts, name: str) -> None:
    if facts.embed_id >= 0:
        raise NotSupported(
            f"the model {name} writes no times of words: use segment",
            param="timestamp_granularities",
        )
    if not facts.aligns:
        raise NotSupported(
            f"the generation_config.json of {name} names no alignment_heads, without "
            "which words have no times: use segment",
            param="timestamp_granularities",
        )


def _translates(facts: SpeechFacts) -> bool:
    return facts.translates or (facts.translate_id >= 0 and bool(facts.languages))


def _ask_of(
    fields: SpeechFields, facts: SpeechFacts, language: str | None, *, translates: bool
) -> SpeechAsk | None:
    """None for a model that is not asked in words. Raises NotSupported."""
    keywords = fields.all_keywords
    takes = {
        "prompt": not fields.prompt.strip() or facts.embed_id < 0 or facts.takes_prompt,
        "keywords": not keywords or facts.takes_keywords,
    }
    for name, is_taken in takes.items():
        if not is_taken:
            raise invalid(
                name, "is not supported by this model: its prompts have none", NotSupported
            )
    if facts.embed_id < 0:
        return None
    return SpeechAsk(
        language=language or "",
        prompt=fields.prompt.strip(),
        keywords=keywords,
        translates=translates,
    )


def _has_timestamps(facts: SpeechFacts) -> bool:
    return facts.num_timestamps > 0
