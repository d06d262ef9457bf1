"""WordCache: the ids of words that were encoded before, so that a text is mostly looked up.

`tokenizers` takes a microsecond or more for each word of a text, also for one that is in its own
cache. To split a text at its spaces and look the words up takes a tenth of that.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from tokenmesh.services.tokenizer_svc.encoding import (
    Ids,
    encode_texts,
    encode_with_ends,
    read_frame,
)
from tokenmesh.shared.errors import CheckpointError

_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS: Final = frozenset((_LLAMA3, _LLAMA3.replace("{1,3}", "")))
"""Patterns of Llama 3 and Qwen 2. As in GPT-2's, which `tokenizers` has built in, no match goes on
over a space behind another character, and nothing looks back: each such space begins a piece of a
text whose ids depend on nothing else."""
_NORMALIZERS: Final = (None, {"type": "NFC"})
"""NFC composes a space with nothing."""
_MOST_WORDS: Final = 1 << 15
_MOST_WORD_CHARS: Final = 32
_MOST_WORD_IDS: Final = 8
"""With the two lines above: the cache takes less than 24 MiB."""
_LEARNED_AT_ONCE: Final = 24
"""Words of a text that is encoded as a whole."""
_PLACES_COST: Final = 2
"""Where the places of tokens are wanted, too, a text takes at most so many times as long."""
_KNOWN_COST: Final = 16
"""As many known characters are looked up in the time of encoding one."""
_SHORT_CHARS: Final = 1 << 15
"""Split and looked up in less than two milliseconds."""
_MOST_PIECES: Final = 512
"""Unknown pieces of a text that is divided on the event loop, in less than a millisecond."""
_MOST_CHARS: Final = 1 << 18
_MOST_SAMPLES: Final = 64
_SAMPLES: Final = (
    "It's 12345 o'clock, isn't it?  Two   spaces\tand a tab \t end .",
    "def f(x):\n    return x  # caf\u00e9 \u00a0 fixed\n\n\n  if (a != b):\r\n\tpass  \n ",
    " leading, 3.14 % and \u4f60\u597d \u043c\u0438\u0440 e\u0301 \u2014 x \u3000 y\u0085 z ",
)


@dataclass(frozen=True, slots=True)
class Found:
    """The known ids of a text's pieces."""

    text: str
    parts: list[tuple[int, ...] | Ids]
    """The ids of each piece of the text, in order; empty where they are unknown."""
    unknown: dict[int, str]
    """Pieces by their place in `parts`."""
    num_unknown: int
    """Their characters."""

    @property
    def is_mostly_known(self) -> bool:
        """True where to encode the rest alone, with places, takes less than the whole text."""
        return self.num_unknown * _PLACES_COST <= len(self.text)

    @property
    def cost(self) -> int:
        """In characters that are encoded in the time that the rest of the work takes."""
        rest = self.num_unknown * _PLACES_COST if self.is_mostly_known else len(self.text)
        return rest + len(self.text) // _KNOWN_COST


