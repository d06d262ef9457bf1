"""Files that hold secrets, in a folder that does not outlive the mesh."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tokenmesh.shared.clock import wall_s

_PREFIX: Final = "tokenmesh-"
_LOCK: Final = "lock"
_YOUNG_S: Final = 60.0


@contextmanager
def private_folder() -> Iterator[Path]:
    """A fresh folder that only its owner enters; gone with all its files afterwards.

    Folders that a killed mesh left behind go, too: nobody holds their lock any more.
    """
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with (folder / _LOCK).open("w") as lock:
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
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            # A young one may be about to be locked.
            is_old = wall_s() - lock.stat().st_mtime > _YOUNG_S
            if is_old and lock.stat().st_uid == os.getuid():
                with lock.open("w") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue
