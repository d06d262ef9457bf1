"""ParserRegistry: names to formats. A built-in one is imported when it is first asked for.

What an operator adds is listed in `gateway.parser_plugins`, each name with its
"package.module:attribute"; nothing outside that list and the tables here is ever imported.
"""

import functools
from collections.abc import Mapping
from importlib import import_module

from tokenmesh.services.gateway.parsers.formats import FormatFamily, ReasoningFormat, ToolFormat
from tokenmesh.services.gateway.parsers.guarded import guard_reasoning, guard_tools
from tokenmesh.services.gateway.parsers.reasoning.table import REASONING
from tokenmesh.services.gateway.parsers.tools.table import TOOLS
from tokenmesh.shared.errors import ConfigError


class ParserRegistry:
    """The built-in formats and the operator's."""

    def __init__(
        self,
        plugins: Mapping[str, str] | None = None,
        reasoning: Mapping[str, str] = REASONING,
        tools: Mapping[str, str] = TOOLS,
    ) -> None:
        """Imports the plugins. Raises ConfigError, naming the entry, for one that is none."""
        self._reasoning = dict(reasoning)
        self._tools = dict(tools)
        self._plugins = frozenset(plugins or ())
        for name, address in (plugins or {}).items():
            self._add(name, address)

    def family(self, reasoning: str, tools: str) -> FormatFamily:
        """The formats of a model; an empty name stands for none. Raises ConfigError."""
        return FormatFamily(
            self.find_reasoning(reasoning) if reasoning else None,
            self.find_tools(tools) if tools else None,
        )

    def find_reasoning(self, name: str) -> ReasoningFormat:
        """Raises ConfigError, listing the names, for an unknown one."""
        found = _load(_address(self._reasoning, name, "reasoning_parser"))
        assert isinstance(found, ReasoningFormat)
        return guard_reasoning(found) if name in self._plugins else found

    def find_tools(self, name: str) -> ToolFormat:
        """Raises ConfigError, listing the names, for an unknown one."""
        found = _load(_address(self._tools, name, "tool_call_parser"))
        assert isinstance(found, ToolFormat)
        return guard_tools(found) if name in self._plugins else found

    def _add(self, name: str, address: str) -> None:
        found = _load_plugin(name, address)
        table = self._reasoning if isinstance(found, ReasoningFormat) else self._tools
        if name in table:
            raise ConfigError(
                f"parser_plugins: {name!r} is the name of a built-in parser", param="parser_plugins"
            )
        table[name] = address


def _address(table: Mapping[str, str], name: str, setting: str) -> str:
    if name not in table:
        known = ", ".join(sorted(table))
        raise ConfigError(f"{setting}: there is no parser {name!r}; known: {known}", param=setting)
    return table[name]


def _load_plugin(name: str, address: str) -> ReasoningFormat | ToolFormat:
    try:
        found = _load(address)
    # A plugin's module is a stranger's program: whatever it raises is told with its name.
    except Exception as error:
        raise ConfigError(
            f"parser_plugins: {name}={address} cannot be imported: {error!r}",
            param="parser_plugins",
        ) from error
    if not isinstance(found, ReasoningFormat | ToolFormat):
        raise ConfigError(
            f"parser_plugins: {name}={address} is no ReasoningFormat and no ToolFormat",
            param="parser_plugins",
        )
    return found


@functools.cache
def _load(address: str) -> object:
    module, _, attribute = address.partition(":")
    return getattr(import_module(module), attribute)
