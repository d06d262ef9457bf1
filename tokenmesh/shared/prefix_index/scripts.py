"""The index's scripts as Redis takes them: each with what they share before it."""

from importlib.resources import files
from typing import Final

_HERE: Final = files(__package__)
_SHARED: Final = _HERE.joinpath("give_back.lua").read_text(encoding="utf-8")

RELEASE: Final = _SHARED + _HERE.joinpath("release.lua").read_text(encoding="utf-8")


def with_shared(source: str) -> str:
    """A script that may give reservations back."""
    return _SHARED + source
