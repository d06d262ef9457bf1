"""TranscriptionResponse: a recording's transcript as an HTTP response, streamed or whole.

Its bodies and events are OpenAI's.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmesh.services.gateway.apis.audio.clip_passes import Recording
from tokenmesh.services.gateway.apis.audio.request import SpeechFields
from tokenmesh.services.gateway.apis.audio.segments import (
    Segment,
    Transcript,
    compression_ratio,
    segments_of,
    text_ids,
    to_srt,
    to_vtt,
    words_of,
)
from tokenmesh.services.gateway.apis.audio.spoken_text import SpokenText, gap_between, spoken
from tokenmesh.services.gateway.apis.audio.transcriber import Transcriber
from tokenmesh.services.gateway.core.context import RequestContext, context_of
from tokenmesh.services.gateway.core.generation.answer import LoadHeaders, forget_frames
from tokenmesh.services.gateway.core.http import sse
from tokenmesh.services.gateway.core.http.response_sender import ClientWatch, ResponseSender
from tokenmesh.shared.errors import Cancelled, TokenMeshError
from tokenmesh.shared.telemetry import REQUEST_ID, Tally
from tokenmesh.shared.text import Detokenizer, make_detokenizer


class DurationUsage(msgspec.Struct, tag="duration"):
    seconds: float


class InputTokenDetails(msgspec.Struct):
    audio_tokens: int
    text_tokens: int


class AudioTokenUsage(msgspec.Struct, tag="tokens"):
    """States of the encoder count as audio tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokenDetails


class Transcription(msgspec.Struct):
    text: str
    usage: DurationUsage


class TranscriptionSegment(msgspec.Struct):
    id: int
    seek: int
    """Start of the clip in hundredths of a second."""
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptionWord(msgspec.Struct):
    word: str
    start: float
    end: float


class VerboseTranscription(msgspec.Struct):
    task: str
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment] | msgspec.UnsetType
    usage: DurationUsage
    words: list[TranscriptionWord] | msgspec.UnsetType


class TextDelta(msgspec.Struct, tag="transcript.text.delta", omit_defaults=True):
    delta: str
    usage: AudioTokenUsage | None = None


class TextDone(msgspec.Struct, tag="transcript.text.done"):
    text: str
    usage: AudioTokenUsage


@dataclass(slots=True)
class TextStream:
    recording: Recording
    text: str = ""
    _detokenizer: Detokenizer | None = None
    _num_read: int = 0
    _clip: Transcript | None = None
    _said: SpokenText | None = None
    _has_text: bool = False
    """It tells whether text of the clip has been sent."""
    language: str | None = None
    """Code of the language that the model names first."""

    def push(self, transcript: Transcript, is_done: bool) -> str:
        """Return what is new; without white space before the first word."""
        recording = self.recording
        if transcript is not self._clip or self._detokenizer is None or self._said is None:
            self._clip, self._num_read, self._has_text = transcript, 0, False
            self._detokenizer = make_detokenizer(recording.text.vocabulary, ())
            self._said = SpokenText(recording.task.facts)
        new = transcript.token_ids[self._num_read :]
        self._num_read = len(transcript.token_ids)
        delta = self._detokenizer.push(text_ids(new, recording.task.facts))
        if is_done:
            delta += self._detokenizer.finish()
        if recording.task.ask is not None:
            delta = self._spoken(self._said, delta, is_done)
        if not self.text:
            delta = delta.lstrip()
        self.text += delta
        return delta

    def _spoken(self, said: SpokenText, delta: str, is_done: bool) -> str:
        """The text that a delta adds, with a space before the first text of a clip."""
        delta = said.push(delta)
        if is_done:
            delta += said.finish()
        self.language = self.language or said.language
        if self._has_text or not delta.strip():
            return delta if self._has_text else ""
        self._has_text = True
        delta = delta.lstrip()
        return gap_between(self.text, delta) + delta


_TEXT_TYPES = {"text": b"text/plain; charset=utf-8", "srt": b"application/x-subrip; charset=utf-8"}
_TEXT_TYPES["vtt"] = b"text/vtt; charset=utf-8"


