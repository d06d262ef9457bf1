"""The most characters of a token: shows without encoding that a text is too long."""

import math
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from tokenizers.pre_tokenizers import ByteLevel

_KEEP_EVERYTHING: Final = {"ByteLevel", "Digits", "Metaspace", "Sequence", "Split"}
"""Pre-tokenizers that drop no text, except a Split with the behaviour Removed."""
_COMPOSED: Final = 4
"""Most characters that NFC and NFKC compose into one (U+1F82)."""
_DECOMPOSED: Final = 18
"""Most characters that NFKD decomposes one into (U+FDFA)."""
_SHRINK_BY_FORM: Final = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1}


@dataclass(frozen=True, slots=True)
class LengthBound:
    """A bound that holds for every text of a tokenizer."""

    chars_per_token: int
    drops_spaces: bool = False
    """True where whitespace may be dropped; it is not counted then."""

    def least_tokens(self, text: str, limit: int) -> int:
        """A lower bound of the text's tokens; 0 if it may have `limit` or fewer."""
        if len(text) <= limit * self.chars_per_token:
            return 0
        num_chars = sum(map(len, text.split())) if self.drops_spaces else len(text)
        least = -(-num_chars // self.chars_per_token)
        return least if least > limit else 0


def length_bound(tokenizer_json: bytes) -> LengthBound | None:
    """The bound of a tokenizer; None if a token may stand for any number of characters.

    It exists for BPE and Unigram models that can write every byte, after normalizers whose effect
    on the length is known.
    """
    try:
        found: Any = msgspec.json.decode(tokenizer_json)
        effect = _effect(found["normalizer"])
        if effect is None or not _drops_nothing(found["pre_tokenizer"]):
            return None
        vocabulary = _vocabulary(found)
        if vocabulary is None:
            return None
        added = found["added_tokens"]
        longest = max((*map(len, vocabulary), *(_added_chars(each, effect) for each in added)))
        strips = any(each["lstrip"] or each["rstrip"] for each in added)
        return LengthBound(math.ceil(longest * effect.shrink), strips or effect.strips)
    except (KeyError, TypeError, AttributeError, ValueError, msgspec.DecodeError):
        return None


@dataclass(frozen=True, slots=True)
class _Effect:
    """The largest effect of a normalizer on the length of a text."""

    shrink: float = 1.0
    """Characters that are composed into one."""
    growth: float = 1.0
    """Characters that one ASCII character becomes."""
    extra: int = 0
    """Characters that are prepended."""
    strips: bool = False
    is_form: bool = False
    """True where it decomposes characters outside ASCII."""


def _effect(normalizer: Any) -> _Effect | None:
    """None for a normalizer that may drop characters, or is unknown."""
    if normalizer is None:
        return _Effect()
    kind = normalizer["type"]
    if kind in _SHRINK_BY_FORM:
        return _Effect(shrink=_SHRINK_BY_FORM[kind], is_form=True)
    if kind == "Prepend":
        return _Effect(extra=len(normalizer["prepend"]))
    if kind == "Strip":
        return _Effect(strips=True)
    if kind == "Replace":
        pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
        if not pattern or not content:
            return None
        ratio = len(pattern) / len(content)
        return _Effect(shrink=max(1.0, ratio), growth=max(1.0, 1 / ratio))
    if kind == "Sequence":
        return _joined([_effect(each) for each in normalizer["normalizers"]])
    return None


def _joined(effects: list[_Effect | None]) -> _Effect | None:
    whole = _Effect()
    for each in effects:
        if each is None:
            return None
        whole = _Effect(
            whole.shrink * each.shrink,
            whole.growth * each.growth,
            math.ceil(whole.extra * each.growth) + each.extra,
            whole.strips or each.strips,
            whole.is_form or each.is_form,
        )
    return whole


def _added_chars(token: Any, effect: _Effect) -> int:
    """Characters of a normalized text for which an added token stands."""
    content: str = token["content"]
    if not token.get("normalized", True):
        return len(content)
    growth = effect.growth
    if effect.is_form and not content.isascii():
        growth *= _DECOMPOSED
    return math.ceil(len(content) * growth) + effect.extra


def _drops_nothing(pre_tokenizer: Any) -> bool:
    if pre_tokenizer is None:
        return True
    parts = pre_tokenizer.get("pretokenizers", ())
    return bool(
        pre_tokenizer["type"] in _KEEP_EVERYTHING
        and pre_tokenizer.get("behavior") != "Removed"
        and all(_drops_nothing(each) for each in parts)
    )


def _vocabulary(found: Any) -> list[str] | None:
    """The entries of a model that can write every byte; None for others."""
    model = found["model"]
    kind, entries = model["type"], model["vocab"]
    if kind == "Unigram":
        entries = [entry for entry, _ in entries]
    elif kind != "BPE":
        return None
    names = set(entries)
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in names for byte in range(256)):
        return list(entries)
    # In a byte-level vocabulary a character stands for a byte, of which a text has at least as
    # many.
    is_byte_level = (
        kind == "BPE"
        and (found["decoder"] or {}).get("type") == "ByteLevel"
        and _has_byte_level(found["pre_tokenizer"])
        and set(ByteLevel.alphabet()) <= names
    )
    return list(entries) if is_byte_level else None


def _has_byte_level(pre_tokenizer: Any) -> bool:
    if pre_tokenizer is None:
        return False
    parts = pre_tokenizer.get("pretokenizers", ())
    return pre_tokenizer["type"] == "ByteLevel" or any(_has_byte_level(each) for each in parts)
