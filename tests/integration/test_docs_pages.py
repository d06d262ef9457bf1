"""/docs and /redoc load nothing from another host."""

import re

import httpx
import pytest

from tests.fakes.back_end import BackEnd
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

_LOADED = re.compile(
    r"""(?:<script[^>]*\ssrc|<link[^>]*\shref|\burl|spec-url)\s*[=:]\s*["']([^"']+)"""
)


@pytest.mark.parametrize("root", ["", "/llm"])
@pytest.mark.parametrize("path", ["/docs", "/redoc"])
async def test_pages_load_only_local_files(
    bus_settings: BusSettings, redis_settings: RedisSettings, path: str, root: str
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings, root_path=root) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        page = await client.get(f"{root}{path}")
        assert page.status_code == 200
        loaded = _LOADED.findall(page.text)
        assert any(address.endswith(".js") for address in loaded)
        assert f"{root}/openapi.json" in loaded
        for address in loaded:
            assert address.startswith(f"{root}/"), address
            assert (await client.get(address)).status_code == 200, address
        assert (await client.get(f"{root}/docs/nothing.js")).status_code == 404


async def test_the_pages_can_be_disabled(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings, docs=False) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        for path in ("/docs", "/redoc", "/openapi.json", "/docs/swagger-ui.css"):
            assert (await client.get(path)).status_code == 404
