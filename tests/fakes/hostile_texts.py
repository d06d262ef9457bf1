"""Texts that cost tokenizers, regular expressions and parsers of JSON the most."""

from collections.abc import Callable, Mapping
from typing import Final

TEXTS: Final[Mapping[str, Callable[[int], str]]] = {
    "one word": lambda length: "w" * length,
    "mixed word": lambda length: ("aZ9_" * (length // 4 + 1))[:length],
    "words": lambda length: ("ab cd\n" * (length // 6 + 1))[:length],
    "spaces": lambda length: " " * length,
    "emoji": lambda length: "\U0001f642" * length,
    "combining": lambda length: ("e\u0301\u0302" * (length // 3 + 1))[:length],
    "escapes": lambda length: ('\\"\n\u0001{' * (length // 5 + 1))[:length],
    "special tokens": lambda length: ("<|im_end|><" * (length // 11 + 1))[:length],
}
"""By their names: what makes one of a number of characters."""
