"""Vocabulary: a model's tokenizer as decoders need it, shared by all streams of the model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Self

from tokenmesh.shared.text.token_names import ANCHORS, byte_level_piece

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT: Final = "\ufffd"


class Vocabulary:
    """Immutable but for its caches, which hold at most one entry an id.

    A byte-level tokenizer (GPT-2, Llama 3, Qwen and their kin) gives each token fixed bytes, so
    its text needs no call into the tokenizer; see `is_byte_level`.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        special_ids: Iterable[int],
        marker_ids: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """`marker_ids`: of texts around reasoning and calls, which tokenizers have encoded."""
        from tokenizers import decoders

        self._tokenizer = tokenizer
        self._marker_ids = marker_ids or {}
        self.special_ids = frozenset(special_ids)
        self.added_ids = frozenset(tokenizer.get_added_tokens_decoder())
        self.is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self.bytes_by_id = _bytes_by_id(tokenizer)
        """Of the tokens that stand for one byte each, where characters fall back to bytes."""
        self._anchor = _find_anchor(tokenizer)
        self._texts: dict[int, tuple[str, bytes]] = {}
        self.pieces = _Pieces(tokenizer)
        """Bytes by id; only for a byte-level tokenizer."""
        self.plain_pieces = _Pieces(tokenizer, self.special_ids)
        """The same with nothing for special ids."""

    @classmethod
    def load(
        cls,
        tokenizer_json: str,
        special_ids: Iterable[int],
        marker_ids: Mapping[str, Sequence[int]] | None = None,
    ) -> Self:
        """Parse the text of a `tokenizer.json`; slow for a large one."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(tokenizer_json), special_ids, marker_ids)

    @classmethod
    def empty(cls) -> "Vocabulary":
        """Without tokens: every id is an empty text. For answers that stay ids."""
        from tokenizers import Tokenizer, decoders, models

        tokenizer = Tokenizer(models.BPE())
        tokenizer.decoder = decoders.ByteLevel()
        return cls(tokenizer, ())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special ones included. Unknown ids are nothing."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def has_markers(self, texts: Iterable[str]) -> bool:
        """Whether `marker_ids` knows all of these."""
        return self._marker_ids.keys() >= {*texts}

    def marker_ids(self, text: str) -> list[int]:
        """The ids of a marker of the model's formats. No other text is encoded in a gateway."""
        return [*self._marker_ids[text]]

    def added_id(self, text: str) -> int | None:
        """The id of a token that was added to the vocabulary, such as a marker; None: no such."""
        found = self._tokenizer.token_to_id(text)
        return found if found in self.added_ids else None

    def name(self, token_id: int) -> str:
        """The token as the vocabulary spells it, such as `Ġhello`; empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token's text in the middle of a text, and its bytes.

        The text of a part of a character is U+FFFD, its bytes are exact where the tokenizer
        knows them.
        """
        known = self._texts.get(token_id)
        if known is None:
            known = self._texts[token_id] = self._token_text(token_id)
        return known

    def _token_text(self, token_id: int) -> tuple[str, bytes]:
        if self.is_byte_level:
            piece = self.pieces[token_id]
            return piece.decode("utf-8", "replace"), piece
        piece = self.bytes_by_id.get(token_id, b"")
        if piece:
            return piece.decode("utf-8", "replace"), piece
        before = self.decode(self._anchor)
        text = self.decode([*self._anchor, token_id])[len(before) :]
        return text, text.encode()


class _Pieces(dict[int, bytes]):
    """Bytes of a byte-level token by id, computed at first use."""

    def __init__(self, tokenizer: "Tokenizer", hidden: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            # Not kept: a worker could name any number of ids that do not exist.
            return b""
        piece = b"" if token_id in self._hidden else byte_level_piece(name)
        self[token_id] = piece
        return piece


def _bytes_by_id(tokenizer: "Tokenizer") -> dict[int, bytes]:
    """Empty where the decoder does not join such tokens."""
    letter = tokenizer.token_to_id("<0x41>")
    if letter is None or tokenizer.decode([letter], skip_special_tokens=False) != "A":
        return {}
    ids = {byte: tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    return {found: bytes([byte]) for byte, found in ids.items() if found is not None}


def _find_anchor(tokenizer: "Tokenizer") -> list[int]:
    """An ordinary token to put before another one, so that it is not the first of its text."""
    for name in ANCHORS:
        token_id = tokenizer.token_to_id(name)
        if token_id is not None:
            return [token_id]
    return []
