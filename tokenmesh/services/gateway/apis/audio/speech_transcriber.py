"""SpeechTranscriber: speech becomes text while it goes on, by a model that writes as it listens.

Speech holds the samples as they arrive. Part after part of it is encoded. After each part the model
writes as many tokens as it has heard, in a request whose prompt is all that it has written before:
the prefix cache of the worker holds what was computed, and any worker can go on.
"""

import asyncio
import io
import wave
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from tokenmesh.services.gateway.apis.audio.clip_passes import RecordingRun
from tokenmesh.services.gateway.apis.audio.prompts import part_of_speech
from tokenmesh.services.gateway.apis.audio.segments import Transcript
from tokenmesh.services.gateway.core.generation.request import PromptJob
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.errors import NotFound, Unavailable
from tokenmesh.shared.hashing import ROUTE_BLOCK_TOKENS, chain_head, route_hashes, route_scope
from tokenmesh.shared.ids import BlobKey, RequestId
from tokenmesh.shared.messages import PrepareSpeech, SpeechPrepared
from tokenmesh.shared.messages.audio import AudioClip
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.tokenize import IdsPrompt, Tokenized
from tokenmesh.shared.telemetry import REQUEST_ID, span
from tokenmesh.shared.tokens import pack_ids

REALTIME_PART_S: Final = 0.48
"""Least audio of the next part of speech that is transcribed while it goes on."""

BYTES_PER_SAMPLE: Final = 2


@dataclass(slots=True)
class Speech:
    """Samples of 16 bits, little-endian, mono. The caller bounds how many there are."""

    rate: int
    is_over: bool = False
    _data: bytearray = field(default_factory=bytearray)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_samples(self) -> int:
        """Samples that have arrived."""
        return len(self._data) // BYTES_PER_SAMPLE

    def append(self, data: bytes) -> None:
        """Take samples that have arrived."""
        self._data += data
        self._changed.set()

    def end(self, whole: bytes) -> None:
        """It is over; `whole`: all its samples."""
        self._data = bytearray(whole)
        self.is_over = True
        self._changed.set()

    def read(self, first: int, end: int) -> bytes:
        """The samples [first, end)."""
        return bytes(self._data[first * BYTES_PER_SAMPLE : end * BYTES_PER_SAMPLE])

    async def wait(self, num_samples: int) -> bool:
        """Wait until there are so many samples, or the speech is over; whether there are.

        The session of the speech ends the wait, which has a time limit.
        """
        while self.num_samples < num_samples and not self.is_over:
            self._changed.clear()
            await self._changed.wait()
        return self.num_samples >= num_samples


