"""TokenTable: the bytes of every token of a vocabulary, read from a checkpoint's tokenizer.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.text.token_names import TokenNames, byte_level_piece

_SPACE = "\u2581"
"""It says how sentencepiece spells a space."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """It holds what a grammar must know of a tokenizer."""

    tokens: list[bytes]
    """By id, as many as the model has; empty for special tokens and ids without a token."""
    eos_ids: tuple[int, ...]
    """Ascending; they end a text."""
    special_by_name: Mapping[str, int] = field(default_factory=dict)
    """Ids of special tokens by their spelling."""

    @property
    def special_ids(self) -> list[int]:
        """Ids that stand for no text."""
        return [token_id for token_id, piece in enumerate(self.tokens) if not piece]


def read_token_table(path: Path, vocab_size: int, eos_ids: frozenset[int]) -> TokenTable:
    """Read the file; vocab_size is the model's, which may be padded. Raises CheckpointError."""
    try:
        return token_table(TokenNames(path.read_bytes()), vocab_size, eos_ids)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: {error}", param=str(path)) from error


def token_table(names: TokenNames, vocab_size: int, eos_ids: frozenset[int]) -> TokenTable:
    """The bytes of each token, as many as the model's vocabulary has."""
    tokens = [b""] * vocab_size
    special: dict[str, int] = {}
    spell = byte_level_piece if names.is_byte_level else _sentencepiece_piece
    for token_id in range(min(vocab_size, len(names))):
        name = names.name(token_id)
        if name is None:
            continue
        if names.is_special(token_id):
            special[name] = token_id
        else:
            # of added tokens too: a text is decoded by their spelling
            tokens[token_id] = spell(name)
    known = sorted(eos for eos in eos_ids if eos < vocab_size)
    for eos in known:
        tokens[eos] = b""
    return TokenTable(tokens, tuple(known), special)


def _sentencepiece_piece(name: str) -> bytes:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace(_SPACE, " ").encode()
