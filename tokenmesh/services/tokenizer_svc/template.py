"""Chat templates: compile one in a sandbox, render one conversation, say what went wrong and where.

Renders what transformers' `apply_chat_template` renders (its environment, filters and functions).
Runs in a rendering process only (render_child.py): templates are programs that strangers wrote.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NoReturn

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tokenmesh.services.tokenizer_svc.template_shape import TemplateShape, template_shape
from tokenmesh.shared import clock

COMPILED_TEMPLATES: Final = 64
"""Compiled templates that a process keeps."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template and what it wants to be given."""

    source: str
    program: Template
    shape: TemplateShape


class RaisedByTemplate(Exception):
    """The template called raise_exception: the conversation breaks one of its rules."""


class TooLong(Exception):
    """The rendering passed its bound."""


@functools.lru_cache(maxsize=COMPILED_TEMPLATES)
def compile_template(source: str) -> ChatTemplate:
    """Compile. Raises jinja2.TemplateSyntaxError with the line."""
    environment = _environment()
    shape = template_shape(environment.parse(source))
    return ChatTemplate(source, environment.from_string(source), shape)


def render(template: ChatTemplate, variables: dict[str, object], max_chars: int) -> str:
    """The text. Raises RaisedByTemplate, TooLong, or whatever the template stumbles over."""
    pieces = []
    num_chars = 0
    for piece in template.program.generate(variables):
        num_chars += len(piece)
        if num_chars > max_chars:
            raise TooLong(f"it renders more than {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def template_line(error: BaseException) -> int | None:
    """The line of the template that an error comes from, when it comes from one."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    line, entry = None, error.__traceback__
    while entry is not None:
        if entry.tb_frame.f_code.co_filename == "<template>":
            line = entry.tb_lineno
        entry = entry.tb_next
    return line


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model wrote, for training; here it only prints its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _SafeNamespace(Namespace):
    """A namespace that takes no underscore names, which could reach CPython's internals."""

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
        raise SecurityError(f"a namespace takes no attribute that begins with _: {name!r}")


def _make_dict(*args: object, **kwargs: object) -> dict[str, object]:
    """Stands for `dict`, without the attributes of a type."""
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
    return datetime.fromtimestamp(clock.wall_s()).strftime(pattern)


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
