"""The decoding process: reads image files from stdin, writes pixels to stdout, until stdin ends.

Regardless of what a file makes the decoders do, the kernel ends it when the alarm of a job goes
off, and refuses memory beyond its address space, files, connections and further processes.
`python -m ...decode_child <seconds> <bytes of memory> <pixels of an image> <checkpoint>`.
"""

import io
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy
from PIL import Image

from tokenmesh.services.tokenizer_svc.loading import ImageProcessor, load_image_processor
from tokenmesh.services.tokenizer_svc.media.image import FORMATS, decode_image
from tokenmesh.services.tokenizer_svc.torch_free import forbid_torch
from tokenmesh.shared.child_pool import serve
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge
from tokenmesh.shared.tensor_blob import TensorBlob

PIXELS: Final = b"p"
INVALID: Final = b"i"
TOO_LARGE: Final = b"l"
"""First byte of an answer; a TensorBlob follows the first, a text the others."""


def pixel_blob(data: bytes, processor: ImageProcessor, max_pixels: int) -> bytes:
    """A file's pixels as the model takes them. Raises InvalidInput or PayloadTooLarge."""
    image = decode_image(data, max_pixels)
    try:
        pixels = processor(image)
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"the image cannot be preprocessed: {error}") from error
    little = numpy.ascontiguousarray(pixels, dtype="<f4")
    return TensorBlob("float32", little.shape, little.tobytes()).encode()


def answer(data: bytes, processor: ImageProcessor, max_pixels: int) -> bytes:
    """Carry out one job; every failure is an answer."""
    try:
        return PIXELS + pixel_blob(data, processor, max_pixels)
    except PayloadTooLarge as error:
        return TOO_LARGE + error.message.encode()
    except InvalidInput as error:
        return INVALID + error.message.encode()
    except MemoryError:
        return TOO_LARGE + b"the image needs more memory than decoding may take"


def _load_ahead(processor: ImageProcessor, max_pixels: int) -> None:
    """Import what pillow and the processor load when they first need it: later no file opens."""
    for name in FORMATS:
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, name)
        answer(file.getvalue(), processor, max_pixels)


def _confine(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for limit in (
        resource.RLIMIT_FSIZE,
        resource.RLIMIT_CORE,
        resource.RLIMIT_NOFILE,
        resource.RLIMIT_NPROC,
    ):
        resource.setrlimit(limit, (0, 0))


def main(time_s: float, memory_bytes: int, max_pixels: int, checkpoint: Path) -> None:
    """Serve until stdin ends."""
    forbid_torch()
    processor = load_image_processor(checkpoint)
    _load_ahead(processor, max_pixels)
    _confine(memory_bytes)

    def prepare(data: bytes) -> Callable[[], bytes]:
        return lambda: answer(data, processor, max_pixels)

    serve(sys.stdin.buffer, sys.stdout.buffer, time_s, prepare)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
