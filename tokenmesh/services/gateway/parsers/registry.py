"""ParserRegistry: formats by name, the built-in ones and those of plugins.

Plugins are listed in `gateway.parser_plugins`, each name with its "package.module:attribute", and
`gateway.parser_files` lists files that hold some; nothing else is imported. When a plugin's parser
raises, the rest of the text is content.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Final, TypeVar

from tokenmesh.services.gateway.parsers import harmony
from tokenmesh.services.gateway.parsers.formats import FormatFamily, ReasoningFormat, ToolFormat
from tokenmesh.services.gateway.parsers.parser import Content, Event, ParseContext, Parser
from tokenmesh.services.gateway.parsers.reasoning import REASONING
from tokenmesh.services.gateway.parsers.tools import (
    gemma,
    headed,
    json_families,
    markup,
    pythonic,
)
from tokenmesh.services.gateway.parsers.tools.script import PlainText
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.parser_names import FILE_TABLE, names_in

TOOLS: Final[Mapping[str, ToolFormat]] = {
    "apertus": json_families.APERTUS,
    "cohere_command3": json_families.COHERE_COMMAND3,
    "deepseek_v3": headed.DEEPSEEK_V3,
    "deepseek_v31": headed.DEEPSEEK_V31,
    "deepseek_v32": markup.DEEPSEEK_V32,
    "deepseek_v4": markup.DEEPSEEK_V32,
    "dots": markup.DOTS,
    "ernie45": json_families.HERMES,
    "functiongemma": gemma.FUNCTIONGEMMA,
    "gemma4": gemma.GEMMA4,
    "gigachat3": json_families.GIGACHAT3,
    "glm45": markup.GLM,
    "glm47": markup.GLM,
    "granite": json_families.GRANITE,
    "granite-20b-fc": json_families.GRANITE_20B_FC,
    "granite4": json_families.HERMES,
    "hermes": json_families.HERMES,
    "hunyuan_a13b": json_families.JAMBA,
    "internlm": json_families.INTERNLM,
    "jamba": json_families.JAMBA,
    "kimi_k2": headed.KIMI_K2,
    "lfm2": pythonic.LFM2,
    "ling3": markup.GLM,
    "llama3_json": json_families.LLAMA_JSON,
    "llama4_json": json_families.LLAMA_JSON,
    "llama4_pythonic": pythonic.LLAMA4_PYTHONIC,
    "longcat": json_families.LONGCAT,
    "mimo": markup.MIMO,
    "minimax_m2": markup.MINIMAX_M2,
    "mistral": headed.MISTRAL,
    "olmo3": pythonic.OLMO3,
    "openai": harmony.OPENAI,
    "phi4_mini_json": json_families.PHI4_MINI,
    "pythonic": pythonic.PYTHONIC,
    "qwen3_coder": markup.QWEN3_CODER,
    "qwen3_xml": markup.QWEN3_CODER,
    "seed_oss": markup.SEED_OSS,
    "step3": markup.STEP3,
    "step3p5": markup.QWEN3_CODER,
    "xlam": json_families.XLAM,
}
"""Formats of tool calls by name; `make docs` writes the names where other services find them."""


logger = logging.getLogger(__name__)


class GuardedParser:
    """A plugin's parser, replaced by PlainText when it raises; the error is logged once."""

    __slots__ = ("_parser",)

    def __init__(self, make: Callable[[ParseContext], Parser], context: ParseContext) -> None:
        try:
            self._parser = make(context)
        except Exception:
            self._give_up()

    @property
    def is_reasoning(self) -> bool:
        try:
            return self._parser.is_reasoning
        except Exception:
            self._give_up()
            return False

    def push(self, text: str) -> list[Event]:
        try:
            return self._parser.push(text)
        except Exception:
            self._give_up()
            return [Content(text)]

    def finish(self) -> list[Event]:
        try:
            return self._parser.finish()
        except Exception:
            self._give_up()
            return []

    def _give_up(self) -> None:
        logger.exception("a parser plugin raised: the rest of the answer is content")
        self._parser = PlainText()


# Cached: FormatFamily compares the format of tools by identity with that of the reasoning format.
@functools.cache
def guard_tools(found: ToolFormat) -> ToolFormat:
    """The format with guarded parsers."""
    return replace(found, make=functools.partial(GuardedParser, found.make))


def guard_reasoning(found: ReasoningFormat) -> ReasoningFormat:
    """The format with guarded parsers."""
    return replace(
        found,
        make=functools.partial(GuardedParser, found.make),
        begins=functools.partial(_begins, found.begins),
        tools=None if found.tools is None else guard_tools(found.tools),
    )


def _begins(begins: Callable[[ParseContext], bool], context: ParseContext) -> bool:
    try:
        return begins(context)
    except Exception:
        logger.exception("a parser plugin raised: assuming an answer without reasoning")
        return False


_Format = TypeVar("_Format", ReasoningFormat, ToolFormat)


class ParserRegistry:
    """The built-in formats and those of plugins."""

    def __init__(self, plugins: Mapping[str, str] | None = None, files: Iterable[str] = ()) -> None:
        """Imports the plugins. Raises ConfigError that names an invalid one."""
        self._reasoning = dict(REASONING)
        self._tools = dict(TOOLS)
        for name, address in (plugins or {}).items():
            self._take(name, _load_plugin(name, address), "parser_plugins")
        for path in files:
            for name, found in _load_file(path).items():
                self._take(name, found, "parser_files")

    def family(self, reasoning: str, tools: str, budget_end: str = "") -> FormatFamily:
        """The formats of a model; an empty name means none. Raises ConfigError."""
        return FormatFamily(
            _find(self._reasoning, reasoning, "reasoning_parser") if reasoning else None,
            _find(self._tools, tools, "tool_call_parser") if tools else None,
            budget_end,
        )

    def _take(self, name: str, found: object, setting: str) -> None:
        if isinstance(found, ReasoningFormat):
            _add(self._reasoning, name, guard_reasoning(found), setting)
        elif isinstance(found, ToolFormat):
            _add(self._tools, name, guard_tools(found), setting)
        else:
            raise ConfigError(
                f"{setting}: {name} is neither a ReasoningFormat nor a ToolFormat", param=setting
            )


def _add(table: dict[str, _Format], name: str, found: _Format, setting: str) -> None:
    if name in table:
        raise ConfigError(f"{setting}: {name!r} is the name of a built-in parser", param=setting)
    table[name] = found


def _find(table: Mapping[str, _Format], name: str, setting: str) -> _Format:
    if name not in table:
        known = ", ".join(sorted(table))
        raise ConfigError(f"{setting}: unknown parser {name!r}; known: {known}", param=setting)
    return table[name]


def _load_plugin(name: str, address: str) -> object:
    module, _, attribute = address.partition(":")
    try:
        return getattr(import_module(module), attribute)
    # A plugin may raise anything; report it with the plugin's name.
    except Exception as error:
        raise ConfigError(
            f"parser_plugins: {name}={address} cannot be imported: {error!r}",
            param="parser_plugins",
        ) from error


def _load_file(path: str) -> dict[str, object]:
    """The formats of a file by name. It is run as Python, with all rights of the gateway."""
    names = names_in(path)
    where = Path(path).expanduser()
    spec = spec_from_file_location(f"tokenmesh_parsers_of_{where.stem}", where)
    try:
        if spec is None or spec.loader is None:
            raise ImportError("its name must end in .py")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        table = getattr(module, FILE_TABLE)
        return {name: table[name] for name in names}
    except Exception as error:
        raise ConfigError(
            f"parser_files: {path} cannot be imported: {error!r}", param="parser_files"
        ) from error
