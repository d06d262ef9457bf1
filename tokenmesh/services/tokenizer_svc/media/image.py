"""Bytes to an image, under a limit of pixels that is checked before any is decoded."""

import io
import struct
from typing import Final

from PIL import ExifTags, Image, UnidentifiedImageError

from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""OpenAI's. Of the others pillow runs programs for some, decodes run lengths of BMP in Python, byte
by byte, and takes the memory of TIFF's tiles, which may be larger than the image by any factor."""
_JPEGS: Final = ("JPEG", "MPO")
"""pillow opens a JPEG that holds several pictures, as phones write them, as the second."""
_MAX_SCANS: Final = 64
"""Of a progressive JPEG; encoders write a dozen. Each is a pass over all pixels for a few bytes."""
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
        raise InvalidInput(f"the file is no image of a known format ({known})") from error
    # What pillow raises for damaged files depends on the format.
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
    """As ImageOps.exif_transpose, which also writes the EXIF anew and fails where it is odd."""
    image.load()
    turn = _TURN_BY_ORIENTATION.get(image.getexif().get(ExifTags.Base.Orientation))
    return image if turn is None else image.transpose(turn)
