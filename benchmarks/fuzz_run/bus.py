"""An attacker that may write to the bus: spoiled messages on every subject of the mesh."""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any, Final, get_args

import msgspec

from benchmarks.fuzz_run.mutate import spoil
from tokenmesh.shared.bus.nats import NatsLink
from tokenmesh.shared.messages import Drain, Message, Sleep, StartProfile, StopProfile, WakeUp
from tokenmesh.shared.subject_table import SUBJECTS

_COMMANDS: Final = (Drain, Sleep, StartProfile, StopProfile, WakeUp)
"""A well-formed one is carried out, from any sender."""
_PAUSE_S: Final = 0.005
_HEADERS: Final[tuple[dict[str, str] | None, ...]] = (
    None,
    None,
    {"tm-schema": "99"},
    {"tm-deadline": "nan"},
    {"tm-deadline": "1e300", "tm-sent": "-1e300"},
    {"traceparent": "x" * 2000},
)


class BusFuzzer:
    """Sends what does not decode, so that no stream may be harmed by it."""

    def __init__(
        self, link: NatsLink, instances: Sequence[str], model: str, random: Random, max_bytes: int
    ) -> None:
        """`instances`: ids of processes that listen on subjects of their own."""
        self._link = link
        self._instances = instances
        self._model = model
        self._random = random
        self._max_bytes = max_bytes
        self._decode = msgspec.msgpack.Decoder(Message).decode
        self._kinds = [each for each in get_args(Message) if each not in _COMMANDS]
        self.num_sent = 0

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            data = self.payload()
            subject = self._subject()
            await self._link.send(subject, data, self._random.choice(_HEADERS))
            self.num_sent += 1
            await asyncio.sleep(_PAUSE_S)

    def payload(self) -> bytes:
        """Bytes that no process takes for a message."""
        while True:
            data = spoil(self._message(), self._random)
            if self._random.random() < 0.01:
                data = b"\xc1" + data * max(1, (self._max_bytes - 1024) // max(1, len(data)))
            data = data[: self._max_bytes - 1024]
            try:
                self._decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                return data

    def _message(self) -> bytes:
        """A message of some kind whose fields are of any type."""
        kind: Any = self._random.choice(self._kinds)
        values: list[Any] = [1, -1, "", "a" * 100, b"\x00" * 64, [], {}, None, 1e308, 2**63]
        fields = {name: self._random.choice(values) for name in kind.__struct_fields__}
        return msgspec.msgpack.encode({"type": kind.__name__, **fields})

    def _subject(self) -> str:
        pattern = self._random.choice([each.pattern for each in SUBJECTS if each.is_ours])
        parts = []
        for part in pattern.split("."):
            if part == "<model>":
                parts.append(self._model)
            elif part.startswith("<"):
                parts.append(self._random.choice(self._instances))
            else:
                parts.append(part)
        return ".".join(parts)