def wav_of(audio: bytes, rate: int) -> bytes:
    """A WAV file of samples of one channel."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(BYTES_PER_SAMPLE)
        writer.setframerate(rate)
        writer.writeframes(audio)
    return file.getvalue()


_MAX_RESTARTS: Final = 2
"""It bounds the restarts of a clip some of whose parts are gone: it is encoded again from its
beginning."""


@dataclass(slots=True)
class _Clip:
    """Speech of at most a window, as far as it is encoded. Samples count from `start`."""

    start: int
    """Its first sample in the speech."""
    transcript: Transcript
    items: list[MediaItem] = field(default_factory=list)
    num_heard: int = 0
    """Tokens that the items are added to."""
    num_samples: int = 0
    """Whose features were requested."""
    next_sample: int = 0
    """The first one that the next part needs."""
    is_whole: bool = False

    def add(self, prepared: SpeechPrepared) -> None:
        """The next part, if there is one."""
        self.next_sample = prepared.next_sample
        if (part := prepared.part) is not None:
            follows = self.items[-1].content_hash if self.items else ""
            self.items.append(part_of_speech(part, self.num_heard, follows))
            self.num_heard += part.num_tokens

    def restart(self) -> None:
        """Forget what was encoded; the text stays."""
        self.items = []
        self.num_heard = self.num_samples = self.next_sample = 0
        self.is_whole = False


@dataclass(slots=True)
class SpeechTranscriber(RecordingRun):
    """Transcribes one speech; used once."""

    speech: Speech
    _num_passes: int = 0

    async def run(self) -> AsyncGenerator[tuple[Transcript, bool], None]:
        """Transcripts as they grow, clip after clip; True: the clip is complete."""
        speech, start, num_clips = self.speech, 0, 0
        window = int(self.recording.task.facts.window_s * speech.rate)
        try:
            while await speech.wait(start + 1):
                num_clips += 1
                async with aclosing(self._follow(_new_clip(start, speech.rate))) as growing:
                    async for each in growing:
                        yield each
                start += window
        finally:
            self._charge_clips(num_clips)

    async def _follow(self, clip: _Clip) -> AsyncGenerator[tuple[Transcript, bool], None]:
        """One clip, until it ends or the model ends the text."""
        num_restarts = 0
        while True:
            try:
                await self._hear(clip)
                async with aclosing(self._write(clip)) as growing:
                    async for is_ended in growing:
                        yield clip.transcript, is_ended
                        if is_ended:
                            return
            except (NotFound, Unavailable):
                num_restarts += 1
                if num_restarts > _MAX_RESTARTS:
                    raise
                clip.restart()
                continue
            if clip.is_whole:
                yield clip.transcript, True
                return

    async def _hear(self, clip: _Clip) -> None:
        """Wait for more of the clip, and have its features made."""
        speech = self.speech
        window = int(self.recording.task.facts.window_s * speech.rate)
        step = int(REALTIME_PART_S * speech.rate)
        await speech.wait(clip.start + min(window, clip.num_samples + step))
        end = min(speech.num_samples, clip.start + window)
        clip.is_whole = end == clip.start + window or speech.is_over
        clip.num_samples = end - clip.start
        clip.add(await self._prepare(clip, speech.read(clip.start + clip.next_sample, end)))

    async def _prepare(self, clip: _Clip, samples: bytes) -> SpeechPrepared:
        """Each part of a speech has a request's time."""
        recording, settings = self.recording, self.settings
        recording.job = replace(recording.job, deadline_s=now_s() + settings.request_timeout_s)
        job = recording.job
        message = PrepareSpeech(
            request_id=job.request_id,
            model=job.card.name,
            source=await self.blobs.put(samples, ttl_s=int(settings.request_timeout_s) + 1),
            rate=self.speech.rate,
            first_sample=clip.next_sample,
            first_token=clip.num_heard,
            follows=clip.items[-1].content_hash if clip.items else "",
            is_end=clip.is_whole,
            tenant=job.tenant.name,
        )
        with span("prepare_audio", {REQUEST_ID: job.request_id}) as current:
            prepared = await self._prepare_audio(message, SpeechPrepared)
            current.set_attribute("tokenmesh.clips", 0 if prepared.part is None else 1)
        return prepared

    async def _write(self, clip: _Clip) -> AsyncGenerator[bool, None]:
        """Have the model write as many tokens as it has heard. Yields after each addition to the
        transcript, True where it ends the text."""
        job = self._job(clip)
        if job is None:
            return
        async with self.passes.deliver([job]) as delivery:
            # with their embeddings, which the next request needs not have made
            clip.items = list(delivery.prompts[0].media)
            async for chunks in delivery.chunks():
                self.meter.flush(delivery.prompts)
                for chunk in chunks:
                    clip.transcript.token_ids += chunk.token_ids
                    yield chunk.finish_reason == "stop"
            if clip.is_whole:
                self.meter.finish(delivery.prompts, delivery.choices)

    def _job(self, clip: _Clip) -> PromptJob | None:
        """The request for what the model writes next; None: it has heard nothing more."""
        job, facts = self.recording.job, self.recording.task.facts
        ids = [*facts.prompt_ids, *clip.transcript.token_ids]
        if clip.num_heard <= len(ids):
            return None
        self._num_passes += 1
        packed, scope = pack_ids(ids), route_scope(job.card.name, "", ROUTE_BLOCK_TOKENS)
        hashes = route_hashes(
            packed, ROUTE_BLOCK_TOKENS, scope, salt=job.cache_salt, media=clip.items
        )
        return replace(
            job,
            request_id=RequestId(f"{job.request_id}-{self._num_passes}"),
            prompt=IdsPrompt(token_ids=packed),
            tokenized=Tokenized(
                token_ids=packed,
                media=clip.items,
                route_hashes=hashes,
                route_head=chain_head(scope),
            ),
            sampling=msgspec.structs.replace(job.sampling, temperature=0.0),
            max_tokens=clip.num_heard - len(ids),
            cuts_max_tokens=True,
        )

    def _charge_clips(self, num_clips: int) -> None:
        """All requests count as one, and its prompt once for each clip."""
        facts, charges = self.recording.task.facts, self.passes.charges
        seconds = self.recording.duration_s = self.speech.num_samples / self.speech.rate
        charges.prompt_tokens, charges.cached_tokens = len(facts.prompt_ids) * num_clips, 0
        self._charge(round(seconds / facts.timestamp_s), seconds)


def _new_clip(start: int, rate: int) -> _Clip:
    named = AudioClip(start_s=start / rate, end_s=0.0, content_hash="", features=BlobKey(""))
    return _Clip(start, Transcript(named))
