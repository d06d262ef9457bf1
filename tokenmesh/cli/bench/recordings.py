"""Recordings to transcribe: a folder of files, or JSON lines that name them, with references."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from tokenmesh.cli.bench.client import ChunkChoice, TokenUsage
from tokenmesh.shared.clock import perf_s
from tokenmesh.shared.errors import TokenMeshError

_SUFFIXES: Final = frozenset(
    (".wav", ".flac", ".ogg", ".opus", ".mp3", ".m4a", ".mp4", ".mpga", ".mpeg", ".webm", ".aiff")
)
_RATE: Final = 8_000
"""At which lengths are read: to an eighth of a millisecond."""
_MAX_S: Final = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class RecordingFile:
    """A file to send."""

    name: str
    data: bytes
    duration_s: float
    reference: str | None = None
    """The text that is said in the recording; None: not known."""
    language: str | None = None


class _Entry(msgspec.Struct):
    """A line of a data set. NeMo's manifests call the file `audio_filepath`."""

    audio: str = ""
    audio_filepath: str = ""
    text: str | None = None
    duration: float | None = None
    language: str | None = None


def recordings(path: Path, count: int, random: Random) -> list[RecordingFile]:
    """`count` recordings of a folder or of a file of JSON lines, in random order, then again.

    Raises ValueError that names what cannot be read.
    """
    entries = _in_folder(path) if path.is_dir() else list(_in_file(path))
    if not entries:
        raise ValueError(f"{path} holds no recording")
    random.shuffle(entries)
    read = [_read(*each) for each in entries[:count]]
    return [read[index % len(read)] for index in range(count)]


def _in_folder(folder: Path) -> list[tuple[Path, _Entry]]:
    """References are in NAME.txt next to NAME.wav, or in LibriSpeech's *.trans.txt."""
    paths = sorted(each for each in folder.rglob("*") if each.suffix.lower() in _SUFFIXES)
    texts: dict[Path, str] = {}
    try:
        for path in folder.rglob("*.trans.txt"):
            for line in path.read_text(encoding="utf-8").splitlines():
                name, _, text = line.partition(" ")
                texts[path.with_name(name)] = text
        for path in paths:
            if (sidecar := path.with_suffix(".txt")).is_file():
                texts[path.with_suffix("")] = sidecar.read_text(encoding="utf-8")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return [(path, _Entry(text=texts.get(path.with_suffix("")))) for path in paths]


def _in_file(path: Path) -> Iterable[tuple[Path, _Entry]]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=_Entry)
        except (ValueError, msgspec.MsgspecError) as error:
            raise ValueError(f"{path}: line {number} is not a recording: {error}") from error
        if not (name := entry.audio or entry.audio_filepath):
            raise ValueError(f"{path}: line {number} is not a recording: `audio` is missing")
        if entry.duration is not None and not entry.duration > 0:
            raise ValueError(f"{path}: line {number}: duration {entry.duration}: above 0")
        yield path.parent / name, entry


def _read(path: Path, entry: _Entry) -> RecordingFile:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    duration_s = _duration_s(path, data) if entry.duration is None else entry.duration
    return RecordingFile(path.name, data, duration_s, entry.text, entry.language)


def _duration_s(path: Path, data: bytes) -> float:
    """Decoded to its end: headers of streams and of MP3 files do not tell."""
    why = f"{path}: its length is not known; JSON lines can give it as `duration`"
    try:
        # only the extra `tokenizer` installs what decodes
        from tokenmesh.services.tokenizer_svc.media.audio_file import AudioLimits, decode_audio
    except (ImportError, OSError) as error:
        raise ValueError(f"{why} ({error})") from error
    try:
        return len(decode_audio(data, _RATE, AudioLimits(max_s=_MAX_S))) / _RATE
    except TokenMeshError as error:
        raise ValueError(f"{why} ({error})") from error


class _Usage(TokenUsage):
    """OpenAI's names besides those of chats, which vLLM sends."""

    input_tokens: int = 0
    output_tokens: int = 0


class _Event(msgspec.Struct):
    """An event of a streamed transcript, of OpenAI's kinds or vLLM's."""

    type: str = ""
    delta: str = ""
    text: str | None = None
    choices: list[ChunkChoice] = []
    usage: _Usage | None = None
    error: dict[str, object] | None = None


_decode = msgspec.json.Decoder(_Event).decode


class TranscriptReader:
    """Gathers a streamed transcript."""

    def __init__(self) -> None:
        self.text = ""
        self.token_times: list[float] = []
        self.usage: TokenUsage | None = None
        self.error: str | None = None
        self.is_done = False
        """OpenAI's last event has come."""

    def push(self, data: bytes) -> None:
        """Take an event. Raises msgspec.MsgspecError."""
        event = _decode(data)
        deltas = [each.delta.content or "" for each in event.choices if each.delta is not None]
        if new := event.delta + "".join(deltas):
            self.text += new
            self.token_times.append(perf_s())
        if event.type == "transcript.text.done":
            self.is_done = True
            self.text = self.text if event.text is None else event.text
        if event.error is not None:
            self.error = str(event.error.get("code") or event.error.get("type"))
        if (usage := event.usage) is not None:
            self.usage = TokenUsage(
                usage.prompt_tokens or usage.input_tokens,
                usage.completion_tokens or usage.output_tokens,
            )


def form(fields: dict[str, str], recording: RecordingFile) -> tuple[bytes, str]:
    """A multipart form with the recording, and its content type."""
    boundary = "tokenmesh-recording"
    while boundary.encode() in recording.data:
        boundary += "-"
    head = "".join(
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    )
    # a quoted string of a header, whatever the file is called
    name = json.dumps(recording.name, ensure_ascii=False)
    head += (
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename={name}\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    body = head.encode() + recording.data + f"\r\n--{boundary}--\r\n".encode()
    return body, f"multipart/form-data; boundary={boundary}"


def edit_distance(reference: Sequence[str], found: Sequence[str]) -> int:
    """Words to insert, delete or replace, by Myers' bit vectors: an hour of speech takes 0.1 s."""
    if not reference:
        return len(found)
    places: dict[str, int] = {}
    for index, word in enumerate(reference):
        places[word] = places.get(word, 0) | 1 << index
    mask, last = (1 << len(reference)) - 1, 1 << len(reference) - 1
    more, less, distance = mask, 0, len(reference)
    for word in found:
        same = places.get(word, 0)
        down = same | less
        across = (((same & more) + more) ^ more) | same
        rises, falls = less | ~(across | more) & mask, more & across
        distance += bool(rises & last) - bool(falls & last)
        rises, falls = rises << 1 | 1, falls << 1
        more, less = (falls | ~(down | rises)) & mask, rises & down & mask
    return distance
