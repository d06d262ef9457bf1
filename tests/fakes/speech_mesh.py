"""SpeechMesh: all five services in this process, serving a tiny model that hears."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import httpx

from tests.fakes.five_services import five_services
from tests.servers import free_port
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.config.model import (
    EncoderSettings,
    MediaSettings,
    ModelSettings,
    TokenizerSettings,
)
from tokenmesh.shared.config.worker import WorkerSettings

NAME: Final = "whisper-tiny"


class SpeechMesh:
    """Use as `async with`; `client` talks to the gateway."""

    def __init__(
        self,
        checkpoint: Path,
        bus: BusSettings,
        redis: RedisSettings,
        gateway: dict[str, Any] | None = None,
        **of_model: Any,
    ) -> None:
        names = {"model": str(checkpoint), "served_model_name": (NAME,), "dtype": "float32"}
        model = ModelSettings.model_validate({**names, **of_model})
        worker = {"device": "cpu", "num_gpu_blocks_override": 256, "max_num_seqs": 8}
        self.settings = Settings(
            models=(model,),
            bus=bus,
            redis=redis,
            tokenizer=TokenizerSettings(media=MediaSettings(decode_processes=1, max_audio_s=120.0)),
            encoder=EncoderSettings(device="cpu"),
            worker=WorkerSettings.model_validate(worker),
            gateway=GatewaySettings.model_validate(
                # random weights make no plausible transcript
                {"port": free_port(), "audio_temperatures": (0.0,), **(gateway or {})}
            ),
        )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "SpeechMesh":
        services = five_services(self.settings)
        self.services, self.client = await self._stack.enter_async_context(services)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def url(self) -> str:
        """The URL of the gateway."""
        return f"http://127.0.0.1:{self.settings.gateway.port}"

    async def transcribe(
        self, file: bytes, route: str = "transcriptions", **fields: Any
    ) -> httpx.Response:
        """The response to a form."""
        data = {"model": NAME, **fields}
        return await self.client.post(
            f"/v1/audio/{route}", data=data, files={"file": ("speech.wav", file)}
        )
