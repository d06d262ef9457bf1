"""TokenNames: how a vocabulary spells its tokens, as flat arrays of some bytes a token.

A tokenizer that also encodes holds a hundred bytes and more for each token and each merge, and
several times as much while it is read.
"""

from array import array
from itertools import accumulate
from typing import Any, Final

import msgspec

MAX_IDS: Final = 1 << 23
"""Ids that a vocabulary may reach to; each takes 5 bytes, whether it has a token or not."""
ANCHORS: Final = ("a", "\u2581a", "\u0120a", "e", "\u2581the", "the")
"""Tokens of which one is in nearly every vocabulary and decodes to plain letters."""
_BYTES: Final = {f"<0x{byte:02X}>": byte for byte in range(256)}
_IS_THERE: Final = 1
_IS_SPECIAL: Final = 2


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    """A list of pieces and their scores is a unigram model's."""


class _Tokenizer(msgspec.Struct):
    """The part of a tokenizer.json that turns ids into text."""

    model: _Model
    added_tokens: list[_Added] | None = None
    decoder: Any = None
    pre_tokenizer: Any = None


class TokenNames:
    """The tokens of a tokenizer.json by id. Immutable."""

    def __init__(self, tokenizer_json: bytes | str) -> None:
        """Raises ValueError for what is not a tokenizer.json."""
        try:
            parsed = msgspec.json.decode(tokenizer_json, type=_Tokenizer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(str(error)) from error
        vocab, added = parsed.model.vocab, parsed.added_tokens or []
        pieces = (
            list(vocab.items())
            if isinstance(vocab, dict)
            else [(entry[0], token_id) for token_id, entry in enumerate(vocab)]
        )
        ids = [token_id for _, token_id in pieces] + [each.id for each in added]
        size = 1 + max(ids, default=-1)
        if size > MAX_IDS or min(ids, default=0) < 0:
            raise ValueError(f"it has ids from {min(ids)} to {size - 1}, not below {MAX_IDS}")
        spelled, flags = [b""] * size, bytearray(size)
        self.known: dict[str, int] = {}
        """Ids of the tokens that were added to the vocabulary, by their text, and of ANCHORS."""
        self.id_by_byte: dict[int, int] = {}
        """Ids of the tokens that stand for one byte by their name, such as `<0x0A>`."""
        for name, token_id in pieces:
            spelled[token_id], flags[token_id] = name.encode(), _IS_THERE
            if name in _BYTES:
                self.id_by_byte[_BYTES[name]] = token_id
            elif name in ANCHORS:
                self.known[name] = token_id
        for each in added:
            spelled[each.id] = each.content.encode()
            flags[each.id] = _IS_THERE | (_IS_SPECIAL if each.special else 0)
            self.known[each.content] = each.id
            if each.content in _BYTES:
                self.id_by_byte[_BYTES[each.content]] = each.id
        self._starts = array("I", accumulate(map(len, spelled), initial=0))
        self._spelled = b"".join(spelled)
        self._flags = bytes(flags)
        self.added_ids = frozenset(each.id for each in added)
        self.decoder = parsed.decoder
        """As in the file."""
        self.is_byte_level = _names_byte_level(parsed.decoder, parsed.pre_tokenizer)
        """True where the characters of a name stand for bytes, as GPT-2 spells them."""

    def __len__(self) -> int:
        """One more than the largest id."""
        return len(self._flags)

    def name(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, such as `Ġhello`; None: no token has this id."""
        if not 0 <= token_id < len(self._flags) or not self._flags[token_id]:
            return None
        return self._spelled[self._starts[token_id] : self._starts[token_id + 1]].decode()

    def is_special(self, token_id: int) -> bool:
        """Return whether a token stands for no text. The id has a token."""
        return bool(self._flags[token_id] & _IS_SPECIAL)


def _names_byte_level(*parts: Any) -> bool:
    todo = [*parts]
    while todo:
        part = todo.pop()
        if part is None:
            continue
        if part["type"] == "ByteLevel":
            return True
        todo += [*part.get("decoders", ()), *part.get("pretokenizers", ())]
    return False


def byte_level_piece(name: str) -> bytes:
    """The bytes of a byte-level token by its name.

    An added token may hold characters outside the byte alphabet: those stand for themselves.
    """
    try:
        return bytes([_BYTE_BY_CHAR[char] for char in name])
    except KeyError:
        return name.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return alphabet


_BYTE_BY_CHAR: Final = _byte_alphabet()
