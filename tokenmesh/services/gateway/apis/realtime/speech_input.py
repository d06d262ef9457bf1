"""SpeechInput: the audio of a session becomes items, and their transcripts, one after the other."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from tokenmesh.services.gateway.apis.audio.request import TranscriptionRequest
from tokenmesh.services.gateway.apis.audio.speech_transcriber import wav_of
from tokenmesh.services.gateway.apis.openai.translation import Json
from tokenmesh.services.gateway.apis.realtime.audio_input import (
    AudioConfig,
    InputBuffer,
    InputTranscription,
    SpeechStarted,
)
from tokenmesh.services.gateway.apis.realtime.conversation import (
    Item,
    RealtimeConversation,
    StoredRecording,
)
from tokenmesh.services.gateway.apis.realtime.errors import ResponseActive
from tokenmesh.services.gateway.apis.realtime.events import Channel, ResponseCreate
from tokenmesh.services.gateway.apis.realtime.item_transcript import ItemTranscripts, LiveTranscript
from tokenmesh.services.gateway.apis.realtime.services import RealtimeServices
from tokenmesh.services.gateway.apis.realtime.session_config import SessionConfig
from tokenmesh.services.gateway.apis.realtime.vllm_dialect import DONE
from tokenmesh.services.gateway.core.files.uploads import NewFile, new_file_id
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.http.event_loop import Turns, off_loop
from tokenmesh.services.gateway.core.tenancy.tenant import Access
from tokenmesh.shared.base64_text import decode_base64
from tokenmesh.shared.errors import Cancelled, Overloaded, TokenMeshError
from tokenmesh.shared.ids import new_request_id

_LONG_CHARS: Final = 256 * 1024
"""It bounds the length of base64 that is decoded in a thread."""
_MAX_WAITING: Final = 8
"""Items of a session that wait to be transcribed."""


@dataclass(slots=True)
class _Turn:
    """An item with audio, to be transcribed or to be answered."""

    item: Item
    audio: bytes
    config: AudioConfig
    is_answered: bool
    live: LiveTranscript | None = None
    """It holds what has transcribed it while it arrived."""
    event: ResponseCreate | None = None
    """The client's, which waits for the transcript."""
    is_done: bool = False
    is_last: bool = False
    """It tells whether vLLM's client gets the whole text after it."""