class TranscriptionResponse(Response):
    """Runs a Transcriber when it is called."""

    def __init__(
        self,
        transcriber: Transcriber,
        fields: SpeechFields,
        task: str,
        load_headers: LoadHeaders,
        on_end: Callable[[], None],
    ) -> None:
        """`on_end` is called when the recording is no longer needed."""
        super().__init__()
        self._transcriber = transcriber
        self._fields = fields
        self._task = task
        self._load_headers = load_headers
        self._on_end = on_end
        self._flushing = Tally("flush")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, transcriber = context_of(scope), self._transcriber
        headers = partial(self._load_headers, context, transcriber.recording.job.card.name)
        try:
            patience_s = transcriber.settings.write_timeout_s
            async with ClientWatch(receive, patience_s) as watch:
                await self._run(ResponseSender(send, watch, self._flushing, headers), context)
        except Cancelled:
            context.has_client_left = True
        finally:
            self._on_end()

    async def _run(self, sender: ResponseSender, context: RequestContext) -> None:
        if self._fields.stream:
            interval_s = self._transcriber.settings.sse_keep_alive_s
            sender.keep_alive(interval_s, sse.COMMENT)
        try:
            with sender.until_draining():
                async with aclosing(self._transcriber.run(context)) as transcripts:
                    if self._fields.stream:
                        await self._stream(sender, transcripts)
                        return
                    done = [each async for each, is_done in transcripts if is_done]
                await self._answer(sender, done)
        except TokenMeshError as error:
            if not sender.has_begun or isinstance(error, Cancelled):
                raise
            forget_frames(error)
            await sender.end(sse.error_frames(error))
        finally:
            sender.stop()
            self._flushing.record({REQUEST_ID: self._transcriber.recording.job.request_id})

    async def _stream(
        self, sender: ResponseSender, transcripts: AsyncIterator[tuple[Transcript, bool]]
    ) -> None:
        stream = TextStream(self._transcriber.recording)
        async for transcript, is_done in transcripts:
            if delta := stream.push(transcript, is_done):
                has_usage = self._fields.stream_continuous_usage_stats
                usage = self._usage() if has_usage else None
                await sender.write(sse.frame(TextDelta(delta, usage)))
        await sender.end(sse.frame(TextDone(stream.text, self._usage())) + sse.DONE)

    def _usage(self) -> AudioTokenUsage:
        charges, audio = self._transcriber.passes.charges, self._transcriber.audio_tokens
        text = charges.prompt_tokens
        if self._transcriber.recording.task.ask is not None:
            text = max(0, text - audio)  # the prompt holds those of the recording
        given, made = text + audio, charges.completion_tokens
        details = InputTokenDetails(audio_tokens=audio, text_tokens=text)
        return AudioTokenUsage(given, made, given + made, details)

    async def _answer(self, sender: ResponseSender, transcripts: list[Transcript]) -> None:
        kind = self._fields.response_format
        if kind in _TEXT_TYPES:
            await sender.answer(self._as_text(transcripts).encode(), _TEXT_TYPES[kind])
        else:
            await sender.answer(sse.encode_json(self._body(transcripts)))

    def _as_text(self, transcripts: list[Transcript]) -> str:
        kind, decode = self._fields.response_format, self._decode
        if kind == "text":
            return self._text(transcripts) + "\n"
        return (to_srt if kind == "srt" else to_vtt)(self._segments(transcripts), decode)

    def _body(self, transcripts: list[Transcript]) -> Any:
        recording = self._transcriber.recording
        usage = DurationUsage(round(recording.duration_s, 3))
        text = self._text(transcripts)
        if self._fields.response_format == "json":
            return Transcription(text, usage)
        wanted, found = self._fields.granularities, enumerate(self._segments(transcripts))
        language = recording.task.language or self._found_language(transcripts)
        return VerboseTranscription(
            self._task,
            language,
            round(recording.duration_s, 3),
            text,
            [self._segment(*each) for each in found] if "segment" in wanted else UNSET,
            usage,
            self._words(transcripts) if "word" in wanted else UNSET,
        )

    def _found_language(self, transcripts: list[Transcript]) -> str:
        """That which the model has named; a model of one language knows English."""
        if self._transcriber.recording.task.ask is None:
            return "en"
        stream = TextStream(self._transcriber.recording)
        for each in transcripts:
            stream.push(each, True)
        return stream.language or "unknown"

    def _words(self, transcripts: list[Transcript]) -> list[TranscriptionWord]:
        task = self._transcriber.recording.task
        return [
            TranscriptionWord(word.text, round(word.start_s, 3), round(word.end_s, 3))
            for transcript in transcripts
            for word in words_of(transcript, task.facts, self._decode, task.language)
        ]

    def _segment(self, number: int, segment: Segment) -> TranscriptionSegment:
        transcript, text = segment.transcript, self._decode(segment.token_ids)
        return TranscriptionSegment(
            id=number,
            seek=round(transcript.clip.start_s * 100),
            start=round(segment.start_s, 3),
            end=round(segment.end_s, 3),
            text=text,
            tokens=list(segment.token_ids),
            temperature=transcript.temperature,
            avg_logprob=transcript.logprob,
            compression_ratio=compression_ratio(text),
            no_speech_prob=transcript.no_speech or 0.0,
        )

    def _segments(self, transcripts: list[Transcript]) -> list[Segment]:
        facts = self._transcriber.recording.task.facts
        return [each for transcript in transcripts for each in segments_of(transcript, facts)]

    def _text(self, transcripts: list[Transcript]) -> str:
        stream = TextStream(self._transcriber.recording)
        return "".join(stream.push(each, True) for each in transcripts).strip()

    def _decode(self, ids: Sequence[int]) -> str:
        recording = self._transcriber.recording
        text = recording.text.vocabulary.decode(ids)
        return text if recording.task.ask is None else spoken(text, recording.task.facts).strip()
