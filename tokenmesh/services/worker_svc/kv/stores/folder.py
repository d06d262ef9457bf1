"""Folders of disk stores, DIRECTORY/SCOPE/NUMBER: each belongs to one process at a time."""

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from tokenmesh.services.worker_svc.kv.stores.store import CannotOpen

logger = logging.getLogger(__name__)

_MOST_FOLDERS: Final = 256
"""Workers with one scope and one directory."""
_LOCK: Final = "lock"
_SCOPE: Final = re.compile("[0-9a-f]{32}")
_NUMBER: Final = re.compile("[0-9]{1,3}")
_OF_OTHERS: Final = 0o022


def take_folder(root: Path, scope: bytes) -> Path:
    """The first one of the scope that no process holds; this one holds it until it ends. Raises
    CannotOpen, OSError."""
    root.mkdir(parents=True, exist_ok=True)
    of_scope = root / scope.hex()
    _make_own(of_scope)
    for number in range(_MOST_FOLDERS):
        folder = of_scope / str(number)
        _make_own(folder)
        if _try_lock(folder) is not None:
            return folder
    raise CannotOpen(f"{_MOST_FOLDERS} workers use {of_scope} already")


def make_room(root: Path, own: Path, num_bytes: int) -> None:
    """Remove folders of other scopes that no process holds, the oldest first, until so much is
    free. Raises CannotOpen, OSError."""
    others = sorted(_others(root, own), key=lambda folder: (folder / _LOCK).stat().st_mtime)
    for folder in others:
        if _free(root) >= num_bytes:
            return
        lock = _try_lock(folder)
        if lock is None:
            continue
        logger.info("KV of another model or version gives way on disk: %s", folder)
        shutil.rmtree(folder)
        os.close(lock)
        with suppress(OSError):
            folder.parent.rmdir()
    if (free := _free(root)) < num_bytes:
        what = f"{num_bytes / (1 << 30):.2f} GiB more are needed and {free / (1 << 30):.2f} GiB"
        raise CannotOpen(f"{what} are free on this disk")


def _free(root: Path) -> int:
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


def _make_own(folder: Path) -> None:
    """Raises CannotOpen where others may write to it: they could have any KV be used."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & _OF_OTHERS or folder.is_symlink():
        raise CannotOpen(f"{folder} can be written by others than this user")


def _try_lock(folder: Path) -> int | None:
    """The file that holds it; None: another process has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(folder / _LOCK, flags, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    # its time says when a process last held the folder
    os.utime(file)
    return file


def _others(root: Path, own: Path) -> Iterator[Path]:
    for scope in root.iterdir():
        if _SCOPE.fullmatch(scope.name) and scope != own.parent and scope.is_dir():
            for folder in scope.iterdir():
                if _NUMBER.fullmatch(folder.name) and (folder / _LOCK).is_file():
                    yield folder
