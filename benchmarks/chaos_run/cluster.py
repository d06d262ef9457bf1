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
from tokenmesh.cli.embedded.plan import Plan, make_plan
from tokenmesh.cli.embedded.ports import LOOPBACK, free_port
from tokenmesh.cli.embedded.private import write_private
from tokenmesh.cli.embedded.spec import ChildSpec
from tokenmesh.shared.config import Settings
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
    ) -> None:
        """`environments`: what a process's environment has more, by its name (`worker 2`)."""
        plan = make_plan(settings, folder)
        self.settings = plan.settings
        self._servers = [Child(spec, logs) for spec in plan.servers]
        services = [spec for spec in plan.services if spec.name.partition(" ")[0] != "encoder"]
        behind = [spec for spec in services if spec.name != "gateway"]
        gateways = dict(_gateways(plan, folder, num_gateways))
        self.urls = list(gateways)
        self._services = [
            Child(_extended(spec, (environments or {}).get(spec.name, {})), logs)
            for spec in (*behind, *gateways.values())
        ]

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


def _extended(spec: ChildSpec, environment: Mapping[str, str]) -> ChildSpec:
    return replace(spec, environment={**spec.environment, **environment})


def _gateways(plan: Plan, folder: Path, count: int) -> Iterator[tuple[str, ChildSpec]]:
    spec = next(each for each in plan.services if each.name == "gateway")
    log_format = {"telemetry": {"log_format": "json"}}
    for number in range(1, count + 1):
        port = free_port()
        settings = changed(plan.settings, {"gateway": {"port": port}, **log_format})
        text = json.dumps(plain_values(settings))
        config = write_private(folder / f"gateway-{number}.json", text)
        command = (*spec.command[:-1], str(config))
        yield (
            f"http://{LOOPBACK}:{port}",
            replace(spec, name=f"gateway {number}", command=command),
        )
