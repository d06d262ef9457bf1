"""Expressions over the characters of a JSON string: what a string says becomes how it is written.

An escape is a lexeme of its own: llguidance's lexer takes the longest lexeme and never goes back,
so one that goes on behind a backslash would hide every other that begins there.
"""

import re
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from tokenmesh.engine.grammar.json_escapes import (
    BARE,
    ESCAPE_PATTERN,
    ESCAPED,
    code_of,
    escaped_in,
    escaped_in_set,
    spellings,
    unknown,
)

_PIECE: Final = re.compile(
    rf"""(?P<escape>{ESCAPE_PATTERN})
    |(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])
    |(?P<group>\((?:\?(?:P?<\w+>|[a-zA-Z-]*[:)])|(?!\?)))
    |(?P<mark>[|)^$.])
    |(?P<times>(?:[*+?]|\{{[0-9]+(?:,[0-9]*)?\}})\??)
    |(?P<char>[^([{{*+?\\])""",
    re.VERBOSE | re.DOTALL,
)
_FLAGS: Final = re.compile(r"\(\?([imsUu]*)(?:-([imsU]*))?[:)]")
_MAX_DEPTH: Final = 50


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of a class."""

    bare: str
    """An expression of those that stand as they are; empty: there are none."""
    escaped: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Series:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Either:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Times:
    part: "Node"
    times: str


Node = Chars | Series | Either | Times


def char_range(first: str, last: str) -> Chars:
    """A character between two others."""
    codes = frozenset(each for each in ESCAPED if ord(first) <= each <= ord(last))
    written = f"[{_code(first)}-{_code(last)}]"
    return Chars(f"[{written}&&{BARE}]" if codes else written, codes)


def characters(text: str, *, any_case: bool = False) -> Series:
    """The characters of a text, one after the other."""
    return Series(tuple(_char(each, any_case) for each in text))


def read_regex(pattern: str, flags: str = "") -> Node:
    """An expression in the syntax of the Rust crate, as llguidance takes it.

    Raises CannotCompile for a construct whose characters are not known here.
    """
    if set(flags) - set("isu"):
        raise unknown(f"the flags {flags}")
    reader = _Reader(pattern, frozenset(flags))
    node = reader.either(0)
    if reader.next is not None:
        raise unknown(pattern)
    return node


def has_escape(node: Node) -> bool:
    """Return whether a text of it may have characters that JSON spells by escapes."""
    if isinstance(node, Chars):
        return bool(node.escaped)
    if isinstance(node, Times):
        return has_escape(node.part)
    return any(map(has_escape, node.parts))


def lark_of(node: Node) -> str:
    """Return what stands for it in a rule."""
    if not has_escape(node):
        text = _regex_of(node)
        return f"/{text}/" if text else '""'
    match node:
        case Chars(bare, escaped):
            return _choice([f"/{bare}/"] if bare else [], escaped)
        case Times(Chars(bare, escaped), "*" | "+" as times) if bare:
            # bare characters in a row are one lexeme: one for each would cost far more
            return _choice([f"/{_group(bare)}+/"], escaped) + times
        case Times(part, times):
            return f"({lark_of(part)}){times}"
        case Either(parts):
            return f"({' | '.join(map(lark_of, parts))})"
        case Series(parts):
            written: list[str] = []
            for is_apart, run in groupby(parts, has_escape):
                row = tuple(run)
                written += map(lark_of, row) if is_apart else [lark_of(Series(row))]
            return f"({' '.join(written)})"


def _choice(bare: list[str], escaped: frozenset[int]) -> str:
    return f"({' | '.join([*bare, f'/{spellings(escaped)}/'])})"


def _regex_of(node: Node) -> str:
    match node:
        case Chars(bare):
            return bare
        case Series(parts):
            return "".join(_group(_regex_of(each), isinstance(each, Either)) for each in parts)
        case Either(parts):
            return "|".join(map(_regex_of, parts))
        case Times(part, times):
            return _group(_regex_of(part)) + times


def _group(text: str, is_needed: bool = True) -> str:
    return f"(?:{text})" if is_needed else text


class _Reader:
    """Goes through the pieces of an expression."""

    def __init__(self, pattern: str, flags: frozenset[str]) -> None:
        self._pattern = pattern
        self._flags = flags
        self._place = 0
        self.next = self._read()
        """The next piece; None at the end."""

    def either(self, depth: int) -> Node:
        """Up to the end of the group."""
        if depth > _MAX_DEPTH:
            raise unknown("groups so deep")
        flags, parts = self._flags, [self._row(depth)]
        while self.next is not None and self.next.group() == "|":
            self._take()
            parts.append(self._row(depth))
        self._flags = flags
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _read(self) -> "re.Match[str] | None":
        if self._place == len(self._pattern):
            return None
        found = _PIECE.match(self._pattern, self._place)
        if found is None:
            raise unknown(self._pattern[self._place :])
        return found

    def _take(self) -> "re.Match[str]":
        found = self.next
        assert found is not None
        self._place = found.end()
        self.next = self._read()
        return found

    def _row(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.next is not None and self.next.group() not in ("|", ")"):
            found = self._take()
            if found["times"] is not None:
                if not parts:
                    raise unknown(found.group())
                # whether little or much is taken makes no other language
                times = found.group()
                lazy = times[-1] == "?" and len(times) > 1
                parts.append(Times(parts.pop(), times[:-1] if lazy else times))
                continue
            node = self._atom(found, depth)
            if node is not None:
                parts.append(node)
        return parts[0] if len(parts) == 1 else Series(tuple(parts))

    def _atom(self, found: "re.Match[str]", depth: int) -> Node | None:
        text, any_case = found.group(), "i" in self._flags
        if found["group"] is not None:
            return self._grouped(text, depth)
        if text in ("^", r"\A", "$", r"\z"):
            is_first, is_last = found.start() == 0, found.end() == len(self._pattern)
            if depth or not (is_first if text in ("^", r"\A") else is_last):
                raise unknown(text)
            return None
        if text == ".":
            return Chars(BARE, ESCAPED if "s" in self._flags else ESCAPED - {10})
        if found["set"] is not None:
            return _class(text, escaped_in_set(text), any_case)
        if found["escape"] is not None and code_of(text) is None:
            return _class(text, escaped_in(text), any_case)
        if found["escape"] is not None:
            return _char(chr(code_of(text) or 0), any_case)
        return _char(text, any_case)

    def _grouped(self, text: str, depth: int) -> Node | None:
        flags = _FLAGS.fullmatch(text)
        if flags is None and text.endswith((":", ")")):
            raise unknown(text)
        outer = self._flags
        if flags is not None:
            self._flags = (outer | {*flags[1]}) - {*(flags[2] or "")}
        if text.endswith(")"):
            return None
        node = self.either(depth + 1)
        if self.next is None or self.next.group() != ")":
            raise unknown(text)
        self._flags = outer
        self._take()
        return node


def _class(text: str, escaped: frozenset[int], any_case: bool) -> Chars:
    bare = f"[{text}&&{BARE}]" if escaped else text
    return Chars(f"(?i:{bare})" if any_case else bare, escaped)


def _char(char: str, any_case: bool) -> Chars:
    if ord(char) in ESCAPED:
        return Chars("", frozenset({ord(char)}))
    written = char if char.isalnum() or char in " _" else _code(char)
    return Chars(f"(?i:{written})" if any_case else written)


def _code(char: str) -> str:
    return rf"\x{{{ord(char):x}}}"
