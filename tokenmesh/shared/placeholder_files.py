"""Files that stand where a model's file should be: pointers, web pages, empty files."""

from pathlib import Path
from typing import Final

_HEADS: Final = {
    b"version https://git-lfs": "it is a pointer of git-lfs: `git lfs pull` fetches the file",
    b"<!doctype html": "it is a web page: download the file itself",
    b"<html": "it is a web page: download the file itself",
    b"version https://hawser": "it is a pointer of git-lfs: `git lfs pull` fetches the file",
}
_LONGEST: Final = max(map(len, _HEADS))


def placeholder_problem(path: Path) -> str | None:
    """Return what the file is instead of a model's, and what to do; None: no such thing."""
    try:
        with path.open("rb") as file:
            head = file.read(_LONGEST + 16).lstrip().lower()
            if not head and not file.read(1):
                return "it is empty: the download has not written it"
    except OSError:
        return None  # its reader says why
    return next((text for start, text in _HEADS.items() if head.startswith(start)), None)
