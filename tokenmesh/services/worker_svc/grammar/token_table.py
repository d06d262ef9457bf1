"""TokenTable: the bytes of every token of a vocabulary, read from a checkpoint's tokenizer.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.text.vocabulary import byte_level_piece

_SPACE = "\u2581"
"""How sentencepiece spells a space."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What a grammar must know of a tokenizer."""

    tokens: list[bytes]
    """By id, as many as the model has; empty for special tokens and ids without a token."""
    eos_ids: tuple[int, ...]
    """Ascending; they end a text."""

    @property
    def special_ids(self) -> list[int]:
        """Ids that stand for no text."""
        return [token_id for token_id, piece in enumerate(self.tokens) if not piece]


def read_token_table(path: Path, vocab_size: int, eos_ids: frozenset[int]) -> TokenTable:
    """Read the file; vocab_size is the model's, which may be padded. Raises CheckpointError."""
    try:
        raw = json.loads(path.read_bytes())
        return token_table(raw, vocab_size, eos_ids)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: {error}", param=str(path)) from error


def token_table(raw: dict[str, Any], vocab_size: int, eos_ids: frozenset[int]) -> TokenTable:
    """Of a parsed tokenizer.json. Raises KeyError and its kin when it is none."""
    tokens = [b""] * vocab_size
    spell = byte_level_piece if _is_byte_level(raw) else _sentencepiece_piece
    for name, token_id in _vocabulary(raw["model"]):
        if token_id < vocab_size:
            tokens[token_id] = spell(name)
    for added in raw.get("added_tokens") or ():
        if added["id"] < vocab_size:
            tokens[added["id"]] = b"" if added.get("special") else added["content"].encode()
    known = sorted(eos for eos in eos_ids if eos < vocab_size)
    for eos in known:
        tokens[eos] = b""
    return TokenTable(tokens, tuple(known))


def _vocabulary(model: dict[str, Any]) -> list[tuple[str, int]]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        return list(vocabulary.items())
    # unigram: a list of pieces and their scores
    return [(entry[0], token_id) for token_id, entry in enumerate(vocabulary)]


def _is_byte_level(raw: dict[str, Any]) -> bool:
    parts = [raw.get("decoder"), raw.get("pre_tokenizer")]
    while parts:
        part = parts.pop()
        if part is None:
            continue
        if part["type"] == "ByteLevel":
            return True
        parts += [*part.get("decoders", ()), *part.get("pretokenizers", ())]
    return False


def _sentencepiece_piece(name: str) -> bytes:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace(_SPACE, " ").encode()
