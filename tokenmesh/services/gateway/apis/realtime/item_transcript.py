"""The transcript of an item's audio: whole once it is committed, or live while it arrives."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from tokenmesh.services.gateway.apis.audio.clip_passes import RecordingRun
from tokenmesh.services.gateway.apis.audio.request import TranscriptionRequest
from tokenmesh.services.gateway.apis.audio.response import TextStream
from tokenmesh.services.gateway.apis.audio.segments import Transcript
from tokenmesh.services.gateway.apis.audio.speech_transcriber import Speech
from tokenmesh.services.gateway.apis.realtime.audio_input import InputTranscription
from tokenmesh.services.gateway.apis.realtime.errors import error_view
from tokenmesh.services.gateway.apis.realtime.events import Channel
from tokenmesh.services.gateway.apis.realtime.services import RealtimeServices
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.tenancy.tenant import Access
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import Cancelled, TokenMeshError
from tokenmesh.shared.ids import RequestId, new_request_id

EVENT: Final = "conversation.item.input_audio_transcription"
_COUNTED: Final = ("prompt_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True)
class FinishedTranscript:
    text: str
    seconds: float
    """This is the length of audio."""
    tokens: dict[str, int]
    """Charged for it: `prompt_tokens` and `completion_tokens`."""


@dataclass(slots=True)
class ItemTranscripts:
    """Transcribes the items of one session; each is a separate request."""

    services: RealtimeServices
    channel: Channel
    access: Access

    async def whole(
        self, item_id: str, fields: TranscriptionRequest, audio: bytes, rate: int
    ) -> FinishedTranscript:
        """Send the deltas of a whole recording. Raises TokenMeshError."""
        context = await self._admitted(self._context())
        try:
            running = self.services.transcriptions.running(fields, context, audio, rate)
            async with running as transcriber:
                stream = TextStream(transcriber.recording)
                return await self._send(item_id, transcriber.run(context), stream, transcriber)
        finally:
            context.release()

    async def live(
        self, item_id: str, fields: TranscriptionRequest, speech: Speech
    ) -> FinishedTranscript | None:
        """Send the deltas of speech while it goes on.

        None: nothing was sent, since the model needs all of it, or for an error, which transcribing
        the whole item reports if it remains. Raises TokenMeshError.
        """
        context, stream = self._context(), None
        try:
            transcriber = await self.services.transcriptions.listen(fields, context, speech)
            if transcriber is None:
                return None
            await self._admitted(context)
            stream = TextStream(transcriber.recording)
            return await self._send(item_id, transcriber.run(), stream, transcriber)
        except TokenMeshError as error:
            if isinstance(error, Cancelled) or (stream is not None and stream.text):
                raise
            return None
        finally:
            context.release()

    def _context(self) -> RequestContext:
        request_id = RequestId(new_request_id("trsc"))
        return RequestContext(request_id, True, monotonic_s(), self.access)

    async def _admitted(self, context: RequestContext) -> RequestContext:
        context.lease = await self.services.core.tenancy.admission.admit(context)
        return context

    async def _send(
        self,
        item_id: str,
        transcripts: AsyncGenerator[tuple[Transcript, bool], None],
        stream: TextStream,
        run: RecordingRun,
    ) -> FinishedTranscript:
        async with aclosing(transcripts) as growing:
            async for transcript, is_done in growing:
                if delta := stream.push(transcript, is_done):
                    place = {"item_id": item_id, "content_index": 0}
                    await self.channel.send({"type": f"{EVENT}.delta", **place, "delta": delta})
        usage = run.usage
        tokens = {} if usage is None else {name: getattr(usage, name) for name in _COUNTED}
        return FinishedTranscript(stream.text.strip(), stream.recording.duration_s, tokens)

    async def send_completed(self, item_id: str, found: FinishedTranscript) -> None:
        """The last event of a transcript."""
        usage = {"type": "duration", "seconds": found.seconds}
        place = {"item_id": item_id, "content_index": 0}
        completed = {**place, "transcript": found.text, "usage": usage}
        await self.channel.send({"type": f"{EVENT}.completed", **completed})

    async def send_failed(self, item_id: str, error: TokenMeshError) -> None:
        """The last event where there is no transcript."""
        view = {**error_view(error), "param": error.param}
        place = {"item_id": item_id, "content_index": 0}
        await self.channel.send({"type": f"{EVENT}.failed", **place, "error": view})


class LiveTranscript:
    """A task that transcribes the audio of the next item while it arrives."""

    def __init__(
        self,
        transcripts: ItemTranscripts,
        item_id: str,
        wanted: InputTranscription,
        fields: TranscriptionRequest,
        rate: int,
    ) -> None:
        self.wanted = wanted
        self._speech = Speech(rate)
        self._task = asyncio.create_task(transcripts.live(item_id, fields, self._speech))

    def append(self, data: bytes) -> None:
        """More audio, unless the model needs all of it."""
        if not self._task.done():
            self._speech.append(data)

    def end(self, audio: bytes) -> None:
        """The item is complete; `audio`: all of it."""
        self._speech.end(audio)

    async def result(self) -> FinishedTranscript | None:
        """Return what `ItemTranscripts.live` returns, or raises."""
        return await self._task

    async def cancel(self) -> None:
        """Stop; no more deltas are sent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
