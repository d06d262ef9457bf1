"""Image files to pixels: which formats are read, within which bounds, and what their colors become.

A picture is upright, in RGB, on white where it is transparent: as transformers' own loading and its
image processors make it.
"""

import io
import struct
from typing import Final

import numpy
from PIL import ExifTags, Image, UnidentifiedImageError

from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""OpenAI's formats. For some others pillow starts programs; it decodes the run lengths of BMP byte
by byte in Python, and allocates TIFF's tiles, which may be larger than the image by any factor."""
_JPEGS: Final = ("JPEG", "MPO")
"""pillow opens a JPEG with several pictures, as phones write them, as MPO."""
_MAX_SCANS: Final = 64
"""Scans of a progressive JPEG; encoders write a dozen. Each costs a pass over all pixels."""
_SCAN: Final = b"\xff\xda"
_WHITE: Final = (255, 255, 255, 255)
_KEY: Final = "transparency"
"""The one color, or of a palette the colors, that a file declares transparent."""
_PNG_DEPTH: Final = 24
"""Place of the bits of a channel in a PNG."""

_TURN_BY_ORIENTATION: Final[dict[object, Image.Transpose]] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The turn that shows the picture upright, by EXIF's number for how the camera was held."""


def decode_image(data: bytes, max_pixels: int) -> Image.Image:
    """The first frame, upright, in RGB. Raises InvalidInput or PayloadTooLarge."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.format not in (*FORMATS, *_JPEGS):
                raise InvalidInput(f"the format {image.format} is not supported")
            width, height = image.size
            if width * height > max_pixels:
                raise PayloadTooLarge(
                    f"the image has {width}x{height} pixels, at most {max_pixels} in all "
                    "(tokenizer.media.max_pixels)"
                )
            if image.format in _JPEGS and data.count(_SCAN) > _MAX_SCANS:
                raise PayloadTooLarge(f"the image has more than {_MAX_SCANS} scans")
            image.load()
            _shorten_key(image, data)
            return _upright_in_rgb(image)
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


def _upright_in_rgb(image: Image.Image) -> Image.Image:
    """Like ImageOps.exif_transpose, which also rewrites EXIF data and fails on invalid data."""
    turn = _TURN_BY_ORIENTATION.get(image.getexif().get(ExifTags.Base.Orientation))
    if image.mode.startswith("I;16"):
        image = _in_8_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image)
    image = image.convert("RGB")
    return image if turn is None else image.transpose(turn)


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Gray of 16 bits by its upper ones, as pillow reads colors of 16 bits; it would clip gray."""
    deep = numpy.asarray(image)
    gray = Image.fromarray((deep >> 8).astype(numpy.uint8))
    if isinstance(key := image.info.get(_KEY), int):
        gray.putalpha(Image.fromarray(numpy.where(deep == key, 0, 255).astype(numpy.uint8)))
    return gray


def _shorten_key(image: Image.Image, data: bytes) -> None:
    """pillow keeps 16 bits of the transparent color of a PNG, but 8 of its pixels."""
    key = image.info.get(_KEY)
    if image.format == "PNG" and data[_PNG_DEPTH] == 16 and isinstance(key, tuple):
        image.info[_KEY] = tuple(each >> 8 for each in key)
