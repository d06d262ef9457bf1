"""SmallMesh: a real gateway, scheduler and simulated workers in this process, a fake tokenizer."""

import asyncio
import json
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from tests.fakes.back_end import FakeTokenizer, fake_tokenizer
from tests.fakes.service_mesh import running
from tests.servers import free_port
from tokenmesh.services.gateway.main import build as build_gateway
from tokenmesh.services.scheduler_svc.main import build as build_scheduler
from tokenmesh.services.worker_svc.main import build as build_worker
from tokenmesh.shared import subjects
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.loader import changed
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import InstanceId, ModelName
from tokenmesh.shared.messages.beat import WorkerLoad
from tokenmesh.shared.service import Mesh


class SmallMesh:
    """Use as `async with`; `client` talks to the gateway."""

    def __init__(
        self,
        folder: Path,
        bus: BusSettings,
        redis: RedisSettings,
        *,
        model: dict[str, Any] | None = None,
        worker: dict[str, Any] | None = None,
        gateway: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        **sections: dict[str, Any],
    ) -> None:
        """`sections`: further ones of the settings."""
        self.model = ModelName(f"small-{secrets.token_hex(4)}")
        vocab_size = fake_tokenizer().get_vocab_size()
        config = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab_size,
            "hidden_size": 16,
            "max_position_embeddings": 512,
            "eos_token_id": 2,
        }
        (folder / "config.json").write_text(json.dumps(config))
        served = {"model": str(folder), "served_model_name": (self.model,), **(model or {})}
        self.settings = Settings(
            models=(ModelSettings.model_validate(served),),
            bus=bus,
            redis=redis,
            worker=WorkerSettings.model_validate(
                {"engine": "sim", "sim_step_s": 0.001, **(worker or {})}
            ),
            gateway=GatewaySettings.model_validate(
                {
                    "port": free_port(),
                    "admin_routes": True,
                    # All tests share a Redis, and each mesh has its own model.
                    "max_usage_models": 1 << 20,
                    **(gateway or {}),
                }
            ),
            scheduler=SchedulerSettings(asleep_retry_after_s=7.0),
        )
        self.settings = changed(self.settings, sections)
        self._headers = headers
        self.workers: list[Mesh] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "SmallMesh":
        try:
            await self._start()
        except BaseException:
            # What has begun would go on in a loop of a whole module.
            await self._stack.aclose()
            raise
        return self

    async def _start(self) -> None:
        async with AsyncExitStack() as leaving:
            # Started first it sees each of the others join, in place of their next heartbeat.
            self.gateway = await leaving.enter_async_context(
                running("gateway", self.settings, build_gateway)
            )
            self.scheduler = await self._stack.enter_async_context(
                running("scheduler", self.settings, build_scheduler)
            )
            self.tokenizer = await self._stack.enter_async_context(
                running("tokenizer", self.settings, self._tokenize)
            )
            await self.add_worker()
            self._stack.push_async_exit(leaving.pop_all())
        self.client = await self._stack.enter_async_context(
            httpx.AsyncClient(
                base_url=self.url,
                timeout=10,
                headers=self._headers,
            )
        )
        await self.until(lambda: len(self.loads()) == len(self.workers))
        await self.until(lambda: len(self.gateway.members.all()) >= 3 + len(self.workers))

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def url(self) -> str:
        """The URL of the gateway."""
        return f"http://127.0.0.1:{self.settings.gateway.port}"

    async def add_worker(self) -> Mesh:
        """One more worker of the model."""
        mesh = await self._stack.enter_async_context(running("worker", self.settings, build_worker))
        self.workers.append(mesh)
        return mesh

    def loads(self) -> list[WorkerLoad]:
        """Return the load of every worker, as the gateway sees it."""
        members = self.gateway.members.workers(self.model)
        return [each.beat.load for each in members if each.beat.load is not None]

    def load_of(self, worker: InstanceId) -> WorkerLoad:
        """As the gateway sees it."""
        member = self.gateway.members.get(worker)
        assert member is not None
        assert member.beat.load is not None
        return member.beat.load

    async def until(self, is_so: Callable[[], bool], seconds: float = 15.0) -> None:
        """Return as soon as something is so."""
        async with asyncio.timeout(seconds):
            while not is_so():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def complete(self, **fields: Any) -> httpx.Response:
        """A short completion."""
        body = {"model": self.model, "prompt": "Hi", "max_tokens": 8, "seed": 1, **fields}
        return await self.client.post("/v1/completions", json=body)

    async def _tokenize(self, mesh: Mesh) -> None:
        await mesh.listen(FakeTokenizer(), subjects.tokenize(self.model))
