"""Counts the files of the gateway that one plain streamed chat passes through."""

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

import httpx
import pytest

from tests.fakes.back_end import BackEnd
from tokenmesh.services import gateway
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

ROOT = str(Path(str(gateway.__file__)).parent)
MAX_FILES = 42
MAX_FUNCTIONS = 290
MAX_CALLS = 1_000
NOT_A_FUNCTION = ("<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")


class Calls:
    """Counts calls of the gateway's functions; each resumption of a coroutine is one."""

    def __init__(self) -> None:
        self.by_code: Counter[CodeType] = Counter()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            self.by_code[code] += 1

    @property
    def total(self) -> int:
        return self.by_code.total()

    @property
    def functions(self) -> list[str]:
        codes = (code for code in self.by_code if code.co_name not in NOT_A_FUNCTION)
        return sorted(f"{_file(code)}:{code.co_qualname}" for code in codes)

    @property
    def files(self) -> list[str]:
        return sorted({_file(code) for code in self.by_code})


def _file(code: CodeType) -> str:
    return code.co_filename.removeprefix(f"{ROOT}/")


async def chat(client: httpx.AsyncClient, mesh: BackEnd) -> None:
    body = {"model": mesh.model, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"


async def traced(client: httpx.AsyncClient, mesh: BackEnd) -> Calls:
    calls = Calls()
    sys.setprofile(calls)
    try:
        await chat(client, mesh)
    finally:
        sys.setprofile(None)
    return calls


async def test_a_plain_streamed_chat_passes_through_few_files(
    bus_settings: BusSettings,
    redis_settings: RedisSettings,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with (
        # On a busy machine the gateway would ping the worker meanwhile; the path is without that.
        BackEnd(bus_settings, redis_settings, silence_s=30.0) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=10) as client,
    ):
        await chat(client, mesh)
        # Heartbeats and usage of earlier chats come in between: the shortest of a few is the path.
        runs = [await traced(client, mesh) for _ in range(4)]
    calls = min(runs, key=lambda each: (len(each.files), len(each.functions), each.total))
    files, functions = calls.files, calls.functions
    with capsys.disabled():
        counts = f"{len(files)} files, {len(functions)} functions, {calls.total} calls"
        sys.stdout.write(f"\na streamed chat: {counts} of the gateway\n")
    assert len(files) <= MAX_FILES, files
    assert len(functions) <= MAX_FUNCTIONS, functions
    assert calls.total <= MAX_CALLS
