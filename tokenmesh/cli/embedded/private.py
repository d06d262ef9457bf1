"""Files that hold secrets."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def private_folder() -> Iterator[Path]:
    """A fresh folder that only its owner enters; gone with all its files afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="tokenmesh-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_private(path: Path, text: str) -> Path:
    """Write a new file that only its owner reads."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return path
