"""SharedGrammars: compiled grammars that workers of the same model share through Redis.

A stream that goes on elsewhere finds its grammar there, compiled by the same library: two libraries
may allow different tokens. Grammars lie in a fixed number of slots, by the hash of their text, so
that clients' grammars never take more room than that.
"""

import asyncio
import hashlib
import importlib.metadata
import logging
import zlib
from pathlib import Path
from typing import Final

import msgspec

from tokenmesh.engine.grammar.compile_job import BackendName
from tokenmesh.shared.blobs import Blobs, check_of
from tokenmesh.shared.config.worker import GrammarBackend, WorkerSettings
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.ids import BlobKey

logger = logging.getLogger(__name__)

GRAMMAR_SHARED_MAX_BYTES: Final = 1 << 20
"""Largest of them, compressed."""
GRAMMAR_SHARED_TTL_S: Final = 86_400
"""It says how long one is kept there after it was compiled."""

_LIBRARIES: Final = ("xgrammar", "llguidance")
_FORM: Final = "3"
"""Increase it when our part of compiling changes: entries in Redis outlive an upgrade."""
_FAST: Final = 1
"""zlib's level: a third of the size for some milliseconds."""


class SharedGrammar(msgspec.Struct, frozen=True):
    key: bytes
    """Hash of the grammar's text: its slot may hold another one."""
    backend: BackendName
    check: str
    """Hash of `data`: corrupted data must not reach a library."""
    data: bytes
    """For `Backend.load`, compressed."""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(SharedGrammar)


def vocabulary_of(
    tokenizer_file: Path, vocab_size: int, eos_ids: frozenset[int], setting: GrammarBackend
) -> bytes:
    """A hash of what a compiled grammar depends on besides its text: tokens and libraries."""
    digest = hashlib.blake2b(tokenizer_file.read_bytes(), digest_size=16)
    versions = [_FORM, *(importlib.metadata.version(name) for name in _LIBRARIES)]
    digest.update(repr((vocab_size, sorted(eos_ids), setting, versions)).encode())
    return digest.digest()


class SharedGrammars:
    """The shared grammars of one vocabulary. Without Redis it is empty, and nothing fails."""

    def __init__(self, blobs: Blobs, vocabulary: bytes, settings: WorkerSettings) -> None:
        self._blobs = blobs
        self._vocabulary = vocabulary
        self._settings = settings

    async def find(self, key: bytes) -> tuple[BackendName, bytes] | None:
        """The library that compiled it and its data; never later than `grammar_shared_wait_s`."""
        if not self._settings.grammar_shared_slots:
            return None
        try:
            async with asyncio.timeout(self._settings.grammar_shared_wait_s):
                found = _decoder.decode(await self._blobs.get(self._slot(key)))
        except (TokenMeshError, TimeoutError, msgspec.DecodeError):
            return None
        if found.key != self._name(key) or check_of(found.data) != found.check:
            return None
        limit = self._settings.grammar_max_bytes
        unpacker = zlib.decompressobj()
        data = await asyncio.to_thread(unpacker.decompress, found.data, limit)
        return (found.backend, data) if unpacker.eof else None

    async def keep(self, key: bytes, backend: BackendName, data: bytes) -> None:
        """Store one, unless it is too large."""
        packed = await asyncio.to_thread(zlib.compress, data, _FAST)
        settings = self._settings
        if not settings.grammar_shared_slots or len(packed) > GRAMMAR_SHARED_MAX_BYTES:
            return
        shared = SharedGrammar(self._name(key), backend, check_of(packed), packed)
        try:
            ttl_s = GRAMMAR_SHARED_TTL_S
            await self._blobs.put(_encoder.encode(shared), self._slot(key), ttl_s)
        except TokenMeshError as error:
            logger.info("a compiled grammar is not shared: %s", error.message)

    def _name(self, key: bytes) -> bytes:
        return hashlib.blake2b(self._vocabulary + key, digest_size=32).digest()

    def _slot(self, key: bytes) -> BlobKey:
        number = int.from_bytes(self._name(key)[:8], "little")
        vocabulary = self._vocabulary.hex()
        return BlobKey(f"grammar:{vocabulary}:{number % self._settings.grammar_shared_slots}")
