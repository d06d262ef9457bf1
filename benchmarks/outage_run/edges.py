"""Asks a mesh for stored responses, /health and /metrics during an outage."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import Final

from tokenmesh.cli.bench.client import Target

_PAUSE_S: Final = 0.5


class Edges:
    """Asks every gateway again and again; `run` ends when it is cancelled."""

    def __init__(self, servers: Sequence[Target], model: str, timeout_s: float) -> None:
        self._servers = servers
        self._model = model
        self._timeout_s = timeout_s
        self.answered: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    async def run(self) -> None:
        """For ever."""
        while True:
            for server in self._servers:
                await self._try("health", self._get(server, "/health"))
                await self._try("metrics", self._get(server, "/metrics"))
                await self._try("models", self._get(server, "/v1/models"))
                await self._try("stored response", self._store_and_read(server))
            await asyncio.sleep(_PAUSE_S)

    async def _try(self, what: str, asking: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await asking
            self.answered[what] += 1
        except (OSError, ValueError, KeyError) as error:
            self.failures[f"{what}: {str(error) or type(error).__name__}"[:200]] += 1

    async def _get(self, server: Target, path: str) -> None:
        await server.fetch("GET", path)

    async def _store_and_read(self, server: Target) -> None:
        body = {
            "model": self._model,
            "input": "Say something.",
            "max_output_tokens": 16,
            "store": True,
        }
        made = json.loads(await server.fetch("POST", "/v1/responses", body))
        # Any gateway has it.
        for each in self._servers:
            await each.fetch("GET", f"/v1/responses/{made['id']}")
