"""The lengths that audio files declare, made to agree with what the files hold.

A writer that cannot go back to the header, because it writes to a pipe or a socket, leaves a length
there that it does not know yet: 0, the largest number, or nothing. libsndfile trusts some of these
and would return a part of the samples, or none.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Final

from tokenmesh.shared.errors import InvalidInput

_CHUNK_BYTES: Final = 8
"""Name and size of a chunk."""
_KEPT: Final = (b"fmt ", b"fact")
"""Chunks of a WAV file that say how its samples are read."""
_MAX_JUNK_BYTES: Final = 1 << 16
"""The most bytes between frames of an MP3 file, in all: beyond it the file counts as damaged."""
_BITRATES: Final = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
)
"""In 1,000 bits a second, of layer III of MPEG 1, and of MPEG 2 and 2.5."""
_RATES: Final = ((11025, 12000, 8000), (), (22050, 24000, 16000), (44100, 48000, 32000))
"""By the version bits of a frame's header; the second value is reserved."""
_MPEG_1: Final = 3
_MONO: Final = 3
_TAGS: Final = (b"Xing", b"Info")
_CHECKSUM_BYTES: Final = 2
_VBRI: Final = b"VBRI"
_VBRI_PLACE: Final = 36
"""In a frame of any kind: of a tag by Fraunhofer's encoder, which libsndfile does not read."""
_MAX_PARTS: Final = 64
_ID3V1_BYTES: Final = 128
_APE_BYTES: Final = 32
"""The size of the header and of the footer of a tag, which states the size of all but the
header."""
_HAS_COUNT: Final = 1
"""Flag of a tag that is followed by the number of frames."""
_TAG_BITRATE: Final = (9, 8)
"""Index of a bitrate at which a frame has room for a tag, by `_BITRATES`."""


def wav_with_true_length(data: bytes) -> bytes:
    """A WAV file of the same samples whose sizes are those of what follows.

    All that follows the header are samples where the declared size is 0 or passes the end. Raises
    InvalidInput for a file without samples.
    """
    kept: list[bytes] = []
    long_size, is_empty = 0, False
    for name, size, start in _chunks(data):
        if name in _KEPT:
            kept.append(struct.pack("<4sI", name, size) + data[start : start + size + size % 2])
        elif name == b"ds64" and size >= 16:
            long_size = int.from_bytes(data[start + 8 : start + 16], "little")
        elif name == b"data":
            declared = long_size if size == 0xFFFFFFFF and long_size else size
            if declared == 0 and _are_chunks(data, start):  # the samples may be in a later one
                is_empty = True
                continue
            body = data[start:] if declared == 0 else data[start:][:declared]
            head = b"".join([*kept, struct.pack("<4sI", b"data", len(body))])
            return struct.pack("<4sI4s", b"RIFF", 4 + len(head) + len(body), b"WAVE") + head + body
    if is_empty:
        raise InvalidInput("the file holds no audio")
    raise InvalidInput("the wav file is damaged: it holds no samples")


