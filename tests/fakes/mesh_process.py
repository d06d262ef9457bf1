"""A mesh as a process of its own, whose pauses and memory are its own, too."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from tests.fakes.hostile_bus import FOREIGN, listened
from tests.fakes.service_mesh import running
from tests.fakes.tokenizers import byte_level_bpe, write_json
from tests.servers import free_port
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.loader import from_plain, plain_values
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.ids import ModelName

_PATIENCE_S = 40.0
_TICKS = os.sysconf("SC_CLK_TCK")
_MARKERS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<think>", "</think>")
_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


class MeshProcess:
    """Use `mesh_process`."""

    def __init__(
        self, pid: int, model: ModelName, client: httpx.AsyncClient, subjects: list[str]
    ) -> None:
        self._pid = pid
        self.subjects = subjects
        """On which its services listen."""
        self.model = model
        self.client = client

    @property
    def memory_bytes(self) -> int:
        """Return its resident memory."""
        pages = Path(f"/proc/{self._pid}/statm").read_text().split()[1]
        return int(pages) * 4096

    @property
    def cpu_s(self) -> float:
        """Processor time that it has used."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    @property
    def url(self) -> str:
        return str(self.client.base_url)


@asynccontextmanager
async def mesh_process(
    folder: Path, bus: BusSettings, redis: RedisSettings, model: ModelName
) -> AsyncIterator[MeshProcess]:
    """A gateway, a scheduler, a tokenizer and a simulated worker on one event loop.

    The model has markers for filling in the middle, and its special tokens are text in contents.
    """
    byte_level_bpe(folder, *_MARKERS)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 16,
        "max_position_embeddings": 4096,
        "eos_token_id": 2,
    }
    write_json(folder / "config.json", config)
    port = free_port()
    settings = Settings.model_validate(
        {
            "models": [
                {
                    "model": str(folder),
                    "served_model_name": [model],
                    "allow_special_tokens_in_content": False,
                    "reasoning_parser": "deepseek_r1",
                }
            ],
            "bus": bus.model_dump(),
            "redis": redis.model_dump(),
            "worker": {"engine": "sim", "sim_step_s": 0.01},
            "tokenizer": {"trust_request_chat_template": True},
            "gateway": {"port": port, "max_usage_models": 1 << 20},
        }
    )
    mine, theirs = _FORKS.Pipe()
    values = json.dumps(plain_values(settings))
    process = _FORKS.Process(target=_serve, args=(values, theirs), daemon=False)
    process.start()
    assert process.pid is not None
    try:
        async with asyncio.timeout(_PATIENCE_S):
            subjects = await asyncio.to_thread(mine.recv)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield MeshProcess(process.pid, model, client, subjects)
        mine.send("stop")
        await asyncio.to_thread(process.join, _PATIENCE_S)
    finally:
        if process.is_alive():
            process.kill()


def _serve(values: str, control: Connection) -> None:
    from tokenmesh.shared.allocator import give_back_freed_memory

    give_back_freed_memory()
    asyncio.run(_run(from_plain(json.loads(values)), control))


async def _run(settings: Settings, control: Connection) -> None:
    from tokenmesh.services.gateway.main import build as build_gateway
    from tokenmesh.services.scheduler_svc.main import build as build_scheduler
    from tokenmesh.services.tokenizer_svc.main import build as build_tokenizer
    from tokenmesh.services.worker_svc.main import build as build_worker

    builds = {
        "gateway": build_gateway,
        "scheduler": build_scheduler,
        "tokenizer": build_tokenizer,
        "worker": build_worker,
    }
    async with AsyncExitStack() as stack:
        services = [
            await stack.enter_async_context(running(name, settings, build))
            for name, build in builds.items()
        ]
        url = f"http://127.0.0.1:{settings.gateway.port}/readyz"
        async with httpx.AsyncClient() as client, asyncio.timeout(_PATIENCE_S):
            while (await client.get(url)).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        subjects = {subject for service in services for subject in listened(service)}
        control.send(sorted(each for each in subjects if not each.startswith(FOREIGN)))
        await asyncio.to_thread(control.recv)
