"""Cases that `make test` leaves to `make test-long`, since others of their test show the same.

Measured with coverage.py: what such a case runs of `tokenmesh` other cases of its file run as well,
line by line. Each test keeps one case or more. `tests/conftest.py` marks them as `slow`.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

_LIST: Final = Path(__file__).with_suffix(".txt")


def read_repeated(text: str) -> Mapping[str, frozenset[str]]:
    """The names of the cases by file; a line that ends with `.py` begins a file."""
    found: dict[str, set[str]] = {}
    names: set[str] = set()
    for line in text.splitlines():
        if line.endswith(".py"):
            names = found.setdefault(line, set())
        elif line:
            names.add(line.strip())
    return {file: frozenset(cases) for file, cases in found.items()}


REPEATED: Final = read_repeated(_LIST.read_text("utf-8"))

COLLECTED: Final = defaultdict[str, set[str]](set)
"""Names of the tests of these files that this process has collected."""


def mark_repeated(items: list[pytest.Item], root: Path) -> None:
    """Mark the listed cases among these tests."""
    for item in items:
        file = item.path.relative_to(root).as_posix()
        if file in REPEATED:
            COLLECTED[file].add(item.name)
            if item.name in REPEATED[file]:
                item.add_marker(pytest.mark.slow)