class SpeechInput:
    """The input audio of one session. `run` must be running."""

    def __init__(
        self,
        services: RealtimeServices,
        channel: Channel,
        conversation: RealtimeConversation,
        access: Access,
        config: SessionConfig,
        on_start: Callable[[], None],
        on_turn: Callable[[ResponseCreate], Awaitable[None]],
    ) -> None:
        """`on_start`: speech has begun that interrupts; `on_turn`: an item is to be answered."""
        self._services = services
        self._channel = channel
        self._conversation = conversation
        self._access = access
        self._session = config
        self._on_start = on_start
        self._on_turn = on_turn
        self._buffer = self._new_buffer()
        self._item_id = new_request_id("item")
        self._waiting: asyncio.Queue[_Turn] = asyncio.Queue(_MAX_WAITING)
        self._newest: _Turn | None = None
        self._transcripts = ItemTranscripts(services, channel, access)
        self._live: LiveTranscript | None = None
        """This is the transcript of the next item."""
        self._lives: set[LiveTranscript] = set()
        """That and those of items that wait."""
        self._usage: Counter[str] = Counter()
        """Tokens of the text that vLLM's client has not got whole."""

    def _new_buffer(self) -> InputBuffer:
        max_s = self._services.core.settings.realtime_max_audio_s
        audio, is_vllm = self._session.audio, self._session.is_vllm
        return InputBuffer(audio.rate, max_s, audio.detection, keeps_silence=is_vllm)

    async def configure(self, config: SessionConfig) -> None:
        """Audio that is not committed is dropped if its format changes."""
        before, self._session = self._session.audio, config
        is_other = config.audio.rate != before.rate
        if is_other or (before.detection is None and config.audio.detection is not None):
            await self._drop_live()
        if is_other:
            self._buffer = self._new_buffer()
        self._buffer.detection = config.audio.detection

    async def append(self, text: str) -> None:
        """Base64 of samples. Raises InvalidInput."""
        data = await off_loop(len(text) > _LONG_CHARS, _decoded, text)
        turns, detection = Turns(), self._session.audio.detection
        self._buffer.cuts_at_pauses = self._takes_item
        for event in self._buffer.append(data):
            await turns.rest()
            if isinstance(event, SpeechStarted):
                await self._channel.send(self._speech_event("started", audio_start_ms=event.at_ms))
                if detection is not None and detection.interrupt_response:
                    self._on_start()
                self._follow_speech()
            elif event is not None:
                await self._channel.send(self._speech_event("stopped", audio_end_ms=event.at_ms))
                await self._commit(event.audio, is_turn=True)
            self._buffer.cuts_at_pauses = self._takes_item
        if data and (detection is None or self._session.is_vllm):
            self._follow_speech()
        if self._live is not None:
            self._live.append(self._buffer.read())

    async def commit(self) -> None:
        """The client ends an item. Raises EmptyBuffer."""
        await self._commit(self._buffer.commit(), is_turn=False)

    @property
    def _takes_item(self) -> bool:
        """Return whether an item may begin: in vLLM's dialect one at a time, as its texts name no
        item.
        """
        is_idle = self._newest is None or self._newest.is_done
        return is_idle or not self._session.is_vllm

    async def finish(self) -> None:
        """A client of vLLM ends its audio, and waits for the whole text."""
        if not self._buffer.is_empty:
            await self._commit(self._buffer.commit(), is_turn=False)
        if self._newest is None or self._newest.is_done:
            await self._send_done()
        else:
            self._newest.is_last = True

    async def _send_done(self) -> None:
        usage, self._usage = self._usage, Counter()
        given, made = usage["prompt_tokens"], usage["completion_tokens"]
        counts = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
        await self._channel.send({"type": DONE, "usage": counts})

    async def clear(self) -> None:
        self._buffer.clear()
        await self._drop_live()
        await self._channel.send({"type": "input_audio_buffer.cleared"})

    def _speech_event(self, kind: str, **times: int) -> Json:
        kind = f"input_audio_buffer.speech_{kind}"
        return {"type": kind, "item_id": self._item_id, **times}

    async def _commit(self, audio: bytes, *, is_turn: bool) -> None:
        """`is_turn`: the end of the audio was detected, which may start an answer."""
        config, item_id, live = self._session.audio, self._item_id, self._live
        self._item_id, self._live = new_request_id("item"), None
        if live is not None:
            config = replace(config, transcription=live.wanted)
            live.end(audio)
        try:
            await self._add_item(item_id, audio, config, live, is_turn=is_turn)
        except TokenMeshError:
            if live is not None:
                await self._cancel(live)
            raise

    async def _add_item(
        self,
        item_id: str,
        audio: bytes,
        config: AudioConfig,
        live: LiveTranscript | None,
        *,
        is_turn: bool,
    ) -> None:
        content = {"type": "input_audio", "transcript": None}
        fields = {"object": "realtime.item", "status": "completed", "type": "message"}
        view = {"id": item_id, **fields, "role": "user", "content": [content]}
        item = Item(view, await self._stored(audio))
        previous_id = None if self._session.is_vllm else self._conversation.add(item)
        place = {"previous_item_id": previous_id}
        await self._channel.send(
            {"type": "input_audio_buffer.committed", "item_id": item_id, **place},
            {"type": "conversation.item.added", "item": item.view, **place},
            {"type": "conversation.item.done", "item": item.view, **place},
        )
        detection = config.detection
        is_answered = is_turn and detection is not None and detection.create_response
        is_answered &= not self._session.is_transcription
        turn = _Turn(item, audio, config, is_answered, live)
        try:
            self._waiting.put_nowait(turn)
            self._newest = turn
        except asyncio.QueueFull:
            if live is not None:
                await self._cancel(live)
            problem = Overloaded(f"{_MAX_WAITING} items wait to be transcribed")
            await self._transcripts.send_failed(item_id, problem)

    async def _stored(self, audio: bytes) -> StoredRecording | None:
        """The audio as a file of the tenant; None where no model hears it.

        Raises InvalidInput for too much audio, and Unavailable during an outage of Redis.
        """
        if self._session.is_transcription or not await self._is_heard():
            return None
        data = await off_loop(len(audio) > _LONG_CHARS, wav_of, audio, self._session.audio.rate)
        self._conversation.check_recording(len(data))
        new = NewFile(
            id=new_file_id(),
            filename="speech.wav",
            purpose="user_data",
            owner=self._access.tenant.name,
            ttl_s=self._services.core.settings.file_ttl_s,
        )
        await self._services.core.uploads.add_data(new, data, self._access.tenant)
        return StoredRecording(new.id, len(data))

    async def _is_heard(self) -> bool:
        try:
            card = await self._services.core.mesh.catalog.find_soon(self._session.model)
        except TokenMeshError:
            return False  # the response reports it
        return card.takes_audio

    async def release(self) -> None:
        """Stop all transcripts and remove the files of the session."""
        for live in list(self._lives):
            await self._cancel(live)
        with suppress(TokenMeshError):
            for each in self._conversation.recordings():
                await self._services.core.uploads.remove(each.file_id, self._access)

    def holds(self, event: ResponseCreate) -> bool:
        """Return whether a response waits for the newest item's transcript, and `run` starts it.

        Raises ResponseActive where another one does.
        """
        turn = self._newest
        if turn is None or turn.is_done or turn.config.transcription is None:
            return False
        if turn.item.recording is not None or (event.response and event.response.input is not None):
            return False
        if turn.event is not None:
            raise ResponseActive(
                "a response.create already waits for the transcript of the input audio"
            )
        turn.event = event
        return True

    async def run(self) -> None:
        """Transcribe and answer item after item until cancelled."""
        while True:
            turn = await self._waiting.get()
            is_known = await self._is_transcribed(turn)
            turn.is_done = True
            if turn.is_last:
                await self._send_done()
            if turn.event is not None or (turn.is_answered and is_known):
                await self._on_turn(turn.event or ResponseCreate(type="response.create"))

    async def _is_transcribed(self, turn: _Turn) -> bool:
        """False where its transcript has failed."""
        if turn.config.transcription is None:
            return True
        try:
            await self._transcribe(turn, turn.config.transcription)
        except Cancelled:
            raise
        except TokenMeshError as error:
            await self._transcripts.send_failed(turn.item.id, error)
            return False
        finally:
            if turn.live is not None:
                self._lives.discard(turn.live)
        return True

    async def _transcribe(self, turn: _Turn, wanted: InputTranscription) -> None:
        item_id, found = turn.item.id, None
        if turn.live is not None:
            found = await turn.live.result()
        if found is None:
            fields = self._fields(wanted)
            found = await self._transcripts.whole(item_id, fields, turn.audio, turn.config.rate)
        turn.item.change(content=[{"type": "input_audio", "transcript": found.text}])
        self._usage.update(found.tokens)
        await self._transcripts.send_completed(item_id, found)

    def _fields(self, wanted: InputTranscription) -> TranscriptionRequest:
        return TranscriptionRequest(
            model=wanted.model or self._session.model,
            language=wanted.language,
            prompt=wanted.prompt,
            stream=True,
        )

    def _follow_speech(self) -> None:
        """Transcribe the next item while its audio arrives, where the model can."""
        wanted = self._session.audio.transcription
        if wanted is None or self._live is not None or not self._takes_item:
            return
        fields, rate = self._fields(wanted), self._session.audio.rate
        self._live = LiveTranscript(self._transcripts, self._item_id, wanted, fields, rate)
        self._lives.add(self._live)

    async def _drop_live(self) -> None:
        """The audio of the next item is gone, or is to be transcribed otherwise."""
        live, self._live = self._live, None
        if live is not None:
            self._item_id = new_request_id("item")
            await self._cancel(live)

    async def _cancel(self, live: LiveTranscript) -> None:
        self._lives.discard(live)
        await live.cancel()


def _decoded(text: str) -> bytes:
    try:
        return decode_base64(text)
    except ValueError as error:
        raise invalid("audio", "is not base64") from error