class WordCache:
    """The words of one tokenizer; safe to use from threads. Adds no special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, tuple[int, ...]] = {}
        """Ids of words, each with a space before it; their last characters are certainly not
        spaces."""
        self._turn = 0

    def work(self, text: str) -> tuple[Callable[[], Ids], int]:
        """Return a call that gives the ids of a text, and its cost in encoded characters.

        A short text is looked up at once.
        """
        found = self.look_up(text, _MOST_PIECES) if len(text) <= _SHORT_CHARS else None
        if found is None:
            return partial(self.encode, text), len(text)
        return partial(self.complete, found), found.cost

    def encode(self, text: str) -> Ids:
        """The ids of at most `_MOST_CHARS`: the words of more would take more memory."""
        found = self.look_up(text)
        assert found is not None
        return self.complete(found)

    def look_up(self, text: str, most_pieces: int = _MOST_CHARS) -> Found | None:
        """Divide a text into pieces, most of which are words. The first one is never known.

        A text of which little is known is not divided; some of its words are returned. None: more
        than `most_pieces` are unknown, though most are known.
        """
        words = text.split(" ")
        known: list[tuple[int, ...] | None] = [None, *map(self._ids.get, words[1:])]
        num_unknown = known.count(None)
        if num_unknown * 2 > len(words):
            return Found(text, [], self._some(words), len(text))
        if num_unknown > most_pieces:
            return None
        return _divided(text, words, known)

    def _some(self, words: list[str]) -> dict[int, str]:
        """Words of a text, others each time. Frequent ones are likely to be among them."""
        self._turn += 1
        step = len(words) // _LEARNED_AT_ONCE + 1
        places = range(1 + self._turn % step, len(words), step)
        return {place: f" {words[place]}" for place in places if words[place] not in self._ids}

    def complete(self, found: Found) -> Ids:
        """The ids of the whole text."""
        if not found.is_mostly_known:
            self._learn([*islice(filter(_is_word, found.unknown.values()), _LEARNED_AT_ONCE)])
            return encode_texts(self._tokenizer, [found.text])[0]
        for place, ids in zip(found.unknown, self._learn([*found.unknown.values()]), strict=True):
            found.parts[place] = ids
        return [*chain.from_iterable(found.parts)]

    def _learn(self, pieces: list[str]) -> list[Ids]:
        """The ids of pieces; those of words are kept."""
        # One after the other they are a text of their own, which takes less than each by itself.
        ids, ends = encode_with_ends(self._tokenizer, "".join(pieces))
        found: list[Ids] = []
        start = num_chars = 0
        for piece in pieces:
            num_chars += len(piece)
            stop = bisect_right(ends, num_chars, start)
            found.append(ids[start:stop])
            start = stop
            if len(found[-1]) <= _MOST_WORD_IDS and _is_word(piece):
                if len(self._ids) >= _MOST_WORDS:
                    self._ids.clear()
                self._ids[piece[1:]] = tuple(found[-1])
        return found


def _divided(text: str, words: list[str], known: list[tuple[int, ...] | None]) -> Found:
    parts: list[Any] = []
    unknown: dict[int, str] = {}
    start = num_unknown = 0
    while True:
        try:
            stop = known.index(None, start)
        except ValueError:
            break
        parts += known[start:stop]
        start = stop + 1
        while start < len(words) and not _ends_piece(words[start - 1]):
            start += 1
        piece = " ".join(words[stop:start])
        unknown[len(parts)] = f" {piece}" if stop else piece
        num_unknown += len(piece) + 1
        parts.append(())
    parts += known[start:]
    return Found(text, parts, unknown, num_unknown)


def word_cache(tokenizer: Tokenizer, lean_json: bytes) -> WordCache | None:
    """A cache; None for a tokenizer with which a word's ids may depend on what is before it.

    lean_json: the tokenizer's, with or without merges.
    """
    try:
        if not _has_pieces(msgspec.json.decode(lean_json)):
            return None
        frame = read_frame(tokenizer, is_pair=False, with_special=True)
    except (KeyError, TypeError, AttributeError, ValueError, CheckpointError):
        return None
    cache = WordCache(tokenizer)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    between = (f"a {each} b{each}{each}  {each}\n" for each in added[:_MOST_SAMPLES])
    for sample in (*_SAMPLES, *between):
        (whole,) = encode_texts(tokenizer, [sample])
        words = sample.split(" ")
        pieces = _divided(sample, words, [None] * len(words)).unknown.values()
        in_pieces = [*chain.from_iterable(encode_texts(tokenizer, [*pieces]))]
        (with_special,) = encode_texts(tokenizer, [sample], add_special_tokens=True)
        if in_pieces != whole or with_special != frame.ids(whole, []):
            return None
    return cache


def _has_pieces(found: Any) -> bool:
    """Return whether the settings are among those whose ids are made word by word."""
    model = found["model"]
    affixes = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    if model["type"] != "BPE" or any(affixes) or model.get("dropout"):
        return False
    added_are_plain = not any(
        each["lstrip"]
        or each["rstrip"]
        or each["single_word"]
        or any(map(str.isspace, each["content"]))
        for each in found["added_tokens"]
    )
    return (
        added_are_plain
        and found["normalizer"] in _NORMALIZERS
        and _splits_at_spaces(found["pre_tokenizer"])
    )


def _splits_at_spaces(pre_tokenizer: Any) -> bool:
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    *before, last = parts
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    if last["use_regex"]:
        return not before
    return (
        len(before) == 1
        and before[0]["type"] == "Split"
        and before[0]["pattern"].get("Regex") in _PATTERNS
        and before[0]["behavior"] == "Isolated"
        and not before[0]["invert"]
    )


def _ends_piece(word: str) -> bool:
    """Return whether its last character is not a space for any tokenizer."""
    last = word[-1:]
    return "!" <= last <= "~" or last.isalnum()


def _is_word(piece: str) -> bool:
    """Return whether the cache may keep it: a space and one word."""
    is_short = len(piece) <= _MOST_WORD_CHARS
    return is_short and piece.startswith(" ") and " " not in piece[1:] and _ends_piece(piece[1:])
