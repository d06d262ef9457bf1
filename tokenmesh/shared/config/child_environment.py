"""The environment of a process that runs what strangers wrote: nothing in it may be a secret."""

import os
from typing import Final

_KEPT: Final = frozenset(
    ("HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ", "VIRTUAL_ENV")
)
_KEPT_PREFIXES: Final = ("GOMP_", "LC_", "MKL_", "OMP_", "PYTHON")


def sandbox_environment() -> dict[str, str]:
    """What an interpreter and its libraries need of this process's environment, and no more."""
    return {
        name: text
        for name, text in os.environ.items()
        if name in _KEPT or name.startswith(_KEPT_PREFIXES)
    }
