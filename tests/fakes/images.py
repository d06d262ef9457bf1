"""Image files made on the spot."""

import base64
import io
import struct
import zlib

import numpy
from PIL import Image


def picture(seed: int = 0, width: int = 40, height: int = 33, mode: str = "RGB") -> Image.Image:
    """Noise that no resampling leaves as it is."""
    draw = numpy.random.default_rng(seed)
    channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}[mode]
    pixels = draw.integers(0, 256, (height, width, channels), dtype=numpy.uint8)
    return Image.fromarray(pixels.squeeze(-1) if channels == 1 else pixels, mode)


def image_file(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """The file's bytes."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png_chunk(kind: bytes, body: bytes) -> bytes:
    """Its length, name, content and checksum."""
    checked = kind + body
    return struct.pack(">I", len(body)) + checked + struct.pack(">I", zlib.crc32(checked))


def deep_png(pixels: numpy.ndarray, transparent: tuple[int, ...] = ()) -> bytes:
    """A PNG of 16 bits a channel, which pillow does not write.

    pixels: [height, width, channels], of 1 to 4 channels; transparent: a color.
    """
    height, width, channels = pixels.shape
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    chunks = [png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0))]
    if transparent:
        chunks.append(png_chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent)))
    chunks += [png_chunk(b"IDAT", zlib.compress(rows)), png_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def data_uri(data: bytes) -> str:
    """As clients send it."""
    return "data:image/png;base64," + base64.b64encode(data).decode()
