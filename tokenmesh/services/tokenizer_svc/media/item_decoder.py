"""ItemDecoder: the processes that turn files of one kind into a model's features."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from tokenmesh.services.tokenizer_svc.media.jobs import (
    INVALID,
    NOUN,
    PREPARED,
    TOO_LARGE,
    job_of,
)
from tokenmesh.services.tokenizer_svc.media.media_model import NOUNS
from tokenmesh.services.tokenizer_svc.media.processor import PreparedItem
from tokenmesh.services.tokenizer_svc.media.video_file import VideoLimits
from tokenmesh.shared.child_pool import ChildDied, ChildLate, ChildLimits, ChildPool
from tokenmesh.shared.config.model import MediaSettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge, ProtocolError
from tokenmesh.shared.messages.media import AUDIO, IMAGE, VIDEO

_MODULE: Final = "tokenmesh.services.tokenizer_svc.media."
_CHILDREN: Final[dict[str, Callable[[MediaSettings], tuple[str, float, object]]]] = {
    IMAGE: lambda limits: (_MODULE + "decode_child", limits.decode_timeout_s, limits.max_pixels),
    VIDEO: lambda limits: (
        _MODULE + "video_child",
        limits.video_timeout_s,
        msgspec.json.encode(_video_limits(limits)).decode(),
    ),
    AUDIO: lambda limits: (_MODULE + "recording_child", limits.audio_timeout_s, limits.max_audio_s),
}
"""By kind: the module of the process, the seconds of a job, and the most that a file may hold."""

_TIME_SETTING: Final = {VIDEO: "video_timeout_s", AUDIO: "audio_timeout_s"}


def _video_limits(limits: MediaSettings) -> VideoLimits:
    """Take the bounds of a video from the settings."""
    return VideoLimits(
        max_s=limits.max_video_s,
        max_pixels=limits.max_pixels,
        max_frames=limits.max_video_frames,
        max_total_pixels=limits.max_video_pixels,
    )


class ItemDecoder:
    """Turns files of one kind into a model's features, in child processes that are killed when
    late. Tenants take turns.
    """

    def __init__(self, kind: str, limits: MediaSettings, checkpoint: Path) -> None:
        self._noun = NOUN[kind]
        self._time = f"tokenizer.media.{_TIME_SETTING.get(kind, 'decode_timeout_s')}"
        child, time_s, most = _CHILDREN[kind](limits)
        self._pool = ChildPool(
            f"{NOUNS[kind]} to be decoded",
            child,
            (str(time_s), str(limits.decode_memory_bytes), str(most), str(checkpoint)),
            ChildLimits(
                limits.decode_processes,
                limits.decode_queue,
                time_s,
                most_each=limits.decode_processes,
            ),
            b"",
        )

    async def decode(self, data: bytes, options: bytes, tenant: str) -> PreparedItem:
        """options: the JSON of `mm_processor_kwargs`, or nothing.

        Raises InvalidInput, PayloadTooLarge, Overloaded.
        """
        try:
            answer = await self._pool.ask(job_of(data, options), tenant, len(data))
        except ChildLate as error:
            raise PayloadTooLarge(
                f"{self._noun} cannot be decoded: {error.message} ({self._time})"
            ) from error
        except ChildDied as error:
            raise PayloadTooLarge(
                f"{self._noun} exceeds the limits of decoding (tokenizer.media.decode_memory_bytes)"
            ) from error
        kind, rest = answer[:1], answer[1:]
        if kind == PREPARED:
            return PreparedItem.decode(rest)
        if kind == TOO_LARGE:
            raise PayloadTooLarge(rest.decode())
        if kind == INVALID:
            raise InvalidInput(rest.decode())
        raise ProtocolError(f"unknown answer of a decoding process: {kind!r}")

    async def start(self) -> None:
        """Start the processes before the first item needs one. Raises Unavailable."""
        await self._pool.start()

    async def stop(self) -> None:
        await self._pool.stop()
