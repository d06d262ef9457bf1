"""An attacker of `/v1/realtime`: events that fit, mutated events, frames that are not JSON."""

import asyncio
import json
from collections import Counter
from random import Random
from typing import Any, Final

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from benchmarks.fuzz_run.mutate import mutate, spoil
from tokenmesh.cli.bench.client import Target

_SESSION_S: Final = 4.0
_MAX_EVENT_BYTES: Final = 200_000
_ITEM: Final = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "rivers"}],
}
_EVENTS: Final[tuple[dict[str, Any], ...]] = (
    {"type": "session.update", "session": {"instructions": "short", "max_output_tokens": 8}},
    {"type": "conversation.item.create", "item": _ITEM},
    {"type": "conversation.item.retrieve", "item_id": "item_1"},
    {"type": "conversation.item.delete", "item_id": "item_1"},
    {"type": "response.create", "response": {"max_output_tokens": 8}},
    {"type": "response.cancel"},
    {"type": "input_audio_buffer.append", "audio": "AAAA"},
)


class RealtimeFuzzer:
    """One session after the other; counts how they end."""

    def __init__(self, server: Target, key: str, model: str, random: Random) -> None:
        self._url = f"ws://127.0.0.1:{server.port}/v1/realtime?model={model}"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._random = random
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self) -> None:
        """One session after the other, until cancelled."""
        while True:
            try:
                await self._session()
                self.ends["left"] += 1
            except ConnectionClosed as error:
                code = error.rcvd.code if error.rcvd else 0
                self.ends[str(code)] += 1
                if code == 1011:
                    self.wrong.append(f"websocket closed with 1011: {error}")
            except (InvalidHandshake, OSError, TimeoutError) as error:
                self.ends[type(error).__name__] += 1
                await asyncio.sleep(0.1)

    async def _session(self) -> None:
        async with connect(self._url, additional_headers=self._headers, max_size=None) as socket:
            reading = asyncio.create_task(self._read(socket))
            try:
                async with asyncio.timeout(_SESSION_S):
                    for _ in range(self._random.randint(1, 40)):
                        await socket.send(self._frame())
                        await asyncio.sleep(0)
                await asyncio.sleep(0.05)
            except TimeoutError:
                return
            finally:
                reading.cancel()

    async def _read(self, socket: Any) -> None:
        async for message in socket:
            event = json.loads(message)
            error = event.get("error") or {}
            if event.get("type") == "error" and error.get("type") == "server_error":
                self.wrong.append(f"realtime: {message[:600]}")

    def _frame(self) -> str | bytes:
        random = self._random
        event: Any = random.choice(_EVENTS)
        if random.random() < 0.6:
            event = mutate(event, random, _MAX_EVENT_BYTES)
        text = json.dumps(event)
        if random.random() < 0.2:
            return spoil(text.encode(), random)
        return text
