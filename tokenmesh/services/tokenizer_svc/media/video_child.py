"""The process that reads the videos of chats.

`python -m ...video_child <seconds> <bytes of memory> <VideoLimits as JSON> <checkpoint>`.
"""

import io
import sys
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy

from tokenmesh.services.tokenizer_svc.loading import forbid_torch
from tokenmesh.services.tokenizer_svc.media.jobs import (
    Prepare,
    answer,
    file_of,
    job_of,
    options_of,
    serve_jobs,
)
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor
from tokenmesh.services.tokenizer_svc.media.video_file import VideoLimits, open_video
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.media import VIDEO

_RATE: Final = 16_000


def prepare_video(job: bytes, processor: ItemProcessor, limits: VideoLimits) -> bytes:
    """An encoded PreparedItem. Raises InvalidInput or PayloadTooLarge."""
    options = options_of(job)
    processor.check(options)
    data = file_of(job)
    with open_video(data, limits) as video:
        try:
            sound = processor.sound(data, options, limits.max_s)
            return processor.video(video, options, limits, sound).encode()
        except (MemoryError, InvalidInput, OSError):  # FFmpeg's errors are OSErrors, too
            raise
        except Exception as error:  # whatever a processor raises about sizes and options
            raise InvalidInput(f"the video cannot be preprocessed: {error}") from error


def _load_ahead(prepare: Prepare, *, hears: bool) -> None:
    """Import what PyAV and the processor load lazily: later no file can be opened."""
    try:
        import av
    except ImportError:
        return
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height = 64, 48
        sound = container.add_stream("aac", rate=_RATE, layout="mono")
        for _ in range(4):
            container.mux(stream.encode(av.VideoFrame(64, 48, "yuv420p")))
        container.mux(stream.encode())
        for _ in range(4):
            silence = numpy.zeros((1, sound.codec_context.frame_size), numpy.float32)
            frame = av.AudioFrame.from_ndarray(silence, format="fltp", layout="mono")
            frame.sample_rate = _RATE
            container.mux(sound.encode(frame))
        container.mux(sound.encode(None))
    options = b'{"use_audio_in_video": true}' if hears else b""
    answer(prepare, VIDEO, job_of(file.getvalue(), options))


def main(time_s: float, memory_bytes: int, limits: VideoLimits, checkpoint: Path) -> None:
    """Serve until stdin ends."""
    forbid_torch()
    processor = ItemProcessor(checkpoint)
    prepare = partial(prepare_video, processor=processor, limits=limits)
    _load_ahead(prepare, hears=processor.hears)
    serve_jobs(prepare, VIDEO, time_s, memory_bytes)


if __name__ == "__main__":
    bounds = msgspec.json.decode(sys.argv[3], type=VideoLimits)
    main(float(sys.argv[1]), int(sys.argv[2]), bounds, Path(sys.argv[4]))
