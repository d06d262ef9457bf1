"""Lark grammars within JSON strings: a grammar of what a string says becomes one of its spellings.

A terminal that may hold a character that JSON escapes becomes a rule, in which escapes are lexemes
of their own; so what is ignored is written out before each terminal of the rules. What stands for
tokens or for other grammars has no spelling, and is refused.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tokenmesh.engine.grammar.lark_terminals import TERMINALS
from tokenmesh.engine.grammar.matcher import CannotCompile
from tokenmesh.engine.grammar.quoted_regex import (
    Node,
    Times,
    char_range,
    characters,
    has_escape,
    lark_of,
    read_regex,
)

_TEXT: Final = r'"(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^"\\\x00-\x1f\x7f])*"'
_TOKEN: Final = re.compile(
    rf"""(?P<space>(?:\#|//)[^\n]*|[ \t\r]+)
    |(?P<line>\n)
    |(?P<range>{_TEXT}[ \t]*\.\.[ \t]*{_TEXT})
    |(?P<text>{_TEXT})(?P<cased>i?)
    |(?P<regex>/(?:\\.|[^/\\])+/)(?P<flags>[imslux]*)
    |(?P<import>%import[ \t]+common\.(?P<only>\w+)(?:[ \t]*->[ \t]*(?P<alias>\w+))?)
    |(?P<imports>%import[ \t]+common[ \t]*\((?P<names>[\w, \t]+)\))
    |(?P<ignore>%ignore\b)
    |(?P<options>%llguidance[ \t]*\{{\s*\}})
    |(?P<name>[!?]?_?[A-Za-z][\w-]*)
    |(?P<other>->|::|\.\.|~(?=[ \t]*[0-9])|[:|()\[\]{{}},=.*+?&]|_|[0-9]+)""",
    re.VERBOSE,
)
_TEXTS: Final = re.compile(_TEXT)
_ATTRIBUTE: Final = re.compile(r"(stop|max_tokens|temperature)[ \t]*=")
"""These need an engine that counts tokens, takes some back or changes how it samples."""
_HEX: Final = re.compile(r"(\\[^x])|\\x")
_SHOWN: Final = 20
_DROPPED: Final = ("space", "line", "options")


@dataclass(frozen=True, slots=True)
class _Reference:
    """A rule or a terminal by its name."""

    name: str

    @property
    def is_terminal(self) -> bool:
        return self.name.lstrip("_")[0].isupper()


@dataclass(slots=True)
class _Definition:
    name: _Reference
    body: list[Node | _Reference | str] = field(default_factory=list)
    """It holds what stands behind the colon; operators and brackets are texts."""
    has_begun: bool = False

    @property
    def has_escape(self) -> bool:
        """Return whether a text of its own may have characters that JSON spells by escapes."""
        nodes = (each for each in self.body if not isinstance(each, _Reference | str))
        return any(map(has_escape, nodes))


def check_lark(text: str) -> None:
    """Raises CannotCompile for an attribute that llguidance takes and that has no effect here."""
    for found in _tokens(text, is_strict=False):
        _check_attribute(text, found)


def quoted_lark(text: str) -> str:
    """The grammar, with a rule `start` too, of what JSON has between its quotes for such a text.

    Raises CannotCompile.
    """
    inner = "inner"
    while inner in text.lower():
        inner += "x"
    return _Writer(_definitions(text, f"{inner.upper()}-SKIP"), inner).text()


class _Writer:
    def __init__(self, definitions: list[_Definition], inner: str) -> None:
        """inner: no name contains it but those of what is ignored."""
        self._definitions = definitions
        self._inner = inner
        self._skipped = [
            each.name for each in definitions if each.name.name.startswith(inner.upper())
        ]
        self._rules = self._rule_names()

    def text(self) -> str:
        lines = [f"start: {self._name(_Reference('start'))}"]
        if self._skipped:
            lines.append(f"{self._inner}-skip: ({' | '.join(map(self._name, self._skipped))})*")
        lines += [f"{self._name(each.name)}: {self._body(each)}" for each in self._definitions]
        return "\n".join(lines)

    def _rule_names(self) -> set[str]:
        """Names of rules, of terminals that may hold escapes, and of those that refer to such."""
        users: dict[str, list[str]] = {}
        for each in self._definitions:
            for item in each.body:
                if isinstance(item, _Reference):
                    users.setdefault(item.name, []).append(each.name.name)
        todo = [each.name.name for each in self._definitions if each.has_escape]
        held = {each.name.name for each in self._definitions if not each.name.is_terminal}
        while todo:
            name = todo.pop()
            if name not in held or name in todo:
                held.add(name)
                todo += [each for each in users.get(name, ()) if each not in held]
        return held

    def _name(self, reference: _Reference) -> str:
        name = reference.name
        is_changed = reference.is_terminal and name in self._rules
        return f"{self._inner}-{name.lower()}" if is_changed or name == "start" else name

    def _body(self, definition: _Definition) -> str:
        is_rule = definition.name.name in self._rules
        skips = bool(self._skipped) and not definition.name.is_terminal
        body, written = definition.body, list[str]()
        for place, item in enumerate(body):
            if isinstance(item, str):
                if item == "&" and is_rule:
                    raise CannotCompile("within a JSON string it takes no & of texts with escapes")
                written.append(item)
            elif isinstance(item, _Reference):
                name = self._name(item)
                is_skipped = skips and item.is_terminal
                written.append(f"({self._inner}-skip {name})" if is_skipped else name)
            elif skips:
                written.append(f"({self._inner}-skip {lark_of(item)})")
            elif is_rule and body[place + 1 : place + 2] in (["*"], ["+"]):
                # read together with its repetition, it is one lexeme where it has no escapes
                written.append(lark_of(Times(item, str(body[place + 1]))))
                body[place + 1] = ""
            else:
                written.append(lark_of(item))
        return " ".join(written)


def _definitions(text: str, skipped: str) -> list[_Definition]:
    """skipped: what names of what is ignored begin with."""
    found: list[_Definition] = []
    is_new, num_skipped = True, 0
    for token in _tokens(text, is_strict=True):
        _check_attribute(text, token)
        kind = _kind(token)
        if kind in ("import", "imports"):
            for name, alias in _imported(token).items():
                found.append(_Definition(_Reference(alias), [read_regex(_common(name))], True))
        elif kind == "ignore":
            found.append(_Definition(_Reference(f"{skipped}{num_skipped}"), [], True))
            num_skipped += 1
        elif kind == "name" and is_new:
            found.append(_Definition(_Reference(token["name"].lstrip("!?"))))
        elif kind not in _DROPPED:
            if not found:
                raise CannotCompile("a grammar begins with a rule")
            _add(found[-1], token)
        # an alternative on the next line belongs to the definition before
        is_new = kind == "line" or (is_new and kind in _DROPPED)
    for each in found:
        _check_brackets(each)
    if len({each.name for each in found}) < len(found):
        raise CannotCompile("two rules of the grammar have one name")
    return found


def _add(definition: _Definition, token: re.Match[str]) -> None:
    shown, body = token.group(), definition.body
    if not definition.has_begun:
        # names of captures and priorities change no language
        if shown in ("lazy", "suffix", "{", "::"):
            raise CannotCompile(f"within a JSON string it does not take {shown!r} of a rule")
        definition.has_begun = shown == ":"
    elif body[-1:] == ["->"]:
        body.pop()
    elif token["name"] is not None:
        body.append(_Reference(shown.lstrip("!?")))
    else:
        body.append(_node(token) or shown)


def _check_brackets(definition: _Definition) -> None:
    depth = 0
    for each in definition.body:
        if isinstance(each, str):
            depth += (each in "([{") - (each in ")]}")
        if depth < 0:
            break
    if depth or not definition.has_begun:
        raise CannotCompile(f"a bracket or the colon of {definition.name.name} is missing")


def _tokens(text: str, *, is_strict: bool) -> Iterator[re.Match[str]]:
    """is_strict: raise CannotCompile for a token that is not read; otherwise pass over it."""
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is not None:
            place = found.end()
            yield found
        elif is_strict:
            shown = text[place : place + _SHOWN]
            raise CannotCompile(f"within a JSON string a grammar cannot hold {shown!r}")
        else:
            place += 1


def _check_attribute(text: str, found: re.Match[str]) -> None:
    attribute = _ATTRIBUTE.match(text, found.start()) if found["name"] else None
    if attribute is not None:
        raise CannotCompile(f"the attribute {attribute[1]} of a rule has no effect here")


def _kind(found: re.Match[str]) -> str:
    """Return which of the tokens it is."""
    return next(name for name, part in found.groupdict().items() if part is not None)


def _node(found: re.Match[str]) -> Node | None:
    """The characters that a token stands for; None for an operator."""
    match _kind(found):
        case "range":
            ends = [_value(each) for each in _TEXTS.findall(found["range"])]
            if any(len(each) != 1 for each in ends):
                raise CannotCompile(f"{found.group()[:_SHOWN]} is not a range of characters")
            return char_range(*ends)
        case "text":
            return characters(_value(found["text"]), any_case=bool(found["cased"]))
        case "regex":
            return read_regex(found["regex"][1:-1], found["flags"])
    return None


def _imported(found: re.Match[str]) -> dict[str, str]:
    """The names that terminals of `common` get."""
    if found["only"] is not None:
        return {found["only"]: found["alias"] or found["only"]}
    return {name: name for name in found["names"].replace(",", " ").split()}


def _common(name: str) -> str:
    if name not in TERMINALS:
        raise CannotCompile(f"common.{name} is not known")
    return TERMINALS[name]


def _value(text: str) -> str:
    r"""Return what a text of Lark says, in which \x41 is a character too."""
    return str(json.loads(_HEX.sub(lambda found: found[1] or r"\u00", text)))
