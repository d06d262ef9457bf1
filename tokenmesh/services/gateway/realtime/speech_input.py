"""SpeechInput: the audio of a session becomes items, and their transcripts, one after the other."""

import asyncio
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from tokenmesh.services.gateway.audio.request import TranscriptionRequest
from tokenmesh.services.gateway.audio.text_stream import TextStream
from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.http.event_loop import Turns, off_loop
from tokenmesh.services.gateway.openai.translation import Json
from tokenmesh.services.gateway.realtime.audio_config import AudioConfig, InputTranscription
from tokenmesh.services.gateway.realtime.channel import Channel, error_view
from tokenmesh.services.gateway.realtime.conversation import Item, RealtimeConversation
from tokenmesh.services.gateway.realtime.session_config import SessionConfig
from tokenmesh.services.gateway.realtime.voice_activity import InputBuffer, SpeechStarted
from tokenmesh.services.gateway.tenancy.tenant import Access
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import Cancelled, InvalidInput, Overloaded, TokenMeshError
from tokenmesh.shared.ids import RequestId, new_request_id

_LONG_CHARS: Final = 256 * 1024
"""Of base64 that is decoded in a thread."""
_MAX_WAITING: Final = 8
"""Items of a session that wait to be transcribed."""
_EVENT: Final = "conversation.item.input_audio_transcription"


@dataclass(frozen=True, slots=True)
class _Turn:
    """An item with audio, to be transcribed or to be answered."""

    item: Item
    audio: bytes
    config: AudioConfig
    is_answered: bool


class SpeechInput:
    """The input audio of one session. `run` must be running."""

    def __init__(
        self,
        gateway: Gateway,
        channel: Channel,
        conversation: RealtimeConversation,
        access: Access,
        config: SessionConfig,
        on_start: Callable[[], None],
        on_turn: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_start`: speech has begun that interrupts; `on_turn`: an item is to be answered."""
        self._gateway = gateway
        self._channel = channel
        self._conversation = conversation
        self._access = access
        self._config = config.audio
        self._model = config.model
        self._on_start = on_start
        self._on_turn = on_turn
        self._buffer = self._new_buffer()
        self._item_id = new_request_id("item")
        self._waiting: asyncio.Queue[_Turn] = asyncio.Queue(_MAX_WAITING)

    def _new_buffer(self) -> InputBuffer:
        max_s = self._gateway.settings.realtime_max_audio_s
        return InputBuffer(self._config.rate, max_s, self._config.detection)

    def configure(self, config: SessionConfig) -> None:
        """Audio that is not committed is dropped if its format changes."""
        is_other, self._config = config.audio.rate != self._config.rate, config.audio
        self._model = config.model
        if is_other:
            self._buffer = self._new_buffer()
        self._buffer.detection = config.audio.detection

    async def append(self, text: str) -> None:
        """Base64 of samples. Raises InvalidInput."""
        data = await off_loop(len(text) > _LONG_CHARS, _decoded, text)
        turns = Turns()
        for event in self._buffer.append(data):
            await turns.rest()
            if isinstance(event, SpeechStarted):
                await self._channel.send(self._speech_event("started", audio_start_ms=event.at_ms))
                if self._config.detection is not None and self._config.detection.interrupt_response:
                    self._on_start()
            elif event is not None:
                await self._channel.send(self._speech_event("stopped", audio_end_ms=event.at_ms))
                await self._commit(event.audio, is_turn=True)

    async def commit(self) -> None:
        """The client ends an item. Raises EmptyBuffer."""
        await self._commit(self._buffer.commit(), is_turn=False)

    async def clear(self) -> None:
        self._buffer.clear()
        await self._channel.send({"type": "input_audio_buffer.cleared"})

    def _speech_event(self, kind: str, **times: int) -> Json:
        kind = f"input_audio_buffer.speech_{kind}"
        return {"type": kind, "item_id": self._item_id, **times}

    async def _commit(self, audio: bytes, *, is_turn: bool) -> None:
        """`is_turn`: the end of the audio was detected, which may start an answer."""
        config, item_id = self._config, self._item_id
        self._item_id = new_request_id("item")
        content = {"type": "input_audio", "transcript": None}
        fields = {"object": "realtime.item", "status": "completed", "type": "message"}
        item = Item({"id": item_id, **fields, "role": "user", "content": [content]})
        previous_id = self._conversation.add(item)
        place = {"previous_item_id": previous_id}
        await self._channel.send(
            {"type": "input_audio_buffer.committed", "item_id": item_id, **place},
            {"type": "conversation.item.added", "item": item.view, **place},
            {"type": "conversation.item.done", "item": item.view, **place},
        )
        detection = config.detection
        is_answered = is_turn and detection is not None and detection.create_response
        turn = _Turn(item, audio, config, is_answered)
        try:
            self._waiting.put_nowait(turn)
        except asyncio.QueueFull:
            await self._fail(turn, Overloaded(f"{_MAX_WAITING} items wait to be transcribed"))

    async def run(self) -> None:
        """Transcribe and answer item after item until cancelled."""
        while True:
            turn = await self._waiting.get()
            if turn.config.transcription is not None:
                try:
                    await self._transcribe(turn, turn.config.transcription)
                except Cancelled:
                    raise
                except TokenMeshError as error:
                    await self._fail(turn, error)
                    continue
            if turn.is_answered:
                await self._on_turn()

    async def _transcribe(self, turn: _Turn, wanted: InputTranscription) -> None:
        item_id, gateway = turn.item.id, self._gateway
        request_id = RequestId(new_request_id("trsc"))
        context = RequestContext(request_id, True, monotonic_s(), self._access)
        fields = TranscriptionRequest(
            model=wanted.model or self._model, language=wanted.language, prompt=wanted.prompt
        )
        place = {"item_id": item_id, "content_index": 0}
        context.lease = await gateway.admission.admit(context)
        try:
            async with gateway.transcriptions.running(
                fields, context, turn.audio, turn.config.rate
            ) as transcriber:
                stream = TextStream(transcriber)
                async with aclosing(transcriber.run(context)) as transcripts:
                    async for transcript, is_done in transcripts:
                        if delta := stream.push(transcript, is_done):
                            event = {"type": f"{_EVENT}.delta", **place, "delta": delta}
                            await self._channel.send(event)
                usage = {"type": "duration", "seconds": transcriber.recording.duration_s}
        finally:
            context.release()
        text = stream.text.strip()
        turn.item.change(content=[{"type": "input_audio", "transcript": text}])
        completed = {"type": f"{_EVENT}.completed", **place, "transcript": text, "usage": usage}
        await self._channel.send(completed)

    async def _fail(self, turn: _Turn, error: TokenMeshError) -> None:
        view = {**error_view(error), "param": error.param}
        place = {"item_id": turn.item.id, "content_index": 0}
        await self._channel.send({"type": f"{_EVENT}.failed", **place, "error": view})


def _decoded(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except (Base64Error, ValueError) as error:
        raise InvalidInput("audio is not base64", param="audio") from error
