"""Real NATS and Redis (or Valkey) processes on free loopback ports, with a random password."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest
from pydantic import SecretStr

from tokenmesh.cli.embedded.servers import find_redis
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.config.up import UpSettings
from tokenmesh.shared.errors import ConfigError

START_TIMEOUT_S = 5.0
_LISTENING_PORTS = range(10_000, 32_000)
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024


@dataclass
class Server:
    """A server process that a test may stop and start again on the same port."""

    command: list[str]
    port: int
    password: str
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None)

    def start(self) -> None:
        """Return when the port accepts connections."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        give_up = time.monotonic() + START_TIMEOUT_S
        while not _accepts(self.port):
            if self.process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"{self.command[0]} did not start: {self.log.read_text()}")
            time.sleep(0.005)

    def stop(self) -> None:
        """Kill it and wait."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A loopback port that is free right now.

    It lies below the ports that the kernel gives to outgoing connections: one of those may take an
    ephemeral port between this call and the listener's start, the more so where tests run in
    parallel.
    """
    while True:
        port = _LISTENING_PORTS[secrets.randbelow(len(_LISTENING_PORTS))]
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _nats_program() -> str:
    """The wheel's in this environment, else the system's; missing: skip, fail in CI."""
    beside_python = Path(sys.executable).with_name("nats-server")
    found = str(beside_python) if beside_python.exists() else shutil.which("nats-server")
    return found or _missing("no nats-server on this machine")


def _redis_program() -> str:
    """The one that `tokenmesh up` would start; missing: skip, fail in CI."""
    try:
        return find_redis(UpSettings())
    except ConfigError as error:
        return _missing(error.message)


def _missing(message: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def make_nats(folder: Path) -> Server:
    """A NATS with JetStream, not yet started; its files go into `folder`."""
    port, password = free_port(), secrets.token_hex(16)
    config = folder / f"nats-{port}.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\n'
        f"max_payload: {MAX_PAYLOAD_BYTES}\n"
        f'authorization {{ user: tokenmesh, password: "{password}" }}\n'
        f'jetstream {{ store_dir: "{folder / f"jetstream-{port}"}" }}\n'
    )
    command = [_nats_program(), "-c", str(config)]
    return Server(command, port, password, folder / f"nats-{port}.log")


def make_redis(folder: Path) -> Server:
    """A Redis that saves nothing, not yet started."""
    port, password = free_port(), secrets.token_hex(16)
    config = folder / f"redis-{port}.conf"
    config.write_text(
        f"bind 127.0.0.1\nport {port}\nrequirepass {password}\n"
        f'save ""\nappendonly no\ndir {folder}\n'
    )
    command = [_redis_program(), str(config)]
    return Server(command, port, password, folder / f"redis-{port}.log")


def bus_settings_of(server: Server) -> BusSettings:
    """Return settings that reach a test's NATS."""
    return BusSettings(
        url=f"nats://127.0.0.1:{server.port}",
        user="tokenmesh",
        password=SecretStr(server.password),
        reconnect_min_s=0.02,
        reconnect_max_s=0.1,
        drain_timeout_s=2.0,
        flush_timeout_s=2.0,
    )


def redis_settings_of(server: Server) -> RedisSettings:
    """Return settings that reach a test's Redis."""
    return RedisSettings(
        url=f"redis://127.0.0.1:{server.port}/0", password=SecretStr(server.password)
    )
