"""Video files to frames: which containers and codecs are read, and within which bounds.

FFmpeg reads them, through PyAV. A file is given only to the reader of the container that its first
bytes name.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import numpy
import numpy.typing as npt

from tokenmesh.services.tokenizer_svc.media.audio_file import container_of
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

if TYPE_CHECKING:
    import av.container
    import av.video

Frame = npt.NDArray[numpy.uint8]
"""[height, width, 3], RGB."""

NAMES: Final = "H.264, H.265, VP8, VP9, AV1 and MPEG-4 in MP4 and WebM"
_FORMATS: Final = {"mp4": "mov", "webm": "matroska"}
_CODECS: Final = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4"})
_MAX_RATE: Final = 1_000


class VideoLimits(msgspec.Struct, frozen=True):
    """Bounds of one file, and of the part of it that a model gets."""

    max_s: float
    max_pixels: int
    """Width times height of a frame of the file."""
    max_frames: int
    """That are taken of the file."""
    max_total_pixels: int
    """The bound of all frames together, resized for the model."""


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """The facts that a file states about its video."""

    num_frames: int
    fps: float
    height: int
    width: int


class VideoFile:
    """An open file. Frames are decoded one after the other, once."""

    def __init__(
        self, file: "av.container.InputContainer", stream: "av.video.VideoStream", facts: VideoFacts
    ) -> None:
        self._file = file
        self._stream = stream
        self.facts = facts

    def frames(self, indices: Sequence[int]) -> Iterator[Frame]:
        """The frame of each index; the indices never fall. Raises InvalidInput."""
        place, number = 0, -1
        for frame in self._file.decode(self._stream):
            number += 1
            if number < indices[place]:
                continue
            if (frame.height, frame.width) != (self.facts.height, self.facts.width):
                raise InvalidInput("the video changes its size, which is not supported")
            if frame.is_corrupt:
                raise InvalidInput(f"the video is damaged: frame {number} is corrupt")
            picture = numpy.asarray(frame.to_ndarray(format="rgb24"), dtype=numpy.uint8)
            while indices[place] == number:
                yield picture
                place += 1
                if place == len(indices):
                    return
        raise InvalidInput(
            f"the video is cut off: it declares {self.facts.num_frames} frames, and {number + 1} "
            "can be decoded"
        )


@contextmanager
def open_video(data: bytes, limits: VideoLimits) -> Iterator[VideoFile]:
    """The first video of a file. Raises InvalidInput or PayloadTooLarge, also within the block."""
    try:
        import av
    except ImportError as error:
        raise InvalidInput(
            "videos are not read by this server: it lacks PyAV, which tokenmesh-server[media] "
            "installs"
        ) from error
    container = container_of(data)
    if container not in _FORMATS:
        raise InvalidInput(f"the file is not a video of a known format ({NAMES})")
    try:
        # tags in another encoding than UTF-8 are not read
        with av.open(
            io.BytesIO(data), "r", format=_FORMATS[container], metadata_errors="replace"
        ) as file:
            if not file.streams.video:
                raise InvalidInput("the file holds no video")
            stream = file.streams.video[0]
            yield VideoFile(file, stream, _facts_of(file, stream, limits))
    except av.FFmpegError as error:
        raise InvalidInput(f"the {container} file is damaged: {error.strerror}") from error


def _facts_of(
    file: "av.container.InputContainer", stream: "av.video.VideoStream", limits: VideoLimits
) -> VideoFacts:
    codec = stream.codec_context
    # PyAV's types do not say that it is None for a codec that FFmpeg does not know
    if getattr(codec, "name", None) is None:
        raise InvalidInput(f"the codec is not known; supported are {NAMES}")
    if codec.name not in _CODECS:
        raise InvalidInput(f"the codec {codec.name} is not supported; supported are {NAMES}")
    codec.thread_count = 1  # a confined process starts no threads
    width, height = codec.width, codec.height
    if width < 1 or height < 1:
        raise InvalidInput("the video declares no size")
    if width * height > limits.max_pixels:
        raise PayloadTooLarge(
            f"a frame of the video has {width}x{height} pixels, at most {limits.max_pixels} in all "
            "(tokenizer.media.max_pixels)"
        )
    fps = float(stream.average_rate or 0)
    if not 0 < fps <= _MAX_RATE:
        raise InvalidInput(f"the video has no rate of frames up to {_MAX_RATE} a second")
    num_frames = stream.frames or _count(file, stream)
    if num_frames < 1:
        raise InvalidInput("the file holds no frames")
    seconds = num_frames / fps
    if seconds > limits.max_s:
        raise PayloadTooLarge(
            f"the video is {seconds:.0f} s long, at most {limits.max_s:g} s "
            "(tokenizer.media.max_video_s)"
        )
    return VideoFacts(num_frames, fps, height, width)


def _count(file: "av.container.InputContainer", stream: "av.video.VideoStream") -> int:
    """Frames of a container that does not state them, such as WebM, without decoding them."""
    count = sum(1 for packet in file.demux(stream) if packet.size)
    file.seek(0)
    return count
