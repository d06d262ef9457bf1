"""The process that reads the images of chats.

`python -m ...decode_child <seconds> <bytes of memory> <pixels of an image> <checkpoint>`.
"""

import io
import sys
from functools import partial
from pathlib import Path

from PIL import Image

from tokenmesh.services.tokenizer_svc.loading import forbid_torch
from tokenmesh.services.tokenizer_svc.media.image_file import FORMATS, decode_image
from tokenmesh.services.tokenizer_svc.media.jobs import (
    Prepare,
    answer,
    file_of,
    job_of,
    options_of,
    serve_jobs,
)
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.media import IMAGE


def prepare_image(job: bytes, processor: ItemProcessor, max_pixels: int) -> bytes:
    """An encoded PreparedItem. Raises InvalidInput or PayloadTooLarge."""
    options = options_of(job)
    processor.check(options)
    image = decode_image(file_of(job), max_pixels)
    try:
        return processor.image(image, options).encode()
    except MemoryError:
        raise
    except Exception as error:  # whatever a processor raises about sizes and options
        raise InvalidInput(f"the image cannot be preprocessed: {error}") from error


def _load_ahead(prepare: Prepare) -> None:
    """Import what pillow and the processor load lazily: later no file can be opened."""
    for name in FORMATS:
        file = io.BytesIO()
        Image.new("RGB", (64, 48)).save(file, name)
        answer(prepare, IMAGE, job_of(file.getvalue()))


def main(time_s: float, memory_bytes: int, max_pixels: int, checkpoint: Path) -> None:
    """Serve until stdin ends."""
    forbid_torch()
    prepare = partial(prepare_image, processor=ItemProcessor(checkpoint), max_pixels=max_pixels)
    _load_ahead(prepare)
    serve_jobs(prepare, IMAGE, time_s, memory_bytes)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
