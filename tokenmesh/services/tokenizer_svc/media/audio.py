"""AudioPreparer: a recording in the blob store becomes clips whose features are stored there."""

from pathlib import Path
from typing import Final

import msgspec

from tokenmesh.services.tokenizer_svc.media.audio_child import (
    DONE,
    INVALID,
    TOO_LARGE,
    AudioJob,
    Clip,
    Clips,
)
from tokenmesh.services.tokenizer_svc.media.speech_part import SpeechPart
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.child_pool import ChildDied, ChildLate, ChildLimits, ChildPool
from tokenmesh.shared.config.model import MediaSettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge, ProtocolError
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.audio import (
    AudioClip,
    AudioPrepared,
    PrepareAudio,
    PrepareSpeech,
    SpeechPrepared,
)
from tokenmesh.shared.telemetry.span import span

_CHILD: Final = "tokenmesh.services.tokenizer_svc.media.audio_child"
_FEATURES: Final = "audio:"
_MAX_CLIPS: Final = 64
"""The most clips of one message."""
_MAX_NUMBER: Final = 1 << 40
"""The most samples or tokens that a message may state."""


class AudioPreparer:
    """Prepares recordings for one model.

    Files are read in processes that are killed when late; tenants take turns.
    """

    def __init__(
        self, limits: MediaSettings, blobs: Blobs, checkpoint: Path, window_s: float
    ) -> None:
        """window_s: of the longest clip, in seconds."""
        self._limits = limits
        self._blobs = blobs
        self._pool = ChildPool(
            "recordings to be decoded",
            _CHILD,
            (
                str(limits.audio_timeout_s),
                str(limits.decode_memory_bytes),
                str(limits.max_audio_s),
                str(checkpoint),
                str(window_s),
            ),
            ChildLimits(
                limits.decode_processes,
                limits.decode_queue,
                limits.audio_timeout_s,
                most_each=limits.decode_processes,
            ),
            b"",
        )

    async def start(self) -> None:
        """Start the processes before the first recording needs one. Raises Unavailable."""
        await self._pool.start()

    async def stop(self) -> None:
        await self._pool.stop()

    async def prepare(self, message: PrepareAudio) -> AudioPrepared:
        """Raises InvalidInput, PayloadTooLarge, Overloaded, and NotFound for an expired file."""
        if not message.first >= 0 or not 1 <= message.count <= _MAX_CLIPS or message.rate < 0:
            raise ProtocolError("first, count or rate is out of range")
        data = await self._blobs.get(message.source)
        if len(data) > self._limits.max_audio_bytes:
            raise PayloadTooLarge(
                f"the file has {len(data)} bytes, at most {self._limits.max_audio_bytes} "
                "(tokenizer.media.max_audio_bytes)"
            )
        found = await self._decode(
            AudioJob(data, message.first, message.count, message.rate), message.tenant
        )
        clips = [await self._stored(clip) for clip in found.clips]
        return AudioPrepared(duration_s=found.duration_s, total=found.total, clips=clips)

    async def prepare_speech(self, message: PrepareSpeech) -> SpeechPrepared:
        """Raises as `prepare` does."""
        numbers = (message.first_sample, message.first_token, _MAX_NUMBER - message.first_sample)
        if min(numbers) < 0 or message.first_token > _MAX_NUMBER:
            raise ProtocolError("first_sample or first_token is out of range")
        data = await self._blobs.get(message.source)
        part = SpeechPart(
            message.first_sample, message.first_token, message.follows, message.is_end
        )
        found = await self._decode(AudioJob(data, 0, 1, message.rate, part), message.tenant)
        clips = [await self._stored(clip) for clip in found.clips]
        part_found = clips[0] if clips else None
        return SpeechPrepared(part=part_found, next_sample=found.next_sample)

    async def _stored(self, clip: Clip) -> AudioClip:
        key = BlobKey(_FEATURES + clip.content_hash)
        if not await self._blobs.renew(key, self._limits.ttl_s):
            await self._blobs.put(clip.features, key=key, ttl_s=self._limits.ttl_s)
        return AudioClip(
            start_s=clip.start_s,
            end_s=clip.end_s,
            content_hash=clip.content_hash,
            features=key,
            num_tokens=clip.num_tokens,
        )

    async def _decode(self, job: AudioJob, tenant: str) -> Clips:
        with span("decode_audio", {"tokenmesh.bytes": len(job.data)}):
            return await self._ask(job, tenant)

    async def _ask(self, job: AudioJob, tenant: str) -> Clips:
        try:
            answer = await self._pool.ask(msgspec.msgpack.encode(job), tenant, len(job.data))
        except ChildLate as error:
            raise PayloadTooLarge(
                f"the audio cannot be decoded: {error.message} (tokenizer.media.audio_timeout_s)"
            ) from error
        except ChildDied as error:
            raise PayloadTooLarge(
                "the audio exceeds the limits of decoding (tokenizer.media.decode_memory_bytes)"
            ) from error
        kind, rest = answer[:1], answer[1:]
        if kind == DONE:
            return msgspec.msgpack.decode(rest, type=Clips)
        if kind == TOO_LARGE:
            raise PayloadTooLarge(rest.decode())
        if kind == INVALID:
            raise InvalidInput(rest.decode())
        raise ProtocolError(f"unknown answer of a decoding process: {kind!r}")
