"""The decoding process: reads image files from stdin, writes features to stdout, until stdin ends.

The kernel enforces its limits for any file: it kills the process when the alarm of a job goes off,
and refuses memory beyond its address space, files, connections and further processes.
`python -m ...decode_child <seconds> <bytes of memory> <pixels of an image> <checkpoint>`.
"""

import io
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from PIL import ExifTags, Image, UnidentifiedImageError

from tokenmesh.services.tokenizer_svc.loading import forbid_torch
from tokenmesh.services.tokenizer_svc.media.confine import confine
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor, read_options
from tokenmesh.shared.child_pool import serve
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

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


PREPARED: Final = b"p"
INVALID: Final = b"i"
TOO_LARGE: Final = b"l"
"""First byte of an answer; an encoded PreparedItem follows the first, a text the others."""


def job_of(data: bytes, options: bytes) -> bytes:
    """A file, and the JSON of `mm_processor_kwargs` or nothing."""
    return b"".join((len(options).to_bytes(4, "little"), options, data))


def prepare_image(job: bytes, processor: ItemProcessor, max_pixels: int) -> bytes:
    """An encoded PreparedItem. Raises InvalidInput or PayloadTooLarge."""
    end = 4 + int.from_bytes(job[:4], "little")
    options = read_options(job[4:end])
    processor.check(options)
    image = decode_image(job[end:], max_pixels)
    try:
        return processor.image(image, options).encode()
    except MemoryError:
        raise
    except Exception as error:  # whatever a processor raises about sizes and options
        raise InvalidInput(f"the image cannot be preprocessed: {error}") from error


def answer(job: bytes, processor: ItemProcessor, max_pixels: int) -> bytes:
    """Execute one job; every failure is an answer."""
    try:
        return PREPARED + prepare_image(job, processor, max_pixels)
    except PayloadTooLarge as error:
        return TOO_LARGE + error.message.encode()
    except InvalidInput as error:
        return INVALID + error.message.encode()
    except MemoryError:
        return TOO_LARGE + b"the image needs more memory than decoding may use"


def _load_ahead(processor: ItemProcessor, max_pixels: int) -> None:
    """Import what pillow and the processor load lazily: later no file can be opened."""
    for name in FORMATS:
        file = io.BytesIO()
        Image.new("RGB", (64, 48)).save(file, name)
        answer(job_of(file.getvalue(), b""), processor, max_pixels)


def main(time_s: float, memory_bytes: int, max_pixels: int, checkpoint: Path) -> None:
    """Serve until stdin ends."""
    forbid_torch()
    processor = ItemProcessor(checkpoint)
    _load_ahead(processor, max_pixels)
    confine(memory_bytes)

    def prepare(data: bytes) -> Callable[[], bytes]:
        return lambda: answer(data, processor, max_pixels)

    serve(sys.stdin.buffer, sys.stdout.buffer, time_s, prepare)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
