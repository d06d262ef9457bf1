"""The process that reads the recordings of chats.

`python -m ...recording_child <seconds> <bytes of memory> <seconds of audio> <checkpoint>`.
"""

import sys
from functools import partial
from pathlib import Path

from tokenmesh.services.tokenizer_svc.loading import forbid_torch
from tokenmesh.services.tokenizer_svc.media.audio_child import load_codecs
from tokenmesh.services.tokenizer_svc.media.audio_file import AudioLimits, decode_audio
from tokenmesh.services.tokenizer_svc.media.jobs import answer, file_of, job_of, serve_jobs
from tokenmesh.services.tokenizer_svc.media.recordings import RecordingProcessor
from tokenmesh.shared.messages.media import AUDIO


def prepare_recording(job: bytes, processor: RecordingProcessor, limits: AudioLimits) -> bytes:
    """An encoded PreparedItem. Raises InvalidInput or PayloadTooLarge."""
    return processor(decode_audio(file_of(job), processor.rate, limits)).encode()


def main(time_s: float, memory_bytes: int, max_s: float, checkpoint: Path) -> None:
    """Serve until stdin ends."""
    forbid_torch()
    processor = RecordingProcessor(checkpoint)
    prepare = partial(prepare_recording, processor=processor, limits=AudioLimits(max_s))
    load_codecs(processor.rate, lambda data: answer(prepare, AUDIO, job_of(data)))
    serve_jobs(prepare, AUDIO, time_s, memory_bytes)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
