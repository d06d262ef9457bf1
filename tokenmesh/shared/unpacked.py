"""Directories of checkpoints that are made of other formats, and their files of tensors.

They are made once and kept next to other caches; every service reads them as any checkpoint.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenmesh.shared.config.environment import cache_folder
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.tensor_file import BYTES_BY_DTYPE, SINGLE_FILE

MADE_BY: Final = {"made_by": "tokenmesh"}
"""In tokenizer_config.json: the tokenizer is whole, and read as it is written."""

_DIGEST: Final = "[0-9a-f]" * 16
"""The end of a directory's name, as a glob pattern."""

_SOURCE: Final = "source.json"
"""The file of a directory that says what it was made of."""

_kept: dict[Path, int] = {}
"""Descriptors of directories that this process reads: each holds a shared lock until its end."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A tensor of safetensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[bytes]]


@dataclass(frozen=True, slots=True)
class Unpacking:
    """A format: where its directories are kept, and the version of what is written."""

    folder: str
    """In the user's cache."""
    layout: int
    """A change makes directories anew."""

    def directory(
        self, source: Path, files: Iterable[Path], make: Callable[[Path], None], folder: str | None
    ) -> Path:
        """The directory that is made of `source`, made unless it is there; blocks.

        `files` are all that it depends on; `make` fills an empty directory. Raises CheckpointError.
        """
        try:
            seen = f"{source.resolve()} {self.layout}"
            for part in files:
                status = part.stat()
                seen += f" {status.st_size} {status.st_mtime_ns}"
            place = Path(folder) if folder else cache_folder() / self.folder
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            target = place / f"{source.stem}-{hashlib.sha256(seen.encode()).hexdigest()[:16]}"
            with (place / f"{target.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another service may be making it
                if not target.is_dir():
                    _make(source, target, make)
                    _delete_outdated(place, source)
                _keep(target)
        except OSError as problem:
            text = f"{source}: cannot be unpacked: {problem}"
            raise CheckpointError(text, param="model") from problem
        return target


def delete_made(stem: str) -> None:
    """Delete what was made of a file or directory of this name, and leave other caches."""
    for format_folder in ("gguf", "ctranslate2"):
        for made in (cache_folder() / format_folder).glob(f"{glob.escape(stem)}-{_DIGEST}"):
            shutil.rmtree(made, ignore_errors=True)


def _make(source: Path, target: Path, make: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    try:
        make(scratch)
        write_objects(scratch, {_SOURCE: {"path": str(source.resolve())}})
        scratch.replace(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    logger.info("unpacked %s into %s", source, target)


def _keep(target: Path) -> None:
    """Hold a shared lock on a directory until this process ends, against deletion by others."""
    found = target.stat()
    held = _kept.get(target)
    if held is not None and os.fstat(held).st_ino == found.st_ino:
        return
    descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    # Some network file systems have no locks: a directory there is never deleted either.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    if held is not None:  # the directory was deleted and made again
        os.close(held)
    _kept[target] = descriptor


def _delete_outdated(place: Path, source: Path) -> None:
    """Delete directories that no process reads and whose source has changed or is gone.

    Without it each new version of a file would take its size on the disk for ever.
    """
    for directory in place.glob(f"*-{_DIGEST}"):
        try:
            made_of = msgspec.json.decode((directory / _SOURCE).read_bytes())["path"]
        except FileNotFoundError:  # made before directories said their source
            made_of = str(source.resolve()) if directory.name[:-17] == source.stem else None
        except (OSError, msgspec.MsgspecError, KeyError):
            continue
        is_outdated = made_of is not None and (
            made_of == str(source.resolve()) or not Path(made_of).exists()
        )
        if is_outdated:
            _delete_unread(directory)


def _delete_unread(directory: Path) -> None:
    """Delete a directory unless a process makes it or reads it."""
    with contextlib.suppress(OSError), (directory.parent / f"{directory.name}.lock").open("w") as m:
        fcntl.flock(m, fcntl.LOCK_EX | fcntl.LOCK_NB)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
            logger.info("deleted %s, which is outdated", directory)
        finally:
            os.close(descriptor)


def write_objects(directory: Path, objects: Mapping[str, Mapping[str, Any]]) -> None:
    """JSON by the names of files."""
    for name, content in objects.items():
        text = json.dumps(content, ensure_ascii=False)
        (directory / name).write_text(text, encoding="utf-8")


def write_tensors(directory: Path, tensors: Sequence[MadeTensor]) -> None:
    """Write them one after the other, as safetensors. Raises OSError."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in tensors:
        begin, end = end, end + math.prod(each.shape) * BYTES_BY_DTYPE[each.dtype]
        offsets = {"shape": each.shape, "data_offsets": [begin, end]}
        header[each.name] = {"dtype": each.dtype, **offsets}
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    with (directory / SINGLE_FILE).open("wb") as to:
        to.write(len(described).to_bytes(8, "little") + described)
        for each in tensors:
            for piece in each.pieces():
                to.write(piece)
        to.flush()
        os.fsync(to.fileno())
