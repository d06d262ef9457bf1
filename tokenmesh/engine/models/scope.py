"""The scope of a model's KV: a hash of all that it depends on besides tokens.

Images are exchanged between equal scopes only. It covers neither a model's name nor its path.
"""

import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final

import torch

import tokenmesh
from tokenmesh.engine.models.kv_store import KvStore

SCOPE_BYTES: Final = 16
_VERSION: Final = 1
"""It is the version of the format of images."""
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 16 << 10
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.gguf", "*.pt")


def scope_of(
    directory: Path, store: KvStore, dtype: torch.dtype, page_dtype: torch.dtype, computed_by: str
) -> bytes:
    """Blocks while it reads samples of the weights. computed_by: equal tokens are promised within
    one kind of kernels and of the instructions that they use only."""
    scope = blake2b(digest_size=SCOPE_BYTES)
    facts = (
        # another version may compute otherwise, and stores outlive this one
        *(
            _VERSION,
            tokenmesh.__version__,
            computed_by,
            dtype,
            page_dtype,
            store.page_size,
            tuple(store.keeps),
        ),
        *(store.grouping, tuple(store.scales), store.image_bytes),
    )
    scope.update(repr(facts).encode())
    config = directory / "config.json"
    if config.is_file():
        scope.update(config.read_bytes())
    for file in sorted(_weight_files(directory), key=lambda each: each.name):
        for part in _samples(file):
            scope.update(part)
    return scope.digest()


def _weight_files(directory: Path) -> Iterator[Path]:
    if directory.is_file():
        yield directory
        return
    for pattern in _WEIGHTS:
        yield from directory.glob(pattern)


def _samples(file: Path) -> Iterator[bytes]:
    """The size and pieces from the beginning, where headers are, to the end."""
    with file.open("rb") as source:
        size = source.seek(0, os.SEEK_END)
        yield size.to_bytes(8, "little")
        for number in range(_SAMPLES):
            source.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            yield source.read(_SAMPLE_BYTES)