def _are_chunks(data: bytes, start: int) -> bool:
    """Return whether the rest of a file is chunks only, such as a title or the samples."""
    while start < len(data):
        if data[start : start + 4] == b"data":  # of any size, which need not be true
            return True
        if not _is_name(data, start):
            return False
        size = int.from_bytes(data[start + 4 : start + 8], "little")
        start += _CHUNK_BYTES + size
        if start > len(data):
            return False
        start += size % 2
    return True


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, declared size and place of the content of each chunk."""
    place = 12
    while place + _CHUNK_BYTES <= len(data):
        name, size = struct.unpack_from("<4sI", data, place)
        place += _CHUNK_BYTES
        yield name, size, place
        place += size
        # A chunk of odd size is followed by a byte of padding, which some writers forget.
        if size % 2 and (_is_name(data, place + 1) or not _is_name(data, place)):
            place += 1


def _is_name(data: bytes, place: int) -> bool:
    name = data[place : place + 4]
    return len(name) == 4 and all(0x20 <= each < 0x7F for each in name)


def aiff_with_true_length(data: bytes) -> bytes:
    """The file, with a size of its samples that is not zero.

    libsndfile reads to the end of the file where the size passes it.
    """
    place = 12
    while place + _CHUNK_BYTES <= len(data):
        name, size = struct.unpack_from(">4sI", data, place)
        # Before the samples a chunk of them has an offset and a size of blocks, 8 bytes in all.
        if name == b"SSND" and size <= _CHUNK_BYTES:
            left = struct.pack(">I", len(data) - place - _CHUNK_BYTES)
            return data[: place + 4] + left + data[place + 8 :]
        place += _CHUNK_BYTES + size + size % 2
    return data


@dataclass(frozen=True, slots=True)
class _Mp3Frame:
    """The facts in the header of a frame of layer III."""

    start: int
    end: int
    is_mpeg_1: bool
    is_mono: bool
    rate: int
    has_checksum: bool

    @property
    def tag(self) -> int:
        """Where libsndfile looks for a tag in a frame, as if there were no checksum."""
        if self.is_mpeg_1:
            return 4 + (17 if self.is_mono else 32)
        return 4 + (9 if self.is_mono else 17)

    @property
    def kind(self) -> tuple[int, bool]:
        """libsndfile reads frames up to the first one of another kind; the rate names a version."""
        return self.rate, self.is_mono


def mp3_parts(data: bytes) -> list[bytes]:
    """The recordings of an MP3 file, each with a tag that says how many frames there are.

    Without one, and where the tag of the file does not know it, the length would be estimated from
    the bitrate of the first frame, and what is beyond it would be lost. Files of other rates may
    have been appended. Raises InvalidInput for a damaged file.
    """
    parts: list[bytes] = []
    for _, frames in groupby(_mp3_frames(data), attrgetter("kind")):
        if len(parts) == _MAX_PARTS:
            raise InvalidInput("the mp3 file is damaged: its rate changes again and again")
        parts.append(_part(data, frames))
    return parts or [data]  # no sound: libsndfile says what it is


def _part(data: bytes, frames: Iterator[_Mp3Frame]) -> bytes:
    """A file of frames of one kind and what is between them."""
    first = last = next(frames)
    count = 0  # without the first one, which may be a tag
    for each in frames:
        last, count = each, count + 1
    data = data[first.start : last.end]
    flags, declared = struct.unpack_from(">II", data.ljust(first.tag + 12, b"\0"), first.tag + 4)
    if data.startswith(_TAGS, first.tag):
        if flags & _HAS_COUNT and declared == count:
            return data
    elif not data.startswith(_VBRI, _VBRI_PLACE) and not (
        first.has_checksum and data.startswith(_TAGS, first.tag + _CHECKSUM_BYTES)
    ):
        return _tag_frame(data, first, count + 1) + data
    # The frame of any other tag is left out: nothing else in it can be relied on.
    return _tag_frame(data, first, count) + data[first.end - first.start :]


def _mp3_frames(data: bytes) -> Iterator[_Mp3Frame]:
    """Those that touch another one like it, or end with the sound of the file."""
    place, junk, end = 0, 0, _end_of_sound(data)
    last: _Mp3Frame | None = None
    while (place := _after_id3(data, place)) + 4 <= end:
        frame = _mp3_frame(data, place)
        if frame is not None and (
            frame.end == end
            or _is_like(data, place, frame.end)
            or (last is not None and last.end == place and last.kind == frame.kind)
        ):
            yield frame
            last, place = frame, frame.end
            continue
        following = data.find(b"\xff", place + 1, end)
        following = following if following >= 0 else end
        junk += following - place
        place = following
        if junk > _MAX_JUNK_BYTES:
            if last is None:
                return
            raise InvalidInput("the mp3 file is damaged: too much of it is not sound")


def _end_of_sound(data: bytes) -> int:
    """Where the tags at the end of a file begin."""
    end = len(data)
    if data[-_ID3V1_BYTES:][:3] == b"TAG":
        end -= _ID3V1_BYTES
    footer = end - _APE_BYTES
    if footer > 0 and data[footer : footer + 8] == b"APETAGEX":
        size, _, flags = struct.unpack_from("<III", data, footer + 12)
        start = end - size - _APE_BYTES * (flags >> 31)
        end = start if start > 0 else footer
    return end


def _after_id3(data: bytes, place: int) -> int:
    while data[place : place + 3] == b"ID3" and place + 10 <= len(data):
        size = 0
        for each in data[place + 6 : place + 10]:
            size = size << 7 | each & 0x7F
        has_footer = bool(data[place + 5] & 0x10)
        place += 10 + size + 10 * has_footer
    return place


def _mp3_frame(data: bytes, start: int) -> _Mp3Frame | None:
    """None: no frame of layer III with a stated bitrate begins there."""
    first, second, third, fourth = data[start : start + 4]
    version, bitrate, rate = second >> 3 & 3, third >> 4, third >> 2 & 3
    if first != 0xFF or second & 0xE6 != 0xE2 or version == 1 or bitrate in (0, 15) or rate == 3:
        return None
    is_mpeg_1 = version == _MPEG_1
    bits = _BITRATES[not is_mpeg_1][bitrate] * 1000
    hertz = _RATES[version][rate]
    end = start + (144 if is_mpeg_1 else 72) * bits // hertz + (third >> 1 & 1)
    return _Mp3Frame(start, end, is_mpeg_1, fourth >> 6 == _MONO, hertz, not second & 1)


def _is_like(data: bytes, one: int, other: int) -> bool:
    """Return whether a header of the same version and rate as that of a frame is at `other`."""
    if data[other : other + 1] != b"\xff" or other + 4 > len(data):
        return False
    second, third = data[other + 1], data[other + 2]
    differs = (second ^ data[one + 1]) & 0xFE or (third ^ data[one + 2]) & 0x0C
    return not differs and third >> 4 not in (0, 15)


def _tag_frame(data: bytes, first: _Mp3Frame, count: int) -> bytes:
    """A frame of silence with a tag, in the format of the first frame, with which `data` begins."""
    head = bytearray(data[:4])
    head[1] |= 1  # no checksum follows
    head[2] = _TAG_BITRATE[not first.is_mpeg_1] << 4 | head[2] & 0x0C
    frame = _mp3_frame(bytes(head), 0)
    assert frame is not None, "the header was changed to a valid one"
    body = bytes(frame.tag - 4) + struct.pack(">4sII", b"Xing", _HAS_COUNT, count)
    return (bytes(head) + body).ljust(frame.end, b"\0")


def ogg_links(data: bytes) -> list[bytes]:
    """The streams of an Ogg file that follow each other, each a file of its own.

    Recorders and radio stations append one to the other; libsndfile reads only the first.
    """
    starts, place, was_first = [0], 0, True
    while data[place : place + 4] == b"OggS" and place + 27 <= len(data):
        is_first = bool(data[place + 5] & 2)
        if is_first and not was_first:
            starts.append(place)
        was_first = is_first
        table = data[place + 27 : place + 27 + data[place + 26]]
        place += 27 + len(table) + sum(table)
    return [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]
