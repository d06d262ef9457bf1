"""Chat templates: compile one in a sandbox, render a conversation, and find the line of an error.

Renders what transformers' `apply_chat_template` renders (its environment, filters and functions).
Runs only in a rendering process (render_child.py), as templates are untrusted programs.

`TemplateShape` is the form in which a template expects content, read from its syntax tree. Some
templates print `message.content`, others loop over its parts, and some test for both. The wrong
form loses text silently, so trial and error would not find it. Aliases (`set content =
message.content`), slices, filters and macros are followed.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NoReturn

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tokenmesh.shared import clock
from tokenmesh.shared.config.environment import start_date


@dataclass(frozen=True, slots=True)
class TemplateShape:
    """The form in which a template expects content."""

    wants_parts: bool
    """It loops over content: pass lists of parts."""
    tests_string: bool
    """It tests whether content is a string: strings may be passed."""
    tests_none: bool
    """It tests whether content is none: pass null as null, else as an empty string."""

    @property
    def takes_strings(self) -> bool:
        """True where content may be a string."""
        return self.tests_string or not self.wants_parts


ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def template_shapes(root: nodes.Template) -> dict[str, TemplateShape]:
    """The shapes of a parsed template by role; that of any other role is under an empty name.

    Many templates loop over what the user says and print what others say: a role's shape is read
    from the branches that its messages can reach.
    """
    names = _Names({macro.name: macro for macro in root.find_all(nodes.Macro)})
    while names.learn(root):
        pass
    names.forget_mixed(root)
    shapes = {role: _shape(list(names.reached(root, role)), names) for role in ROLES}
    return {"": _shape([root, *root.find_all(nodes.Node)], names), **shapes}


def _shape(found: list[nodes.Node], names: "_Names") -> TemplateShape:
    tests = [each for each in found if isinstance(each, nodes.Test) and names.is_content(each.node)]
    compares = [each for each in found if isinstance(each, nodes.Compare)]
    return TemplateShape(
        wants_parts=any(
            isinstance(each, nodes.For) and names.is_content(each.iter) for each in found
        ),
        tests_string=any(test.name == "string" for test in tests),
        tests_none=any(test.name == "none" for test in tests)
        or any(names.compares_none(compare) for compare in compares),
    )


@dataclass(slots=True)
class _Names:
    """The variables that hold the conversation, a message or a message's content."""

    macros: dict[str, nodes.Macro]
    conversations: set[str] = field(default_factory=lambda: {"messages"})
    messages: set[str] = field(default_factory=set)
    contents: set[str] = field(default_factory=set)

    def learn(self, root: nodes.Template) -> bool:
        """Follow every assignment, loop and macro call once; True if a variable was added."""
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
        """Drop variables that also hold other fields of a message.

        Mistral's templates loop over `tool_calls`, which in old formats comes from content.
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

    def reached(self, root: nodes.Node, role: str) -> Iterator[nodes.Node]:
        """All nodes but those in branches, and in macros, that no message of the role reaches."""
        called: set[str] = set()
        waiting: list[nodes.Node] = [root]
        while waiting:
            node = waiting.pop()
            yield node
            if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
                macro = self.macros.get(node.node.name)
                if macro is not None and macro.name not in called:
                    called.add(macro.name)
                    waiting.extend(macro.body)
            if isinstance(node, nodes.If):
                waiting.extend(self._branches(node, role))
            elif not isinstance(node, nodes.Macro):
                waiting.extend(node.iter_child_nodes())

    def _branches(self, branch: nodes.If, role: str) -> Iterator[nodes.Node]:
        for each in (branch, *branch.elif_):
            yield each.test
            taken = self._is_true(each.test, role)
            if taken is not False:
                yield from each.body
            if taken:
                return
        yield from branch.else_

    def _is_true(self, test: nodes.Node, role: str) -> bool | None:
        """Evaluate a test of messages of a role; None where it depends on something else."""
        if isinstance(test, nodes.Not):
            inner = self._is_true(test.node, role)
            return None if inner is None else not inner
        if isinstance(test, nodes.And | nodes.Or):
            decides = isinstance(test, nodes.Or)
            found = {self._is_true(each, role) for each in (test.left, test.right)}
            if decides in found:
                return decides
            return None if None in found else not decides
        if not isinstance(test, nodes.Compare) or len(test.ops) != 1:
            return None
        if not self._is_role(test.expr):
            return None
        (operand,) = test.ops
        named = operand.expr
        is_list = isinstance(named, nodes.List | nodes.Tuple)
        values = named.items if isinstance(named, nodes.List | nodes.Tuple) else [named]
        constants = [each.value for each in values if isinstance(each, nodes.Const)]
        if len(constants) < len(values):
            return None
        if operand.op not in (("in", "notin") if is_list else ("eq", "ne")):
            return None
        return (role in constants) == (operand.op in ("in", "eq"))

    def _is_role(self, node: nodes.Node) -> bool:
        if not isinstance(node, nodes.Getitem | nodes.Getattr) or _key(node) != "role":
            return False
        return self.is_message(node.node)

    def compares_none(self, compare: nodes.Compare) -> bool:
        return self.is_content(compare.expr) and any(
            isinstance(operand.expr, nodes.Const) and operand.expr.value is None
            for operand in compare.ops
        )


def _variable(node: nodes.Node | None) -> str | None:
    """`x` or, for a namespace, `ns.x`; None if the node is not a variable."""
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


COMPILED_TEMPLATES: Final = 64
"""Compiled templates that a process keeps."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template and its shapes."""

    source: str
    program: Template
    shapes: Mapping[str, TemplateShape]
    """The shape of each role's messages; that of any other role is under an empty name."""

    def shape_of(self, role: str) -> TemplateShape:
        """The form in which it expects the content of messages of a role."""
        return self.shapes.get(role) or self.shapes[""]


