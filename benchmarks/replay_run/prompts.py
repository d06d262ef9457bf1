"""Prompts: the same 512 tokens for the same hash id, everywhere and always."""

from functools import lru_cache
from random import Random
from typing import Final

import msgspec

from benchmarks.replay_run.trace import BLOCK_TOKENS, Entry

_FIRST_ID: Final = 64
"""Below it are a tokenizer's special tokens."""
_BLOCKS_KEPT: Final = 65536


class Prompts:
    """Token ids as JSON, below `vocab_size`."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._block = lru_cache(_BLOCKS_KEPT)(self._make_block)

    def of(self, entry: Entry) -> msgspec.Raw:
        """A JSON list of `input_length` ids."""
        whole, rest = divmod(entry.input_length, BLOCK_TOKENS)
        parts = [self._block(each)[0] for each in entry.hash_ids[:whole]]
        if rest:
            ids = self._block(entry.hash_ids[whole])[1]
            parts.append(",".join(map(str, ids[:rest])))
        return msgspec.Raw(f"[{','.join(parts)}]".encode())

    def ids(self, entry: Entry) -> list[int]:
        """The same as numbers."""
        return msgspec.json.decode(self.of(entry), type=list[int])

    def _make_block(self, hash_id: int) -> tuple[str, tuple[int, ...]]:
        random = Random(hash_id)
        ids = tuple(random.choices(range(_FIRST_ID, self._vocab_size), k=BLOCK_TOKENS))
        return ",".join(map(str, ids)), ids
