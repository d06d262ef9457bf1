"""Answers of megabytes are written outside the event loop, and are the same."""

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.small_mesh import SmallMesh
from tokenmesh.services.gateway.core.http import sse
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings


async def test_many_logprobs_are_written_in_a_thread(
    bus_settings: BusSettings,
    redis_settings: RedisSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writers: list[bool] = []
    encode = sse.encode_json

    def noting(value: Any) -> bytes:
        writers.append(threading.current_thread() is threading.main_thread())
        return encode(value)

    monkeypatch.setattr(sse, "encode_json", noting)
    limits = {"inline_logprobs": 20}
    async with SmallMesh(tmp_path, bus_settings, redis_settings, gateway=limits) as mesh:

        async def ask(**fields: Any) -> list[Any]:
            writers.clear()
            response = await mesh.complete(max_tokens=8, ignore_eos=True, **fields)
            assert response.status_code == 200
            choices: list[Any] = response.json()["choices"]
            return choices

        plain = await ask(prompt=[5] * 30)
        assert writers == [True]
        few = await ask(prompt=[5] * 30, logprobs=2)
        assert writers == [True]
        many = await ask(prompt=[5] * 30, logprobs=2, prompt_logprobs=2)
        assert writers == [False]
        assert few[0]["logprobs"] == many[0]["logprobs"]
        assert [each["text"] for each in plain] == [each["text"] for each in many]
        assert len(many[0]["prompt_logprobs"]) == 30
