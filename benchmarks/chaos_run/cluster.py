"""Cluster: NATS, Redis and every service as processes of this machine, gateways more than one."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from benchmarks.chaos_run.child import Child
from tokenmesh.cli.embedded.child import ChildSpec
from tokenmesh.cli.embedded.plan import MeshPlan, make_plan
from tokenmesh.cli.embedded.ports import LOOPBACK, free_port
from tokenmesh.cli.embedded.private import write_private
from tokenmesh.shared.config import Settings, load_settings
from tokenmesh.shared.config.loader import changed, plain_values

LEAVE_S = 20.0


class Cluster:
    """All processes; secrets are in `folder`, logs in `logs`."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        logs: Path,
        num_gateways: int,
        environments: Mapping[str, Mapping[str, str]] | None = None,
        *,
        num_responders: int = 0,
        is_redis_durable: bool = False,
    ) -> None:
        """`environments`: what a process's environment has more, by its name (`worker 2`).

        `num_responders`: further gateways, which may die: they are to serve stored responses, and
        chats, whose clients send the request again.
        """
        plan = make_plan(settings, folder, with_admin=True)
        if is_redis_durable:
            _keep_on_disk(folder)
        self.nats_monitor = _open_monitor(folder)
        self.temporary = folder / "temporary"
        """Where processes put temporary files."""
        self.temporary.mkdir()
        self.settings = plan.settings
        self._servers = [Child(spec, logs) for spec in plan.servers]
        services = [spec for spec in plan.services if spec.name.partition(" ")[0] != "encoder"]
        behind = [spec for spec in services if spec.name != "gateway"]
        gateways = dict(_gateways(plan, folder, "gateway", num_gateways))
        responders = dict(_gateways(plan, folder, "responder", num_responders))
        self.urls = list(gateways)
        self.responder_urls = list(responders)
        self._services = [
            Child(self._extended(spec, (environments or {}).get(spec.name, {})), logs)
            for spec in (*behind, *gateways.values(), *responders.values())
        ]

    def _extended(self, spec: ChildSpec, environment: Mapping[str, str]) -> ChildSpec:
        own = {"TMPDIR": str(self.temporary)}
        return replace(spec, environment={**spec.environment, **own, **environment})

    @property
    def children(self) -> list[Child]:
        """Every process that should be there."""
        return [*self._servers, *self._services]

    def of(self, service: str) -> list[Child]:
        """The processes of one service."""
        return [child for child in self.children if child.service == service]

    async def start(self) -> None:
        """Return when everything serves. Raises RuntimeError."""
        for group in (self._servers, self._services):
            for child in group:
                await child.start()
            await asyncio.gather(*(child.wait_ready() for child in group))

    async def stop(self) -> list[str]:
        """End all; what did not leave by itself, or left a process behind, is named."""
        stubborn = []
        for group in (list(reversed(self._services)), self._servers):
            for child in group:
                child.send(signal.SIGTERM)
                child.send(signal.SIGCONT)
            ends = await asyncio.gather(*(child.wait_end(LEAVE_S) for child in group))
            stubborn += [each.name for each, left in zip(group, ends, strict=True) if not left]
        return stubborn + await self._orphans()

    async def _orphans(self) -> list[str]:
        """Processes that outlived those that had started them, by name; killed."""
        groups = {group: child for child in self.children for group in child.groups}
        # They notice by polling that their parent is gone.
        await asyncio.sleep(2 * self.settings.service.parent_poll_s)
        found = []
        for process in psutil.process_iter():
            try:
                child = groups.get(os.getpgid(process.pid))
                if child is not None and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{child.name}: {' '.join(process.cmdline())}")
                    process.kill()
            except (OSError, psutil.Error):
                continue
        return found


def _open_monitor(folder: Path) -> str:
    """Let the NATS server tell who has subscribed to how much; the URL."""
    port = free_port()
    with (folder / "nats.conf").open("a", encoding="utf-8") as file:
        file.write(f'http: "{LOOPBACK}:{port}"\n')
    return f"http://{LOOPBACK}:{port}"


def _keep_on_disk(folder: Path) -> None:
    """Let Redis write before each answer, though never sync: what it has answered survives."""
    with (folder / "redis.conf").open("a", encoding="utf-8") as file:
        file.write("appendonly yes\nappendfsync no\n")


def _gateways(
    plan: MeshPlan, folder: Path, kind: str, count: int
) -> Iterator[tuple[str, ChildSpec]]:
    spec = next(each for each in plan.services if each.name == "gateway")
    log_format = {"telemetry": {"log_format": "json"}}
    for number in range(1, count + 1):
        port = free_port()
        own = load_settings(Path(spec.command[-1]))
        settings = changed(own, {"gateway": {"port": port}, **log_format})
        text = json.dumps(plain_values(settings))
        config = write_private(folder / f"{kind}-{number}.json", text)
        command = (*spec.command[:-1], str(config))
        yield (
            f"http://{LOOPBACK}:{port}",
            replace(spec, name=f"{kind} {number}", command=command),
        )
