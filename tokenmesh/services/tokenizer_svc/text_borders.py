"""Borders: places at which a text may be divided, so that the parts have the ids of the whole.

A border is before a space between two letters or digits, for some tokenizers also before a
punctuation mark behind one of the common letters. It is proven from the tokenizer's settings that
no token and no piece crosses it, and tried on samples. For a tokenizer of which it cannot be proven
there are no borders.
"""

import re
import unicodedata
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from tokenmesh.services.tokenizer_svc.encoding import encode_texts

_SPACE: Final = "\u2581"
"""SentencePiece writes this for a space."""
_LETTERS: Final = r"A-Za-z0-9\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
"""Letters and digits in every version of Unicode."""
_VANISHING: Final = r"\u037a\ufc5e-\ufc63\ufe70-\ufe7f\uff9e\uff9f"
"""Letters of which NFKC makes a combining mark alone, which StripAccents deletes."""
_WORD_CHAR: Final = rf"[^\W_{_VANISHING}]"
_AT_SPACES: Final = rf" (?<={_WORD_CHAR} )(?={_WORD_CHAR})"
_AT_MARKS: Final = rf"[,.;:!?\uff0c\u3002\u3001\uff01\uff1f\uff1b\uff1a](?<=[{_LETTERS}].)"
_SPACES: Final = re.compile(_AT_SPACES)
_SPACES_AND_MARKS: Final = re.compile(f"{_AT_SPACES}|{_AT_MARKS}")
_WINDOW: Final = 1 << 12
"""Characters that are looked through at a time."""
_ALTERNATIVES: Final = frozenset(
    (
        # GPT-2, Llama 3, Qwen
        *(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"'s|'t|'re|'ve|'m|'ll|'d", r"[^\r\n\p{L}\p{N}]?\p{L}+"),
        *(r" ?\p{L}+", r" ?\p{N}+", r"\p{L}+", r"\p{N}", r"\p{N}+", r"\p{N}{1,3}"),
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
        *(r"\s*[\r\n]", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
        # GPT-4o, gpt-oss, Mistral's tekken
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        # DeepSeek
        *("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"),
        *(r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+", r" ?[\p{P}\p{S}]+[\r\n]*"),
    )
)
"""Parts of patterns that match no space behind another character, no mark but an apostrophe behind
a letter or digit, and look at nothing before."""
_SYNTAX: Final = re.compile(r"\\.|[()\[\]|]")
_ANY_SPACES: Final = r"\s+"
_KEEP_MARKS: Final = frozenset(("NFC", "NFKC", "Lowercase", "StripAccents", "Nmt"))
"""Normalizers behind which the common letters are letters still, and marks are marks. Behind the
others a pattern may take what a letter became together with the mark: NFD makes two characters of
a voiced kana, BertNormalizer puts a space behind a Chinese one."""
_KEEP_MARKS_OF_WORDS: Final = _KEEP_MARKS | {"NFD", "NFKD", "BertNormalizer", "Strip"}
"""Where words are split that have their combining marks, and spaces are dropped."""
_NORMALIZERS: Final = _KEEP_MARKS_OF_WORDS | {"Precompiled", "Prepend"}
_BESIDE_PREPEND: Final = frozenset(("Prepend", "Replace", "NFC", "NFKC", "Lowercase"))
"""Normalizers that change a text that begins behind a space as they do with the space."""
_WORD_SPLITTERS: Final = frozenset(("BertPreTokenizer", "Whitespace", "WhitespaceSplit"))
_MARK_SPLITTERS: Final = _WORD_SPLITTERS - {"WhitespaceSplit"}
_SPLIT_FURTHER: Final = _WORD_SPLITTERS | {"Punctuation", "Digits", "Metaspace"}
_SAMPLES: Final = (
    "the quick brown fox jumps over the lazy dog 12 345 6789 times in a row",
    "It is 3 o'clock, isn't it? Yes: x = f(a, b) \u4f60\u597d \u4e16\u754c caf\u00e9 na\u00efve Z",
    "x,y;z. 1,234.5: \u4f60\u597d\uff0c\u4e16\u754c\u3002\n\u3000\u304b\u306a\u3001 A!? (b) c's, d",
    "Two  spaces\tand a tab <b>bold</b> e\u0301t\u00e9 \u043c\u0438\u0440 \u0e44\u0e17\u0e22 end 1",
)
_MOST_SAMPLES: Final = 32


@dataclass(frozen=True, slots=True)
class Borders:
    """Finds the borders of one tokenizer; a border is the place of the character behind it."""

    drops_space: bool = False
    """True where the space is left out: the tokenizer puts one before each text."""
    has_marks: bool = False
    """True where there are borders at punctuation marks."""

    def last(self, text: str, low: int, high: int) -> int | None:
        """The last border above `low` and up to `high`."""
        for stop in range(high, low, -_WINDOW):
            if found := self._within(text, max(low, stop - _WINDOW), stop):
                return found[-1]
        return None

    def first(self, text: str, low: int, high: int) -> int | None:
        """The first border above `low` and up to `high`."""
        for start in range(low, high, _WINDOW):
            if found := self._within(text, start, min(high, start + _WINDOW)):
                return found[0]
        return None

    def behind(self, place: int, text: str) -> int:
        """Where what follows a border begins."""
        return place + (self.drops_space and text[place] == " ")

    def all_in(self, text: str) -> list[int]:
        """Every border of a short text."""
        return self._within(text, 0, len(text) - 1)

    def _within(self, text: str, low: int, high: int) -> list[int]:
        """The borders above `low` and up to `high`, in their order."""
        pattern = _SPACES_AND_MARKS if self.has_marks else _SPACES
        # what follows a space decides, too
        found = (each.start() for each in pattern.finditer(text, low + 1, high + 2))
        return [place for place in found if place <= high]


def find_borders(tokenizer: Tokenizer, lean_json: bytes) -> Borders | None:
    """None: a text cannot be divided. lean_json: the tokenizer's, with or without merges."""
    try:
        found = msgspec.json.decode(lean_json)
        borders = _by_settings(found)
    except (KeyError, TypeError, AttributeError, ValueError):
        return None
    if borders is None:
        return None
    added = _some_of_each_kind(found["added_tokens"])
    samples = [*_SAMPLES]
    samples += [f"a {each} b{each}c d{each}  e {each}f g" for each in added]
    is_right = all(_is_right(tokenizer, borders, sample) for sample in samples)
    return borders if is_right else None


def _some_of_each_kind(added: list[Any]) -> list[str]:
    """At most `_MOST_SAMPLES` added tokens; of a kind that has few, one at least."""
    first_of_kind: dict[object, str] = {}
    for token in added:
        content = token["content"]
        kind = [value for key, value in token.items() if key not in ("id", "content")]
        kind += [content[:1].isalnum(), content[-1:].isalnum(), content.isspace()]
        first_of_kind.setdefault(tuple(kind), content)
    contents = (*first_of_kind.values(), *(token["content"] for token in added))
    return [*dict.fromkeys(contents)][:_MOST_SAMPLES]


def _is_right(tokenizer: Tokenizer, borders: Borders, sample: str) -> bool:
    ends = [0, *borders.all_in(sample), len(sample)]
    parts = [
        sample[borders.behind(start, sample) if start else 0 : end] for start, end in pairwise(ends)
    ]
    whole, *found = encode_texts(tokenizer, [sample, *parts])
    return whole == [token for ids in found for token in ids]


def _by_settings(found: Any) -> Borders | None:
    model, pre_tokenizer = found["model"], found["pre_tokenizer"]
    affixes = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    if model["type"] == "BPE" and (any(affixes) or model.get("dropout")):
        return None
    normalizers = _parts(found["normalizer"], "normalizers")
    if not all(map(_keeps_spaces, normalizers)):
        return None
    if not all(map(_keeps_borders, found["added_tokens"])):
        return None
    kinds = {each["type"] for each in normalizers}
    prepends = "Prepend" in kinds
    if prepends and not _may_prepend(found["added_tokens"], normalizers):
        return None
    parts = _parts(pre_tokenizer, "pretokenizers")
    if not _keeps_edges(normalizers, parts[0] if parts else None):
        return None
    if parts and all(map(_is_known, parts)) and any(map(_splits_at_spaces, parts)):
        return None if prepends else Borders(has_marks=kinds <= _KEEP_MARKS)
    if parts and _splits_words(parts[0]):
        first = parts[0]["type"]
        if (prepends and first != "Metaspace") or not all(map(_splits_further, parts[1:])):
            return None
        return Borders(prepends, first in _MARK_SPLITTERS and kinds <= _KEEP_MARKS_OF_WORDS)
    if model["type"] == "BPE" and _is_one_piece(parts) and _has_no_inner_space(found, normalizers):
        return Borders(drops_space=prepends)
    return None


def _may_prepend(added: list[Any], normalizers: list[Any]) -> bool:
    """Return whether a part gets as its first character the space that was left out before it."""
    if any(each.get("prepend", _SPACE) != _SPACE for each in normalizers):
        return False
    # Behind an added token, or before one, there would be a space more or less.
    ends = (token["content"][end] for token in added for end in (0, -1))
    return {each["type"] for each in normalizers} <= _BESIDE_PREPEND and not any(
        map(str.isalnum, ends)
    )


def _keeps_edges(normalizers: list[Any], first: Any) -> bool:
    """Return whether the space before a part stays, or does not count."""
    if first is not None and first["type"] in _WORD_SPLITTERS:
        return True
    # Where each part gets a space before it, one that was dropped comes back.
    always = first is not None and first.get("prepend_scheme") == "always"
    return not any(
        each["type"] == "BertNormalizer" or (each.get("strip_left") and not always)
        for each in normalizers
    )


def _parts(setting: Any, key: str) -> list[Any]:
    """The steps of a Sequence; one that is none is its only step."""
    if setting is None:
        return []
    if key not in setting:
        return [setting]
    return [part for each in setting[key] for part in _parts(each, key)]


def _keeps_spaces(normalizer: dict[str, Any]) -> bool:
    """Return whether a normalizer changes each side of a border by itself."""
    if normalizer["type"] != "Replace":
        return normalizer["type"] in _NORMALIZERS
    pattern, content = normalizer["pattern"], normalizer["content"]
    if pattern in ({"String": " "}, {"Regex": " {2,}"}):
        return content in (" ", _SPACE)
    text = pattern.get("String")
    # What is put in may not be a space, nor what another normalizer deletes.
    return bool(
        text
        and not _has_space(text)
        and content.isascii()
        and content.isprintable()
        and content
        and not _has_space(content)
    )


def _has_space(text: str) -> bool:
    return _SPACE in text or any(map(str.isspace, text))


def _keeps_borders(token: Any) -> bool:
    """Return whether an added token never crosses a border or takes its space."""
    content = token["content"]
    if Borders(has_marks=True).all_in(content):
        return False
    if content.isspace():
        return content != " " and not token["lstrip"] and not token["rstrip"]
    if token["single_word"] or any(map(str.isspace, content)):
        return False
    # It is looked for as the normalizer writes it.
    written = unicodedata.normalize("NFKC", content) if token["normalized"] else ""
    if content.strip(_SPACE) and _has_space(written):
        return False
    first, last = content[:1], content[-1:]
    return not (token["lstrip"] and first.isalnum()) and not (token["rstrip"] and last.isalnum())


def _is_known(part: Any) -> bool:
    """Return whether a step of a byte-level tokenizer is among those that keep borders."""
    if part["type"] == "ByteLevel":
        return not part["add_prefix_space"]
    if part["type"] == "Digits":
        return True
    if part["type"] != "Split" or (part["behavior"], part["invert"]) not in (
        ("Isolated", False),
        ("Removed", True),
    ):
        return False
    return _alternatives(part) <= _ALTERNATIVES


def _splits_at_spaces(part: Any) -> bool:
    if part["type"] == "ByteLevel":
        return bool(part["use_regex"])
    return part["type"] == "Split" and _ANY_SPACES in _alternatives(part)


def _alternatives(split: Any) -> frozenset[str]:
    """The alternatives of a pattern at its top level."""
    pattern = split["pattern"].get("Regex") or ""
    contractions = r"'s|'t|'re|'ve|'m|'ll|'d"
    if pattern.startswith(f"{contractions}|"):
        return frozenset((contractions,)) | _divided(pattern[len(contractions) + 1 :])
    return _divided(pattern)


def _divided(pattern: str) -> frozenset[str]:
    found, start, depth, in_class = [], 0, 0, False
    for match in _SYNTAX.finditer(pattern):
        char = match.group()
        if in_class or char in "[]":
            in_class = char == "[" or (in_class and char != "]")
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and not depth:
            found.append(pattern[start : match.start()])
            start = match.end()
    return frozenset((*found, pattern[start:]))


def _splits_words(part: Any) -> bool:
    if part["type"] == "Metaspace":
        return bool(part.get("split") is not False and part["replacement"] == _SPACE)
    return part["type"] in _WORD_SPLITTERS


def _splits_further(part: Any) -> bool:
    """Return whether a step behind the first one changes each piece by itself."""
    return part["type"] in _SPLIT_FURTHER and part.get("prepend_scheme") != "first"


def _is_one_piece(parts: list[Any]) -> bool:
    """Return whether a text is one piece, as in SentencePiece's BPE."""
    if not parts:
        return True
    (part,) = parts if len(parts) == 1 else (None,)
    if part is None:
        return False
    if part["type"] == "Metaspace":
        return bool(part["replacement"] == _SPACE)
    # Gemma: behind its normalizer a text has no spaces at which this one splits
    return bool(part["type"] == "Split" and part["pattern"] == {"String": " "})


def _has_no_inner_space(found: Any, normalizers: list[Any]) -> bool:
    """Return whether no token goes on over a space behind another character: so no merge does."""
    replaces = [each for each in normalizers if each["type"] == "Replace"]
    if any((each["pattern"], each["content"]) != ({"String": " "}, _SPACE) for each in replaces):
        return False
    parts = _parts(found["pre_tokenizer"], "pretokenizers")
    if not replaces and not any(each["type"] == "Metaspace" for each in parts):
        return False
    vocabulary = found["model"]["vocab"]
    inner = re.compile(f"[^{_SPACE}]{_SPACE}")
    return _SPACE in vocabulary and not any(map(inner.search, vocabulary))
