"""EBNF as a tree: rules of literals, character classes, references, sequences and choices.

Read is what xgrammar and llama.cpp share; a text with more (lookaheads, tag dispatch) is not.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<rule>[A-Za-z_][\w.-]*)\s*::=
    |(?P<name>[A-Za-z_][\w.-]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\])
    |(?P<times>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<mark>[|()])(?!=)""",
    re.VERBOSE,
)
_MAX_DEPTH: Final = 50


class NotRead(ValueError):
    """The text is not a grammar of this kind."""


@dataclass(frozen=True, slots=True)
class Text:
    """A literal or a character class, as it is written."""

    source: str

    @property
    def is_class(self) -> bool:
        """Return whether it is one character out of a class."""
        return self.source.startswith("[")


@dataclass(frozen=True, slots=True)
class RuleReference:
    """It holds what the rule of that name is."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """So many times: `*`, `+`, `?` or `{2,5}`."""

    part: "Node"
    times: str


Node = Text | RuleReference | Sequence | Alternation | Repeat
Rules = dict[str, Node]


def sequence(*parts: Node) -> Node:
    """One after the other; of one part, that part."""
    flat = [each for part in parts for each in _parts(part, Sequence)]
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def choice(*parts: Node) -> Node:
    """One of them; of one part, that part."""
    flat = [each for part in parts for each in _parts(part, Alternation)]
    return flat[0] if len(flat) == 1 else Alternation(tuple(flat))


def children(node: Node) -> tuple[Node, ...]:
    """Return what it is made of."""
    if isinstance(node, Sequence | Alternation):
        return node.parts
    return (node.part,) if isinstance(node, Repeat) else ()


def walk(node: Node) -> Iterator[Node]:
    """The node and all within."""
    yield node
    for each in children(node):
        yield from walk(each)


def write_rules(rules: Rules) -> str:
    """The grammar as text."""
    return "\n".join(f"{name} ::= {_write(node)}" for name, node in rules.items())


def read_rules(text: str) -> Rules:
    """The rules by name. Raises NotRead."""
    rules: Rules = {}
    for name, tokens in _split(text):
        if not name or name in rules:
            raise NotRead(f"two rules {name}" if name else "something before the first rule")
        reader = _Reader(tokens)
        rules[name] = reader.read_choice(0)
        if reader.peek() is not None:
            raise NotRead(f"rule {name}: {reader.peek()}")
    nodes = (each for node in rules.values() for each in walk(node))
    names = {each.name for each in nodes if isinstance(each, RuleReference)}
    if "root" not in rules or names - rules.keys():
        raise NotRead("a rule is missing")
    return rules


def _write(node: Node) -> str:
    match node:
        case Text(source):
            return source
        case RuleReference(name):
            return name
        case Sequence(parts):
            return " ".join(_write_within(each) for each in parts) or '""'
        case Alternation(parts):
            return " | ".join(_write_within(each) for each in parts)
        case Repeat(part, times):
            inner = _write(part)
            return (
                f"{inner}{times}" if isinstance(part, Text | RuleReference) else f"({inner}){times}"
            )


def _write_within(node: Node) -> str:
    return f"({_write(node)})" if isinstance(node, Sequence | Alternation) else _write(node)


def _parts(node: Node, kind: type[Sequence] | type[Alternation]) -> tuple[Node, ...]:
    return node.parts if isinstance(node, kind) else (node,)


def _split(text: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The names of the rules and what stands after them: kinds and texts."""
    rule, tokens, place = "", list[tuple[str, str]](), 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise NotRead(f"character {place}")
        place = found.end()
        kind = found.lastgroup or ""
        if kind == "rule":
            if rule or tokens:
                yield rule, tokens
            rule, tokens = found["rule"], []
        elif kind != "space":
            tokens.append((kind, found[kind]))
    yield rule, tokens


class _Reader:
    """Goes through the tokens of one rule."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._next = 0

    def peek(self) -> tuple[str, str] | None:
        """The next token; None at the end."""
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def read_choice(self, depth: int) -> Node:
        """Up to the end or a closing parenthesis. Raises NotRead."""
        if depth > _MAX_DEPTH:
            raise NotRead("too deep")
        parts = [self._sequence(depth)]
        while self.peek() == ("mark", "|"):
            self._next += 1
            parts.append(self._sequence(depth))
        return choice(*parts)

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while (token := self.peek()) is not None and token[1] not in ("|", ")"):
            self._next += 1
            parts.append(self._repeats(self._atom(token, depth)))
        if not parts:
            raise NotRead("nothing where something should be")
        return sequence(*parts)

    def _atom(self, token: tuple[str, str], depth: int) -> Node:
        kind, text = token
        if kind == "text":
            return Text(text)
        if kind == "name":
            return RuleReference(text)
        if text != "(":
            raise NotRead(text)
        inner = self.read_choice(depth + 1)
        if self.peek() != ("mark", ")"):
            raise NotRead("a parenthesis is open")
        self._next += 1
        return inner

    def _repeats(self, node: Node) -> Node:
        token = self.peek()
        if token is None or token[0] != "times":
            return node
        self._next += 1
        return Repeat(node, token[1])
