"""Bytes to an image, under a limit of pixels that is checked before any is decoded."""

import io
from typing import Final

from PIL import Image, ImageOps, UnidentifiedImageError

from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Raster formats that pillow decodes by itself: no PostScript, no plugins that run programs."""


def decode_image(data: bytes, max_pixels: int) -> Image.Image:
    """The first frame, upright, in RGB. Raises InvalidInput or PayloadTooLarge."""
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise PayloadTooLarge(
                    f"the image has {width}x{height} pixels, at most {max_pixels} in all"
                )
            return ImageOps.exif_transpose(image).convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PayloadTooLarge(f"the image is too large: {error}") from error
    except UnidentifiedImageError as error:
        known = ", ".join(_FORMATS)
        raise InvalidInput(f"the file is no image of a known format ({known})") from error
    # What pillow raises for damaged files depends on the format.
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError) as error:
        raise InvalidInput(f"the image is damaged: {error}") from error
