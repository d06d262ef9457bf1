"""Know which characters of an expression's classes JSON strings spell by escapes, and how."""

import re
import unicodedata
from collections.abc import Iterable
from typing import Final

from tokenmesh.engine.grammar.matcher import CannotCompile

ESCAPE_PATTERN: Final = (
    r"\\(?:[pP](?:\{[^}]*\}|.)|x(?:\{[0-9a-fA-F]+\}|[0-9a-fA-F]{2})"
    r"|u(?:\{[0-9a-fA-F]+\}|[0-9a-fA-F]{4})|U(?:\{[0-9a-fA-F]+\}|[0-9a-fA-F]{8})|.)"
)
"""It holds what a backslash begins in an expression of the Rust crate."""
ESCAPED: Final = frozenset((*range(32), 34, 92))
"""Characters that do not stand in a JSON string as they are."""
BARE: Final = r'[^"\\\x00-\x1f]'
"""A class of all others."""
_LETTERS: Final = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
"""It holds what stands behind the backslash."""
_ESCAPE: Final = re.compile(ESCAPE_PATTERN, re.DOTALL)
_CODE: Final = re.compile(r"\\[xuU]\{?([0-9a-fA-F]+)\}?")
_CATEGORY: Final = re.compile(r"\\([pP])(?:\{(\^?)([LMNPSZC][a-z]?)\}|([LMNPSZC]))")
_NAMED_CODES: Final = {"a": 7, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_SPACES: Final = frozenset(range(9, 14))
_SHOWN: Final = 20


def unknown(text: str) -> CannotCompile:
    """The refusal of a part of a grammar."""
    return CannotCompile(f"within a JSON string it does not take {text[:_SHOWN]!r}")


def spellings(escaped: Iterable[int]) -> str:
    """An expression of the shortest escapes of these characters."""
    codes = sorted(escaped)
    parts = []
    letters = [_LETTERS[code] for code in codes if code in _LETTERS]
    if letters:
        parts.append(rf"\\[{''.join(re.escape(each) for each in letters)}]")
    for high in (0, 1):
        low = [f"{code & 15:x}" for code in codes if code >> 4 == high and code not in _LETTERS]
        if low:
            parts.append(rf"\\u00{high}[{''.join(low)}]")
    return "|".join(parts)


def escaped_in_set(text: str) -> frozenset[int]:
    """Those of the class that need an escape."""
    inner = text[1:-1]
    is_negated = inner.startswith("^")
    inner = inner[is_negated:]
    items = _items(inner)
    if any(mark in inner for mark in ("&&", "--", "~~")) or "[" in items:
        raise unknown(text)
    held: set[int] = set()
    place = 0
    while place < len(items):
        if place + 2 < len(items) and items[place + 1] == "-":
            first, last = code_of(items[place]), code_of(items[place + 2])
            if first is None or last is None:
                raise unknown(text)
            held.update(code for code in ESCAPED if first <= code <= last)
            place += 3
        else:
            held |= escaped_in(items[place])
            place += 1
    return ESCAPED - held if is_negated else frozenset(held)


def _items(inner: str) -> list[str]:
    """Characters and escapes of a class."""
    items: list[str] = []
    place = 0
    while place < len(inner):
        found = _ESCAPE.match(inner, place) if inner[place] == "\\" else None
        items.append(inner[place] if found is None else found.group())
        place += len(items[-1])
    return items


def code_of(item: str) -> int | None:
    """The character of an item; None for a class."""
    if len(item) == 1:
        return ord(item)
    code = _CODE.fullmatch(item)
    if code is not None:
        return int(code[1], 16)
    name = item[1:]
    if name in _NAMED_CODES:
        return _NAMED_CODES[name]
    # what else has a meaning is of ASCII
    return ord(name) if len(name) == 1 and name.isascii() and not name.isalnum() else None


def escaped_in(item: str) -> frozenset[int]:
    """Those of a character, or of a class with a name, that need an escape."""
    code = code_of(item)
    if code is not None:
        return ESCAPED & {code}
    if item in (r"\d", r"\w"):
        return frozenset()
    if item in (r"\D", r"\W"):
        return ESCAPED
    if item in (r"\s", r"\S"):
        return _SPACES if item == r"\s" else ESCAPED - _SPACES
    category = _CATEGORY.fullmatch(item)
    if category is None:
        raise unknown(item)
    name = category[3] or category[4]
    held = frozenset(each for each in ESCAPED if unicodedata.category(chr(each)).startswith(name))
    return ESCAPED - held if (category[1] == "P") != bool(category[2]) else held
