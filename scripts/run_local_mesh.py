"""Starts the services of compose/compose.yaml on this machine, without containers.

The commands and variables are those of the file; NATS and Redis are the embedded ones, and the
addresses of the containers are replaced by theirs. Ctrl-C stops everything.
"""

import argparse
import asyncio
import os
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from tokenmesh.cli.embedded.child import ChildSpec, Phase
from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.cli.embedded.private import private_folder
from tokenmesh.cli.embedded.servers import nats_server, redis_server
from tokenmesh.cli.embedded.supervisor import ProcessSupervisor
from tokenmesh.shared.config.up import UpSettings
from tokenmesh.shared.lifecycle import StopSignals
from tokenmesh.shared.rights import SERVICE_USERS
from tokenmesh.shared.services import SERVICE_BY_NAME

COMPOSE: Final = Path(__file__).resolve().parent.parent / "compose/compose.yaml"
GRACE_S: Final = 40.0
_VARIABLE: Final = re.compile(r"\$(?:\$|\{(\w+)(?:(:-|:\?)([^}]*))?\})")


@dataclass(frozen=True)
class Service:
    """A service of ours as the compose file describes it."""

    name: str
    target: str
    """Stage of the Dockerfile."""
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)


class MissingVariable(Exception):
    """A `${NAME:?}` without a value."""


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Replace `${NAME}`, `${NAME:-default}`, `${NAME:?message}` and `$$` as compose does."""

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        if name is None:
            return "$"
        found = variables.get(name, "")
        if not found and operator == ":?":
            raise MissingVariable(f"{name}: {rest}")
        return found or (rest if operator == ":-" else "")

    return _VARIABLE.sub(value, text)


def interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    """The same for every text in a YAML value."""
    if isinstance(value, str):
        return interpolate(value, variables)
    if isinstance(value, dict):
        return {key: interpolated(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [interpolated(each, variables) for each in value]
    return value


def services_of(compose: Path, variables: Mapping[str, str]) -> list[Service]:
    """The services that are built from this repository."""
    document = interpolated(yaml.safe_load(compose.read_text(encoding="utf-8")), variables)
    return [
        Service(name, each["build"]["target"], tuple(each["command"]), dict(each["environment"]))
        for name, each in document["services"].items()
        if "build" in each
    ]


def local_spec(service: Service, addresses: Mapping[str, str], port: int) -> ChildSpec:
    """The service's own command, with addresses of this machine."""
    words = [sys.executable, "-P", "-m", *service.command]
    if "--port" in words:
        words[words.index("--port") + 1] = str(port)
        words[words.index("--host") + 1] = "127.0.0.1"
    phase = Phase.EDGE if SERVICE_BY_NAME[service.name].faces_clients else Phase.MESH
    environment = {**service.environment, **addresses, "TOKENMESH_SERVICE__EXIT_WITH_PARENT": "1"}
    return ChildSpec(service.name, tuple(words), phase, environment)


async def run(port: int, variables: Mapping[str, str]) -> int:
    """Until a signal, or until a service cannot be kept alive; the exit code."""
    limits = UpSettings()
    passwords = {user: secrets.token_hex(24) for user in SERVICE_USERS}
    variables = {**variables, **{f"{user.upper()}_PASSWORD": passwords[user] for user in passwords}}
    nats, redis = free_port(), free_port()
    # No collector and no container network here; five processes share one host's ports.
    addresses = {
        "TOKENMESH_BUS__URL": f"nats://127.0.0.1:{nats}",
        "TOKENMESH_REDIS__URL": f"redis://127.0.0.1:{redis}/0",
        "TOKENMESH_TELEMETRY__OTLP_ENDPOINT": "",
        "TOKENMESH_TELEMETRY__METRICS_PORT": "0",
    }
    services = services_of(COMPOSE, variables)
    stops = StopSignals()
    with private_folder() as folder, stops.installed():
        supervisor = ProcessSupervisor(
            limits, lambda name, line: print(f"{name}: {line}", flush=True), lambda *_: None
        )
        servers = (
            nats_server(folder, limits, nats, passwords),
            redis_server(folder, limits, redis, passwords),
        )
        try:
            await supervisor.start(servers)
            await supervisor.start([local_spec(each, addresses, port) for each in services])
            stop = asyncio.create_task(stops.first.wait())
            await asyncio.wait((stop, supervisor.dead), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await supervisor.stop(GRACE_S, stops.second)
    if not supervisor.dead.done():
        return 0
    death = supervisor.dead.result()
    print(f"{death.name} died with exit code {death.exit_code}", file=sys.stderr)
    return 1


def main() -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="port of the gateway")
    arguments = parser.parse_args()
    try:
        return asyncio.run(run(arguments.port, os.environ))
    except MissingVariable as missing:
        print(missing, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
