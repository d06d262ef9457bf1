"""ParserRegistry: formats by name, the built-in ones and those of plugins.

Plugins are listed in `gateway.parser_plugins`, each name with its "package.module:attribute"; no
other module is imported.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TypeVar

from tokenmesh.services.gateway.parsers.formats import FormatFamily, ReasoningFormat, ToolFormat
from tokenmesh.services.gateway.parsers.guarded import guard_reasoning, guard_tools
from tokenmesh.services.gateway.parsers.reasoning.families import REASONING
from tokenmesh.services.gateway.parsers.tools.table import TOOLS
from tokenmesh.shared.errors import ConfigError

_Format = TypeVar("_Format", ReasoningFormat, ToolFormat)


class ParserRegistry:
    """The built-in formats and those of plugins."""

    def __init__(self, plugins: Mapping[str, str] | None = None) -> None:
        """Imports the plugins. Raises ConfigError that names an invalid one."""
        self._reasoning = dict(REASONING)
        self._tools = dict(TOOLS)
        for name, address in (plugins or {}).items():
            found = _load_plugin(name, address)
            if isinstance(found, ReasoningFormat):
                _add(self._reasoning, name, guard_reasoning(found))
            else:
                _add(self._tools, name, guard_tools(found))

    def family(self, reasoning: str, tools: str) -> FormatFamily:
        """The formats of a model; an empty name means none. Raises ConfigError."""
        return FormatFamily(
            _find(self._reasoning, reasoning, "reasoning_parser") if reasoning else None,
            _find(self._tools, tools, "tool_call_parser") if tools else None,
        )


def _add(table: dict[str, _Format], name: str, found: _Format) -> None:
    if name in table:
        raise ConfigError(
            f"parser_plugins: {name!r} is the name of a built-in parser", param="parser_plugins"
        )
    table[name] = found


def _find(table: Mapping[str, _Format], name: str, setting: str) -> _Format:
    if name not in table:
        known = ", ".join(sorted(table))
        raise ConfigError(f"{setting}: unknown parser {name!r}; known: {known}", param=setting)
    return table[name]


def _load_plugin(name: str, address: str) -> ReasoningFormat | ToolFormat:
    module, _, attribute = address.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    # A plugin may raise anything; report it with the plugin's name.
    except Exception as error:
        raise ConfigError(
            f"parser_plugins: {name}={address} cannot be imported: {error!r}",
            param="parser_plugins",
        ) from error
    if not isinstance(found, ReasoningFormat | ToolFormat):
        raise ConfigError(
            f"parser_plugins: {name}={address} is neither a ReasoningFormat nor a ToolFormat",
            param="parser_plugins",
        )
    return found
