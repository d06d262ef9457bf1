"""How many characters a token stands for at most: a text can be too long before it is encoded."""

from typing import Any, Final

import msgspec
from tokenizers.pre_tokenizers import ByteLevel

_HARMLESS: Final = {"ByteLevel", "Digits", "Sequence", "Split"}


def chars_per_token(tokenizer_json: bytes) -> int | None:
    """None where a token may stand for any number: of characters that are dropped, say.

    Known of byte-level BPE without a normalizer, which is what large models have.
    """
    try:
        found: Any = msgspec.json.decode(tokenizer_json)
        return _longest(found) if _keeps_every_byte(found) else None
    except (KeyError, TypeError, AttributeError, msgspec.DecodeError):
        return None


def _keeps_every_byte(found: Any) -> bool:
    model, added = found["model"], found["added_tokens"]
    return bool(
        found["normalizer"] is None
        and found["decoder"]["type"] == "ByteLevel"
        and _drops_nothing(found["pre_tokenizer"])
        and model["type"] == "BPE"
        and set(ByteLevel.alphabet()) <= set(model["vocab"])
        and not any(each["lstrip"] or each["rstrip"] for each in added)
    )


def _drops_nothing(pre_tokenizer: Any) -> bool:
    parts = pre_tokenizer.get("pretokenizers", ())
    return bool(
        pre_tokenizer["type"] in _HARMLESS
        and pre_tokenizer.get("behavior") != "Removed"
        and all(_drops_nothing(each) for each in parts)
    )


def _longest(found: Any) -> int:
    """In the vocabulary a character stands for a byte; a text's has one at least."""
    added = (len(each["content"]) for each in found["added_tokens"])
    return max((*map(len, found["model"]["vocab"]), *added))
