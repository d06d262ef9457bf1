"""EBNF rewritten for xgrammar, whose masks are ready where a token ends within one rule.

A token that leaves its rule is tried out in every step, so the same language with fewer rules costs
less. xgrammar makes a rule of every group that repeats, but none of a class that does. Hence
small rules are put where they are used, and `(class | other)*` is `class* (other class*)*`.
"""

from collections import Counter
from typing import Final

from tokenmesh.engine.grammar.ebnf import (
    Alternation,
    Node,
    NotRead,
    Repeat,
    RuleReference,
    Rules,
    Sequence,
    Text,
    children,
    choice,
    read_rules,
    sequence,
    walk,
    write_rules,
)

_MAX_NODES: Final = 120
"""Compiled, a node takes 10 to 50 KiB at a vocabulary of 152k."""


def faster_ebnf(text: str) -> str | None:
    """The same language; None where nothing is gained, or the text is not understood."""
    try:
        rules = read_rules(text)
    except NotRead:
        return None
    rewritten = {name: _rewrite(node) for name, node in _inline(rules).items()}
    return write_rules(rewritten) if rewritten != rules else None


def _inline(rules: Rules) -> Rules:
    """The smallest rules first, but for those that contain themselves."""
    rules = dict(rules)
    if sum(1 for node in rules.values() for _ in walk(node)) > _MAX_NODES:
        return rules
    while (name := _next_to_inline(rules)) is not None:
        body = rules.pop(name)
        rules = {user: _replace(node, name, body) for user, node in rules.items()}
    return rules


def _next_to_inline(rules: Rules) -> str | None:
    sizes = {name: sum(1 for _ in walk(node)) for name, node in rules.items()}
    used = {name: _references(node) for name, node in rules.items()}
    uses = sum(used.values(), Counter[str]())
    room = _MAX_NODES - sum(sizes.values())
    for name in sorted(sizes, key=sizes.__getitem__):
        if name != "root" and not used[name][name] and (uses[name] - 1) * sizes[name] <= room:
            return name
    return None


def _references(node: Node) -> Counter[str]:
    return Counter(each.name for each in walk(node) if isinstance(each, RuleReference))


def _replace(node: Node, name: str, body: Node) -> Node:
    match node:
        case RuleReference():
            return body if node.name == name else node
        case Sequence(parts):
            return sequence(*(_replace(each, name, body) for each in parts))
        case Alternation(parts):
            return choice(*(_replace(each, name, body) for each in parts))
        case Repeat(part, times):
            return Repeat(_replace(part, name, body), times)
        case _:
            return node


def _rewrite(node: Node) -> Node:
    match node:
        case Sequence(parts):
            return sequence(*map(_rewrite, parts))
        case Alternation(parts):
            return choice(*map(_rewrite, parts))
        case Repeat(part, times):
            return _repeat(_rewrite(part), times)
        case _:
            return node


def _repeat(part: Node, times: str) -> Node:
    parts = children(part) if isinstance(part, Alternation) else ()
    classes = [each.source for each in parts if isinstance(each, Text) and each.is_class]
    joined = _join(classes)
    if times not in ("*", "+") or joined is None:
        return Repeat(part, times)
    others = [each for each in parts if not (isinstance(each, Text) and each.is_class)]
    if not others:
        return Repeat(joined, times)
    after = sequence(choice(*others), Repeat(joined, "*"))
    if times == "*":
        return sequence(Repeat(joined, "*"), Repeat(after, "*"))
    return choice(sequence(Repeat(joined, "+"), Repeat(after, "*")), Repeat(after, "+"))


def _join(classes: list[str]) -> Text | None:
    """One class for all of them."""
    if len(classes) < 2:
        return Text(classes[0]) if classes else None
    inner = [each[1:-1] for each in classes]
    # what these mean depends on where they stand
    if any(each.startswith(("^", "-")) or each.endswith("-") for each in inner):
        return None
    return Text(f"[{''.join(inner)}]")