class RaisedByTemplate(Exception):
    """The template called raise_exception: the conversation violates one of its rules."""


class TooLong(Exception):
    """The rendering is longer than its limit."""


@functools.lru_cache(maxsize=COMPILED_TEMPLATES)
def compile_template(source: str) -> ChatTemplate:
    """Compile. Raises jinja2.TemplateSyntaxError with the line."""
    environment = _environment()
    shapes = template_shapes(environment.parse(source))
    return ChatTemplate(source, environment.from_string(source), shapes)


def render(template: ChatTemplate, variables: dict[str, object], max_chars: int) -> str:
    """The text. Raises RaisedByTemplate, TooLong, or any error of the template."""
    pieces = []
    num_chars = 0
    for piece in template.program.generate(variables):
        num_chars += len(piece)
        if num_chars > max_chars:
            raise TooLong(
                f"it renders more than {max_chars} characters (tokenizer.max_prompt_chars)"
            )
        pieces.append(piece)
    return "".join(pieces)


def template_line(error: BaseException) -> int | None:
    """The line of the template that raised an error; None if it was raised elsewhere."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    line, entry = None, error.__traceback__
    while entry is not None:
        if entry.tb_frame.f_code.co_filename == "<template>":
            line = entry.tb_lineno
        entry = entry.tb_next
    return line


class _GenerationTag(Extension):
    """`{% generation %}` marks a model's text for training; here it only prints its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _SafeNamespace(Namespace):
    """A namespace without underscore names, which could reach CPython's internals."""

    def __init__(*args: object, **kwargs: object) -> None:
        self, *positional = args
        assert isinstance(self, _SafeNamespace)
        values: dict[str, object] = dict(*positional, **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute must not begin with _: {name!r}")


def _make_dict(*args: object, **kwargs: object) -> dict[str, object]:
    """Replaces `dict` by a function, which has no attributes of a type."""
    return dict(*args, **kwargs)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter: no HTML escapes, and transformers' arguments."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise RaisedByTemplate(message)


def _strftime_now(pattern: str) -> str:
    now = datetime.fromtimestamp(clock.wall_s())
    day = start_date()
    return (now if day is None else datetime.combine(day, now.time())).strftime(pattern)


_FUNCTIONS: Final[dict[str, Callable[..., object]]] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
    "dict": _make_dict,
    "namespace": _SafeNamespace,
}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(_FUNCTIONS)
    return environment
