"""Small files that claim to be large, or cost much to decode."""

import io
import struct
import zlib

import numpy
from PIL import Image

from tests.fakes.images import png_chunk
from tests.fakes.recordings import RATE, audio_file


def png_declaring(width: int, height: int) -> bytes:
    """A few hundred bytes that claim to be width x height pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" * 100_000)
    chunks = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def with_scans(data: bytes, count: int) -> bytes:
    """A progressive JPEG with so many more scans, each a pass over all pixels."""
    last = data[data.rindex(b"\xff\xda") : -2][:40]
    return data[:-2] + count * last + data[-2:]


def multi_picture(data: bytes) -> bytes:
    """A JPEG with the marker of a file that holds two pictures: pillow calls that MPO."""
    entry = struct.pack("<IIIHH", 0x00030000, len(data), 0, 0, 0)
    tags = struct.pack("<HHI4s", 0xB000, 7, 4, b"0100")
    tags += struct.pack("<HHII", 0xB001, 4, 1, 2) + struct.pack("<HHII", 0xB002, 7, 32, 50)
    body = b"MPF\0II*\0" + struct.pack("<IH", 8, 3) + tags + bytes(4) + entry + entry
    return data[:2] + b"\xff\xe2" + struct.pack(">H", len(body) + 2) + body + data[2:]


def animation(kind: str, size: int, count: int) -> bytes:
    """Frames of one color."""
    frames = [Image.new("P", (size, size), number % 256) for number in range(count)]
    if kind == "WEBP":
        frames = [frame.convert("RGB") for frame in frames]
    file = io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


def flac_declaring(num_samples: int, seconds: float) -> bytes:
    """A file of silence whose header declares another length."""
    data = bytearray(audio_file(numpy.zeros(int(seconds * RATE), numpy.float32), "FLAC"))
    facts = int.from_bytes(data[18:26], "big")  # rate, channels, bits, samples
    data[18:26] = (facts >> 36 << 36 | num_samples).to_bytes(8, "big")
    return bytes(data)


def mp4_declaring(data: bytes, width: int, height: int) -> bytes:
    """An MP4 whose sample description declares another size."""
    place = data.index(b"avc1") + 28
    return data[:place] + struct.pack(">HH", width, height) + data[place + 4 :]
