"""AdapterRegistry: in Redis, the adapters of a model that every worker is to have.

Workers hold them as well, and write what is missing here: Redis may lose it.
"""

from typing import Final

import msgspec

from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.redis import Redis

MAX_RECORDS: Final = 8192
"""Names of one model, unloaded ones included; the oldest of these are deleted first."""

_SOURCE: Final = """
local held = redis.call('HGET', KEYS[1], ARGV[1])
if held and cjson.decode(held).version > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The latest command about a name."""

    version: int
    """Milliseconds since 1970; the highest counts."""
    path: str = ""
    """On the workers' machines; empty: in `lora_dir`."""
    content_hash: str = ""
    is_unloaded: bool = False


class AdapterRegistry:
    def __init__(self, redis: Redis, model: ModelName) -> None:
        self._redis = redis
        # the braces keep it on one node of a cluster
        self._key = f"tm:adapters:{{{model}}}"
        self._write = redis.script(_SOURCE)
        self._decoder = msgspec.json.Decoder(AdapterRecord)

    async def read(self) -> dict[str, AdapterRecord]:
        """All records by name; those that cannot be read are left out. Raises Unavailable."""
        reply = await self._redis.call("HGETALL", self._key)
        found: dict[str, AdapterRecord] = {}
        if not isinstance(reply, list):
            return found
        for name, value in zip(reply[::2], reply[1::2], strict=False):
            if isinstance(name, bytes) and isinstance(value, bytes):
                try:
                    found[name.decode()] = self._decoder.decode(value)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    continue
        return found

    async def write(self, name: str, record: AdapterRecord) -> None:
        """Unless a later command was written. Raises Unavailable."""
        value = msgspec.json.encode(record)
        await self._write([self._key], [name, str(record.version), value])

    async def prune(self, records: dict[str, AdapterRecord]) -> None:
        """Delete the oldest names that are unloaded, where there are too many."""
        unloaded = sorted(
            (each.version, name) for name, each in records.items() if each.is_unloaded
        )
        surplus = [name for _, name in unloaded[: max(0, len(records) - MAX_RECORDS)]]
        if surplus:
            await self._redis.call("HDEL", self._key, *surplus)
