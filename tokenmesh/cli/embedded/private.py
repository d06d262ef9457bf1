"""Files that hold secrets, in a folder that does not outlive the mesh."""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tokenmesh.shared.clock import wall_s

_PREFIX: Final = "tokenmesh-"
_LOCK: Final = "lock"
_YOUNG_S: Final = 60.0
"""A mesh makes the file and then locks it; on a machine that stands still, seconds lie between."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """A fresh folder that only its owner enters; removed with all its files afterwards.

    Also removes folders of killed meshes, whose locks are free.
    """
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with write_private(folder / _LOCK, "").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_private(path: Path, text: str) -> Path:
    """Write a new file that only its owner reads."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def _sweep() -> None:
    """Remove the folders of killed meshes; other users may have put anything into the parent."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Raises OSError for a folder of another user, and for one whose lock is held.

    Both are opened without following a link, and examined once open: what is checked is what is
    used. Only this user may write to the folder, so the lock is this user's.
    """
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(parent)
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            return
        # O_NONBLOCK: opening a FIFO must not wait for its other end.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
        lock = os.open(_LOCK, flags, dir_fd=parent)
        try:
            _lock_old_file(lock)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
    finally:
        os.close(parent)


def _lock_old_file(lock: int) -> None:
    """Raises OSError when it is locked, young or no plain file; a young one may be locked soon."""
    status = os.fstat(lock)
    if not stat.S_ISREG(status.st_mode) or wall_s() - status.st_mtime <= _YOUNG_S:
        raise BlockingIOError("not the lock of a mesh that has ended")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
