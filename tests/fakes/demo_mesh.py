"""The built-in model behind real services in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

# Before a worker's grammars: their libraries are imported without it.
from transformers import AutoTokenizer  # noqa: F401

import tokenmesh
from tests.fakes.five_services import five_services
from tests.servers import Server, bus_settings_of, free_port, redis_settings_of
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings

DEMO = Path(tokenmesh.__file__).parent / "demo_model"


@asynccontextmanager
async def demo_mesh(
    nats: Server,
    redis: Server,
    *,
    worker: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that serves it as `demo`."""
    settings = Settings(
        models=(
            ModelSettings.model_validate(
                {"model": str(DEMO), "served_model_name": ("demo",), **(model or {})}
            ),
        ),
        bus=bus_settings_of(nats),
        redis=redis_settings_of(redis),
        gateway=GatewaySettings(port=free_port()),
        worker=WorkerSettings(device="cpu", num_gpu_blocks_override=256, **(worker or {})),
    )
    async with five_services(settings, without=("encoder",)) as (_, client):
        yield client
