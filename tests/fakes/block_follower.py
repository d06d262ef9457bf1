"""The subscriber of the guide, which knows nothing but bytes, and what it must come to."""

import hashlib
from abc import abstractmethod
from typing import Any

import msgspec

from tests.fakes.engine_schedules import Schedule
from tests.fakes.guide_code import module_of
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.kv.block_log import BlockChange, BlockLog
from tokenmesh.engine.request.request import Request
from tokenmesh.shared.embeds_keys import embeds_keys
from tokenmesh.shared.hashing import Adapter, EmbedsKeys
from tokenmesh.shared.messages.media import EMBEDS, MediaItem
from tokenmesh.shared.tensor_blob import TensorBlob

GUIDE = "subscribe-to-block-events.md"
follow = module_of(GUIDE)

ADAPTERS = (Adapter("a", "1f"), Adapter("a", "2e"), Adapter("b", "1f"))
_TAGS = {"lora": b"L", "salt": b"S", "media": b"M", "kv_dtype": b"K", "prompt_embeds": b"E"}


def packed(key: dict[str, Any]) -> bytes:
    """An extra key, by the words of the guide."""
    value = str(key["value"]).encode()
    if key["kind"] in ("media", "prompt_embeds"):
        value += key.get("offset", 0).to_bytes(4, "little", signed=True)
    return _TAGS[str(key["kind"])] + len(value).to_bytes(4, "little") + value


def check_hashes(worker: Any) -> None:
    """Every hash follows from what the events say of its block."""
    for block_hash, (parent, token_ids, extras) in worker.blocks.items():
        content = (parent or bytes(16)) + token_ids + b"".join(map(packed, extras))
        assert hashlib.blake2b(content, digest_size=16).digest() == block_hash


class LoggedSchedule(Schedule):
    """Random requests, adapters among them, on an engine that logs its blocks."""

    def __init__(
        self,
        seed: int,
        trouble: float = 0.1,
        has_states: bool = False,
        kv_cache_dtype: str = "auto",
        has_host: bool = False,
    ) -> None:
        super().__init__(
            seed,
            trouble,
            is_async=seed % 2 == 0,
            has_boundary=seed % 3 == 0,
            has_states=has_states,
            has_host=has_host,
        )
        # images that come from elsewhere are in no log yet
        self._loads = self._fetches = None
        self.settings = self.settings.model_copy(update={"kv_cache_dtype": kv_cache_dtype})
        self.engine = Engine(self.runner, self.settings, log=BlockLog())
        for case in self.cases:
            # the fake model has no adapters: the same tokens, other blocks
            lora = self._rng.choice([None, None, *ADAPTERS])
            media = self._given(case.request)
            keys = self._keys_of(media)
            case.change_spec(lora=lora, media=media)
            case.request.prepared.embeds_keys = keys

    def _given(self, request: Request) -> list[MediaItem]:
        """Some media as embeddings of a client."""
        return [
            msgspec.structs.replace(item, kind=EMBEDS) if self._rng.random() < 0.5 else item
            for item in request.spec.media
        ]

    def _keys_of(self, media: list[MediaItem]) -> EmbedsKeys:
        """Those of tensors whose first rows are equal."""
        tensors = {
            each.content_hash: TensorBlob("float16", (each.length, 1), b"12" * each.length)
            for each in media
        }
        return embeds_keys(media, tensors, self.settings.block_size)

    @abstractmethod
    def note_blocks(self, changes: list[BlockChange]) -> None:
        """After each step."""

    @property
    def findable(self) -> set[bytes]:
        """Return the blocks that the pool or the host tier has; where rows keep states, those
        before a saved one."""
        states, host = self.engine._cache._states, self.engine._cache.host
        if states is not None:
            return set(states._num_behind)
        images = set() if host is None else {*host._ready, *host._saving}
        return images | set(self.engine._pool._block_by_hash)
