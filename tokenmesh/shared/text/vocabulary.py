"""Vocabulary: a model's tokens as decoders need them, shared by all streams of the model."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Self

from tokenmesh.shared.text.token_names import ANCHORS, TokenNames, byte_level_piece

REPLACEMENT: Final = "\ufffd"
_BYTE_LEVEL: Final = "ByteLevel"


class Vocabulary:
    """Immutable but for its caches, which hold at most one entry an id.

    A byte-level tokenizer (GPT-2, Llama 3, Qwen and their kin) gives each token fixed bytes, so
    its text needs no call into the tokenizers' library; see `is_byte_level`.
    """

    def __init__(
        self,
        names: TokenNames,
        special_ids: Iterable[int],
        marker_ids: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """`marker_ids`: of texts around reasoning and calls, which tokenizers have encoded."""
        self._names = names
        self._marker_ids = marker_ids or {}
        self.special_ids = frozenset(special_ids)
        self.added_ids = names.added_ids
        self.is_byte_level = _kind_of(names.decoder) == _BYTE_LEVEL
        self._name_by_id = _Names(names)
        self._texts: dict[int, tuple[str, bytes]] = {}
        self.pieces = _Pieces(names)
        """Bytes by id; only for a byte-level tokenizer."""
        self.plain_pieces = _Pieces(names, self.special_ids)
        """The same with nothing for special ids."""
        self._join = self._joined_bytes if self.is_byte_level else _joiner(names.decoder)
        self.bytes_by_id: dict[int, bytes] = {}
        """Ids of the tokens that stand for one byte each, where characters fall back to bytes."""
        letter = names.id_by_byte.get(ord("A"))
        if letter is not None and self.decode([letter]) == "A":
            self.bytes_by_id = {found: bytes([byte]) for byte, found in names.id_by_byte.items()}
        self._anchor = [names.known[each] for each in ANCHORS if each in names.known][:1]
        """An ordinary token to put before another one, so that it is not the first of its text."""

    @classmethod
    def load(
        cls,
        tokenizer_json: str,
        special_ids: Iterable[int],
        marker_ids: Mapping[str, Sequence[int]] | None = None,
    ) -> Self:
        """Parse the text of a `tokenizer.json`, with merges or without; slow for a large one.

        Raises ValueError for another text.
        """
        return cls(TokenNames(tokenizer_json), special_ids, marker_ids)

    @classmethod
    def empty(cls) -> "Vocabulary":
        """Without tokens: every id is an empty text. For answers that stay ids."""
        return cls.load(json.dumps({"model": {"vocab": {}}, "decoder": {"type": _BYTE_LEVEL}}), ())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special ones included. Unknown ids are nothing."""
        names = self._name_by_id
        return self._join([name for each in ids if (name := names[each]) is not None])

    def _joined_bytes(self, names: list[str]) -> str:
        return b"".join(map(byte_level_piece, names)).decode("utf-8", "replace")

    def has_markers(self, texts: Iterable[str]) -> bool:
        """Return whether `marker_ids` knows all of these."""
        return self._marker_ids.keys() >= {*texts}

    def marker_ids(self, text: str) -> list[int]:
        """The ids of a marker of the model's formats. No other text is encoded in a gateway."""
        return [*self._marker_ids[text]]

    def added_id(self, text: str) -> int | None:
        """The id of a token that was added to the vocabulary, such as a marker; None: no such."""
        found = self._names.known.get(text)
        return found if found in self.added_ids else None

    def name(self, token_id: int) -> str:
        """The token as the vocabulary spells it, such as `Ġhello`; empty for an unknown id."""
        return self._name_by_id[token_id] or ""

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


class _Names(dict[int, str | None]):
    """Names by id, looked up at first use."""

    def __init__(self, names: TokenNames) -> None:
        super().__init__()
        self._names = names

    def __missing__(self, token_id: int) -> str | None:
        name = self._names.name(token_id)
        # None is not kept: a worker could name any number of ids that do not exist.
        if name is not None:
            self[token_id] = name
        return name


class _Pieces(dict[int, bytes]):
    """Bytes of a byte-level token by id, computed at first use."""

    def __init__(self, names: TokenNames, hidden: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._names = names
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        name = self._names.name(token_id)
        if name is None:
            return b""
        piece = b"" if token_id in self._hidden else byte_level_piece(name)
        self[token_id] = piece
        return piece


def _kind_of(decoder: Any) -> object:
    return decoder.get("type") if isinstance(decoder, dict) else None


def _joiner(decoder: Any) -> Callable[[list[str]], str]:
    """Names -> text, by the library's own decoder. Raises ValueError for one it does not know."""
    if decoder is None:
        return " ".join
    from tokenizers import Tokenizer

    # a decoder alone has no text form
    model = {"type": "BPE", "vocab": {}, "merges": []}
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor"))
    whole = {"version": "1.0", "added_tokens": [], **parts, "decoder": decoder, "model": model}
    try:
        found = Tokenizer.from_str(json.dumps(whole)).decoder
    # tokenizers raises bare Exception
    except Exception as error:
        raise ValueError(f"its decoder is unknown: {error}") from error
    join: Callable[[list[str]], str] = found.decode
    return join
