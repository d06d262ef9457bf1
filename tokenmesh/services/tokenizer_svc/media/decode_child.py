"""The process that reads the images of chats.

`python -m ...decode_child <seconds> <bytes of memory> <pixels of an image> <checkpoint>`.
"""

import io
import struct
import sys
from functools import partial
from pathlib import Path
from typing import Final

from PIL import ExifTags, Image, UnidentifiedImageError

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
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge
from tokenmesh.shared.messages.media import IMAGE

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""OpenAI's formats. For some others pillow starts programs; it decodes the run lengths of BMP byte
by byte in Python, and allocates TIFF's tiles, which may be larger than the image by any factor."""
_JPEGS: Final = ("JPEG", "MPO")
"""pillow opens a JPEG with several pictures, as phones write them, as MPO."""
_MAX_SCANS: Final = 64
"""Scans of a progressive JPEG; encoders write a dozen. Each costs a pass over all pixels."""
_SCAN: Final = b"\xff\xda"

_TURN_BY_ORIENTATION: Final[dict[object, Image.Transpose]] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What EXIF says of how the camera was held."""


def decode_image(data: bytes, max_pixels: int) -> Image.Image:
    """The first frame, upright, in RGB. Raises InvalidInput or PayloadTooLarge."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.format not in (*FORMATS, *_JPEGS):
                raise InvalidInput(f"the format {image.format} is not supported")
            width, height = image.size
            if width * height > max_pixels:
                raise PayloadTooLarge(
                    f"the image has {width}x{height} pixels, at most {max_pixels} in all"
                )
            if image.format in _JPEGS and data.count(_SCAN) > _MAX_SCANS:
                raise PayloadTooLarge(f"the image has more than {_MAX_SCANS} scans")
            return _upright(image).convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PayloadTooLarge(f"the image is too large: {error}") from error
    except UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise InvalidInput(f"the file is not an image of a known format ({known})") from error
    # The errors of pillow for damaged files depend on the format.
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        LookupError,
        TypeError,
        struct.error,
    ) as error:
        raise InvalidInput(f"the image is damaged: {error}") from error


def _upright(image: Image.Image) -> Image.Image:
    """Like ImageOps.exif_transpose, which also rewrites EXIF data and fails on invalid data."""
    image.load()
    turn = _TURN_BY_ORIENTATION.get(image.getexif().get(ExifTags.Base.Orientation))
    return image if turn is None else image.transpose(turn)


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
