"""Image files made on the spot."""

import base64
import io

import numpy
from PIL import Image


def picture(seed: int = 0, width: int = 40, height: int = 33, mode: str = "RGB") -> Image.Image:
    """Noise that no resampling leaves as it is."""
    draw = numpy.random.default_rng(seed)
    channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
    pixels = draw.integers(0, 256, (height, width, channels), dtype=numpy.uint8)
    return Image.fromarray(pixels.squeeze(-1) if channels == 1 else pixels, mode)


def image_file(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """The file's bytes."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def data_uri(data: bytes) -> str:
    """As clients send it."""
    return "data:image/png;base64," + base64.b64encode(data).decode()
