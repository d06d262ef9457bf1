"""What a chat template expects a message's content to be, read from its syntax tree.

Some templates print `message.content`, others loop over its parts, and some ask first which of the
two they got. Giving a template the wrong one loses text silently, so this is decided here and not
by trying. Aliases (`set content = message.content`), slices, filters and macros are followed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from jinja2 import nodes


@dataclass(frozen=True, slots=True)
class TemplateShape:
    """How content reaches the template."""

    wants_parts: bool
    """It loops over content: give lists of parts."""
    tests_string: bool
    """It asks whether content is a string: a plain string may stay one."""
    tests_none: bool
    """It asks whether content is none: leave null content null, else give an empty string."""


def template_shape(root: nodes.Template) -> TemplateShape:
    """The shape of a parsed template."""
    names = _Names({macro.name: macro for macro in root.find_all(nodes.Macro)})
    while names.learn(root):
        pass
    names.forget_mixed(root)
    tests = [test for test in root.find_all(nodes.Test) if names.is_content(test.node)]
    return TemplateShape(
        wants_parts=any(names.is_content(loop.iter) for loop in root.find_all(nodes.For)),
        tests_string=any(test.name == "string" for test in tests),
        tests_none=any(test.name == "none" for test in tests)
        or any(names.compares_none(compare) for compare in root.find_all(nodes.Compare)),
    )


@dataclass(slots=True)
class _Names:
    """Which variables hold the conversation, a message or a message's content."""

    macros: dict[str, nodes.Macro]
    conversations: set[str] = field(default_factory=lambda: {"messages"})
    messages: set[str] = field(default_factory=set)
    contents: set[str] = field(default_factory=set)

    def learn(self, root: nodes.Template) -> bool:
        """Follow every assignment, loop and macro call once; True when something was new."""
        before = len(self.conversations) + len(self.messages) + len(self.contents)
        for name, value in self._bindings(root):
            if self.is_conversation(value):
                self.conversations.add(name)
            elif self.is_message(value):
                self.messages.add(name)
            elif self.is_content(value):
                self.contents.add(name)
        for loop in root.find_all(nodes.For):
            if isinstance(loop.target, nodes.Name) and self.is_conversation(loop.iter):
                self.messages.add(loop.target.name)
        return len(self.conversations) + len(self.messages) + len(self.contents) > before

    def forget_mixed(self, root: nodes.Template) -> None:
        """Drop names that also hold other fields of a message: they stand for those.

        Mistral's templates loop over `tool_calls`, which they take from content in old formats.
        """
        for name, value in self._bindings(root):
            if (
                isinstance(value, nodes.Getitem | nodes.Getattr)
                and self.is_message(value.node)
                and _key(value) != "content"
            ):
                self.contents.discard(name)

    def _bindings(self, root: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
        for assign in root.find_all(nodes.Assign):
            if name := _variable(assign.target):
                yield name, assign.node
        for call in root.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in self.macros:
                parameters = [argument.name for argument in self.macros[call.node.name].args]
                yield from zip(parameters, call.args, strict=False)
                yield from ((pair.key, pair.value) for pair in call.kwargs)

    def is_conversation(self, node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Filter):
            return node.name not in ("first", "last") and self.is_conversation(node.node)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self.is_conversation(node.node)
        return _variable(node) in self.conversations

    def is_message(self, node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            return self.is_conversation(node.node)
        if isinstance(node, nodes.Filter):
            return node.name in ("first", "last") and self.is_conversation(node.node)
        return _variable(node) in self.messages

    def is_content(self, node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Filter):
            return self.is_content(node.node)
        if isinstance(node, nodes.CondExpr):
            return self.is_content(node.expr1) or self.is_content(node.expr2)
        if isinstance(node, nodes.Getitem | nodes.Getattr) and _key(node) == "content":
            return self.is_message(node.node)
        return _variable(node) in self.contents

    def compares_none(self, compare: nodes.Compare) -> bool:
        return self.is_content(compare.expr) and any(
            isinstance(operand.expr, nodes.Const) and operand.expr.value is None
            for operand in compare.ops
        )


def _variable(node: nodes.Node | None) -> str | None:
    """`x` or, for a namespace, `ns.x`; None for what is no variable."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.NSRef):
        return f"{node.name}.{node.attr}"
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return f"{node.node.name}.{node.attr}"
    return None


def _key(node: nodes.Getitem | nodes.Getattr) -> object:
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node.arg, nodes.Const) else None
